"""Bulk: count, list, retry, cancel and delete by a filter, in batches; nothing but the filter is ever touched.

Each batch asks the whole filter again in its update, so that a task which changed since it was found is left alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

from pymongo.errors import OperationFailure

from taskmesh import rules
from taskmesh.store import control, undo
from taskmesh.store.connection import Store
from taskmesh.store.driver import Document
from taskmesh.store.faults import is_over_deadline
from taskmesh.store.stamp import starting_with
from taskmesh.store.strangers import WELL_FORMED

Action = Literal["retry", "cancel", "delete"]
BATCH = 500
_ROUNDS = 10


class Filter(Protocol):
    """What a filter has to tell (see `where.TaskFilter`)."""

    def query(self, now: rules.Expression) -> Document:
        """Return the conditions on stored fields."""

    def status_is(self, status: rules.Expression) -> rules.Expression:
        """Return the condition on the status as it is at the moment."""


def _fits(store: Store, which: Filter) -> rules.Expression:
    return which.status_is(rules.status_on_reading(store.now))


def _seems_to_fit(store: Store, which: Filter) -> rules.Expression:
    """Return the same for readers of many: time changes the unfinished alone, so the entries of others are not looked at."""
    unfinished = {"$in": ["$status", ["INIT", "RUNNING"]]}
    return which.status_is({"$cond": [unfinished, rules.status_on_reading(store.now), "$status"]})


async def _query_of(store: Store, which: Filter) -> Document:
    """Return the filter's conditions on stored fields, such that an index serves them if it can be."""
    query = which.query(store.now)
    if (keys := query.get("key")) is None or "_id" in query:
        return query
    # No index has keys without names; but names are few, and `_id` has them before the keys.
    names = await _names(store)
    if names is None:
        return query
    ranges: list[Document] = [{"_id": {sign: f"{name}:{key}" for sign, key in keys.items()}} for name in names]
    del query["key"]
    return {"$and": [query, {"$or": ranges or [{"_id": ""}]}]}


async def _names(store: Store, at_most: int = 100) -> list[str] | None:
    """Return the names of all tasks, by one look at the index on `_id` for each; None if there are more than so many."""
    found: list[str] = []
    last = ""
    for _ in range(at_most):
        cursor = store.driver.collection(store.tasks).find({"_id": {"$gt": last}}, {"_id": 1}, limit=1).sort("_id", 1)
        rows = await cursor.to_list(1)
        if not rows:
            return found
        id_ = str(rows[0]["_id"])
        name, colon, _ = id_.partition(":")
        found += [name] if colon else []
        last = f"{name};" if colon else id_  # behind the colon comes the semicolon: behind the name's last key
    return None


def _options(query: Document, deadline_ms: int | None) -> Document:
    options: Document = {} if deadline_ms is None else {"maxTimeMS": deadline_ms}
    return options if query.keys() - {"$expr"} else options | {"hint": {"_id": 1}}


async def count(store: Store, which: Filter, at_most: int | None = None, deadline_ms: int | None = None) -> int | None:
    """Count the tasks that fit, no further than `at_most`; None if that takes longer than the deadline."""
    query = await _query_of(store, which)
    stages: list[Document] = [{"$match": query}, {"$match": {"$expr": _seems_to_fit(store, which)}}]
    stages += [{"$limit": at_most}] if at_most is not None else []
    try:
        options = _options(query, deadline_ms)
        cursor = await store.driver.aggregate(store.tasks, [*stages, {"$count": "n"}], **options)
        rows = await cursor.to_list(None)
    except OperationFailure as error:
        if is_over_deadline(error):
            return None
        raise
    return int(rows[0]["n"]) if rows else 0


async def ids(store: Store, which: Filter) -> AsyncIterator[list[str]]:
    """Yield the `_id`s of the tasks that fit, in batches; those that come to fit meanwhile perhaps too."""
    stages: list[Document] = [
        {"$match": await _query_of(store, which)},
        {"$match": {"$expr": _seems_to_fit(store, which)}},
        {"$project": {"_id": 1}},
    ]
    cursor = await store.driver.aggregate(store.tasks, stages, batchSize=BATCH)
    try:
        while rows := await cursor.to_list(BATCH):
            yield [row["_id"] for row in rows if isinstance(row["_id"], str)]
    finally:
        await cursor.close()


async def act(
    store: Store, action: Action, which: Filter, batch: list[str], *, undo_id: str | None = None, undo_ms: int = 0
) -> int:
    """Do this to those of a batch that still fit; return to how many. Running ones are not retried.

    `undo_id`: copy them aside first, under this action. Those that change between the copy and the action are copied again; one
    that changes all the time is left alone in the end.
    """
    query = _query(store, action, which, batch)
    if undo_id is None:
        return await _change(store, action, query, batch, {})
    done = 0
    for _ in range(_ROUNDS):
        left = query if action == "delete" else {"$and": [query, {"bulk_id": {"$ne": undo_id}}]}
        states = await undo.keep(store, undo_id, left, undo_ms)
        if not states:
            break
        as_copied = {"$and": [left, {"_id": {"$in": list(states)}}, {"$expr": undo.as_copied(states)}]}
        done += await _change(store, action, as_copied, batch, {"bulk_id": undo_id})
    return done


def _query(store: Store, action: Action, which: Filter, batch: list[str]) -> Document:
    now = store.now
    fits: list[rules.Expression] = [_fits(store, which)]
    status = rules.status_on_reading(now)
    if action == "retry":
        fits.append({"$ne": [status, "RUNNING"]})
    elif action == "cancel":
        fits.append({"$in": [status, ["INIT", "RUNNING"]]})
    # A document that is no task of ours would make the rule's expressions fail, and the whole batch with it.
    ours = [] if action == "delete" else [WELL_FORMED]
    return {"$and": [{"_id": {"$in": batch}}, which.query(now), *ours, {"$expr": {"$and": fits}}]}


async def _change(store: Store, action: Action, query: Document, batch: list[str], mark: Document) -> int:
    """Change what fits of a batch. `mark`: fields that say by which action."""
    now = store.now
    marking: list[Document] = [{"$set": mark}] if mark else []
    if action == "delete":
        # Running executions hear of it by this word. With a copy to match, what has had it does not fit any more.
        await store.update({"$and": [query, {"status": "RUNNING"}]}, [*marking, *control.deletion_pipeline(now)])
        doomed = query
        if mark:
            doomed = {"_id": {"$in": batch}, "$or": [query, {**mark, "event": starting_with(["deleted"])}]}
        result = await store.driver.collection(store.tasks).delete_many(doomed)
        return int(result.deleted_count)
    pipeline = control.retry_pipeline(now) if action == "retry" else control.cancel_pipeline(now)
    return int((await store.update(query, [*marking, *pipeline]))["n"])


async def page(
    store: Store, which: Filter, *, newest: bool, behind: list[Any] | None, limit: int, deadline_ms: int
) -> tuple[list[Document], list[Any] | None] | None:
    """Return a page of what fits, in short, and where to go on behind it; None if that takes longer than the deadline.

    `newest`: the last published first, else by `_id`. `behind`: what the page before gave.
    """
    query = await _query_of(store, which)
    sort = {"task_state.create_time": -1, "_id": -1} if newest else {"_id": 1}
    if behind is not None:
        query = {"$and": [query, _behind(behind, newest=newest)]}
    stages: list[Document] = [
        {"$match": query},
        {"$sort": sort},
        {"$match": {"$expr": _seems_to_fit(store, which)}},
        {"$limit": limit + 1},
        {"$project": _short(store.now)},
    ]
    try:
        cursor = await store.driver.aggregate(store.tasks, stages, maxTimeMS=deadline_ms, batchSize=limit + 1)
        found = await cursor.to_list(None)
    except OperationFailure as error:
        if is_over_deadline(error):
            return None
        raise
    following: list[Any] | None = None
    if len(found) > limit:
        found = found[:limit]
        following = [found[-1]["create_time"], found[-1]["_id"]] if newest else [found[-1]["_id"]]
    return found, following


def _behind(behind: list[Any], *, newest: bool) -> Document:
    if not newest:
        return {"_id": {"$gt": behind[0]}}
    moment, id_ = behind
    return {
        "task_state.create_time": {"$lte": moment},
        "$or": [{"task_state.create_time": {"$lt": moment}}, {"_id": {"$lt": id_}}],
    }


def _short(now: rules.Expression) -> Document:
    """What a listing shows of a task: no params, no results, no logs."""
    entries = {"$cond": [{"$isArray": [rules.ENTRIES]}, rules.ENTRIES, []]}
    fails = {"$filter": {"input": entries, "cond": {"$eq": ["$$this.state", "FAIL"]}}}
    live = {"$filter": {"input": entries, "cond": rules.is_live(now)}}
    last_reason = {"$arrayElemAt": [{"$map": {"input": fails, "in": {"$ifNull": ["$$this.fail_reason", ""]}}}, -1]}
    return {
        "name": 1,
        "key": 1,
        "queue": 1,
        "group": 1,
        "status": rules.status_on_reading(now),
        "priority": "$task_option.priority",
        "create_time": "$task_state.create_time",
        "start_time": "$task_state.start_time",
        "next_claim_time": 1,
        "finish_time": 1,
        "progress": "$task_state.progress",
        "fail_cnt": {"$size": fails},
        "running_on": {"$map": {"input": live, "in": "$$this.worker_id"}},
        "reason": {"$substrCP": [{"$ifNull": [last_reason, ""]}, 0, 200]},
    }
