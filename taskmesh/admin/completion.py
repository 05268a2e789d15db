"""What somebody may be about to type: names, keys, workers, queues, schedules and actions, as the database has them now."""

from __future__ import annotations

from taskmesh.admin.store import completion, undo
from taskmesh.client.connection import Connected
from taskmesh.store import registry, schedules
from taskmesh.store.find import queues_in_use


async def names(mesh: Connected, prefix: str = "") -> list[str]:
    """Return the names of tasks that begin with `prefix` or that a worker knows, sorted."""
    known = {name for worker in await registry.workers(mesh.store) for name in worker.get("names", [])}
    return sorted({*known, *await completion.names(mesh.store, prefix)})


async def keys(mesh: Connected, name: str, prefix: str = "") -> list[str]:
    """Return the first keys of tasks of this name that begin with `prefix`, at most 50."""
    return await completion.keys(mesh.store, name, prefix)


async def live_workers(mesh: Connected) -> list[str]:
    """Return the ids of the live workers, sorted."""
    return sorted(worker["_id"] for worker in await registry.workers(mesh.store) if worker.get("live"))


async def queues(mesh: Connected) -> list[str]:
    """Return the queues that have settings or tasks, sorted."""
    return sorted({*await registry.queues(mesh.store), *await queues_in_use(mesh.store)})


async def schedule_ids(mesh: Connected) -> list[str]:
    """Return the ids of all schedules, sorted."""
    return sorted(document["_id"] for document in await schedules.read_all(mesh.store))


async def undoable_actions(mesh: Connected) -> list[str]:
    """Return the ids of the last bulk actions that can still be undone, the newest first, at most 20."""
    return [document["_id"] for document in await undo.actions(mesh.store, 20) if document["undoable"]]
