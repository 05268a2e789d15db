"""One task or many: `retry cancel delete` by NAME KEY or `--where`, `purge`, `undo`; and `audit`: who changed what."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Unpack

import typer
from rich.console import RenderableType
from rich.progress import Progress

from taskmesh.admin.audit import NotedAction
from taskmesh.admin.bulk import UNDO_MS, BulkAction, BulkOptions, BulkResult
from taskmesh.admin.filters import TaskFilter
from taskmesh.cli import completion, output
from taskmesh.cli.connected import App, Collection, Database, Uri, mesh_of, run_at
from taskmesh.cli.output import Json, show_found
from taskmesh.cli.tasks import task_json
from taskmesh.mesh import TaskMesh
from taskmesh.model.task import Status, Task
from taskmesh.model.times import duration

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="The task's name.", autocompletion=completion.name)]
Key = Annotated[str | None, typer.Argument(metavar="KEY", help="Its key.", autocompletion=completion.key)]
Where = Annotated[
    str | None,
    typer.Option(
        metavar="FILTER",
        help="Instead of one task: all that match, like 'status:FAIL name:resize error:timeout age>1h'. "
        "Knows name: status: queue: group: key: error: worker: lost: age> age<.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="With --where: only count the tasks.")]
Undo = Annotated[
    bool,
    typer.Option("--undo/--no-undo", help="Of many tasks: keep copies, so that `taskmesh undo` can restore them."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="With NAME KEY: start over, without recorded steps and without signals.")
]


_ActOnMany = Callable[..., Awaitable[BulkResult]]
"""Takes a filter; `dry_run`, `progress` and `by`."""


@dataclass(frozen=True, kw_only=True)
class _Verb:
    """An action on one task or on many."""

    name: str
    help: str
    done: str
    """What is said of one task afterwards."""
    question: str | None = None
    """The question before it is done to one task; None: it is not asked."""
    one: Callable[[TaskMesh], Callable[[str, str], Awaitable[Task]]]
    many: Callable[[TaskMesh], _ActOnMany]
    fresh: Callable[[TaskMesh], Callable[[str, str], Awaitable[Task]]] | None = None
    """With `--fresh`; None: there is no such option."""


_RETRY = _Verb(
    name="retry",
    help="Run finished tasks again; make waiting ones due at once. Steps that are recorded are not done again.",
    done="will run again",
    one=lambda mesh: mesh.retry,
    fresh=lambda mesh: partial(mesh.retry, fresh=True),
    many=lambda mesh: mesh.bulk.retry,
)
_CANCEL = _Verb(
    name="cancel",
    help="Cancel tasks and stop those that run. Finished tasks stay as they are.",
    done="is cancelled",
    question="cancel {}?",
    one=lambda mesh: mesh.cancel,
    many=lambda mesh: mesh.bulk.cancel,
)
_DELETE = _Verb(
    name="delete",
    help="Remove tasks with their results, and stop those that run.",
    done="is deleted",
    question="delete {} for good, with its results?",
    one=lambda mesh: mesh.delete,
    many=lambda mesh: mesh.bulk.delete,
)


def _command(verb: _Verb) -> Callable[..., None]:
    def run(
        name: Name = None,
        key: Key = None,
        *,
        where: Where = None,
        dry_run: DryRun = False,
        undo: Undo = True,
        yes: Yes = False,
        fresh: Fresh = False,
        as_json: Json = False,
        app: App = None,
        uri: Uri = None,
        database: Database = None,
        collection: Collection = None,
    ) -> None:
        if (name is None or key is None) == (where is None) or (name is not None and where is not None):
            raise typer.BadParameter("say which: NAME KEY, or --where FILTER")
        if dry_run and where is None:
            raise typer.BadParameter("--dry-run needs --where")
        if fresh and where is not None:
            raise typer.BadParameter("--fresh is for one task: NAME KEY, not --where")
        which = None if where is None else TaskFilter.parse(where)
        if which is not None and not dry_run:
            output.check_can_ask(verb.name, yes=yes)

        async def use(mesh: TaskMesh) -> None:
            if which is None:
                assert name is not None
                assert key is not None
                act_on_one = verb.fresh if fresh and verb.fresh is not None else verb.one
                await _one(verb, act_on_one(mesh), name, key, yes=yes, as_json=as_json)
                return

            act = partial(verb.many(mesh), undo_ms=UNDO_MS if undo else 0)
            await _many(mesh, act, which, verb.name, dry_run=dry_run, yes=yes, as_json=as_json)

        run_at(mesh_of(app, uri, database, collection), use)

    run.__name__, run.__doc__ = verb.name, verb.help
    if verb.fresh is None:
        signature = inspect.signature(run, eval_str=True)
        parameters = [each for each in signature.parameters.values() if each.name != "fresh"]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # what typer reads
    return run


retry, cancel, delete = (_command(verb) for verb in (_RETRY, _CANCEL, _DELETE))


async def _one(
    verb: _Verb, act: Callable[[str, str], Awaitable[Task]], name: str, key: str, *, yes: bool, as_json: bool
) -> None:
    if verb.question is not None:
        output.confirm(verb.question.format(f"{name} {key}"), yes=yes)
    task = await act(name, key)
    if as_json:
        output.show_json(task_json(task))
    elif verb is _CANCEL and task.status is not Status.CANCELLED:
        output.say(f"{task.name} {task.key} had already finished: {task.status}")
    else:
        output.say(f"{task.name} {task.key} {verb.done}")


async def _many(
    mesh: TaskMesh, act: _ActOnMany, where: TaskFilter, verb: str, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Count first, ask on a terminal, then act in batches. Each task is checked against the filter again."""
    counted = await act(where, dry_run=True)
    if not dry_run and counted.matched:
        tasks = "1 task that matches" if counted.matched == 1 else f"{counted.matched} tasks that match"
        output.confirm(f"{verb} {tasks} {counted.where!r}?", yes=yes)
        console = output.console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
            bar = progress.add_task(verb, total=counted.matched)
            counted = await act(where, progress=lambda done: progress.update(bar, completed=done))
    if not counted.matched:
        output.say(f"no tasks match {counted.where!r}; looked at {mesh.address}", stderr=as_json)
    if as_json:
        output.show_json(counted)
    if as_json or not counted.matched:
        return
    if counted.dry_run:
        tasks = "1 task matches" if counted.matched == 1 else f"{counted.matched} tasks match"
        output.say(f"{tasks} {counted.where!r}")
        return
    output.say(f"{verb}: {counted.done} of {counted.matched} tasks")
    if counted.id is not None:
        output.say(f"can be undone for {duration(UNDO_MS)}: taskmesh undo {counted.id}", stderr=True)


async def redrive(
    mesh: TaskMesh,
    queue: Annotated[
        str, typer.Argument(metavar="QUEUE", help="The queue of dead letters.", autocompletion=completion.queue)
    ],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count them.")] = False,
    undo: Undo = True,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Retry the dead letters of a queue: each goes back to the queue that it came from."""
    if not dry_run:
        output.check_can_ask("redrive", yes=yes)

    async def act(_: TaskFilter, **options: Unpack[BulkOptions]) -> BulkResult:
        options["undo_ms"] = UNDO_MS if undo else 0
        return await mesh.bulk.redrive(queue, **options)

    await _many(mesh, act, TaskFilter(), "redrive", dry_run=dry_run, yes=yes, as_json=as_json)


async def purge(
    mesh: TaskMesh,
    *,
    where: Annotated[str | None, typer.Option(metavar="FILTER", help="Those that match, like 'age>7d'.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every finished task.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count them.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove finished tasks for good, before their retention is over. Their keys become free."""
    if everything == bool(where):
        raise typer.BadParameter("say which: --where FILTER, or --all for every finished task")
    if not dry_run:
        output.check_can_ask("purge", yes=yes)
    await _many(
        mesh, mesh.bulk.purge, TaskFilter.parse(where or ""), "purge", dry_run=dry_run, yes=yes, as_json=as_json
    )


async def undo(
    mesh: TaskMesh,
    action: Annotated[
        str | None,
        typer.Argument(
            metavar="ACTION",
            help="The action's id. Without it: list recent actions.",
            autocompletion=completion.action,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Undo what `retry`, `cancel` or `delete --where` did within the last hour, or list such actions.

    Tasks to which something has happened since (claimed, published again) stay as they are.
    """
    if action is None:
        nothing = "there were no bulk actions within the last month"
        await show_found(mesh, mesh.bulk.actions, _action_table, nothing, as_json=as_json)
        return
    undone = await mesh.bulk.undo(action)
    if as_json:
        output.show_json(undone)
    else:
        left = f"; {undone.left} have changed since and stay as they are" if undone.left else ""
        output.say(f"undone: {undone.action}, {undone.restored} tasks restored{left}")


def _action_table(found: list[BulkAction]) -> RenderableType:
    rows = [
        [
            each.id,
            each.time,
            each.by,
            each.action,
            each.where,
            None if each.done is None else f"{each.done} of {each.matched}",
            "was undone" if each.undone_time else each.undo_until if each.undoable else "no",
        ]
        for each in found
    ]
    return output.table(["ACTION", "WHEN", "BY", "DID", "TO", "DONE", "UNDO"], rows)


async def audit(
    mesh: TaskMesh,
    limit: Annotated[int, typer.Option(min=1, help="At most this many of each kind, the newest first.")] = 50,
    as_json: Json = False,
) -> None:
    """List who changed what within the last month: tasks, queues, workers, schedules. Programs that publish are not listed."""

    async def read() -> list[BulkAction | NotedAction]:
        found: list[BulkAction | NotedAction] = [*await mesh.bulk.actions(limit), *await mesh.audit.actions(limit)]
        return sorted(found, key=lambda action: action.time, reverse=True)

    await show_found(mesh, read, _audit_table, "nothing was changed within the last month", as_json=as_json)


def _audit_table(found: list[BulkAction | NotedAction]) -> RenderableType:
    rows: list[list[object]] = [[each.time, each.by, each.action, _about(each)] for each in found]
    return output.table(["WHEN", "BY", "DID", "TO"], rows)


def _about(action: BulkAction | NotedAction) -> str:
    if isinstance(action, NotedAction):
        return output.printable(action.about)
    done = "not ended" if action.done is None else f"{action.done} of {action.matched} tasks"
    return output.printable(f"{action.where or 'all'} ({done})")
