"""Who did what: `audit` lists what was changed, whether by Python code, commands, the dashboard or the API."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType

from taskmesh.admin.audit import NotedAction
from taskmesh.admin.bulk import BulkAction
from taskmesh.cli import output
from taskmesh.cli.output import Json, show_found
from taskmesh.mesh import TaskMesh


async def audit(
    mesh: TaskMesh,
    limit: Annotated[int, typer.Option(min=1, help="At most this many of each kind, the newest first.")] = 50,
    as_json: Json = False,
) -> None:
    """List who changed what within the last month: tasks, queues, workers, schedules. Programs that publish are not listed."""

    async def read() -> list[BulkAction | NotedAction]:
        found: list[BulkAction | NotedAction] = [*await mesh.bulk.actions(limit), *await mesh.audit.actions(limit)]
        return sorted(found, key=lambda action: action.time, reverse=True)

    await show_found(mesh, read, _table, "nobody has changed anything within the last month", as_json=as_json)


def _table(found: list[BulkAction | NotedAction]) -> RenderableType:
    rows: list[list[object]] = [[each.time, each.by, each.action, _about(each)] for each in found]
    return output.table(["WHEN", "BY", "DID", "TO"], rows)


def _about(action: BulkAction | NotedAction) -> str:
    if isinstance(action, NotedAction):
        return output.printable(action.about)
    done = "not ended" if action.done is None else f"{action.done} of {action.matched} tasks"
    return output.printable(f"{action.where or 'all'} ({done})")
