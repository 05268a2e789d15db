"""Flows: many tasks that are published as a whole, or not at all.

    open: members are inserted, behind a gate of their own  →  sealed: all are there; the gates are opened  →  opened

One document for each flow names its members. A publisher that dies while the flow is open leaves tasks that nobody may claim,
and the same publication completes it; if one dies while it is sealed, the next sweep goes on. Everything can be done twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

from pymongo.errors import OperationFailure

from taskmesh.store import control, finish, rules
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import Code, patiently
from taskmesh.store.pipeline.by_id import in_parts
from taskmesh.store.publication import Publication
from taskmesh.store.publish import Published, publish
from taskmesh.store.relations import dependencies
from taskmesh.store.relations.opening import Gate, open_gate
from taskmesh.store.store import Store

MAX_BYTES = 12_000_000
"""The most bytes of the members' `_id`s together: the flow's document names them all."""
FOUND_AFTER_MS = 1_000
_KEPT_EMPTY_MS = 3_600_000
_CHECKED_AT_ONCE = 50
_FIRST_MEMBERS = 20
"""Of a flow that is checked; the others only if none of these is left."""
_KEPT_OPEN_MS = 24 * 3_600_000


async def read(store: Store, key: str) -> Document | None:
    """Return a flow's document."""
    found: Document | None = await _flows(store).find_one({"_id": key})
    return found


async def of_member(store: Store, id_: str) -> str | None:
    """Return the newest flow that a task is a member of."""
    cursor = _flows(store).find({"members": id_}, {"_id": 1}, limit=1).sort([("create_time", -1)])
    rows = await cursor.to_list(1)
    return rows[0]["_id"] if rows else None


async def begin(store: Store, key: str, ids: Sequence[str]) -> None:
    """Open a flow with these members, or add them to it. The order of the first publication stays."""
    added = {"$filter": {"input": {"$literal": list(ids)}, "cond": {"$not": [{"$in": ["$$this", "$$known"]}]}}}
    known = {"$ifNull": ["$members", []]}
    members = {"$let": {"vars": {"known": known}, "in": {"$concatArrays": ["$$known", added]}}}
    fields = {"members": members, "state": "open", "state_time": store.now}
    fields["check_time"] = {"$add": [store.now, _KEPT_OPEN_MS]}
    # Until it is sealed, nobody opens the gates of its members.
    pipeline: list[Document] = [{"$set": {**fields, "create_time": {"$ifNull": ["$create_time", store.now]}}}]
    while True:
        try:
            await _flows(store).update_one({"_id": key}, pipeline, upsert=True)
        except OperationFailure as error:  # somebody else inserts it at this moment
            if error.code != Code.DUPLICATE_KEY:
                raise
        else:
            return


async def forgotten(store: Store, flow: Document) -> bool:
    """Whether a flow was published and nothing is left of it. Then its key is free: a sweep just has not removed it yet."""
    if flow["state"] != "opened" or not flow["members"] or await _any_left(store, flow["members"]):
        return False
    await _flows(store).delete_one({"_id": flow["_id"], "state": "opened", "state_time": flow["state_time"]})
    return True


async def _any_left(store: Store, ids: Sequence[str]) -> bool:
    for part in in_parts(ids):
        if await members(store, part):
            return True
    return False


async def publish_members(store: Store, publications: Sequence[Publication], now: datetime) -> list[Published]:
    """Insert the members, each behind its gates. Existing tasks join as they are."""
    return await publish(store, publications, now)


async def seal(store: Store, key: str) -> None:
    """Note that all members are there: from now on anybody may open their gates."""
    # From an open one alone: whoever opens the gates of a sealed one may have finished meanwhile.
    await _flows(store).update_one(
        {"_id": key, "state": "open"}, [{"$set": {"state": "sealed", "state_time": store.now}}]
    )


async def open_members(store: Store, key: str) -> None:
    """Open the gates of a sealed flow's members, a thousand at a time, and check what each of them waits for."""
    flow = await read(store, key)
    if flow is None or flow["state"] != "sealed":
        return
    members: list[str] = flow["members"]
    all_open = [await open_gate(store, Gate.FLOW, part, {Gate.FLOW: key}) for part in in_parts(members)]
    await dependencies.tell(store, members)
    if not all(all_open):
        return  # somebody's open transaction holds one: a sweep opens it later
    opened = {"state": "opened", "state_time": store.now, "check_time": {"$add": [store.now, _KEPT_EMPTY_MS]}}
    # Not if somebody has added members since.
    await _flows(store).update_one({"_id": key, "state": "sealed", "members": members}, [{"$set": opened}])


def unopened(store: Store) -> Document:
    """Return the filter for flows that were sealed more than a second ago and not opened."""
    return {"state": "sealed", "$expr": {"$lte": ["$state_time", {"$subtract": [store.now, FOUND_AFTER_MS]}]}}


def unchecked(store: Store) -> Document:
    """Return the filter for flows of which nothing may be left, since they were not checked for an hour."""
    return {"state": {"$in": ["opened", "open"]}, "$expr": {"$lte": ["$check_time", store.now]}}


async def sweep(store: Store) -> int:
    """Open what is `unopened`, and remove what is `unchecked` and of which nothing is left."""
    sealed = await _flows(store).find(unopened(store), {"_id": 1}, limit=10).to_list(None)
    for flow in sealed:
        await open_members(store, flow["_id"])
    await _remove_empty(store)
    return len(sealed)


async def _remove_empty(store: Store) -> None:
    """Check what is `unchecked`, some at a time. Those of which no task is left are removed."""
    due = unchecked(store)
    fields = {"first": {"$slice": ["$members", _FIRST_MEMBERS]}, "size": {"$size": "$members"}}
    checked = await _flows(store).find(due, fields, limit=_CHECKED_AT_ONCE).to_list(None)
    if not checked:
        return
    first = [id_ for flow in checked for id_ in flow["first"]]
    left = await _left_of(store, first)
    empty = [
        flow["_id"]
        for flow in checked
        if left.isdisjoint(flow["first"]) and (flow["size"] <= _FIRST_MEMBERS or await _is_empty(store, flow["_id"]))
    ]
    # Only what is due still: whoever publishes a flow again puts that off. By `_id`: the server might look at all that are due.
    await _flows(store).delete_many({"_id": {"$in": empty}, **due}, hint="_id_")
    again: list[Document] = [
        # Looked at again in an hour.
        {"$set": {"check_time": {"$add": [store.now, _KEPT_EMPTY_MS]}}}
    ]
    await _flows(store).update_many({"_id": {"$in": [flow["_id"] for flow in checked]}, **due}, again, hint="_id_")


async def _is_empty(store: Store, key: str) -> bool:
    """Whether no document of a member is left: one that is deleted or past its retention counts, since an undo may restore it."""
    flow = await read(store, key)
    for part in in_parts(flow["members"] if flow is not None else ()):
        if await _left_of(store, part):
            return False
    return True


async def _left_of(store: Store, ids: Sequence[str]) -> set[str]:
    return {task["_id"] for task in await store.find({"_id": {"$in": list(ids)}}, {"_id": 1})}


async def members(store: Store, ids: Sequence[str]) -> list[Document]:
    """Return the status of these tasks now, and what each of them comes after."""
    found: list[Document] = []
    for part in in_parts(ids):
        fields = {
            "status": rules.status_on_reading(store.now),
            "after": "$task_state.after.ids",
            "by_dependency": {"$gt": ["$task_state.dependency_failure", None]},
        }
        kept = {"$expr": {"$not": [rules.is_forgotten(store.now)]}}
        found += await store.find({"_id": {"$in": part}, **kept}, fields)
    return found


async def cancel(store: Store, ids: Sequence[str]) -> None:
    """Cancel those of these tasks that are not finished."""
    now = store.now
    unfinished = rules.with_facts(now, {"$in": [rules.status(now), ["INIT", "RUNNING"]]})
    for part in in_parts(ids):
        query = {"_id": {"$in": part}, "$expr": unfinished}
        await patiently(partial(store.update, query, finish.cancel_pipeline(now)))  # again: those that are left
    await dependencies.tell(store, ids)


async def retry(store: Store, ids: Sequence[str]) -> None:
    """Restart those of these tasks that are finished."""
    now = store.now
    running = rules.with_facts(now, {"$in": [rules.status(now), ["INIT", "RUNNING", "SUCCESS"]]})
    for part in in_parts(ids):
        query = {"_id": {"$in": part}, "$expr": {"$not": [running]}}
        await patiently(partial(store.update, query, control.retry_pipeline(now)))
    await dependencies.tell(store, ids)


def _flows(store: Store) -> Any:
    return store.driver.collection(store.flows)
