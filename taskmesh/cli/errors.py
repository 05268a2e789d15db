"""What fails, and why: `errors`."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from taskmesh.cli import completion, output
from taskmesh.cli.connected import connected
from taskmesh.cli.listing import Json, Listing, Watch, show
from taskmesh.error_groups import ErrorGroup, ErrorReport
from taskmesh.mesh import TaskMesh


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command("errors", rich_help_panel="Tasks")(connected(errors))


async def errors(
    mesh: TaskMesh,
    name: Annotated[
        str | None, typer.Option(help="Only of tasks of this name.", autocompletion=completion.name)
    ] = None,
    at_most: Annotated[int, typer.Option(min=1, help="Look at so many tasks, some of each name.")] = 10_000,
    as_json: Json = False,
    watch: Watch = None,
) -> None:
    """Tell what fails, and why: failures grouped by task, type of error and place, the most frequent first."""

    async def read() -> Listing:
        report = await mesh.errors(name, at_most=at_most)
        return Listing(report.groups, _report(report))

    await show(read, as_json=as_json, every_s=watch)


def _report(report: ErrorReport) -> RenderableType:
    now = datetime.now(UTC)
    parts = [_group(group, now) for group in report.groups]
    said = (
        f"{report.looked_at} tasks were looked at" if report.groups else f"nothing fails: {report.looked_at} looked at"
    )
    more = "" if report.complete else "; there are more, --at-most N looks at more of them"
    return Group(*parts, Text(said + more, style="dim"))


def _group(group: ErrorGroup, now: datetime) -> RenderableType:
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
    lines.append(f"    all of them: taskmesh retry --where {output.printable(_word(group.where))}\n")
    return Group(head, *(Text(line, no_wrap=True, overflow="ignore") for line in lines))  # commands are to be copied


def _word(text: str) -> str:
    """Return a text as one word of a shell's command, in the quotes that read best."""
    return f'"{text}"' if "'" in text and not set(text) & set('"$`\\!') else shlex.quote(text)
