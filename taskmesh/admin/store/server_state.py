"""Server state: what the server and the collection look like from outside, for `doctor`.

Reads only, each query with a deadline.

Some queries need rights that an application's user rarely has. Such a query returns None; nothing else goes wrong then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, ParamSpec, TypeVar

from pymongo.errors import OperationFailure

from taskmesh.store.acceptance import INSERTED
from taskmesh.store.mongodb.driver import Document, own_database
from taskmesh.store.store import Store

P = ParamSpec("P")
R = TypeVar("R")

DEADLINE_MS = 5_000
_LOOKED_AT = 3_000
"""Up to this many unfinished tasks are read."""
_NAMED = 5
_NOT_FOR_US = frozenset({13, 8000, 73, 26, 76, 115, 40324, 11601, 50})
"""Not authorized (13, Atlas 8000); no such collection or command here (a sharded cluster has no oplog); took too long."""


def if_allowed(look: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R | None]]:
    """Make a query return None if the server does not permit it."""

    async def looked(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return await look(*args, **kwargs)
        except OperationFailure as error:
            if error.code in _NOT_FOR_US or "CommandNotFound" in str(error):
                return None
            raise

    return looked


@if_allowed
async def members(store: Store) -> list[Document]:
    """Return the members of the replica set: `name`, `stateStr`, `health`."""
    status = await store.driver.admin({"replSetGetStatus": 1})
    return list(status["members"])


@if_allowed
async def oplog_window_s(store: Store) -> float | None:
    """Return how far back the oplog goes, in seconds. None if that is unknown."""
    oplog = own_database(store.driver.client, "local").get_collection("oplog.rs")
    ends: list[datetime] = []
    for direction in (1, -1):
        cursor = oplog.find({}, {"ts": 1}, limit=1, max_time_ms=DEADLINE_MS).sort([("$natural", direction)])
        ends.extend(entry["ts"].as_datetime() for entry in await cursor.to_list(1))
    return (ends[1] - ends[0]).total_seconds() if len(ends) == 2 else None


@if_allowed
async def index_use(store: Store) -> dict[str, Document]:
    """Return the indexes of the task collection by name: `key`, and how many `ops` used it since the server started."""
    # How often each index was used, as the server counts it.
    rows = await _rows(store, [{"$indexStats": {}}], None)
    found: dict[str, Document] = {}
    for row in rows:  # one for each shard
        found.setdefault(row["name"], {"key": row["key"], "ops": 0})["ops"] += int(row["accesses"]["ops"])
    return found


@if_allowed
async def size(store: Store) -> Document:
    """Return `count` and `size` of the task collection, from its statistics."""
    # The collection's statistics, a row for each shard.
    rows = await _rows(store, [{"$collStats": {"storageStats": {}}}], None)
    return {name: sum(row["storageStats"].get(name, 0) for row in rows) for name in ("count", "size")}


@if_allowed
async def long_transactions(store: Store, longer_than_s: float) -> int:
    """Count anybody's transactions that have been open for longer than this."""
    stages: list[Document] = [
        # What everybody does, including sessions that are idle at the moment: a forgotten transaction is one.
        {"$currentOp": {"allUsers": True, "idleSessions": True}},
        # Transactions that were opened too long ago.
        {"$match": {"transaction.timeOpenMicros": {"$gt": longer_than_s * 1_000_000}}},
        {"$count": "n"},
    ]
    reply = await store.driver.admin({"aggregate": 1, "pipeline": stages, "cursor": {}, "maxTimeMS": DEADLINE_MS})
    batch: list[Document] = reply["cursor"]["firstBatch"]
    return int(batch[0]["n"]) if batch else 0


@if_allowed
async def never_accepted(store: Store) -> list[Any]:
    """Return the `_id`s of some documents that look as if inserted by another program, and that no worker ever accepts."""
    waiting = {"status": {"$in": [None, "INIT"]}, "queue": {"$exists": False}, "$nor": [INSERTED]}
    tasks = store.driver.collection(store.tasks)
    cursor = tasks.find(waiting, {"_id": 1}, limit=_NAMED, max_time_ms=DEADLINE_MS).hint("taskmesh_status")
    return [document["_id"] for document in await cursor.to_list(_NAMED)]


@if_allowed
async def past_retention(store: Store, by_s: float) -> int:
    """Count the tasks that should have been deleted so long ago, up to 1 000: more than a few mean an idle TTL monitor."""
    due = {"$lt": ["$delete_time", {"$subtract": [store.now, by_s * 1_000]}]}
    return await _count(store, {"delete_time": {"$exists": True}, "$expr": due}, "taskmesh_delete")


@if_allowed
async def unclaimed_leases(store: Store, by_s: float) -> int:
    """Count the tasks whose last lease ran out so long ago and that nobody has claimed since, up to 1 000."""
    query = {
        "status": "RUNNING",
        "next_claim_time": {"$exists": True},
        "$expr": {"$lt": ["$next_claim_time", {"$subtract": [store.now, by_s * 1_000]}]},
    }
    return await _count(store, query, "taskmesh_status")


@if_allowed
async def short_leases(store: Store) -> list[str]:
    """Return the names of unfinished tasks whose lease is shorter than two pings: one late ping loses them."""
    timeout, ping = "$task_option.worker_timeout_ms", "$task_option.ping_interval_ms"
    stages: list[Document] = [
        *_some_of({"status": {"$in": ["INIT", "RUNNING"]}}),
        # Those whose lease ends before their second ping; their names.
        {"$match": {"$expr": {"$lt": [timeout, {"$multiply": [ping, 2]}]}}},
        # Each name once, in order.
        {"$group": {"_id": "$name"}},
        {"$sort": {"_id": 1}},
    ]
    return [str(row["_id"]) for row in await _rows(store, stages)]


@if_allowed
async def needs_of_waiting(store: Store) -> list[tuple[str, str, list[str], int]]:
    """Return queue, name and needed labels of waiting tasks, each combination once, counted among the first few thousand."""
    stages: list[Document] = [
        *_some_of({"status": "INIT"}),
        # Those that need labels; in a foreign document it may be no list.
        {"$match": {"needs": {"$type": "array"}}},
        # Each combination once, and how many they are.
        {"$group": {"_id": {"queue": "$queue", "name": "$name", "needs": "$needs"}, "n": {"$sum": 1}}},
        {"$sort": {"n": -1}},
        {"$limit": 100},
    ]
    rows = [(row["_id"], int(row["n"])) for row in await _rows(store, stages)]
    return [(str(of["queue"]), str(of["name"]), [str(need) for need in of["needs"]], n) for of, n in rows]


@if_allowed
async def large_tasks(store: Store, larger_than: int) -> list[Document]:
    """Return the largest unfinished tasks over this size, of the first few thousand: `_id` and `bytes`."""
    stages: list[Document] = [
        *_some_of({"status": {"$in": ["INIT", "RUNNING"]}}),
        # How large each is.
        {"$project": {"bytes": {"$bsonSize": "$$ROOT"}}},
        # The largest of those that are too large.
        {"$match": {"bytes": {"$gt": larger_than}}},
        {"$sort": {"bytes": -1}},
        {"$limit": 5},
    ]
    return await _rows(store, stages)


@if_allowed
async def stranded(store: Store, by_s: float) -> list[str]:
    """Return the `_id`s of a few tasks whose gate is shut though nothing that they wait for is unfinished, without a mark."""
    just_asked = {"$gt": ["$task_state.ask_time", {"$subtract": [store.now, by_s * 1_000]}]}
    stages: list[Document] = [
        # Tasks that wait for others.
        *_some_of({"status": "INIT", "task_state.waits_for": {"$exists": True}}),
        # Without those that are being checked at this moment.
        {"$match": {"$expr": {"$not": [just_asked]}}},
        # Those that nothing unfinished names.
        {
            "$lookup": {
                "from": store.tasks,
                "localField": "_id",
                "foreignField": "task_state.dependents",
                # The first is enough.
                "pipeline": [{"$match": {"task_state.pending": True}}, {"$limit": 1}],
                "as": "left",
            }
        },
        # A few, by name.
        {"$match": {"left": []}},
        {"$limit": 5},
        # (And nothing else of them.)
        {"$project": {"_id": 1}},
    ]
    return [str(row["_id"]) for row in await _rows(store, stages)]


@if_allowed
async def waits_for_its_own_line(store: Store, id_: str | None = None) -> tuple[str, str] | None:
    """Return a task at the head of its line, and one behind it for which it waits: neither ever runs. `id_`: only this task."""
    stages: list[Document] = [
        # Some thousand heads that wait for others: their gate `sequence` is open.
        {
            "$match": {
                **({} if id_ is None else {"_id": id_}),
                "status": "INIT",
                "task_state.waits_for": {"$exists": True},
                "task_state.line": {"$exists": True},
                "task_state.in_line": {"$exists": False},
            }
        },
        {"$limit": _LOOKED_AT},
        # What each waits for, and is behind it in line.
        {
            "$lookup": {
                "from": store.tasks,
                "localField": "_id",
                "foreignField": "task_state.dependents",
                "let": {"line": "$task_state.line"},
                "pipeline": [
                    # What is not finished, and has not had its turn.
                    {"$match": {"task_state.pending": True, "task_state.in_line": True}},
                    # In the same line; the first is enough.
                    {"$match": {"$expr": {"$eq": ["$task_state.line", "$$line"]}}},
                    {"$limit": 1},
                    # (By name.)
                    {"$project": {"_id": 1}},
                ],
                "as": "behind",
            }
        },
        # One of them, by name.
        {"$match": {"behind": {"$ne": []}}},
        {"$limit": 1},
        # (With what is behind it.)
        {"$project": {"behind": {"$first": "$behind._id"}}},
    ]
    hint = "taskmesh_status" if id_ is None else "_id_"
    found = await _rows(store, stages, hint)
    return (str(found[0]["_id"]), str(found[0]["behind"])) if found else None


@if_allowed
async def open_flows(store: Store, by_s: float) -> list[str]:
    """Return the keys of a few flows whose publication began so long ago, and of which tasks wait for the rest."""
    old = {"$lt": ["$state_time", {"$subtract": [store.now, by_s * 1_000]}]}
    stages: list[Document] = [
        # What was begun long ago, and is not sealed.
        {"$match": {"state": "open", "$expr": old}},
        {"$limit": 100},
        # Whether one of its members is there and unfinished.
        {
            "$lookup": {
                "from": store.tasks,
                "localField": "members",
                "foreignField": "_id",
                # The first is enough.
                "pipeline": [{"$match": {"status": "INIT"}}, {"$limit": 1}, {"$project": {"_id": 1}}],
                "as": "waits",
            }
        },
        # A few, by their keys.
        {"$match": {"waits": {"$ne": []}}},
        {"$limit": 5},
        # (And nothing else of them.)
        {"$project": {"_id": 1}},
    ]
    return [str(flow["_id"]) for flow in await store.driver.rows(store.flows, stages, maxTimeMS=DEADLINE_MS)]


def _some_of(query: Document) -> list[Document]:
    # Matching documents, but no more than a few thousand: the doctor must not read a whole collection.
    return [{"$match": query}, {"$limit": _LOOKED_AT}]


async def _rows(store: Store, stages: list[Document], hint: str | None = "taskmesh_status") -> list[Document]:
    index: dict[str, Any] = {} if hint is None else {"hint": hint}
    return await store.driver.rows(store.tasks, stages, maxTimeMS=DEADLINE_MS, **index)


async def _count(store: Store, query: Document, hint: str) -> int:
    # How many match, up to a thousand: more would say no more.
    stages: list[Any] = [{"$match": query}, {"$limit": 1_000}, {"$count": "n"}]
    rows = await _rows(store, stages, hint)
    return int(rows[0]["n"]) if rows else 0
