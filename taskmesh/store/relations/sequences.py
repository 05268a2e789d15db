"""Sequences: the tasks with one sequence key in one queue form a line, in which one at a time may be claimed: its head.

A task is published in line, with its gate shut (`task_state.in_line`). One document for each line that is not empty says which
task is the head, and only a compare-and-set changes that: from a head that has left the line to the first in line, by the order
of publication. So there is one head, however many workers check at once; its gate is opened after that is written, by whoever
comes first or next.

A task joins its line again each time its gate is shut: `task_state.place` is a different number then. So what was decided about
its earlier place opens nothing, and a head that has finished and is retried is no longer the head, but in line again.

Everything here can be done twice, by anybody. A process that dies in the middle leaves a mark in a task (see `dependencies`), or
a head that is not opened yet, which is noticed when the line is next checked.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pymongo.errors import OperationFailure

from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import Code
from taskmesh.store.pipeline.by_id import own_value
from taskmesh.store.relations.opening import Gate, open_gate
from taskmesh.store.store import WRITE_DEADLINE_MS, Store

logger = logging.getLogger("taskmesh.sequences")

_ROUNDS = 10
_LINES_AT_ONCE = 250
_FIRST_LOOK_AFTER_MS = 10_000
_LONGEST_PAUSE_MS = 600_000
_LOOKED_AT_ONCE = 250
_UNFINISHED = ("INIT", "RUNNING")
FIELDS = dict.fromkeys(("status", *(f"task_state.{n}" for n in ("place", "in_line", "line", "on_sequence_failure"))), 1)
"""What is read of a task."""
_NOTHING: Mapping[str, Document] = MappingProxyType({})


async def advance_those_of(store: Store, tasks: Iterable[Document], empty: set[str] | None = None) -> bool:
    """Make sure that the heads of the lines are open in which these tasks stand, or stood. Returns as `advance` does.

    `tasks`: with `FIELDS`, as a majority has them. `empty`: as for `advance`.
    """
    left: dict[str, list[Document]] = {}
    for task in tasks:
        state = task["task_state"]
        head = {"head": task["_id"], "place": state.get("place"), "task": task}
        left.setdefault(state["line"], []).extend([head] if _has_left(head, task) else [])
    # Of several that have left a line, each may have been its head.
    presumed = {line: heads[0] for line, heads in left.items() if len(heads) == 1}
    return await advance(store, left, presumed, empty)


async def advance(
    store: Store,
    lines: Collection[str],
    presumed: Mapping[str, Document] = _NOTHING,
    empty: set[str] | None = None,
) -> bool:
    """Make sure that the head of each of these lines is open. False if it has to be done again, since others held something.

    `presumed`: heads, as `_heads` would return them, that have most likely not been replaced yet. They are not read.

    `empty`: takes the lines whose head has left, and in which nobody waits: the caller calls again for these, without it, and
    then they are removed. (Whoever is published meanwhile finds the head that has left.)
    """
    todo = sorted(lines)
    done = True
    for start in range(0, len(todo), _LINES_AT_ONCE):
        done &= await _advance(store, todo[start : start + _LINES_AT_ONCE], presumed, empty)
    return done


async def _advance(
    store: Store, lines: Sequence[str], presumed: Mapping[str, Document], empty: set[str] | None
) -> bool:
    left = set(lines)
    heads = {line: presumed[line] for line in left & presumed.keys()}
    for _ in range(_ROUNDS):
        if unread := left - heads.keys():
            heads |= await _heads(store, unread)
        gone = [line for line in left if line not in heads or _has_left(heads[line], heads[line]["task"])]
        waiting = [heads[line] for line in left.intersection(heads).difference(gone)]
        if not await _open(store, [each for each in waiting if _is_shut(each["task"])]):
            return False
        left = set(gone)
        if not left:
            return True
        following = await _first_in_line(store, sorted(left))
        if empty is not None:
            empty |= left & heads.keys() - following.keys()
            left -= empty
        won, gone_for_good = await _move_on(store, sorted(left), heads, following)
        if not await _open(store, won):
            return False
        left -= gone_for_good | {head["_id"] for head in won}
        if not left:
            return True
        heads = {}
    return False


async def _heads(store: Store, lines: Collection[str]) -> dict[str, Document]:
    """Return the heads of these lines, as far as they have one, each with its `task`, or None if that is gone.

    As a majority has them: no failover can bring a task back that has left, beside the next.
    """
    stages: list[Document] = [
        # The lines,
        {"$match": {"_id": {"$in": sorted(lines)}}},
        # each with the task at its head, unless somebody has removed that.
        {
            "$lookup": {
                "from": store.tasks,
                "localField": "head",
                "foreignField": "_id",
                "pipeline": [
                    # What `_has_left` and `_is_shut` read.
                    {"$project": FIELDS},
                ],
                "as": "task",
            }
        },
    ]
    found = await store.driver.rows(store.sequences, stages, majority=True)
    return {head["_id"]: {**head, "task": next(iter(head["task"]), None)} for head in found}


def _has_left(head: Document, task: Document | None) -> bool:
    """Whether a task that was the head is no longer in the line, at that place. By what is stored, never by time alone.

    (A task that time alone has finished may still be given more time by a write; recording its end leaves a mark.)
    """
    if task is None or task["task_state"].get("place") != head["place"]:
        return True
    blocks = task["status"] == "FAIL" and task["task_state"].get("on_sequence_failure") == "block"
    return task["status"] not in _UNFINISHED and not blocks


def _is_shut(task: Document | None) -> bool:
    return task is not None and task["status"] in _UNFINISHED and task["task_state"].get("in_line") is True


async def _first_in_line(store: Store, lines: Sequence[str]) -> dict[str, Document]:
    """Return the first task in each of these lines, by the order of publication."""
    stages: list[Document] = [
        # Tasks in line: by an index of those alone.
        {"$match": {"task_state.line": {"$in": list(lines)}, "task_state.in_line": True}},
        # In the order of the index, so that the server steps from one line to the next.
        {"$sort": {"task_state.line": 1, "publish_number": 1, "_id": 1}},
        # The first of each.
        {"$group": {"_id": "$task_state.line", "head": {"$first": "$_id"}, "place": {"$first": "$task_state.place"}}},
    ]
    rows = await store.driver.rows(store.tasks, stages, majority=True, hint="taskmesh_in_line")
    return {row["_id"]: row for row in rows}


async def _move_on(
    store: Store, lines: Sequence[str], heads: dict[str, Document], following: dict[str, Document]
) -> tuple[list[Document], set[str]]:
    """Write the new heads, each only if nobody else has done it. Return those written here, and the lines that are empty.

    If another worker was faster with any of them, it is unknown with which: then none counts as written here.
    """
    check = {"pause_ms": _FIRST_LOOK_AFTER_MS, "check_time": {"$add": [store.now, _FIRST_LOOK_AFTER_MS]}}
    left = [line for line in lines if line in heads and line not in following]
    begun = [line for line in lines if line in following and line not in heads]
    moved = [line for line in lines if line in following and line in heads]
    if left:
        await _write(store, {"delete": store.sequences, "deletes": [{"q": _as_seen(left, heads), "limit": 0}]})
    updates: list[Document] = []
    if moved:
        new = own_value(moved, [_head_of(following[line]) for line in moved])
        # The new head, and when to look at it if it is that still.
        change: list[Document] = [{"$replaceWith": {"$mergeObjects": ["$$ROOT", new, check]}}]
        updates.append({"q": _as_seen(moved, heads), "u": change, "multi": True, "hint": "_id_"})
    for line in begun:
        # The first head.
        change = [
            {"$set": {**{name: {"$literal": value} for name, value in _head_of(following[line]).items()}, **check}}
        ]
        updates.append({"q": {"_id": line, "head": None}, "u": change, "upsert": True})
    empty = {line for line in lines if line not in heads and line not in following}
    if updates and await _write(store, {"update": store.sequences, "updates": updates}) == len(moved) + len(begun):
        return list(following.values()), empty
    return [], empty


def _head_of(found: Document) -> Document:
    return {"head": found["head"], "place": found["place"]}


def _as_seen(lines: Sequence[str], heads: Mapping[str, Document]) -> Document:
    """Match those of these lines whose heads are still the ones that were seen."""
    seen = own_value(lines, [_head_of(heads[line]) for line in lines])
    return {"_id": {"$in": list(lines)}, "$expr": {"$eq": [{"head": "$head", "place": "$place"}, seen]}}


async def _write(store: Store, command: Document) -> int:
    """Write. Return how many lines it concerned; if another worker was faster with some, the next look shows which."""
    command |= {"ordered": False, "writeConcern": {"w": "majority"}, "maxTimeMS": WRITE_DEADLINE_MS}
    try:
        return int((await store.driver.command(command))["n"])
    except OperationFailure as error:
        failed = (error.details or {}).get("writeErrors", [])
        if not failed or any(each.get("code") != Code.DUPLICATE_KEY for each in failed):
            raise
        return 0


async def _open(store: Store, heads: Sequence[Document]) -> bool:
    """Open the gates of these heads, each only at the place at which it became the head. False if somebody held one."""
    ids = [head["head"] for head in heads]
    at = {"$expr": {"$eq": ["$task_state.place", own_value(ids, [head["place"] for head in heads])]}}
    return not ids or await open_gate(store, Gate.SEQUENCE, ids, {"status": "INIT", **at})


async def head_of(store: Store, line: str) -> str | None:
    """Return the `_id` of the head of a line. None: it has none at the moment."""
    heads = await _heads(store, [line])
    return heads[line]["head"] if heads else None


def unchecked(store: Store) -> Document:
    """Return the filter for lines whose head has been that for long."""
    return {"$expr": {"$lte": ["$check_time", store.now]}}


async def sweep(store: Store) -> None:
    """Check heads that have been that for long: a task that was removed by hand has left no mark.

    The longer a head has been that, the less often, so that thousands of lines that wait for a paused queue cost next to nothing.
    """
    due = unchecked(store)
    cursor = store.driver.collection(store.sequences).find(due, {"_id": 1}, limit=_LOOKED_AT_ONCE)
    lines: list[Any] = [each["_id"] for each in await cursor.sort([("check_time", 1)]).to_list(None)]
    if lines:
        # So that not every worker checks, and others have their turn.
        looked: list[Document] = [
            # The next pause is twice as long as the last one,
            {"$set": {"pause_ms": {"$min": [_LONGEST_PAUSE_MS, {"$multiply": [2, "$pause_ms"]}]}}},
            # and begins now.
            {"$set": {"check_time": {"$add": [store.now, "$pause_ms"]}}},
        ]
        # By `_id`: the server might prefer the index of `check_time`, and look at all that are due.
        await store.driver.collection(store.sequences).update_many({"_id": {"$in": lines}, **due}, looked, hint="_id_")
        await advance(store, lines)
