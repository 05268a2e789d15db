"""Waiting for what happens to tasks: `result` and `events`."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Annotated, Any

import typer

from taskmesh.cli import completion, output
from taskmesh.cli.connected import connected
from taskmesh.cli.tasks import Key, Name
from taskmesh.client.definition import TaskHandle
from taskmesh.mesh import TaskMesh
from taskmesh.model.errors import TaskMeshError
from taskmesh.model.event import TaskEvent

Timeout = Annotated[float | None, typer.Option(min=0.1, metavar="SECONDS", help="Wait no longer, and end with 1.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.command("result", rich_help_panel="Tasks")(connected(result))
    app.command("events", rich_help_panel="Tasks")(connected(events))


async def result(mesh: TaskMesh, name: Name, key: Key, timeout: Timeout = None) -> None:
    """Wait until a task is finished, and print its result as JSON. Ends with 1 if it has none: FAIL, CANCELLED, EXPIRED."""
    await show_result(TaskHandle(mesh, name, key, created=False, updated=False, warnings=[]), timeout)


async def show_result(handle: TaskHandle[Any], timeout: float | None) -> None:
    """Wait for the result, and print it. Raises `TaskMeshError` if there is none, or not in time."""
    try:
        value = await handle.result(timeout)
    except TimeoutError as error:
        raise TaskMeshError(str(error)) from None
    output.show_json(value)


async def events(
    mesh: TaskMesh,
    name: Annotated[str | None, typer.Option(help="Of tasks of this name.", autocompletion=completion.name)] = None,
    key: Annotated[str | None, typer.Option(help="Of tasks with this key.")] = None,
    after: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Begin behind the event of this token, as --json tells it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object on each line.")] = False,
) -> None:
    """Tell what happens to tasks from now on, a line for each event, until Ctrl-C."""
    try:
        async with mesh.events(name, key, after=after) as happening:
            output.say("listening; Ctrl-C ends", stderr=True)
            async for event in happening:
                line = output.one_line(dataclasses.asdict(event)) if as_json else output.printable(_line(event))
                print(line, flush=True)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(0) from None  # that is how one ends it


def _line(event: TaskEvent) -> str:
    time = event.time.isoformat(" ", "milliseconds")
    if event.kind == "missed":
        return f"{time}  {event.missed} events came too fast, and are left out"
    if event.kind == "gap":
        return f"{time}  the stream was interrupted: some events may be missing"
    words = [f"{time}  {event.kind:<14}", event.name, event.key, event.worker_id, event.status]
    return "  ".join(word for word in words if word)
