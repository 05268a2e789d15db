"""Schedules: periodic tasks, and which of their ticks were published.

First the tick's task is published, under a key that names the tick; then the schedule advances, if it is still as its reader
saw it. However many workers race, the key exists once, and a late one (frozen since it read the schedule) is refused by the
server's clock before the key can be free again. A worker that dies in between leaves a tick that is published already and a
schedule that the next worker advances. (A transaction around both would be simpler, but one whose worker is killed keeps the
schedule locked for a minute; measured.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import bson
from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError, OperationFailure

from taskmesh.model.schedule import Attendance
from taskmesh.store import rules
from taskmesh.store.mongodb.driver import CODEC, Document, find_and_update
from taskmesh.store.mongodb.server_errors import Code, patiently
from taskmesh.store.publication import Publication, new_document
from taskmesh.store.store import Store

OUTAGE_MS = 3_000
"""If no worker looked after the schedules for this long, what ticked meanwhile was missed."""
_SEEN_EVERY_MS = 700
KEPT_TICKS = 10
_READ_GOOD_FOR_MS = 10_000
"""How long a worker may publish ticks after it has read a schedule."""
_AT_ONE_LOOK = 1_000
_SOON_MS = 1_500
"""Longer than the pause between two looks. Schedules that tick later are not read, however many they are."""
_PERIODIC = {"_id": "periodic"}


async def attend(store: Store) -> Attendance:
    """Note that somebody looks after the schedules now. Return the last period in which nobody did.

    A worker that looked after them for less time than the shortest outage has not ended that outage.
    """
    meta = store.driver.collection(store.meta)
    stages = [
        # One document, in which workers note that somebody looks after the schedules.
        {"$match": _PERIODIC},
        # How long ago that was, by the server's clock.
        {"$set": {"now": store.now, "age": {"$subtract": [store.now, "$seen"]}}},
    ]
    while True:
        found = await store.driver.rows(store.meta, stages)
        if not found:
            with contextlib.suppress(DuplicateKeyError):
                # The first worker ever: no outage before it.
                await meta.update_one(_PERIODIC, [{"$set": {"seen": store.now}}], upsert=True)
        elif 0 <= found[0]["age"] <= _SEEN_EVERY_MS:  # most of the time somebody else has just done it
            return _attendance(found[0])
        else:
            silent = {"$gt": [{"$subtract": [store.now, "$seen"]}, OUTAGE_MS]}
            # A short visit (code that declares a schedule, a worker that was killed) published nothing of what it missed.
            goes_on = {"$lte": [{"$subtract": ["$seen", "$outage_to"]}, OUTAGE_MS]}
            begin = {"$cond": [{"$and": [{"$gt": ["$outage_to", None]}, goes_on]}, "$outage_from", "$seen"]}
            outage = {
                "outage_from": {"$cond": [silent, begin, {"$ifNull": ["$outage_from", None]}]},
                "outage_to": {"$cond": [silent, store.now, {"$ifNull": ["$outage_to", None]}]},
            }
            seen = await find_and_update(
                meta,
                _PERIODIC | {"seen": found[0]["seen"]},
                # Seen now; and if nobody was for long, from when to when.
                [{"$set": outage | {"seen": store.now}}],
                return_document=ReturnDocument.AFTER,
            )
            if seen is not None:
                return _attendance(seen | {"now": seen["seen"]})


def _attendance(document: Document) -> Attendance:
    return Attendance(document["now"], document.get("outage_from"), document.get("outage_to"))


class ChangedMeanwhile(Exception):
    """Somebody else has changed the schedule since it was read."""


async def declare(
    store: Store, id_: str, fields: Document, first_time: Any, *, as_seen: Document | None = None
) -> Document:
    """Create a schedule, or change it to these fields; `first_time`, a function of now, returns when it ticks next.

    A schedule that is unchanged keeps its next tick, and a paused one stays paused. Ticks from now on do not count as missed,
    as long as a worker attends soon: nobody looks after schedules where there are none. `as_seen`: raise `ChangedMeanwhile` if
    its fields are no longer these; if that is empty, if the schedule exists.
    """
    schedules = store.driver.collection(store.schedules)
    while True:
        stored = await read(store, id_)
        if as_seen is not None and _differ(stored or {}, as_seen, fields):
            raise ChangedMeanwhile
        if stored is not None and not _differ(stored, fields, fields):
            return stored
        now = (await attend(store)).now
        timing = ("cron", "interval_ms") if fields["cron"] is None else ("cron", "timezone")  # intervals know no zone
        fresh: Document = dict(fields)
        if stored is None or any(stored.get(name) != fields.get(name) for name in timing):
            fresh |= {"anchor_time": now, "next_time": first_time(now)}
        if stored is None:
            document = {"_id": id_, "paused": False, "create_time": now, "ticks": [], "revision": 0, **fresh}
            with contextlib.suppress(DuplicateKeyError):
                await schedules.insert_one(document)
        else:
            update = {"$set": fresh, "$inc": {"revision": 1}}
            await schedules.update_one({"_id": id_, "revision": stored["revision"]}, update)


def _differ(one: Document, other: Document, names: Iterable[str]) -> bool:
    """Whether some of these fields are stored differently.

    Some values do not equal themselves when read: tuples, microseconds, NaN.
    """
    a, b = ({name: each.get(name) for name in names} for each in (one, other))
    return bson.encode(a, codec_options=CODEC) != bson.encode(b, codec_options=CODEC)


async def read(store: Store, id_: str) -> Document | None:
    """Return a schedule, with the server's `now`."""
    found = await patiently(lambda: _read(store, {"_id": id_}))
    return found[0] if found else None


async def read_all(store: Store) -> list[Document]:
    """Return all schedules, each with the server's `now`."""
    return await _read(store, {})


async def due(store: Store) -> list[Document]:
    """Return the schedules that are due or tick soon, the earliest first; as many as one look can deal with, and at least one."""
    ticking: Document = {"paused": False, "next_time": {"$type": "date"}}
    # By the index on `next_time`, the earliest first; what is left over comes with the next look.
    in_order = {"$sort": {"next_time": 1}}
    first = await _read(store, ticking, in_order, {"$limit": 1})
    if not first or first[0]["next_time"] > first[0]["now"] + timedelta(milliseconds=_SOON_MS):
        return first
    ticking["$expr"] = {"$lte": ["$next_time", {"$add": [store.now, _SOON_MS]}]}
    return await _read(store, ticking, in_order, {"$limit": _AT_ONE_LOOK})


async def _read(store: Store, query: Document, *stages_between: Document) -> list[Document]:
    stages = [
        # Those requested.
        {"$match": query},
        *stages_between,
        # With the server's time, by which their ticks are judged.
        {"$set": {"now": store.now}},
        # The next to tick first; those of one moment always in one order.
        {"$sort": {"next_time": 1, "_id": 1}},
    ]
    return await store.driver.rows(store.schedules, stages)


async def publish_ticks(
    store: Store,
    schedule: Document,
    publications: Sequence[Publication],
    ticks: list[Document],
    next_time: datetime | None,
) -> tuple[int, bool]:
    """Publish these tasks and advance the schedule to `next_time`. Return how many were new, and whether we advanced it.

    `ticks`: what to remember of them in the schedule, the publications' own first. Those that are not published in time are
    left for the next look. Safe to repeat, to race and to die in.
    """
    created = 0
    for place, publication in enumerate(publications):
        put = await _put(store, publication, schedule["now"])
        if put is None:
            if not place:
                return created, False
            publications, ticks, next_time = publications[:place], ticks[:place], ticks[place]["time"]
            break
        created += put
    last = {"last_key": publications[-1].key} if publications else {}
    moved = {
        "$set": {"next_time": next_time, **last},
        "$inc": {"revision": 1},
        "$push": {"ticks": {"$each": ticks, "$slice": -KEPT_TICKS}},
    }
    as_seen = {"_id": schedule["_id"], "revision": schedule["revision"], "paused": False}
    result = await store.driver.collection(store.schedules).update_one(as_seen, moved)
    return created, bool(result.matched_count)


async def _put(store: Store, publication: Publication, read_at: datetime) -> bool | None:
    """Publish a tick's task. Return whether it is new; None, with nothing done, if the schedule was read too long ago.

    Not a plain insert: only an update can use the server's clock.
    """
    too_late = {"$gt": [{"$subtract": [store.now, read_at]}, _READ_GOOD_FOR_MS]}
    document = new_document(publication, read_at)
    fails = {"$toInt": {"$concat": ["too late for ", "$_id"]}}  # no constant: that would fail whenever it is read
    pipeline = [
        # Fail, and so write nothing, if it was read too long ago.
        {"$set": {"_late": {"$cond": [too_late, fails, "$$REMOVE"]}}},
        # The new task, if the key is free; else what is there, unchanged.
        {"$replaceWith": {"$cond": [{"$eq": [{"$type": "$publish_id"}, "missing"]}, {"$literal": document}, "$$ROOT"]}},
    ]
    try:
        result = await store.driver.collection(store.tasks).update_one({"_id": publication.id}, pipeline, upsert=True)
    except DuplicateKeyError:  # another worker did it at the same moment
        return False
    except OperationFailure as error:
        if error.code == Code.CONVERSION_FAILURE:
            return None
        raise
    return result.upserted_id is not None


async def note_tick(store: Store, id_: str, tick: Document) -> None:
    """Remember a tick that somebody triggered by hand."""
    update = {"$push": {"ticks": {"$each": [tick], "$slice": -KEPT_TICKS}}}
    await store.driver.collection(store.schedules).update_one({"_id": id_}, update)


async def set_paused(store: Store, id_: str, fields: Document) -> bool:
    """Pause a schedule, or end its pause. False if there is none."""
    if not fields["paused"]:
        await attend(store)
    update = {"$set": fields, "$inc": {"revision": 1}}
    schedules = store.driver.collection(store.schedules)
    result = await patiently(lambda: schedules.update_one({"_id": id_}, update))
    return bool(result.matched_count)


async def remove(store: Store, id_: str) -> None:
    """Remove a schedule, if there is one. Tasks that it published stay."""
    await patiently(lambda: store.driver.collection(store.schedules).delete_one({"_id": id_}))


async def is_unfinished(store: Store, id_: str) -> bool:
    """Whether this task exists and is not finished."""
    unfinished = rules.with_facts(store.now, {"$in": [rules.status(store.now), ["INIT", "RUNNING"]]})
    return bool(await store.find({"_id": id_, "$expr": unfinished}, {"_id": 1}))
