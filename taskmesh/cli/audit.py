"""Who did what: what a command line changes is written down, and `audit` lists it with what the dashboard and the API changed."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pymongo.errors import PyMongoError
from rich.console import RenderableType

from taskmesh.admin.audit import NotedAction
from taskmesh.admin.bulk import BulkAction
from taskmesh.cli import output
from taskmesh.cli.output import Json, show_found
from taskmesh.mesh import TaskMesh


async def noted(mesh: TaskMesh, action: str, **about: Any) -> None:
    """Write down what was done, and to what; who it was is known. If that fails, it is done all the same."""
    told = ", ".join(f"{name} {value!r}" for name, value in about.items() if value is not None)
    try:
        await mesh.audit.note(action, told, output.somebody())
    except PyMongoError as error:
        output.say(f"warning: it is not written down who did this ({type(error).__name__})", stderr=True)


async def audit(
    mesh: TaskMesh,
    limit: Annotated[int, typer.Option(min=1, help="At most so many of each kind, the newest.")] = 50,
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
