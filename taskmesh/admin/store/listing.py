"""Listing: find, page through and count matching tasks, quickly however many others there are (`index_choice`).

What became true by time alone (expired, a lease that ran out) is computed with the expressions of the rule, so nothing read
here is stale. `params` are left out unless requested.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from pymongo.errors import OperationFailure

from taskmesh.admin.filters import TaskFilter
from taskmesh.admin.store.index_choice import (
    FEW,
    STATUSES,
    Deadline,
    Order,
    Part,
    counted,
    is_indexed,
    parts_of,
    status_fits,
    stored_status,
    ways_in_order,
)
from taskmesh.store import rules
from taskmesh.store.find import as_it_stands
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import is_over_deadline
from taskmesh.store.store import Store

_SORTS: dict[Order, dict[str, int]] = {
    "key": {"_id": 1},
    "newest": {"task_state.create_time": -1, "_id": -1},
    "oldest": {"task_state.create_time": 1, "_id": 1},
}
_FINISHED = frozenset(STATUSES) - {"INIT", "RUNNING"}
_BATCH = 500
_HAS_A_PLACE: Document = {
    "_id": {"$type": "string"},
    "$expr": {"$eq": [{"$type": "$task_state.create_time"}, "date"]},
}
"""What a page can end at. A foreign document is skipped: the next page could not start after it."""


async def find(
    store: Store,
    which: TaskFilter,
    *,
    order: Order = "key",
    limit: int = 100,
    params: bool = False,
    after: str | None = None,
) -> AsyncIterator[Document]:
    """Yield the matching tasks, as they stand now. `after`: an `_id` after which to continue (by key). `limit=0`: all."""
    shape = as_it_stands(store.now)
    # A listing shows neither records nor signals, which is much data for many tasks; params only on request.
    shape += [{"$unset": ["task_state.steps", "task_state.signals", *([] if params else ["params"])]}]
    behind = [] if after is None else [{"_id": {"$gt": after}}]
    async with _opened(store, which, order, limit, shape, behind, Deadline(None)) as found:
        async for document in found:
            yield document


async def page(
    store: Store, which: TaskFilter, *, newest: bool, behind: list[Any] | None, limit: int, deadline_ms: int
) -> tuple[list[Document], list[Any] | None] | None:
    """Return a page of matching tasks, shortened, and where to continue; None if that takes longer than the deadline.

    `newest`: the newest first, else by `_id`. `behind`: where the last page ended.
    """
    order: Order = "newest" if newest else "key"
    begin = [_HAS_A_PLACE] if behind is None else [_HAS_A_PLACE, _behind(behind, newest=newest)]
    # The fields of a row of the listing, computed by the server.
    shape = [{"$project": _short(store.now)}]
    try:
        async with _opened(store, which, order, limit + 1, shape, begin, Deadline(deadline_ms)) as documents:
            found = [document async for document in documents]
    except OperationFailure as error:
        if is_over_deadline(error):
            return None
        raise
    following: list[Any] | None = None
    if len(found) > limit:
        found = found[:limit]
        following = [found[-1]["create_time"], found[-1]["_id"]] if newest else [found[-1]["_id"]]
    return found, following


async def count(
    store: Store, which: TaskFilter, at_most: int | None = None, deadline_ms: int | None = None
) -> int | None:
    """Count the matching tasks, up to `at_most`. None if that takes longer than the deadline."""
    deadline = Deadline(deadline_ms)
    found = 0
    try:
        for part in await parts_of(store, which):
            left = None if at_most is None else at_most - found
            by_keys = await _count_keys(store, which, part, left, deadline)
            if by_keys is None:
                fitting = _fitting(store, which, part.query)
                by_keys = await counted(store, fitting, part.index, left, deadline)
            found += by_keys
            if found == at_most:
                break
    except OperationFailure as error:
        if is_over_deadline(error):
            return None
        raise
    return found


async def _count_keys(
    store: Store, which: TaskFilter, part: Part, at_most: int | None, deadline: Deadline
) -> int | None:
    """Count keys alone, less what is gone and not removed yet. None if keys are not enough."""
    any_status = not stored_status(which, store.now)
    if not is_indexed(which) or not (any_status or _FINISHED.issuperset(part.stored["status"].get("$in", STATUSES))):
        return None
    past = {
        "delete_time": {"$exists": True},
        "status": {"$ne": "DELETED"},
        "$expr": {"$lte": ["$delete_time", store.now]},
    }
    # What is past its retention and not removed yet: by the keys of its own index.
    forgotten = await counted(store, [{"$match": {"$and": [past, part.known]}}], "taskmesh_delete", FEW + 1, deadline)
    if not part.stored:  # otherwise none of their statuses is requested
        # And what is deleted, and keeps a handler's place.
        deleted = [{"$match": {"$and": [{"status": "DELETED"}, part.known]}}]
        forgotten += await counted(store, deleted, "taskmesh_status", FEW + 1, deadline)
    if forgotten > FEW:
        return None
    limit = None if at_most is None else at_most + forgotten
    # All matching keys, less these.
    return max(0, await counted(store, [{"$match": part.known}], part.index, limit, deadline) - forgotten)


async def ids(store: Store, which: TaskFilter) -> AsyncIterator[list[str]]:
    """Yield the `_id`s of matching tasks, in batches, perhaps including those that come to match meanwhile."""
    for part in await parts_of(store, which):
        # Of matching tasks, the `_id` alone.
        stages = [*_fitting(store, which, part.query), {"$project": {"_id": 1}}]
        cursor = await store.driver.aggregate(store.tasks, stages, batchSize=_BATCH, hint=part.index)
        try:
            while rows := await cursor.to_list(_BATCH):
                yield [row["_id"] for row in rows if isinstance(row["_id"], str)]
        finally:
            await cursor.close()


def _fitting(store: Store, which: TaskFilter, query: Document) -> list[Document]:
    """Return the stages that keep matching tasks. Time changes only unfinished ones, so the entries of others are not read."""
    unfinished = {"$in": ["$status", ["INIT", "RUNNING"]]}
    fits = status_fits(which, {"$cond": [unfinished, rules.status_on_reading(store.now), "$status"]})
    return [
        # The conditions on stored fields, as the index has them.
        {"$match": query},
        # The status as it is by now, which no index can have.
        {"$match": {"$expr": fits}},
    ]


@asynccontextmanager
async def _opened(
    store: Store,
    which: TaskFilter,
    order: Order,
    limit: int,
    shape: list[Document],
    behind: list[Document],
    deadline: Deadline,
) -> AsyncIterator[AsyncIterator[Document]]:
    """Open all ways, and yield what is read along them, in order, up to the limit."""
    cursors: list[Any] = []
    try:
        for way in await ways_in_order(store, which, order, deadline):
            stages: list[Document] = [
                *_fitting(store, which, {"$and": [way.query, *behind]}),
                # In the order of the index already, unless few match.
                {"$sort": _SORTS[order]},
                # No more than are shown.
                *([{"$limit": limit}] if limit else []),
            ]
            options = {"hint": way.index, "batchSize": min(limit or _BATCH, _BATCH), **deadline.options()}
            cursors.append(await store.driver.aggregate(store.tasks, [*stages, *shape], **options))
        yield _merged(cursors, order, limit)
    finally:
        for cursor in cursors:
            await cursor.close()


async def _merged(cursors: Sequence[Any], order: Order, limit: int) -> AsyncIterator[Document]:
    """Yield what all cursors return, in order. A task that changed its part meanwhile is returned once."""
    first: Callable[..., tuple[Any, int, Document]] = max if order == "newest" else min
    readers = [_each(cursor) for cursor in cursors]
    heads: dict[int, tuple[Any, int, Document]] = {}

    async def advance(number: int) -> None:
        heads.pop(number, None)
        if (document := await anext(readers[number], None)) is not None:
            heads[number] = (_place(document, order), number, document)

    for number in range(len(readers)):
        await advance(number)
    given, last = 0, None
    while heads and (not limit or given < limit):
        place, number, document = first(heads.values(), key=lambda head: head[:2])
        if place != last:
            yield document
            given, last = given + 1, place
        await advance(number)


async def _each(cursor: Any) -> AsyncIterator[Document]:
    while batch := await cursor.to_list(_BATCH):
        for document in batch:
            yield document


def _place(document: Document, order: Order) -> tuple[Any, ...]:
    """Return the sort key of a document. In a foreign document it may be anything."""
    id_ = document["_id"]
    if order == "key":
        return (not isinstance(id_, str), str(id_))
    state = document.get("task_state")
    created = document.get("create_time", state.get("create_time") if isinstance(state, dict) else None)
    return (created if isinstance(created, datetime) else datetime.min.replace(tzinfo=UTC), str(id_))


def _behind(behind: list[Any], *, newest: bool) -> Document:
    if not newest:
        return {"_id": {"$gt": behind[0]}}
    moment, id_ = behind
    return {
        "task_state.create_time": {"$lte": moment},
        "$or": [{"task_state.create_time": {"$lt": moment}}, {"_id": {"$lt": id_}}],
    }


def _short(now: rules.Expression) -> Document:
    """Return what a page shows of a task: no params, no results, no logs."""
    entries = _array(rules.ENTRIES)
    fails = {"$filter": {"input": entries, "cond": {"$eq": ["$$this.state", "FAIL"]}}}
    live = {"$filter": {"input": entries, "cond": rules.is_live(now)}}
    dropped = {"$cond": [{"$isNumber": "$task_state.dropped_fail_cnt"}, "$task_state.dropped_fail_cnt", 0]}

    def last(field: str) -> Document:
        """Return a field of the newest execution."""
        return {"$last": {"$map": {"input": entries, "in": {"$ifNull": [f"$$this.{field}", None]}}}}

    still = {"$cond": [{"$eq": [last("state"), "RUNNING"]}, now, None]}
    ended = {"$ifNull": [last("success_time"), last("fail_time"), still]}
    both = {"$and": [{"$eq": [{"$type": moment}, "date"]} for moment in (last("start_time"), ended)]}
    took_ms = {"$cond": [both, {"$subtract": [ended, last("start_time")]}, None]}
    reason = {"$cond": [{"$eq": [{"$type": "$$this.fail_reason"}, "string"]}, "$$this.fail_reason", ""]}
    last_reason = {"$arrayElemAt": [{"$map": {"input": fails, "in": reason}}, -1]}
    return {
        "name": 1,
        "key": 1,
        "queue": 1,
        "group": 1,
        "tags": {
            "$cond": [
                {"$isArray": ["$tags"]},
                {"$filter": {"input": "$tags", "cond": {"$eq": [{"$type": "$$this"}, "string"]}}},
                [],
            ]
        },
        "status": rules.status_on_reading(now),
        "standing": rules.standing_on_reading(now),
        "priority": "$task_option.priority",
        "create_time": "$task_state.create_time",
        "start_time": "$task_state.start_time",
        "next_claim_time": 1,
        "finish_time": 1,
        "progress": "$task_state.progress",
        "fail_cnt": {"$size": fails},
        "executions": {"$add": [{"$size": entries}, {"$size": _array("$task_state.losses")}, dropped]},
        "took_ms": took_ms,
        "worker": {"$cond": [{"$eq": [{"$type": last("worker_id")}, "string"]}, last("worker_id"), None]},
        "running_on": {"$map": {"input": live, "in": "$$this.worker_id"}},
        "reason": {"$substrCP": [{"$ifNull": [last_reason, ""]}, 0, 200]},
    }


def _array(field: str) -> Document:
    """Return an array of the document; an empty one if it is something else, as in a foreign document."""
    return {"$cond": [{"$isArray": [field]}, field, []]}
