"""Completion of the names and keys of tasks, as the database has them now."""

from __future__ import annotations

from taskmesh.admin.store import completion
from taskmesh.client.connection import Connection
from taskmesh.model.worker import read_workers
from taskmesh.store import registry


async def names(connection: Connection, prefix: str = "") -> list[str]:
    """Return the names of tasks that begin with `prefix` or that a worker knows, sorted."""
    known = {name for worker in read_workers(await registry.workers(connection.store)) for name in worker.names}
    return sorted({*known, *await completion.names(connection.store, prefix)})


async def keys(connection: Connection, name: str, prefix: str = "") -> list[str]:
    """Return the first keys of tasks of this name that begin with `prefix`, at most 50."""
    return await completion.keys(connection.store, name, prefix)
