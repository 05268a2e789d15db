"""What somebody may be about to type: names, keys, workers, queues, schedules and actions, as the database has them now."""

from __future__ import annotations

from taskmesh.admin.store import completion, undo
from taskmesh.client.connection import Connection
from taskmesh.model.worker import read_workers
from taskmesh.store import registry, schedules
from taskmesh.store.find import queues_in_use


async def names(connection: Connection, prefix: str = "") -> list[str]:
    """Return the names of tasks that begin with `prefix` or that a worker knows, sorted."""
    known = {name for worker in read_workers(await registry.workers(connection.store)) for name in worker.names}
    return sorted({*known, *await completion.names(connection.store, prefix)})


async def keys(connection: Connection, name: str, prefix: str = "") -> list[str]:
    """Return the first keys of tasks of this name that begin with `prefix`, at most 50."""
    return await completion.keys(connection.store, name, prefix)


async def live_workers(connection: Connection) -> list[str]:
    """Return the ids of the live workers, sorted."""
    return sorted(worker["_id"] for worker in await registry.workers(connection.store) if worker.get("live"))


async def queues(connection: Connection) -> list[str]:
    """Return the queues that have settings or tasks, sorted."""
    return sorted({*await registry.queues(connection.store), *await queues_in_use(connection.store)})


async def schedule_ids(connection: Connection) -> list[str]:
    """Return the ids of all schedules, sorted."""
    return sorted(document["_id"] for document in await schedules.read_all(connection.store))


async def undoable_actions(connection: Connection) -> list[str]:
    """Return the ids of the last bulk actions that can still be undone, the newest first, at most 20."""
    return [document["_id"] for document in await undo.actions(connection.store, 20) if document["undoable"]]
