"""Schema: check the server, and create what is missing: collections, indexes, the schema version.

Data of an unknown version is refused before anything is changed.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from pymongo.errors import CollectionInvalid, OperationFailure

from taskmesh.model import distribution
from taskmesh.model.errors import IncompatibleCollection, NotAReplicaSet, TaskMeshError
from taskmesh.store import reach
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import Code
from taskmesh.store.registry import LIVE_MS
from taskmesh.store.store import Store

SCHEMA_VERSION = 1
OLDEST_WIRE_VERSION = 17
"""The `maxWireVersion` of MongoDB 6.0: `wallTime` in change events needs it."""


_CREATED_WITHIN_S = 3.0
_LOOK_AGAIN_S = 0.1

_present = {"$exists": True}
_WAITS: Document = {"status": "INIT", "next_claim_time": {"$type": "date"}}
INDEXES: dict[str, tuple[list[tuple[str, int]], Document]] = {
    # Waiting tasks for anybody, in the order of claiming. A claimed task leaves this index, and costs nothing here from then on.
    # Behind the order of publication, everything that a scan needs of an untried task: so it reads no document.
    "waiting_in_order": (
        [
            ("queue", 1),
            ("name", 1),
            ("task_option.priority", -1),
            ("next_claim_time", 1),
            ("publish_number", 1),
            ("lane", 1),
            ("status", 1),
            ("pinned", 1),
            ("group", 1),
            ("event", 1),
            ("settle_time", 1),
            ("_id", 1),
        ],
        {"partialFilterExpression": _WAITS | {"pinned": False}},
    ),
    # Running tasks that have room for more workers, in the same order. Empty where each task is for one worker.
    "shared": (
        [("queue", 1), ("name", 1), ("task_option.priority", -1), ("next_claim_time", 1), ("lane", 1)],
        {
            "partialFilterExpression": {
                "status": "RUNNING",
                "pinned": False,
                "task_option.concurrent_worker_cnt": {"$gt": 1},
                "next_claim_time": _present,
            }
        },
    ),
    # Claimable tasks by the workers that they name: neither these nor other tasks can starve one another.
    "claimable_by_name": (
        [
            ("task_option.specific_worker_ids", 1),
            ("queue", 1),
            ("name", 1),
            ("task_option.priority", -1),
            ("next_claim_time", 1),
        ],
        {"partialFilterExpression": {"pinned": True, "next_claim_time": _present}},
    ),
    # The same by the labels that they need: a worker reads no backlog that is for others.
    "claimable_by_label": (
        [("needs", 1), ("queue", 1), ("name", 1), ("task_option.priority", -1), ("next_claim_time", 1)],
        {"partialFilterExpression": {"pinned": True, "needs": _present, "next_claim_time": _present}},
    ),
    # Claimable tasks by group: where much waits, each group is looked at by itself. Empty without groups. It has no other fields,
    # so that the server can step from group to group, and takes no other index for that.
    "by_group": (
        [("queue", 1), ("group", 1), ("name", 1), ("task_option.priority", -1), ("next_claim_time", 1)],
        {"partialFilterExpression": {"group": _present, "next_claim_time": _present}},
    ),
    # Leases that run out: scans find them at once, however long the backlog that waits.
    "leases": (
        [("queue", 1), ("name", 1), ("next_claim_time", 1)],
        {"partialFilterExpression": {"status": "RUNNING", "next_claim_time": _present}},
    ),
    # What becomes due next, in whatever queue: where nothing is due, one look tells, and reads no document.
    "waiting_due": (
        [("next_claim_time", 1), ("queue", 1), ("name", 1), ("status", 1)],
        {"partialFilterExpression": _WAITS},
    ),
    # What time alone will finish.
    "settle": ([("settle_time", 1)], {"partialFilterExpression": {"settle_time": _present}}),
    # Whether anything is left that a task waits for. Unfinished tasks alone, so that a finish costs the same however many wait.
    "pending": ([("task_state.dependents", 1)], {"partialFilterExpression": {"task_state.pending": True}}),
    # Tasks with a mark that somebody has to act on. Empty where no task waits for another.
    "ask": ([("task_state.ask_time", 1)], {"partialFilterExpression": {"task_state.ask_time": _present}}),
    # Tasks in line, in the order of publication. Empty without sequence keys.
    "in_line": (
        [("task_state.line", 1), ("publish_number", 1), ("_id", 1), ("task_state.place", 1), ("task_state.in_line", 1)],
        {"partialFilterExpression": {"task_state.in_line": True}},
    ),
    # Listings and counts.
    "status": ([("status", 1), ("queue", 1), ("name", 1), ("_id", 1)], {}),
    # Tasks by their tags. Empty without tags.
    "tags": ([("tags", 1), ("_id", 1)], {"partialFilterExpression": {"tags": _present}}),
    # The newest first. With `_id` for those of one millisecond: the next page continues exactly where the last ended.
    "newest": ([("task_state.create_time", 1), ("_id", 1)], {}),
    # What a handler has started.
    "children": ([("task_state.parent", 1)], {"partialFilterExpression": {"task_state.parent": _present}}),
    # Retention.
    "delete": ([("delete_time", 1)], {"expireAfterSeconds": 0, "partialFilterExpression": {"delete_time": _present}}),
}
REPLACED = ("claimable", "due", "waiting", "claimable_by_group")
"""Indexes of older releases that a claim updates in vain. They stay for as long as a live worker uses them."""
INDEX_GENERATION = 3
"""Written into the registration of every worker that does without what is `REPLACED`."""
WORKER_INDEXES: dict[str, tuple[list[tuple[str, int]], Document]] = {
    "delete": ([("delete_time", 1)], {"expireAfterSeconds": 0}),
}
SCHEDULE_INDEXES: dict[str, tuple[list[tuple[str, int]], Document]] = {
    # What ticks next.
    "next": ([("paused", 1), ("next_time", 1)], {}),
}
ACTION_INDEXES = WORKER_INDEXES | {"time": ([("time", -1)], {})}
FLOW_INDEXES: dict[str, tuple[list[tuple[str, int]], Document]] = {
    # What was sealed and not opened, and what has to be looked at now.
    "check": ([("state", 1), ("check_time", 1)], {}),
    # The flows that a task is in.
    "members": ([("members", 1)], {}),
}
SEQUENCE_INDEXES: dict[str, tuple[list[tuple[str, int]], Document]] = {
    # Lines whose head has been that for long, and has to be looked at now.
    "check": ([("check_time", 1)], {}),
}
UNDO_INDEXES = WORKER_INDEXES | {"of": ([("of", 1), ("_id", 1)], {})}


async def check_server(store: Store) -> Document:
    """Return the server's `hello`. Raises `NotAReplicaSet`, or `TaskMeshError` if the server is too old or out of reach."""
    hello = await reach.hello(store)
    if "setName" not in hello and hello.get("msg") != "isdbgrid":
        # Read from the installation's files, so not in the event loop.
        embedded = await asyncio.to_thread(distribution.install, "embedded")
        raise NotAReplicaSet(
            f"the MongoDB at {reach.hosts(store)} is a standalone server, without change streams and transactions: start it "
            "with --replSet rs0 and run rs.initiate() once, or use the embedded one "
            f"({embedded})"
        )
    if hello["maxWireVersion"] < OLDEST_WIRE_VERSION:
        raise TaskMeshError(f"the MongoDB at {reach.hosts(store)} is older than 6.0: upgrade it")
    return hello


async def create(store: Store) -> None:
    """Create what is missing. Safe to run from many processes at once. Raises `IncompatibleCollection`."""
    await check_version(store)
    existing = await _collections(store)
    for name in (name for name in store.collections if name not in existing):
        try:
            await store.driver.command({"create": name})
        except (CollectionInvalid, OperationFailure) as error:
            if isinstance(error, OperationFailure) and error.code != Code.NAMESPACE_EXISTS:
                raise
    await create_indexes(store)
    await _drop_replaced(store)
    await store.driver.collection(store.meta).update_one(
        {"_id": "schema"}, {"$setOnInsert": {"version": SCHEMA_VERSION, "create_time": datetime.now(UTC)}}, upsert=True
    )


async def _collections(store: Store) -> set[str]:
    """Return the names of the existing collections: one query, where each creation would be refused."""
    # Only of those that this user may use, so everybody may ask.
    reply = await store.driver.command({"listCollections": 1, "nameOnly": True, "authorizedCollections": True})
    return {collection["name"] for collection in reply["cursor"]["firstBatch"]}


async def check_readable(store: Store) -> None:
    """Check, without creating anything, that tasks can be listed here: there are none at all, or their indexes exist.

    Somebody may be creating them at this moment. Raises `IncompatibleCollection`.
    """
    await check_version(store)
    give_up = time.monotonic() + _CREATED_WITHIN_S
    while missing := await _missing_indexes(store):
        if time.monotonic() > give_up:
            raise IncompatibleCollection(
                f"the collection {store.driver.database.name}.{store.tasks} lacks {', '.join(missing)}: if it is taskmesh's, any "
                "worker creates them when it starts; if it is not, name another database or collection"
            )
        await asyncio.sleep(_LOOK_AGAIN_S)


async def _missing_indexes(store: Store) -> list[str]:
    """Return the names of the missing indexes of tasks. None are missing if there is no collection."""
    collection = store.driver.collection(store.tasks)
    found = await collection.index_information()  # empty for a collection that does not exist
    return sorted({f"taskmesh_{name}" for name in INDEXES} - set(found)) if found else []


async def check_version(store: Store) -> None:
    """Refuse a collection whose schema version is unknown."""
    stored = await store.driver.collection(store.meta).find_one({"_id": "schema"})
    if stored is not None and stored.get("version") != SCHEMA_VERSION:
        raise IncompatibleCollection(
            f"the collection {store.driver.database.name}.{store.tasks} has schema version {stored.get('version')!r}, and this "
            f"taskmesh knows version {SCHEMA_VERSION}: use the taskmesh release that wrote it, or another collection"
        )


async def create_indexes(store: Store) -> None:
    """Create the missing indexes. Raises `IncompatibleCollection` if a different index has the name of one of them."""
    for collection, indexes in (
        (store.tasks, INDEXES),
        (store.workers, WORKER_INDEXES),
        (store.schedules, SCHEDULE_INDEXES),
        (store.actions, ACTION_INDEXES),
        (store.undo, UNDO_INDEXES),
        (store.flows, FLOW_INDEXES),
        (store.sequences, SEQUENCE_INDEXES),
    ):
        specifications: list[Any] = [
            {"key": dict(keys), "name": f"taskmesh_{name}", **options} for name, (keys, options) in indexes.items()
        ]
        try:
            await store.driver.command({"createIndexes": collection, "indexes": specifications})
        except OperationFailure as error:
            if error.code in (Code.INDEX_OPTIONS_CONFLICT, Code.INDEX_KEY_SPECS_CONFLICT):
                raise IncompatibleCollection(
                    f"an index of {store.driver.database.name}.{collection} is in the way of one that taskmesh needs "
                    f"({error.details and error.details.get('errmsg')}): drop it, then start again"
                ) from error
            raise


async def _drop_replaced(store: Store) -> None:
    """Drop the indexes that no worker uses any more. Left to the next process that connects, if this user may not."""
    tasks = store.driver.collection(store.tasks)
    found = {f"taskmesh_{name}" for name in REPLACED} & set(await tasks.index_information())
    if not found or await _is_needed_by_older_workers(store):
        return
    for name in sorted(found):
        with suppress(OperationFailure):  # another process has just dropped it
            await tasks.drop_index(name)


async def _is_needed_by_older_workers(store: Store) -> bool:
    older = {
        "indexes": {"$not": {"$gte": INDEX_GENERATION}},
        "state": {"$ne": "stopped"},
        "$expr": {"$gte": ["$last_seen", {"$subtract": [store.now, LIVE_MS]}]},
    }
    return await store.driver.collection(store.workers).find_one(older, {"_id": 1}) is not None
