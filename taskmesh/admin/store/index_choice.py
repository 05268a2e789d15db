"""Index choice: what a filter asks of stored tasks, and along which indexes matching tasks are read.

An index serves the order of a listing or its filter. Along the order's index, tasks that do not match are skipped; along the
filter's, matching tasks have to be sorted. Which is less depends on how many match, so that is asked first, from the keys
alone. In the order of keys one index serves both: with one status, queue and name, the index on status is in the order of
`_id`, and the server merges as many such rows as there are values.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Literal

from taskmesh.admin.filters import TaskFilter
from taskmesh.model.task import Status
from taskmesh.store import rules
from taskmesh.store.find import values_of
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.store import Store

Order = Literal["key", "newest", "oldest"]
STATUSES = tuple(str(status) for status in Status)
_LAST = "\U0010ffff"
"""After every other character."""
FEW = 5_000
"""Up to so many tasks are sorted rather than looked for along the order's index: some 50 ms at most."""
_ORDERED_BY: dict[Order, str] = {"key": "_id_", "newest": "taskmesh_newest", "oldest": "taskmesh_newest"}
_ROWS = 200
"""The server merges no more rows of an index (its parameter `internalQueryMaxScansToExplode`)."""
_NAMES = 200
"""With more task names, a key prefix without a name is looked for along the order's index."""


def conditions(which: TaskFilter, now: rules.Expression) -> Document:
    """Return all conditions on stored fields. Check `status_fits`, too: time alone may have changed the status."""
    named = {"name": which.name, "queue": which.queue}
    query: Document = {field: value for field, value in named.items() if value is not None}
    if which.key_prefix is not None:
        query["key"] = _beginning(which.key_prefix)
    stored = stored_status(which, now)
    return {"$and": [query, unindexed(which, now), *([{"$or": stored}] if stored else [])]}


def stored_status(which: TaskFilter, now: rules.Expression) -> list[Document]:
    """Return conditions on the stored status that exclude each other, of which one holds; none if the status does not matter.

    By time alone a RUNNING task becomes INIT again when its lease ends, and an unfinished one FAIL or EXPIRED at its
    `settle_time`: an index has those whose time has come, so that nobody reads all that wait.
    """
    if not which.status:
        return []
    stored = {str(status) for status in which.status} | ({"RUNNING"} if Status.INIT in which.status else set())
    found: list[Document] = [{"status": {"$in": sorted(stored)}}]
    if not stored >= {"INIT", "RUNNING"} and {Status.FAIL, Status.EXPIRED} & set(which.status):
        due = {"settle_time": {"$exists": True}, "$expr": {"$lte": ["$settle_time", now]}}
        found.append({**due, "status": {"$nin": sorted(stored)}})
    return found


def unindexed(which: TaskFilter, now: rules.Expression) -> Document:
    """Return the conditions on stored fields that no index has."""
    query: Document = {}
    computed: list[rules.Expression] = [{"$not": [rules.is_forgotten(now)]}]
    if which.standing:
        stands = {"$in": [rules.standing_on_reading(now), list(which.standing)]}
        computed.append({"$or": [{"$ne": [rules.status_on_reading(now), "INIT"]}, stands]})
    if which.group is not None:
        query["group"] = which.group
    if which.tags:
        query["tags"] = {"$all": list(which.tags)}
    entry: Document = {}
    if which.worker is not None:
        entry["worker_id"] = which.worker
    if which.error is not None:
        entry["fail_reason"] = {"$regex": re.escape(which.error), "$options": "i"}
    if entry:
        query["task_state.worker_states"] = {"$elemMatch": entry}
    if which.lost is not None:
        query["task_state.lost_cnt"] = {"$gte": 1} if which.lost else {"$not": {"$gte": 1}}
    for sign, age in (("$lte", which.older_than_ms), ("$gte", which.younger_than_ms)):
        if age is not None:
            computed.append({sign: ["$task_state.create_time", {"$subtract": [now, age]}]})
    return query | {"$expr": {"$and": computed}}


def status_fits(which: TaskFilter, status: rules.Expression) -> rules.Expression:
    """Return the condition on the current status, which is `status`."""
    return {"$in": [status, [str(wanted) for wanted in which.status or Status]]}


def is_indexed(which: TaskFilter) -> bool:
    """Whether the filter asks only for name, key, queue and status, which indexes have."""
    others = (
        which.tags or None,
        which.group,
        which.error,
        which.worker,
        which.lost,
        which.older_than_ms,
        which.younger_than_ms,
    )
    return not which.standing and all(other is None for other in others)


@dataclass(frozen=True, slots=True)
class Way:
    """A query, and the index along which it is read."""

    query: Document
    index: str


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a filter with one condition on the stored status. No task is in two parts."""

    stored: Document
    """The condition. Empty if the status does not matter."""
    index: str
    """The index that has most of it."""
    known: Document
    """The conditions that the keys of that index have."""
    query: Document
    """All conditions on stored fields."""


class Deadline:
    """How long a listing may take in all, in ms. None: no limit."""

    def __init__(self, within_ms: int | None) -> None:
        self._end = None if within_ms is None else time.monotonic() + within_ms / 1000

    def options(self) -> Document:
        """Return the options for the next command."""
        return {} if self._end is None else {"maxTimeMS": max(1, round((self._end - time.monotonic()) * 1000))}


async def parts_of(store: Store, which: TaskFilter) -> list[Part]:
    """Return the parts of a filter, each with the index that serves it best regardless of order."""
    span = await _span(store, which)
    name = [] if which.name is None else [{"name": which.name}]
    queue = [] if which.queue is None else [{"queue": which.queue}]
    parts: list[Part] = []
    for stored in stored_status(which, store.now) or [{"status": {"$in": list(STATUSES)}} if queue else {}]:
        asked = [stored, *name, *queue, *span]
        if "settle_time" in stored:
            index, known = "taskmesh_settle", [stored]
        elif which.tags:  # whatever else is requested: a tag has few tasks
            index, known = "taskmesh_tags", [{"tags": which.tags[0]}]
        elif stored:
            index, known = "taskmesh_status", asked
        else:
            index, known = "_id_", span or [{}]
        parts.append(Part(stored, index, {"$and": known}, {"$and": [*asked, unindexed(which, store.now)]}))
    return parts


async def ways_in_order(store: Store, which: TaskFilter, order: Order, deadline: Deadline) -> list[Way]:
    """Return the ways along which the matching tasks come in this order, after few others."""
    ways: list[Way] = []
    for part in await parts_of(store, which):
        if order == "key" and part.index == "taskmesh_status" and (rows := await _rows(store, which, part)) is not None:
            ways += rows
        else:
            ways.append(Way(part.query, await _best_index(store, which, part, order, deadline)))
    return ways


async def _rows(store: Store, which: TaskFilter, part: Part) -> list[Way] | None:
    """Return a way for each status, along rows of the index that are in the order of `_id`. None if there are too many."""
    queues = [which.queue] if which.queue is not None else await values_of(store, "queue", part.stored)
    names = [which.name] if which.name is not None else await values_of(store, "name", part.stored)
    if queues is None or names is None or len(queues) * len(names) > _ROWS:
        return None
    places = {"queue": {"$in": queues}, "name": {"$in": names}}
    statuses = part.stored["status"]["$in"]
    return [Way({"$and": [{"status": status}, places, part.query]}, part.index) for status in statuses]


async def _best_index(store: Store, which: TaskFilter, part: Part, order: Order, deadline: Deadline) -> str:
    """Return the index along which to read: the filter's if few tasks match, otherwise the order's."""
    if _ORDERED_BY[order] == part.index:
        return part.index  # it serves both
    if part.index != "_id_" or which.name is not None or which.key_prefix is not None:
        # What keys alone can tell: no document is read.
        stages = [{"$match": part.known}]
        if await counted(store, stages, part.index, FEW + 1, deadline) <= FEW:
            return part.index
    return _ORDERED_BY[order]


async def counted(store: Store, stages: list[Document], index: str, at_most: int | None, deadline: Deadline) -> int:
    """Count what comes out of these stages along an index, up to `at_most`."""
    # No more than are asked for.
    limit: list[Document] = [] if at_most is None else [{"$limit": at_most}]
    # And their number.
    pipeline = [*stages, *limit, {"$count": "n"}]
    rows = await store.driver.rows(store.tasks, pipeline, hint=index, **deadline.options())
    return int(sum(row["n"] for row in rows))


async def _span(store: Store, which: TaskFilter) -> list[Document]:
    """Return the condition on name and key as one on `_id`, which an index has in order."""
    if which.name is not None:
        return [_between(which.name, which.key_prefix or "")]
    if which.key_prefix is None:
        return []
    # No index has keys without names; but names are few, and in `_id` they come before the keys.
    names = await values_of(store, "name", {"status": {"$in": list(STATUSES)}})
    if names is None or len(names) > _NAMES:
        return [{"key": _beginning(which.key_prefix)}]
    return [{"$or": [_between(name, which.key_prefix) for name in names] or [{"_id": ""}]}]


def _beginning(text: str) -> Document:
    return {"$gte": text, "$lt": text + _LAST}


def _between(name: str, prefix: str) -> Document:
    # After the colon comes the semicolon: after the last key of the name.
    return {"_id": {"$gte": f"{name}:{prefix}", "$lt": f"{name}:{prefix}{_LAST}" if prefix else f"{name};"}}
