"""One task or many: `retry cancel delete` by NAME KEY or `--where`, and `purge`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import typer
from rich.progress import Progress

from taskmesh.bulk import BulkResult
from taskmesh.cli import output
from taskmesh.cli.connected import Collection, Database, Uri, run_at
from taskmesh.cli.listing import Json
from taskmesh.cli.tasks import task_json
from taskmesh.mesh import TaskMesh
from taskmesh.task import Status, Task
from taskmesh.where import TaskFilter

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="The task's name.")]
Key = Annotated[str | None, typer.Argument(metavar="KEY", help="Its key.")]
Where = Annotated[
    str | None,
    typer.Option(
        metavar="FILTER",
        help="Instead of one: all that fit, like 'status:FAIL name:resize error:timeout age>1h'. "
        "Knows name: status: queue: group: key: error: worker: age> age<.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="With --where: only count them.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (retry, cancel, delete, purge):
        app.command(rich_help_panel="Tasks")(command)


class _ActOnMany(Protocol):
    async def __call__(
        self, where: TaskFilter, *, dry_run: bool = False, progress: Callable[[int], None] | None = None
    ) -> BulkResult: ...


@dataclass(frozen=True, kw_only=True)
class _Target:
    """What was asked for: one task, or all that fit."""

    name: str | None
    key: str | None
    where: TaskFilter | None
    dry_run: bool
    yes: bool
    as_json: bool


def _target(
    name: str | None, key: str | None, where: str | None, *, dry_run: bool, yes: bool, as_json: bool
) -> _Target:
    if (name is None or key is None) == (where is None) or (name is not None and where is not None):
        raise typer.BadParameter("say which: NAME KEY, or --where FILTER")
    if dry_run and where is None:
        raise typer.BadParameter("--dry-run counts what --where finds")
    which = None if where is None else TaskFilter.parse(where)
    return _Target(name=name, key=key, where=which, dry_run=dry_run, yes=yes, as_json=as_json)


def retry(
    name: Name = None,
    key: Key = None,
    *,
    where: Where = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    uri: Uri = None,
    database: Database = None,
    collection: Collection = None,
) -> None:
    """Run finished tasks again from the start; make waiting ones due at once."""
    target = _target(name, key, where, dry_run=dry_run, yes=yes, as_json=as_json)

    async def use(mesh: TaskMesh) -> None:
        if target.where is not None:
            await _many(mesh.retry_all, target, target.where, "retry")
        else:
            await _one(mesh.retry, target, "will run again")

    run_at(uri, database, collection, use)


def cancel(
    name: Name = None,
    key: Key = None,
    *,
    where: Where = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    uri: Uri = None,
    database: Database = None,
    collection: Collection = None,
) -> None:
    """Cancel tasks; what runs of them is stopped. Finished ones stay as they are."""
    target = _target(name, key, where, dry_run=dry_run, yes=yes, as_json=as_json)

    async def use(mesh: TaskMesh) -> None:
        if target.where is not None:
            await _many(mesh.cancel_all, target, target.where, "cancel")
        else:
            output.confirm(f"cancel {name} {key}?", yes=yes)
            await _one(mesh.cancel, target, "is cancelled")

    run_at(uri, database, collection, use)


def delete(
    name: Name = None,
    key: Key = None,
    *,
    where: Where = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    uri: Uri = None,
    database: Database = None,
    collection: Collection = None,
) -> None:
    """Remove tasks with their results; what runs of them is stopped."""
    target = _target(name, key, where, dry_run=dry_run, yes=yes, as_json=as_json)

    async def use(mesh: TaskMesh) -> None:
        if target.where is not None:
            await _many(mesh.delete_all, target, target.where, "delete")
        else:
            output.confirm(f"delete {name} {key} for good, with its results?", yes=yes)
            await _one(mesh.delete, target, "is deleted")

    run_at(uri, database, collection, use)


def purge(
    *,
    where: Annotated[str, typer.Option(metavar="FILTER", help="Only those that fit, like 'age>7d'.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count them.")] = False,
    yes: Yes = False,
    as_json: Json = False,
    uri: Uri = None,
    database: Database = None,
    collection: Collection = None,
) -> None:
    """Remove finished tasks before their retention is over. Their keys are free again then."""
    which = TaskFilter.parse(where)
    target = _Target(name=None, key=None, where=which, dry_run=dry_run, yes=yes, as_json=as_json)

    async def use(mesh: TaskMesh) -> None:
        await _many(mesh.purge, target, which, "purge")

    run_at(uri, database, collection, use)


async def _one(change: Callable[[str, str], Awaitable[Task]], target: _Target, done: str) -> None:
    assert target.name is not None
    assert target.key is not None
    task = await change(target.name, target.key)
    if target.as_json:
        output.show_json(task_json(task))
    elif done == "is cancelled" and task.status is not Status.CANCELLED:
        output.say(f"{task.name} {task.key} was finished already: {task.status}")
    else:
        output.say(f"{task.name} {task.key} {done}")


async def _many(act: _ActOnMany, target: _Target, where: TaskFilter, verb: str) -> None:
    """Count first, ask on a terminal, then do it in batches. The filter is asked again for each task."""
    counted = await act(where, dry_run=True)
    if not target.dry_run and counted.matched:
        output.confirm(f"{verb} {counted.matched} tasks that fit {counted.where!r}?", yes=target.yes)
        console = output.console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
            bar = progress.add_task(verb, total=counted.matched)
            counted = await act(where, progress=lambda done: progress.update(bar, completed=done))
    if target.as_json:
        output.show_json(counted)
    elif counted.dry_run:
        output.say(f"{counted.matched} tasks fit {counted.where or 'anything finished'!r}")
    else:
        output.say(f"{verb}: {counted.done} of {counted.matched} tasks")
