"""Registry: the workers, with orders to them; the settings of queues; and the definitions of tasks.

A worker's document is a heartbeat and a letter box, nothing else: it never decides who holds a task; only leases do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import datetime

from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from taskmesh.model.queue import QueueLimits
from taskmesh.store import rules
from taskmesh.store.mongodb.driver import Document, find_and_update
from taskmesh.store.mongodb.server_errors import patiently
from taskmesh.store.store import Store

HEARTBEAT_MS = 2_000
LIVE_MS = 8_000
"""A worker that was not seen for this long counts as gone."""
_REMEMBERED_MS = 3_600_000


async def register(store: Store, worker_id: str, instance: str, description: Document) -> Document | None:
    """Register a worker and return its document. None if a live worker of another instance has this id."""
    workers = store.driver.collection(store.workers)
    fields = _seen(store) | {"instance": instance, "start_time": store.now, **_literal(description)}
    free = {
        "$or": [
            {"instance": instance},
            {"state": "stopped"},
            {"$expr": {"$lt": ["$last_seen", {"$subtract": [store.now, LIVE_MS]}]}},
        ]
    }
    with contextlib.suppress(DuplicateKeyError):
        await workers.insert_one({"_id": worker_id, "instance": instance})
    fresh = [
        # Nothing of a predecessor under this id stays, least of all orders to it.
        {"$replaceWith": {"_id": "$_id"}},
        # Who it is, and when it was seen.
        {"$set": fields},
    ]
    return await _updated(store, {"_id": worker_id, **free}, fresh)


async def heartbeat(store: Store, worker_id: str, instance: str, description: Document) -> Document | None:
    """Write a heartbeat and return the worker's document: `last_seen` is the server's time. None if it lost its id.

    A heartbeat that arrives after the worker has said that it has stopped does not count, either: it was on its way.
    """
    fields = _seen(store) | _literal(description)
    here = {"_id": worker_id, "instance": instance, "state": {"$ne": "stopped"}}
    # What changes about the worker, and that it was seen, by the server's clock. Orders to it stay.
    return await _updated(store, here, [{"$set": fields}])


async def _updated(store: Store, query: Document, pipeline: list[Document]) -> Document | None:
    workers = store.driver.collection(store.workers)
    return await find_and_update(workers, query, pipeline, return_document=ReturnDocument.AFTER)  # type: ignore[no-any-return]


def _seen(store: Store) -> Document:
    return {"last_seen": store.now, "delete_time": {"$add": [store.now, _REMEMBERED_MS]}}


def _literal(values: Document) -> Document:
    return {name: {"$literal": value} for name, value in values.items()}


async def order(store: Store, worker_id: str, changes: Document) -> bool:
    """Leave an order for a worker. False if no worker of that id is registered. Its stream announces `order_time`."""
    fields: Document = {f"order.{name}": {"$literal": value} for name, value in changes.items()}
    fields |= {f"order_times.{name}": store.now for name in changes}
    workers = store.driver.collection(store.workers)
    # The order, when each part of it was given, and one time for all, by which the stream announces it.
    result = await workers.update_one({"_id": worker_id}, [{"$set": fields | {"order_time": store.now}}])
    return bool(result.matched_count)


async def read_worker(store: Store, worker_id: str) -> Document | None:
    """Return a worker's document."""
    return await store.driver.collection(store.workers).find_one({"_id": worker_id})  # type: ignore[no-any-return]


async def workers(store: Store, *, live_only: bool = False) -> list[Document]:
    """Return all workers of the last hour, or the live ones alone, each with `live` and the server's `now`."""
    live = {
        "$and": [
            {"$ne": ["$state", "stopped"]},
            {"$gte": ["$last_seen", {"$subtract": [store.now, LIVE_MS]}]},
        ]
    }
    stages = [
        # Not those whose registration is just being made.
        {"$match": {"last_seen": {"$exists": True}}},
        # Whether it was seen recently, by the server's clock; and that clock, from which ages are computed.
        {"$set": {"live": live, "now": store.now}},
        # Those that have stopped may be many, where each job is a worker.
        *([{"$match": {"live": True}}] if live_only else []),
        # By id, so that lists stay in place from one look to the next.
        {"$sort": {"_id": 1}},
    ]
    return await store.driver.rows(store.workers, stages)


async def queues(store: Store) -> dict[str, Document]:
    """Return the settings of all queues that have any, by name, each with whether it is `paused` now, and which groups are."""
    paused = {
        "$and": [
            {"$eq": ["$paused", True]},
            {"$gt": [{"$ifNull": ["$paused_until", rules.NEVER]}, store.now]},
        ]
    }
    groups = {
        "$filter": {
            "input": {"$ifNull": ["$paused_groups", []]},
            "cond": {"$gt": [{"$ifNull": ["$$this.until", rules.NEVER]}, store.now]},
        }
    }
    # All settings as they are, but the pauses as of now: one may be over that nobody has removed.
    found = await store.driver.rows(store.queues, [{"$set": {"paused": paused, "paused_groups": groups}}])
    return {document["_id"]: document for document in found}


async def closed_queues(store: Store) -> list[str]:
    """Return the queues from which nobody claims: those that are paused, and those whose limits let nothing start."""
    settings = (await queues(store)).items()
    return [
        name
        for name, queue in settings
        if queue["paused"] or QueueLimits.from_document(queue.get("limits") or {}).starts_nothing
    ]


async def set_queue(store: Store, queue: str, settings: Document) -> None:
    """Change settings of a queue. Creates its document if necessary."""
    collection = store.driver.collection(store.queues)
    # A plain update: nothing of it is computed.
    await patiently(lambda: collection.update_one({"_id": queue}, {"$set": settings}, upsert=True))


async def pause_group(store: Store, queue: str, group: str, pause: Document | None) -> None:
    """Pause one group of a queue, or end its pause."""
    others = {
        "$filter": {
            "input": {"$ifNull": ["$paused_groups", []]},
            "cond": {"$ne": ["$$this.g", {"$literal": group}]},
        }
    }
    own = [] if pause is None else [{"g": group, **pause}]
    # The pauses of the other groups stay. One update, so that none of two concurrent changes is lost.
    stages = [{"$set": {"paused_groups": {"$concatArrays": [others, {"$literal": own}]}}}]
    queues = store.driver.collection(store.queues)
    await patiently(lambda: queues.update_one({"_id": queue}, stages, upsert=True))


async def server_time(store: Store) -> datetime:
    """Return the server's clock."""
    hello = await store.driver.admin({"hello": 1})
    return hello["localTime"] + store.ahead  # type: ignore[no-any-return]


async def forget(store: Store, worker_id: str, instance: str) -> None:
    """Mark a registration as that of a process that is known to be gone."""
    # The state alone: so its id is free at once.
    await _updated(store, {"_id": worker_id, "instance": instance}, [{"$set": {"state": "stopped"}}])


async def register_definitions(store: Store, definitions: Mapping[str, Document]) -> list[str]:
    """Write how workers define their tasks, for publishers without the code. Return the names of those that are new or differ.

    One document for each name: `queue`, `option` and, as a text, the JSON `schema` of the params (its fields start with `$`).
    It outlives the worker that wrote it; of two versions that of the newest start stays. Safe to repeat.
    """
    known = {document.pop("_id"): document for document in await _definitions(store, list(definitions))}
    changed = [name for name, document in definitions.items() if known.get(name) != document]
    if changed:
        updates = [
            {
                "q": {"_id": name},
                # The definition as a whole: nothing of an older version stays.
                "u": [{"$replaceWith": {"$literal": {"_id": name, **definitions[name]}}}],
                "upsert": True,
            }
            for name in changed
        ]
        await store.driver.command(
            {"update": store.definitions, "updates": updates, "ordered": False, "writeConcern": {"w": "majority"}}
        )
    return changed


async def read_definition(store: Store, name: str) -> Document | None:
    """Return the registered definition of the tasks of this name."""
    found = await _definitions(store, [name])
    return found[0] if found else None


async def loop_names(store: Store) -> list[str]:
    """Return the names that workers have registered as loops or singletons."""
    cursor = store.driver.collection(store.definitions).find({"loop": {"$exists": True}}, {"_id": 1})
    return [document["_id"] for document in await cursor.to_list(None)]


async def dead_letter_queues(store: Store) -> list[str]:
    """Return the queues that workers have registered for dead letters."""
    found = await store.driver.collection(store.definitions).distinct("option.on_fail")
    return [queue for queue in found if isinstance(queue, str)]


async def retentions_ms(store: Store) -> set[int]:
    """Return how long the finished tasks of registered definitions are kept, except for those kept for ever."""
    definitions = store.driver.collection(store.definitions)
    found = [await definitions.distinct(f"option.{field}") for field in ("retain_success_ms", "retain_failed_ms")]
    return {value for values in found for value in values if isinstance(value, int)}


async def _definitions(store: Store, names: list[str]) -> list[Document]:
    cursor = store.driver.collection(store.definitions).find({"_id": {"$in": names}})
    return await cursor.to_list(None)  # type: ignore[no-any-return]  # both drivers leave it untyped
