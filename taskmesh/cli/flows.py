"""Looking at a flow, and acting on it: `flow`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text

from taskmesh.admin.words import first_three
from taskmesh.cli.output import Json, Listing, Watch, show, table
from taskmesh.mesh import TaskMesh
from taskmesh.model.errors import InvalidOption
from taskmesh.model.flow import FlowStatus
from taskmesh.model.jsonable import jsonable

_MOST_ROWS = 100


async def flow(
    mesh: TaskMesh,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The flow's key.")],
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel its tasks that are not finished.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Retry its tasks that did not succeed.")] = False,
    as_json: Json = False,
    watch: Watch = None,
) -> None:
    """Show the progress of a flow: its tasks by status, and what waits for what."""
    if cancel and retry:
        raise InvalidOption("--cancel and --retry were both given: use one of them")
    if cancel:
        await mesh.flows.cancel(key)
    if retry:
        await mesh.flows.retry(key)

    async def read() -> Listing:
        status = await mesh.flow_status(key)
        return Listing(jsonable(status), _page(status))

    await show(read, as_json=as_json, every_s=watch)


def _page(status: FlowStatus) -> Group:
    counts = ", ".join(f"{count} {name}" for name, count in status.counts.items()) or "no tasks"
    said = "" if status.published else "; not completely published: publish it again"
    head = Text(f"{status.progress:.0%} done: {counts}{said}")
    before: dict[tuple[str, str], list[str]] = {}
    for first, task in status.edges:
        before.setdefault(task, []).append(" ".join(first))
    rows = [
        [task.name, task.key, task.status or "GONE", first_three(before.get((task.name, task.key), []))]
        for task in status.tasks[:_MOST_ROWS]
    ]
    more = len(status.tasks) - len(rows)
    tail = [Text(f"and {more} more; --json shows all")] if more else []
    return Group(head, table(["NAME", "KEY", "STATUS", "AFTER"], rows), *tail) if rows else Group(head)
