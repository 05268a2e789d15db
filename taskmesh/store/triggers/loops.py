"""The tasks of loops: which exist, and the removal of those that nobody will run any more."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from taskmesh.store import rules
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.store import Store


async def which_are_there(store: Store, ids: Sequence[str]) -> set[str]:
    """Return those of these `_id`s that have a task, whatever became of it."""
    kept = {"$not": [rules.is_forgotten(store.now)]}
    found = await store.find({"_id": {"$in": list(ids)}, "$expr": kept}, {"_id": 1})
    return {document["_id"] for document in found}


async def forget(store: Store, name: str, queue: str, per: str, keys: Collection[str]) -> None:
    """Delete the tasks of this loop that belong to other workers, or hosts, than these, and that nobody runs."""
    query: Document = {
        "status": {"$in": ["INIT", "RUNNING"]},
        "queue": queue,
        "name": name,
        "loop.per": per,
        "key": {"$nin": list(keys)},
    }
    await _delete_unless_it_runs(store, query)


async def delete_waiting(store: Store, ids: Sequence[str]) -> None:
    """Delete these tasks, except those that somebody runs."""
    await _delete_unless_it_runs(store, {"_id": {"$in": list(ids)}, "status": {"$in": ["INIT", "RUNNING"]}})


async def _delete_unless_it_runs(store: Store, query: Document) -> None:
    idle = {"$eq": [rules.places(store.now), []]}
    await store.driver.collection(store.tasks).delete_many({**query, "$expr": rules.with_facts(store.now, idle)})
