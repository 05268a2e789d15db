"""Find: read tasks as they stand at the moment of reading, and scan for what can be claimed.

What became true by time alone (expired, a lease that ran out) is computed with the expressions of the rule, so nothing read
here is stale. `params` are left out unless asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from inspect import isawaitable
from math import ceil, inf, isfinite
from types import NoneType
from typing import Any, Literal

import anyio
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern

from taskmesh.model.worker import Claimant
from taskmesh.store import rules
from taskmesh.store.malformed import WELL_FORMED, Strange, past_strangers
from taskmesh.store.mongodb.driver import PLAIN_CODEC, Document, restored
from taskmesh.store.mongodb.server_errors import Code, is_over_deadline
from taskmesh.store.numbers import number_at
from taskmesh.store.pipeline.by_id import in_parts
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.store import Store

UNFINISHED = ("INIT", "RUNNING")
KEY_FIELDS = dict.fromkeys(
    ("_id", "queue", "group", "next_claim_time", "publish_number", "task_option.priority", "event", "settle_time"), 1
)
_DUE_AT_MOST = 200
_VALUES_MS = 300
_BATCH = 1_000
_CLOSED_WITHIN_S = 0.2


async def get(
    store: Store,
    ids: Sequence[str],
    *,
    params: bool = True,
    majority: bool = False,
    forgotten: bool = False,
    kept_for_ms: int = 0,
    session: Any = None,
) -> list[Document]:
    """Return the tasks with these `_id`s that are still kept.

    `majority`: as no failover can roll them back. `forgotten`: also tasks that are past their retention and not removed yet.
    `kept_for_ms`: those only if they have been so for less than this, and were not deleted; the field `forgotten` tells.
    """
    stages = [
        # The documents, by their `_id`s.
        {"$match": {"_id": {"$in": list(ids)}}},
        *as_read(store.now, params=params, forgotten=forgotten, kept_for_ms=kept_for_ms),
    ]
    collection_cursor = await store.driver.aggregate(store.tasks, stages, majority=majority, session=session)
    return await collection_cursor.to_list(None)  # type: ignore[no-any-return]  # both drivers leave it untyped


async def places(store: Store, ids: Sequence[str]) -> dict[str, tuple[str, str | None]]:
    """Return the queue and group of each of these tasks. Foreign documents, and tasks without a queue, are left out."""
    found: list[Document] = []
    for part in in_parts(ids):
        found += await store.find({"_id": {"$in": part}}, {"queue": 1, "group": 1})
    return {
        task["_id"]: (task["queue"], task.get("group"))
        for task in found
        if isinstance(task.get("queue"), str) and isinstance(task.get("group"), (str, NoneType))
    }


def as_read(now: rules.Expression, *, params: bool, forgotten: bool = False, kept_for_ms: int = 0) -> list[Document]:
    """Return stages that show documents as they stand now, without those past their retention (for at least `kept_for_ms`)."""
    by = {"$subtract": [now, kept_for_ms]} if kept_for_ms else now
    return [
        # Not what is deleted, or past its retention (for so long), even if the TTL monitor has not removed it yet.
        *([] if forgotten else [{"$match": {"$expr": {"$not": [rules.is_forgotten(by)]}}}]),
        # If that is shown for a while nevertheless, mark it.
        *([{"$set": {"forgotten": rules.is_forgotten(now)}}] if kept_for_ms else []),
        # What time alone has changed since the last write.
        *as_it_stands(now),
        # Params may be large: only on request.
        *([] if params else [{"$unset": "params"}]),
    ]


async def written(store: Store, document: Document) -> Document:
    """Return a document that was just written as `get` shows it: with what is derived and not stored."""
    stages = [
        # The document has users' values, so it is a literal.
        {"$documents": [{"$literal": document}]},
        *as_it_stands(store.now),
    ]
    reply = await store.driver.command({"aggregate": 1, "pipeline": stages, "cursor": {}})
    return restored(reply["cursor"]["firstBatch"][0])  # type: ignore[no-any-return]  # a document


def as_it_stands(now: rules.Expression) -> list[Document]:
    """Return stages that add what is true now: the status and, in `task_state`, what INIT means and what is waited for."""
    is_init = {"$eq": ["$status", "INIT"]}
    standing = {"$cond": [is_init, rules.standing_on_reading(now), "$$REMOVE"]}
    suspended = {"$and": [is_init, {"$gt": ["$task_state.suspended_until", now]}]}
    waits_for = {"$cond": [suspended, "$task_state.suspended_for", "$$REMOVE"]}
    return [
        # The status as it is now, where the stored one is outdated by time alone.
        {"$set": {"status": rules.status_on_reading(now)}},
        # Whether INIT means ready, retrying or scheduled. A stage of its own: it reads the status set above. What was waited for
        # stays stored after it has happened; then it is not shown.
        {"$set": {"task_state.standing": standing, "task_state.suspended_for": waits_for}},
    ]


@dataclass(slots=True, eq=False)
class Claimable:
    """A task that a scan has found, with what its place in the claim queue depends on."""

    id: str
    queue: str
    priority: int
    number: int
    """Its place in the order of publication."""
    fail_cnt: int
    named: bool
    """Whether it names this worker."""
    claim_time: Any
    """When this worker may claim it: None (at once), a time, or `NEVER`."""
    next_claim_time: Any
    group: str | None = None
    needs: Sequence[str] = ()
    """The labels that a worker must have, as they are stored, if its document was read."""
    wanted: int = 1
    """How many workers it is for, if its document was read: the index does not tell."""


Sort = Literal["waiting", "shared", "named", "labelled"]
"""What a scan looks for: waiting tasks for anybody; running tasks with room for more workers; tasks that name this worker; tasks
that need labels of which it has at least one.

Each has an index of its own, so that none starves the others."""
IN_ORDER = [("task_option.priority", -1), ("next_claim_time", 1)]
"""The few tasks that neither of these distinguishes, within one millisecond, are sorted when they are claimed."""
_ORDER: dict[Sort, list[tuple[str, int]]] = {
    "waiting": [*IN_ORDER, ("publish_number", 1)],
    "shared": IN_ORDER,
    "named": IN_ORDER,
    "labelled": IN_ORDER,
}
_INDEX: dict[Sort, str | None] = {
    "waiting": "taskmesh_waiting_in_order",
    "shared": "taskmesh_shared",
    "named": None,
    "labelled": "taskmesh_claimable_by_label",
}


@dataclass(slots=True, frozen=True)
class ScanRange:
    """What a scan looks at: task names, queues, lanes (None: all), up to a time."""

    names: Sequence[str]
    queues: Sequence[str]
    lanes: Sequence[int] | None
    until: datetime
    """By the server's clock, as well as the worker knows it. The claim decides what may be claimed."""
    since: datetime | None = None
    """Only what has become due after that."""
    above: int | None = None
    """Only what has a higher priority."""


@dataclass(slots=True, frozen=True)
class Page:
    """The result of one look."""

    rows: list[Claimable]
    full: bool
    """Whether it reached its limit: there may be more."""
    rest: OpenScan | None = None
    """What continues behind a full page, if that was asked for."""


@dataclass(slots=True, frozen=True)
class OpenScan:
    """A scan that is read page by page."""

    store: Store
    worker: Claimant | str
    cursor: Any
    limit: int
    """That of all pages: the driver would keep what it had read beyond it, and that would be outdated."""

    async def next_page(self) -> Page:
        """Return the next page, as of now. Raises `Strange`."""
        found = await self.cursor.to_list(self.limit)
        full = len(found) == self.limit
        return Page(await judged(self.store, self.worker, found), full, self if full and self.cursor.alive else None)


async def close_scans(scans: Iterable[OpenScan]) -> None:
    """Let the server forget these scans, or leave that to the server, which forgets what nobody has read for ten minutes.

    After a failover the driver would wait for the member that had them.
    """
    with anyio.move_on_after(_CLOSED_WITHIN_S):
        for each in scans:
            await each.cursor.close()


async def scan(
    store: Store,
    worker: Claimant | str,
    what: ScanRange,
    limit: int,
    sort: Sort = "waiting",
    *,
    to_continue: bool = False,
) -> Page:
    """Return the first tasks of this sort that some worker may claim by then: by priority, time, order of publication.

    `to_continue`: of waiting tasks, keep the cursor of a full page open. Its limit may be a little larger then.
    """
    query = _scan_query(worker, what, sort)
    if sort != "waiting":
        rows = await read_claimable(store, worker, query, _ORDER[sort], limit=limit, hint=_INDEX[sort])
        return Page(rows, len(rows) == limit)
    batches = ceil(limit / _BATCH)
    batch = ceil(limit / batches)

    async def read(query: Document) -> Page:
        cursor = _keys_in_order(store, query, batch_size=batch, limit=0 if to_continue else limit)
        return await OpenScan(store, worker, cursor, batches * batch if to_continue else limit).next_page()

    return await past_strangers(store, query, read)


def open_scan(store: Store, worker: Claimant | str, what: ScanRange, sort: Sort, limit: int) -> OpenScan:
    """Begin a scan of all such tasks, `limit` to a page. Nothing is read yet."""
    query = {"$and": [_scan_query(worker, what, sort), WELL_FORMED]}
    return OpenScan(store, worker, _keys_in_order(store, query, sort, batch_size=limit), limit)


def _keys_in_order(store: Store, query: Document, sort: Sort = "waiting", **options: int) -> Any:
    cursor = store.driver.collection(store.tasks, PLAIN_CODEC).find(query, KEY_FIELDS, **options)
    return cursor.sort(_ORDER[sort]).hint(_INDEX[sort])


async def judged(store: Store, worker: Claimant | str, found: Sequence[Document]) -> list[Claimable]:
    """Return what a scan has found, in its order. The rule is evaluated only for tasks that were touched, or may expire.

    For a task that nobody has touched since it was published the index tells everything, so no document is read. Raises
    `Strange`.
    """
    if odd := [task["_id"] for task in found if not isinstance(task["_id"], str)]:
        raise Strange(f"the document {odd[0]!r}")
    asked = [task["_id"] for task in found if not _is_untouched(task)]
    if not asked:
        return [_untouched(task) for task in found]
    known = {row.id: row for row in await look_up(store, worker, asked)}
    rows = [_untouched(task) if _is_untouched(task) else known.get(task["_id"]) for task in found]
    return [row for row in rows if row is not None]


def _is_untouched(task: Document) -> bool:
    """Whether nobody has written to the task, and time alone does not change it."""
    return task.get("event") is None and task.get("settle_time") is None


def _untouched(task: Document) -> Claimable:
    option = task.get("task_option")
    task["priority"] = option.get("priority") if isinstance(option, dict) else None
    task["fail_cnt"], task["claim_time"] = 0, None
    return claimable_from(task)


def _scan_query(worker: Claimant | str, what: ScanRange, sort: Sort) -> Document:
    query: Document = {
        "pinned": sort in ("named", "labelled"),
        "queue": {"$in": list(what.queues)},
        "name": {"$in": list(what.names)},
        "next_claim_time": {"$type": "date", "$lte": what.until, **({"$gt": what.since} if what.since else {})},
    }
    if what.above is not None:
        query["task_option.priority"] = {"$gt": what.above}
    if sort == "named":
        query["task_option.specific_worker_ids"] = _any_of(worker)
    elif sort == "labelled":
        query["needs"] = _labels_of(worker)
    else:
        query["status"] = "INIT" if sort == "waiting" else "RUNNING"
        if what.lanes is not None:
            query["lane"] = {"$in": list(what.lanes)}
    if sort == "shared":
        query["task_option.concurrent_worker_cnt"] = {"$gt": 1}
    return query


def _any_of(worker: Claimant | str) -> Any:
    """Match any of the names by which a task may name this worker."""
    names = _claimant(worker).names
    return names[0] if len(names) == 1 else {"$in": names}


def _labels_of(worker: Claimant | str) -> Document:
    """Match any of the worker's labels. Whether it has all that a task needs, the rule decides."""
    return {"$in": list(_claimant(worker).labels)}


def _claimant(worker: Claimant | str) -> Claimant:
    return Claimant(worker) if isinstance(worker, str) else worker


async def fitting(store: Store, found: Sequence[Claimable], narrowed_by: Mapping[str, Any]) -> list[Claimable]:
    """Return those of the tasks found that match a filter; an empty one leaves all of them."""
    if not narrowed_by:
        return list(found)
    query = {"$and": [{"_id": {"$in": [row.id for row in found]}}, dict(narrowed_by)]}
    ids = {document["_id"] for document in await store.find(query, {"_id": 1})} if found else set()
    return [row for row in found if row.id in ids]


async def scan_leases(store: Store, worker: Claimant | str, what: ScanRange, limit: int) -> list[Claimable]:
    """Return RUNNING tasks for one worker each whose lease has run out by then. The others are found as `shared` or `named`."""
    query: Document = {
        "status": "RUNNING",
        "queue": {"$in": list(what.queues)},
        "name": {"$in": list(what.names)},
        "next_claim_time": {"$type": "date", "$lte": what.until},
        "task_option.concurrent_worker_cnt": {"$lte": 1},
    }
    return await read_claimable(store, worker, query, [("next_claim_time", 1)], limit=limit, hint="taskmesh_leases")


async def look_up(store: Store, worker: Claimant | str, ids: Sequence[str]) -> list[Claimable]:
    """Return these tasks as a scan would, whatever their queue: for hints that carry only the `_id`."""
    query = {"_id": {"$in": list(ids)}, "next_claim_time": {"$exists": True}}
    return await read_claimable(store, worker, query, [("_id", 1)])


async def read_claimable(
    store: Store,
    worker: Claimant | str,
    query: Document,
    sort: Sequence[tuple[str, int]],
    *,
    limit: int = 0,
    hint: str | None = None,
) -> list[Claimable]:
    """Return the first tasks that match, whatever else is in the collection."""

    async def read(query: Document) -> list[Claimable]:
        cursor = store.driver.collection(store.tasks, PLAIN_CODEC).find(
            query, prepared(claimable_fields, store.now, worker), limit=limit, batch_size=min(limit or 1000, 1000)
        )
        cursor = cursor.sort(list(sort)) if hint is None else cursor.sort(list(sort)).hint(hint)
        return [claimable_from(document) for document in await cursor.to_list(None)]

    return await past_strangers(store, query, read)


def claimable_fields(now: rules.Expression, worker: Claimant | str) -> Document:
    """Return the projection that `claimable_from` reads."""
    return {
        "queue": 1,
        "group": 1,
        "next_claim_time": 1,
        "publish_number": 1,
        "priority": "$task_option.priority",
        "fail_cnt": rules.with_facts(now, rules.FAIL_CNT),
        "claim_time": rules.claim_time(worker, now),
        "named": {"$ne": ["$task_option.specific_worker_ids", []]},
        "needs": 1,
        "wanted": "$task_option.concurrent_worker_cnt",
    }


def claimable_from(document: Document) -> Claimable:
    """Read what a scan has returned. Raises `Strange`."""
    id_, queue, priority = document["_id"], document.get("queue"), document.get("priority")
    fail_cnt, claim_time, opens = document.get("fail_cnt"), document.get("claim_time"), document.get("next_claim_time")
    group = document.get("group")
    if not (
        isinstance(id_, str)
        and isinstance(queue, str)
        and isinstance(priority, (int, float))
        and isfinite(priority)
        and isinstance(fail_cnt, (int, float))
        and (claim_time is None or isinstance(claim_time, datetime))
        and isinstance(opens, datetime)
        and (group is None or isinstance(group, str))
    ):
        raise Strange(f"the document {id_!r}")
    named, number = document.get("named") is True, number_of(document, opens)
    # In a foreign document it may be no list: then the rule lets nobody have it.
    needs = tuple(map(str, needs)) if (needs := document.get("needs")) and isinstance(needs, list) else ()
    wanted = wanted if isinstance(wanted := document.get("wanted"), int) else 1
    # Positional arguments: there are thousands per second.
    return Claimable(id_, queue, int(priority), number, int(fail_cnt), named, claim_time, opens, group, needs, wanted)


def number_of(document: Document, opens: datetime) -> int:
    """Return a task's place in the order of publication.

    Without a number, it follows from when the task could first be claimed.
    """
    number = document.get("publish_number")
    return int(number) if isinstance(number, int) else number_at(opens)


async def values_of(store: Store, field: str, query: Document) -> list[str] | None:
    """Return the values that a field of the index on status has among these tasks, by one look for each.

    None if there are very many, or if it takes long: an array in that field of a foreign document makes the server read every
    task.
    """
    try:
        found = await store.driver.collection(store.tasks).distinct(field, query, maxTimeMS=_VALUES_MS)
    except OperationFailure as error:
        if error.code == Code.DISTINCT_TOO_LARGE or is_over_deadline(error):
            return None
        raise
    return sorted(value for value in found if isinstance(value, str))


async def places_due(
    store: Store, names: Collection[str], until: datetime | None = None, *, status: str = "INIT", majority: bool = False
) -> tuple[set[tuple[str, str]], bool]:
    """Return queue and name of the tasks of these names that become due by then (None: now), and whether these are all.

    One look, at `_DUE_AT_MOST` tasks, whatever the number of queues and names: for INIT at keys alone, for RUNNING at leases that
    run out and tasks that have room for more workers.
    """
    query: Document = {"status": status, "next_claim_time": {"$type": "date"}}
    if until is None:
        query["$expr"] = {"$lte": ["$next_claim_time", store.now]}
    else:
        query["next_claim_time"]["$lte"] = until
    if status == "RUNNING":
        # The queue without a bound lets the index step from one queue and name to the next.
        query |= {"queue": {"$gte": ""}, "name": {"$in": list(names)}}
    tasks = store.driver.collection(store.tasks, PLAIN_CODEC)
    tasks = tasks.with_options(read_concern=ReadConcern("majority")) if majority else tasks
    cursor = tasks.find(query, {"_id": 0, "queue": 1, "name": 1}, limit=_DUE_AT_MOST, batch_size=_DUE_AT_MOST + 1)
    if status == "RUNNING":
        cursor = cursor.hint("taskmesh_leases")
    else:
        cursor = cursor.sort([("next_claim_time", 1)]).hint("taskmesh_waiting_due")
    rows = [(row.get("queue"), row.get("name")) for row in await cursor.to_list(_DUE_AT_MOST)]
    found = {
        (queue, name) for queue, name in rows if isinstance(queue, str) and isinstance(name, str) and name in names
    }
    return found, len(rows) < _DUE_AT_MOST


async def queues_in_use(store: Store, statuses: Iterable[str] = UNFINISHED) -> list[str]:
    """Return the queues in which there are tasks with these statuses."""
    found: set[str] = set()
    for status in statuses:
        queues = await values_of(store, "queue", {"status": status})
        found.update(await _queues_one_by_one(store, status) if queues is None else queues)
    return sorted(found)


async def _queues_one_by_one(store: Store, status: str) -> list[str]:
    """Step from queue to queue along the index on status, where a foreign array makes `distinct` read all tasks."""
    found: list[str] = []
    last = ""
    while True:
        cursor = (
            store.driver.collection(store.tasks)
            .find(
                {"status": status, "queue": {"$gt": last, "$not": {"$type": "array"}}},
                {"_id": 0, "queue": 1, "status": 1},
                limit=1,
            )
            .sort([("status", 1), ("queue", 1)])
        )
        rows = await cursor.to_list(1)
        if not rows:
            return found
        last = rows[0]["queue"]
        found.append(last)


async def places_in_use(store: Store, status: str = "INIT") -> list[tuple[str, str]]:
    """Return queue and name of the tasks with this status, each pair once."""
    if (found := await places_if_known(store, status)) is not None:
        return found
    return [pair for queue in await queues_in_use(store, [status]) for pair in await _names_in(store, status, queue)]


async def places_if_known(store: Store, status: str, at_most: float = inf) -> list[tuple[str, str]] | None:
    """Return queue and name of the tasks with this status, each pair once: as many looks as there are queues or names.

    None if there are more than `at_most`, or if `values_of` cannot tell.
    """
    names, queues = [await values_of(store, field, {"status": status}) for field in ("name", "queue")]
    if names is None or queues is None:
        return None
    found: list[tuple[str, str]] = []
    by, of, values = ("name", "queue", names) if len(names) < len(queues) else ("queue", "name", queues)
    for value in values:
        others = await values_of(store, of, {"status": status, by: value})
        if others is None or len(found) + len(others) > at_most:
            return None
        found += [(value, other) if by == "queue" else (other, value) for other in others]
    return sorted(found)


async def _names_in(store: Store, status: str, queue: str) -> list[tuple[str, str]]:
    """Step from name to name within one queue, as `_queues_one_by_one` steps from queue to queue."""
    found: list[tuple[str, str]] = []
    last = ""
    while True:
        cursor = (
            store.driver.collection(store.tasks)
            .find(
                {"status": status, "queue": queue, "name": {"$gt": last, "$not": {"$type": "array"}}},
                {"_id": 0, "status": 1, "queue": 1, "name": 1},
                limit=1,
            )
            .sort([("status", 1), ("queue", 1), ("name", 1)])
        )
        rows = await cursor.to_list(1)
        if not rows:
            return found
        last = rows[0]["name"]
        found.append((queue, last))


async def unfinished_left(
    store: Store,
    worker: Claimant | str,
    names: Sequence[str],
    queues: Sequence[str] | None,
    closed_queues: Collection[str] = (),
    *,
    known_queues: Collection[str] = (),
    narrowed_by: Mapping[str, Any] | None = None,
) -> bool:
    """Whether a task of these names and queues is claimable by this worker now, or is running and could become so.

    Tasks that it may not have do not count: those in closed queues, and those that do not match the filter `narrowed_by`. If no
    `queues` are given, the `known_queues` are looked at beside those that the database shows to be in use. Delayed tasks are
    not read: the indexes hold them behind what is due.
    """
    looked_at = set(known_queues if queues is None else queues)
    if queues is None:
        looked_at |= await _queues_with_work(store, names)
    place = {"queue": {"$in": sorted(looked_at.difference(closed_queues))}, "name": {"$in": list(names)}}
    due = {
        **place,
        "next_claim_time": {"$type": "date"},
        "$expr": {"$lte": ["$next_claim_time", store.now]},
    }
    query: Document = {
        "$or": [
            {"status": "RUNNING", **place},
            {"status": "INIT", "pinned": False, **due},
            {"status": "INIT", "pinned": True, "task_option.specific_worker_ids": _any_of(worker), **due},
            {"status": "INIT", "pinned": True, "needs": _labels_of(worker), **due},
        ]
    }
    if narrowed_by:
        query = {"$and": [query, dict(narrowed_by)]}
    running = rules.with_facts(store.now, {"$and": [{"$ne": ["$$live", []]}, rules.may_become_claimable(worker)]})
    left = {"$or": [running, rules.claimable(worker, closed_queues, store.now)]}

    async def read(query: Document) -> bool:
        tasks = store.driver.collection(store.tasks).with_options(read_concern=ReadConcern("majority"))
        stages = [
            # What the indexes can tell: tasks that run, and those that are due.
            {"$match": query},
            # What only the gates can tell: whether this worker could have it, now or when what runs has ended.
            {"$project": {"left": left}},
            # Only what it could have.
            {"$match": {"left": True}},
            # One is enough to know.
            {"$limit": 1},
        ]
        cursor = tasks.aggregate(stages)
        cursor = await cursor if isawaitable(cursor) else cursor
        return bool(await cursor.to_list(1))

    if await past_strangers(store, query, read):
        return True
    # What has moved to another queue meanwhile was seen in neither.
    return queues is None and not looked_at.issuperset(await _queues_with_work(store, names))


async def _queues_with_work(store: Store, names: Sequence[str]) -> set[str]:
    """Return the queues in which something runs, or tasks of these names are due. May return more, if there are very many."""
    # In this order: a task that is given back between the two looks is due by then, and found by the second.
    running_in = set(await queues_in_use(store, ["RUNNING"]))
    due, all_of_them = await places_due(store, names, majority=True)
    return running_in | ({queue for queue, _ in due} if all_of_them else set(await queues_in_use(store, ["INIT"])))
