"""Values that are stored separately from their tasks, since they are large: as chunks, in a collection of the mesh.

Chunks are written first, then the task that refers to them; a task is removed first, then its chunks. So a task never refers to
missing chunks, and a process that dies in between leaves chunks without a reference. `sweep` finds those: each value is checked
now and then, and removed if its task referred to it and no longer does, or has not begun to within a day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bson import ObjectId
from bson.binary import Binary

from taskmesh.store import rules
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.store import Store

MAX_BYTES = 256_000_000
"""The most bytes of params, or of a result, with what is stored separately."""
CHUNK_BYTES = 4_000_000
_FIRST_LOOK_MS = 600_000
_LOOK_EVERY_MS = 900_000
_SECOND_LOOK_MS = 60_000
"""A value is removed only if it was unreferenced at two checks so far apart: an undo may be putting the task back."""
_NEVER_SEEN_MS = 86_400_000
"""How long somebody may still be about to write the task."""
_AT_ONE_LOOK, _MOST_LOOKS = 200, 50
_LAST = 2**31


@dataclass(slots=True, frozen=True)
class Apart:
    """A value that has to be stored separately."""

    id: ObjectId
    task: str
    """The `_id` of the task that will refer to it."""
    data: bytes


async def put(store: Store, values: Sequence[Apart]) -> None:
    """Write values, unless they exist already. Safe to repeat."""
    if not values:
        return
    chunks = store.driver.collection(store.payloads)
    await store.driver.command(
        {
            "createIndexes": store.payloads,
            "indexes": [{"key": {"look_time": 1}, "name": "taskmesh_look", "sparse": True}],
        }
    )
    for value in values:
        parts = [Binary(value.data[at : at + CHUNK_BYTES]) for at in range(0, len(value.data), CHUNK_BYTES)]
        head = {"task": {"$literal": value.task}, "put_time": store.now, "look_time": _later(store.now, _FIRST_LOOK_MS)}
        # First a document without data: which task they belong to, and when to check them. `sweep` finds them by it.
        await chunks.update_one({"_id": _chunk(value.id, 0)}, [{"$set": head}], upsert=True)
        for n, part in enumerate(parts, 1):
            await chunks.replace_one({"_id": _chunk(value.id, n)}, {"data": part}, upsert=True)


async def read(store: Store, ids: Iterable[ObjectId]) -> dict[ObjectId, bytes]:
    """Return the values with these ids, as far as they exist."""
    found: dict[ObjectId, bytes] = {}
    for id_ in ids:
        cursor = store.driver.collection(store.payloads).find(_chunks(id_), {"data": 1}).sort("_id", 1)
        if parts := [chunk["data"] for chunk in await cursor.to_list(None)]:
            found[id_] = b"".join(parts)
    return found


async def remove(store: Store, ids: Iterable[ObjectId]) -> None:
    """Remove values. Safe to repeat."""
    chunks = store.driver.collection(store.payloads)
    for id_ in ids:
        await chunks.delete_many(_chunks(id_))
        await chunks.delete_one({"_id": _chunk(id_, 0)})  # last: the others are found through it


async def sweep(store: Store, references: Callable[[Mapping[str, Any]], Iterable[ObjectId]]) -> int:
    """Check the values that are due, and remove those that no task refers to. Return how many were removed.

    `references` returns the values that a task's document refers to.
    """
    removed = 0
    for _ in range(_MOST_LOOKS):
        looked_at, gone = await _look(store, references)
        removed += gone
        if looked_at < _AT_ONE_LOOK:
            break
    return removed


async def _look(store: Store, references: Callable[[Mapping[str, Any]], Iterable[ObjectId]]) -> tuple[int, int]:
    """Check a few values. Return how many were checked, and how many removed."""
    chunks = store.driver.collection(store.payloads)
    stages: list[Document] = [
        # Those that are due, by the server's clock, the most overdue first.
        {"$match": {"look_time": {"$exists": True}, "$expr": {"$lte": ["$look_time", store.now]}}},
        {"$sort": {"look_time": 1}},
        {"$limit": _AT_ONE_LOOK},
        # Which task they belong to; whether it was seen to refer to them, and later not to; whether it might still begin to.
        {
            "$project": {
                "task": 1,
                "seen": {"$ifNull": ["$seen", False]},
                "gone": {"$gt": ["$gone_time", None]},
                "old": {"$lt": [_later("$put_time", _NEVER_SEEN_MS), store.now]},
            }
        },
    ]
    due = await store.driver.rows(store.payloads, stages)
    if not due:
        return 0, 0
    alive = await _referred_to(store, [value["task"] for value in due], references)
    found = {value["_id"]["id"]: value for value in due}
    orphans = {id_: value for id_, value in found.items() if id_ not in alive}
    gone = [id_ for id_, value in orphans.items() if value["gone"] or (not value["seen"] and value["old"])]
    going = [id_ for id_, value in orphans.items() if value["seen"] and not value["gone"]]
    waiting = [id_ for id_, value in orphans.items() if not value["seen"] and id_ not in gone]
    await remove(store, gone)
    changes: list[tuple[list[ObjectId], Document, int]] = [
        # Referred to: check again later.
        ([id_ for id_ in found if id_ in alive], {"seen": True, "gone_time": "$$REMOVE"}, _LOOK_EVERY_MS),
        # No longer: check once more soon, then remove.
        (going, {"gone_time": store.now}, _SECOND_LOOK_MS),
        # Not yet.
        (waiting, {}, _LOOK_EVERY_MS),
    ]
    for ids, change, next_look_ms in changes:
        if ids:
            # What was seen, and when to check again, by the server's clock.
            stages = [{"$set": {**change, "look_time": _later(store.now, next_look_ms)}}]
            await chunks.update_many({"_id": {"$in": [_chunk(id_, 0) for id_ in ids]}}, stages)
    return len(due), len(gone)


async def _referred_to(
    store: Store, tasks: Sequence[str], references: Callable[[Mapping[str, Any]], Iterable[ObjectId]]
) -> set[ObjectId]:
    """Return what these tasks refer to, or the copies of them that an undo may put back."""
    fields = {"params": 1, "task_state.worker_states.returns": 1, "task_state.stages.params": 1}
    ids = sorted(set(tasks))
    kept = store.driver.collection(store.actions).find({"$expr": {"$gt": ["$undo_until", store.now]}}, {"_id": 1})
    copies = [f"{action['_id']}/{id_}" for action in await kept.to_list(None) for id_ in ids]
    copied = store.driver.collection(store.undo).find({"_id": {"$in": copies}}, {f"task.{name}": 1 for name in fields})
    documents = [copy["task"] for copy in await copied.to_list(None)]
    documents += await store.find({"_id": {"$in": ids}}, fields)
    return {reference for document in documents for reference in references(document)}


def _later(moment: Any, ms: int) -> rules.Expression:
    return {"$add": [moment, ms]}


def _chunk(id_: ObjectId, n: int) -> Document:
    return {"id": id_, "n": n}


def _chunks(id_: ObjectId) -> Document:
    """The chunks that have data."""
    return {"_id": {"$gt": _chunk(id_, 0), "$lt": _chunk(id_, _LAST)}}
