"""What fails, and why: `errors`."""

from __future__ import annotations

import shlex
import time
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from taskmesh.admin.error_groups import ErrorGroup, ErrorReport
from taskmesh.cli import completion, output
from taskmesh.cli.connected import connected
from taskmesh.cli.listing import Json, Listing, Watch, nothing_found, show
from taskmesh.mesh import TaskMesh

_COUNTED_TO = 10_000
_COUNTING_S = 2.0


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command("errors", rich_help_panel="Tasks")(connected(errors))


async def errors(
    mesh: TaskMesh,
    name: Annotated[
        str | None, typer.Option(help="Only of tasks of this name.", autocompletion=completion.name)
    ] = None,
    at_most: Annotated[int, typer.Option(min=1, help="Look at this many tasks, some of each name.")] = 10_000,
    as_json: Json = False,
    watch: Watch = None,
) -> None:
    """Tell what fails, and why: failures grouped by task, type of error and place, the most frequent first."""

    async def read() -> Listing:
        report = await mesh.errors(name, at_most=at_most)
        fits = await _counted(mesh, report.groups)
        if as_json and not report.complete:
            output.say(f"warning: {report.looked_at} tasks were looked at; there are more", stderr=True)
        about = {"looked_at": report.looked_at, "complete": report.complete}
        groups = [dict(group) | {"fits": n} | about for group, n in zip(report.groups, fits, strict=True)]
        if not groups:
            return nothing_found(mesh, f"nothing fails: {_looked_at(report)}", groups)
        return Listing(groups, _report(report, fits))

    await show(read, as_json=as_json, every_s=watch)


async def _counted(mesh: TaskMesh, groups: list[ErrorGroup]) -> list[int | None]:
    """Return how many tasks match each group's filter, the first groups first; None where that would take too long."""
    end = time.monotonic() + _COUNTING_S
    found: list[int | None] = []
    for group in groups:
        left_ms = round((end - time.monotonic()) * 1000)
        counting = mesh.count_within(group.where, at_most=_COUNTED_TO, deadline_ms=left_ms) if left_ms > 0 else None
        found.append(None if counting is None else await counting)
    return found


def _report(report: ErrorReport, fits: list[int | None]) -> RenderableType:
    now = datetime.now(UTC)
    parts = [_group(group, n, now) for group, n in zip(report.groups, fits, strict=True)]
    return Group(*parts, Text(_looked_at(report), style="dim"))


def _looked_at(report: ErrorReport) -> str:
    more = "" if report.complete else "; there are more, --at-most N looks at more of them"
    return f"{_tasks(report.looked_at)} {'was' if report.looked_at == 1 else 'were'} looked at{more}"


def _group(group: ErrorGroup, fits: int | None, now: datetime) -> RenderableType:
    counts = [f"{group.failed} failed" if group.failed else "", f"{group.retrying} retrying" if group.retrying else ""]
    head = Text()
    head.append(output.printable(group.name), style="bold")
    head.append(f"  {output.printable(group.error)}", style=output.STYLES["FAIL"])
    head.append(f"  {', '.join(filter(None, counts))}")
    if group.first_time is not None and group.last_time is not None:
        head.append(f"  since {output.age(group.first_time, now)}, last {output.age(group.last_time, now)}")
    lines = [f"    {output.printable(group.message)}"]
    if group.frame is not None:
        lines.append(f"    at {output.printable(group.frame)}")
    lines.append(f"    one of them: taskmesh show {group.name} {output.printable(_word(group.example_key))}")
    # A filter knows no place in the code, and takes whatever entry of a task says this.
    tasks = "" if fits is None else f" ({_COUNTED_TO} tasks or more)" if fits >= _COUNTED_TO else f" ({_tasks(fits)})"
    lines.append(
        f"    these and others like them{tasks}: taskmesh retry --where {output.printable(_word(group.where))}\n"
    )
    return Group(head, *(Text(line, no_wrap=True, overflow="ignore") for line in lines))  # commands are to be copied


def _tasks(count: int) -> str:
    return "1 task" if count == 1 else f"{count} tasks"


def _word(text: str) -> str:
    """Return a text as one word of a shell's command, in the quotes that read best."""
    return f'"{text}"' if "'" in text and not set(text) & set('"$`\\!') else shlex.quote(text)
