"""What Tab offers: names, keys, workers, queues, schedules and actions, as the database has them now.

Silent and quick: whoever presses Tab wants no error, no wait, no collection made and no server started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable

import typer

from taskmesh.admin.store import completion, undo
from taskmesh.cli.connected import DEFAULT_COLLECTION, DEFAULT_DATABASE, patient_for
from taskmesh.store import Store, registry, schedules
from taskmesh.store.find import queues_in_use

_PATIENCE_MS = 1_500

Completion = Callable[[typer.Context, str], list[str]]
_Read = Callable[[Store, typer.Context, str], Awaitable[Iterable[str]]]


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
    database, collection = _given(context, "database"), _given(context, "collection")
    store = Store(patient_for(uri, _PATIENCE_MS), database or DEFAULT_DATABASE, collection or DEFAULT_COLLECTION)
    try:
        return list(await read(store, context, incomplete))
    finally:
        await store.close()


def _given(context: typer.Context, name: str) -> str | None:
    """Return an option that was given after the command, before it, or by the environment."""
    value = context.params.get(name) or (context.parent.params.get(name) if context.parent is not None else None)
    return value or os.environ.get(f"TASKMESH_{name.upper()}")


def _running_here() -> str | None:
    """Return the URI of this directory's embedded MongoDB, if it runs."""
    from taskmesh.embedded import running_in  # noqa: PLC0415 — an extra

    return running_in()


async def _names(store: Store, _context: typer.Context, incomplete: str) -> Iterable[str]:
    known = {name for worker in await registry.workers(store) for name in worker.get("names", [])}
    return sorted({*known, *await completion.names(store, incomplete)})


async def _keys(store: Store, context: typer.Context, incomplete: str) -> Iterable[str]:
    name = context.params.get("name")
    return await completion.keys(store, name, incomplete) if name else []


async def _workers(store: Store, _context: typer.Context, _incomplete: str) -> Iterable[str]:
    return sorted(worker["_id"] for worker in await registry.workers(store) if worker.get("live"))


async def _queues(store: Store, _context: typer.Context, _incomplete: str) -> Iterable[str]:
    return sorted({*await registry.queues(store), *await queues_in_use(store)})


async def _schedules(store: Store, _context: typer.Context, _incomplete: str) -> Iterable[str]:
    return sorted(document["_id"] for document in await schedules.read_all(store))


async def _actions(store: Store, _context: typer.Context, _incomplete: str) -> Iterable[str]:
    return [document["_id"] for document in await undo.actions(store, 20) if document["undoable"]]


name = _completion(_names)
key = _completion(_keys)
worker = _completion(_workers)
queue = _completion(_queues)
schedule = _completion(_schedules)
action = _completion(_actions)
