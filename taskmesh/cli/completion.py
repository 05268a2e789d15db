"""Completion: names, keys, workers, queues, schedules and actions, as the database has them now.

Pressing Tab shows no error, waits only briefly, creates no collection and starts no server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable

import typer

from taskmesh.admin import completion
from taskmesh.cli.connected import mesh_of
from taskmesh.mesh import TaskMesh

_PATIENCE_MS = 1_500

Completion = Callable[[typer.Context, str], list[str]]
_Read = Callable[[TaskMesh, typer.Context, str], Awaitable[Iterable[str]]]


def _completion(read: _Read) -> Completion:
    """Make what typer calls with the words so far: it must not fail, and must not take long."""

    def offer(context: typer.Context, incomplete: str) -> list[str]:
        with contextlib.suppress(Exception):
            found = asyncio.run(asyncio.wait_for(_from_database(read, context, incomplete), _PATIENCE_MS / 1000))
            return [each for each in found if each.startswith(incomplete)]
        return []

    return offer


async def _from_database(read: _Read, context: typer.Context, incomplete: str) -> list[str]:
    uri = _given(context, "uri") or await asyncio.to_thread(_running_here)
    if uri is None:
        return []
    mesh = mesh_of(None, uri, _given(context, "database"), _given(context, "collection"), _PATIENCE_MS)
    await mesh.connect(create=False)
    try:
        return list(await read(mesh, context, incomplete))
    finally:
        await mesh.close()


def _given(context: typer.Context, name: str) -> str | None:
    """Return an option that was given after the command, before it, or by the environment."""
    value = context.params.get(name) or (context.parent.params.get(name) if context.parent is not None else None)
    return value or os.environ.get(f"TASKMESH_{name.upper()}")


def _running_here() -> str | None:
    """Return the URI of this directory's embedded MongoDB, if it runs."""
    from taskmesh.embedded import running_in  # noqa: PLC0415 — an extra

    return running_in()


async def _keys(mesh: TaskMesh, context: typer.Context, incomplete: str) -> Iterable[str]:
    given = context.params.get("name")
    return await completion.keys(mesh.connection, given, incomplete) if given else []


async def _workers(mesh: TaskMesh, *_: object) -> Iterable[str]:
    return sorted(worker.worker_id for worker in await mesh.workers() if worker.live)


async def _queues(mesh: TaskMesh, *_: object) -> Iterable[str]:
    return [each.queue for each in await mesh.queues.all(counted_to=1)]


async def _schedules(mesh: TaskMesh, *_: object) -> Iterable[str]:
    return sorted(schedule.schedule_id for schedule in await mesh.schedules.all())


async def _actions(mesh: TaskMesh, *_: object) -> Iterable[str]:
    return [action.id for action in await mesh.bulk.actions() if action.undoable]


name = _completion(lambda mesh, _, incomplete: completion.names(mesh.connection, incomplete))
key = _completion(_keys)
worker = _completion(_workers)
queue = _completion(_queues)
schedule = _completion(_schedules)
action = _completion(_actions)
