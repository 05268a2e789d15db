"""Task counts: how many tasks there are by name and status, how many are due, and since when the oldest waits.

No count is maintained that every write would have to change. An index has the tasks of one status, queue and name side by side,
as a row; one look for each row tells which rows exist, and the server counts them without reading the tasks. What time alone
has changed is read, to correct the counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from pymongo.errors import OperationFailure

from taskmesh.store import rules
from taskmesh.store.find import UNFINISHED, places_if_known, values_of
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import Code
from taskmesh.store.registry import closed_queues, loop_names, server_time
from taskmesh.store.store import Store

_MOST_ROWS = 2_000
"""With more of them the whole index is read instead."""
_AT_ONCE = 100
"""Rows that one command asks about."""
_MOST_PRIORITIES = 20
_MOST_DUE = 50_000
"""Up to so many tasks it is determined whether they wait for no time."""


class Row(NamedTuple):
    """Tasks that are side by side in the index on status."""

    status: str
    queue: str
    name: str


async def counts(store: Store, statuses: Sequence[str] | None = None) -> list[Document]:
    """Return how many tasks there are by name and stored status, from the index alone. `statuses`: only of these."""
    found_rows = await rows(store, statuses)
    if found_rows is None:
        wanted: Document = {"$ne": "DELETED"} if statuses is None else {"$in": list(statuses)}
        stages: list[Document] = [
            # The keys of these statuses, along their index: no task is read.
            {"$match": {"status": wanted}},
            # One answer for each name and status.
            {"$group": {"_id": {"name": "$name", "status": "$status"}, "count": {"$sum": 1}}},
        ]
        cursor = await store.driver.aggregate(store.tasks, stages, hint="taskmesh_status")
        return await cursor.to_list(None)  # type: ignore[no-any-return]  # both drivers leave it untyped
    counting: list[list[Document]] = [
        [
            # The keys of one row, counted.
            {"$match": row._asdict()},
            {"$count": "n"},
            # Which row that is.
            {"$set": {"_id": told(row)}},
        ]
        for row in found_rows
    ]
    found: Counter[tuple[str, str]] = Counter()
    for answer in await _ask_each(store, counting):
        found[answer["_id"]["name"], answer["_id"]["status"]] += answer["n"]
    return [{"_id": {"name": name, "status": status}, "count": n} for (name, status), n in found.items()]


async def rows(store: Store, statuses: Sequence[str] | None = None) -> list[Row] | None:
    """Return the existing rows, of these statuses or all. None if there are too many to ask for each."""
    found: list[Row] = []
    if statuses is None:
        stored = await values_of(store, "status", {})
        statuses = None if stored is None else [status for status in stored if status != "DELETED"]
    for status in statuses or ():
        places = await places_if_known(store, status, at_most=_MOST_ROWS - len(found))
        if places is None:
            return None
        found += [Row(status, queue, name) for queue, name in places]
    return None if statuses is None else found


def told(row: Row) -> Document:
    """Return the fields by which an answer says which row it is about."""
    return {name: {"$literal": value} for name, value in row._asdict().items()}


async def _ask_each(store: Store, questions: Sequence[list[Document]]) -> list[Document]:
    """Return the answers to all of these pipelines, many by one command."""
    answers: list[Document] = []
    for start in range(0, len(questions), _AT_ONCE):
        cursor = await store.driver.aggregate(store.tasks, union_of(store, questions[start : start + _AT_ONCE]))
        answers += await cursor.to_list(None)
    return answers


def union_of(store: Store, questions: Sequence[list[Document]]) -> list[Document]:
    """Return one pipeline over the tasks that returns what all of these return."""
    first, *others = questions
    # The other questions as branches of the first: one command for all.
    return [*first, *({"$unionWith": {"coll": store.tasks, "pipeline": other}} for other in others)]


async def stale_counts(store: Store) -> list[Document]:
    """Count the tasks whose stored status is wrong by time alone, by name, stored status, the true one and its standing."""
    first_lease_end = {"$min": f"{rules.ENTRIES}.ping_expire_time"}
    stale = {
        "$or": [
            {"settle_time": {"$exists": True}, "$expr": {"$lte": ["$settle_time", store.now]}},
            {"status": "RUNNING", "$expr": {"$lte": [first_lease_end, store.now]}},
        ]
    }
    now, standing = rules.status_on_reading(store.now), rules.standing_on_reading(store.now)
    group = {"name": "$name", "stored": "$stored", "now": "$now", "standing": "$standing"}
    stages: list[Any] = [
        # What time may have changed: by two indexes.
        {"$match": stale},
        # The stored status, and what the rule says now.
        {"$project": {"name": 1, "stored": "$status", "now": now, "standing": standing}},
        # Only where they differ.
        {"$match": {"$expr": {"$ne": ["$stored", "$now"]}}},
        # How many moved from where to where.
        {"$group": {"_id": group, "count": {"$sum": 1}}},
    ]
    cursor = await store.driver.aggregate(store.tasks, stages)
    return await cursor.to_list(None)  # type: ignore[no-any-return]  # both drivers leave it untyped


class Later(NamedTuple):
    """What is known about INIT tasks that wait for a time."""

    found: Counter[tuple[str, str]]
    """How many there are, by name and standing."""
    ready: dict[str, int]
    """For names whose tasks were not all examined: how many are ready, as far as they were counted."""
    any_name: bool
    """Whether such names are unknown, since there are too many: then it may be any."""
    never: Counter[str]
    """How many wait for no time: for a signal, for other tasks, for the rest of their flow; by name. Empty if more than 50 000
    tasks are ready or scheduled, which are then not counted one by one."""


async def later(store: Store, at_most: int) -> Later:
    """Count, by name, INIT tasks that are not `ready`: they are apart in an index, so ready ones are not read, however many.

    Examines `at_most` tasks, the same share of each name and queue (at least 20), and as many that name their workers.
    """
    waits = {"status": "INIT", "next_claim_time": {"$type": "date"}, "$expr": {"$gt": ["$next_claim_time", store.now]}}
    each = {"_id": {"name": "$name", "standing": rules.standing_on_reading(store.now)}, "count": {"$sum": 1}}

    async def first_of(query: Document, index: str) -> list[Document]:
        stages: list[Document] = [
            # What waits for a time, up to the limit.
            {"$match": query | waits},
            {"$limit": at_most},
            # How many of each name are scheduled, how many retrying.
            {"$group": each},
        ]
        cursor = await store.driver.aggregate(store.tasks, stages, hint=index)
        return await cursor.to_list(None)  # type: ignore[no-any-return]  # both drivers leave it untyped

    waiting_rows = await rows(store, ["INIT"])
    share = max(20, at_most // max(1, len(waiting_rows or ())))
    # In the order of the index: only this ensures that no planner takes the one that has ready tasks in between.
    in_order: list[Document] = [{"$sort": {"task_option.priority": -1, "next_claim_time": 1}}, {"$limit": share}]
    questions: list[list[Document]] = [
        [
            # What waits for a time in one row.
            {"$match": {**row._asdict(), "pinned": False, **waits}},
            # No further than its share.
            *in_order,
            # How many are scheduled, how many retrying.
            {"$group": each},
            # Which row that is.
            {"$set": {"row": told(row)}},
        ]
        for row in waiting_rows or ()
    ]
    of_rows = await _ask_each(store, questions)
    together = [await first_of({"pinned": True}, "taskmesh_claimable_by_name")]
    if waiting_rows is None:
        together.append(await first_of({"pinned": False}, "taskmesh_waiting_in_order"))

    # If a limit was met, the others are unknown: those of the row, or of any row.
    met: Counter[Row] = Counter()
    for answer in of_rows:
        met[Row(**answer["row"])] += answer["count"]
    cut = {row.name for row, count in met.items() if count >= share}
    together_met = any(sum(answer["count"] for answer in answers) >= at_most for answers in together)
    if together_met:
        cut |= {row.name for row in waiting_rows or ()}
    found: Counter[tuple[str, str]] = Counter()
    for answer in (*of_rows, *(answer for answers in together for answer in answers)):
        found[str(answer["_id"].get("name")), str(answer["_id"].get("standing"))] += answer["count"]
    ready = await _ready(store, [row for row in waiting_rows or () if row.name in cut], at_most)
    never = await _never(store, waiting_rows or ())
    return Later(found, ready, any_name=together_met and waiting_rows is None, never=never)


async def _never(store: Store, init_rows: Sequence[Row]) -> Counter[str]:
    """Count INIT tasks that have no time at which they can be claimed, by name: all of INIT, less those with a time.

    One command that sees one moment: between two commands, tasks may start, and the difference would count them.
    """
    dated: list[Document] = [
        # What has a time, past or not, up to the limit of what is worth counting.
        {"$match": {"status": "INIT", "next_claim_time": {"$type": "date"}}},
        {"$limit": _MOST_DUE},
        # How many of each name.
        {"$group": {"_id": "$name", "count": {"$sum": -1}}},
    ]
    all_of_them: list[list[Document]] = [
        [
            # The keys of one row, counted.
            {"$match": row._asdict()},
            {"$count": "count"},
            # Of which name that is.
            {"$set": {"_id": {"$literal": row.name}}},
        ]
        for row in init_rows[:_AT_ONCE]
    ]
    if not init_rows or len(init_rows) > _AT_ONCE:
        return Counter()
    stages = union_of(store, [dated, *all_of_them])
    try:
        cursor = await store.driver.aggregate(store.tasks, stages, snapshot=True, hint="taskmesh_waiting_due")
        answers = await cursor.to_list(None)
    except OperationFailure as error:
        if error.code != Code.SNAPSHOT_UNAVAILABLE:  # the collection or an index was created at this moment
            raise
        return Counter()
    found: Counter[str] = Counter()
    met = 0
    for answer in answers:
        found[str(answer["_id"])] += answer["count"]  # the name of a foreign document may be anything
        met -= min(0, answer["count"])
    return Counter() if met >= _MOST_DUE else +found


async def _ready(store: Store, of: Sequence[Row], at_most: int) -> dict[str, int]:
    """Count what could be claimed by now, by name, up to `at_most` in each row, without tasks that name their workers."""
    questions: list[list[Document]] = [
        [
            # What is due in one row, in the order of its index, counted up to the limit.
            {"$match": {**row._asdict(), "pinned": False, **_due(store.now)}},
            {"$sort": {"task_option.priority": -1, "next_claim_time": 1}},
            {"$limit": at_most},
            {"$count": "count"},
            # Which row that is.
            {"$set": {"_id": told(row)}},
        ]
        for row in of
    ]
    found = {row.name: 0 for row in of}
    for answer in await _ask_each(store, questions):
        found[answer["_id"]["name"]] += answer["count"]
    return found


async def waiting(store: Store, queues: Sequence[str], at_most: int) -> dict[str, int]:
    """Count the tasks of each queue that could be claimed now if it has room, up to `at_most`."""
    questions: list[list[Document]] = [
        [
            # What is due in one queue, in the order of the index, counted up to the limit.
            {"$match": {"status": status, "pinned": False, "queue": queue, **_due(store.now)}},
            {"$limit": at_most},
            {"$count": "count"},
            # Which queue that is.
            {"$set": {"_id": {"$literal": queue}}},
        ]
        for queue in queues
        for status in UNFINISHED
    ]
    # Their index begins with the workers, so no planner takes it for a queue by itself.
    pinned: list[Document] = [
        # What is due of the tasks that name their workers, in all of these queues, no further than asked for.
        {"$match": {"pinned": True, "queue": {"$in": list(queues)}, **_due(store.now)}},
        {"$limit": max(1, at_most * len(queues))},
        # How many in each queue.
        {"$group": {"_id": "$queue", "count": {"$sum": 1}}},
    ]
    cursor = await store.driver.aggregate(store.tasks, pinned, hint="taskmesh_claimable_by_name")
    found = dict.fromkeys(queues, 0)
    for answer in [*await _ask_each(store, questions), *await cursor.to_list(None)]:
        found[answer["_id"]] = min(at_most, found[answer["_id"]] + answer["count"])
    return found


async def waiting_by_group(store: Store, queue: str, at_most: int) -> dict[str | None, int]:
    """Count the tasks of one queue that could be claimed now if it has room, by group; None: those without.

    Of pinned and of other tasks no more than `at_most` each.
    """
    found: dict[str | None, int] = {}
    for which, hint in (
        ({"status": "INIT", "pinned": False}, "taskmesh_waiting_in_order"),
        ({"status": "RUNNING", "pinned": False}, "taskmesh_leases"),
        ({"pinned": True}, "taskmesh_claimable_by_name"),
    ):
        stages: list[Document] = [
            # What is due, no further than asked for.
            {"$match": {**which, "queue": queue, **_due(store.now)}},
            {"$limit": at_most},
            # How many in each group.
            {"$group": {"_id": "$group", "count": {"$sum": 1}}},
        ]
        cursor = await store.driver.aggregate(store.tasks, stages, hint=hint)
        for row in await cursor.to_list(None):
            found[row["_id"]] = found.get(row["_id"], 0) + row["count"]
    return found


def _due(now: rules.Expression) -> Document:
    """What can be claimed by now; a bound of the indexes, so that what waits for later is not read."""
    return {"next_claim_time": {"$type": "date"}, "$expr": {"$lte": ["$next_claim_time", now]}}


async def oldest_claimable(store: Store) -> tuple[datetime, dict[str, datetime]]:
    """Return the server's time, and since when the oldest claimable task of each queue has been so. In a paused one none is."""
    now = await server_time(store)
    closed = await closed_queues(store)
    # A loop is due for a moment at each round, or waits until code declares it again: neither tells of too few workers.
    loops = await loop_names(store)
    open_ = ({"queue": {"$nin": closed}} if closed else {}) | ({"name": {"$nin": loops}} if loops else {})
    found = [
        *await _oldest(store, {"status": "RUNNING", **open_}, now, "taskmesh_leases"),
        *await _oldest(store, {"pinned": True, **open_}, now, "taskmesh_claimable_by_name"),
    ]
    waiting_rows = await rows(store, ["INIT"])
    left: dict[Row, Document] = {
        row: {} for row in waiting_rows or () if row.queue not in closed and row.name not in loops
    }
    # In a row the tasks of one priority stand together, the oldest first: so it is one look for each priority.
    for _ in range(_MOST_PRIORITIES):
        answers = await _ask_each(store, [_oldest_of_row(row, lower, now) for row, lower in left.items()])
        found += [(answer["_id"]["queue"], answer["next_claim_time"]) for answer in answers]
        left = {Row(**answer["_id"]): {"task_option.priority": {"$lt": answer.get("priority")}} for answer in answers}
        if not left or not all(isinstance(answer.get("priority"), (int, float)) for answer in answers):
            break
    if left or waiting_rows is None:  # very many priorities, or a stranger's among them
        found += await _oldest(store, {"status": "INIT", "pinned": False, **open_}, now, "taskmesh_waiting_in_order")
    oldest: dict[str, datetime] = {}
    for queue, time in found:
        if isinstance(time, datetime) and isinstance(queue, str):
            oldest[queue] = min(time, oldest.get(queue, time))
    return now, oldest


def _oldest_of_row(row: Row, lower: Document, now: datetime) -> list[Document]:
    return [
        # What is due in the row, of the priorities that were not looked at yet.
        {"$match": {**row._asdict(), "pinned": False, "next_claim_time": {"$type": "date", "$lte": now}, **lower}},
        # The first by the index's order: of the highest of these priorities, the oldest.
        {"$sort": {"task_option.priority": -1, "next_claim_time": 1}},
        {"$limit": 1},
        # Since when it is due, and where to go on below.
        {"$project": {"next_claim_time": 1, "priority": "$task_option.priority"}},
        # Which row that is.
        {"$set": {"_id": told(row)}},
    ]


async def _oldest(store: Store, query: Document, now: datetime, index: str) -> list[tuple[Any, datetime]]:
    """Return the earliest `next_claim_time` of what is due in each queue, by reading all of it."""
    stages: list[Any] = [
        # All of it that is due.
        {"$match": query | {"next_claim_time": {"$type": "date", "$lte": now}}},
        # The earliest moment in each queue.
        {"$group": {"_id": "$queue", "oldest": {"$min": "$next_claim_time"}}},
    ]
    cursor = await store.driver.aggregate(store.tasks, stages, hint=index)
    return [(row["_id"], row["oldest"]) for row in await cursor.to_list(None)]
