"""Limits: how many tasks of a queue may start in a period, and how many may run at once, over the whole fleet.

Settings are in `queues`, where every worker is told of a change. State is in a collection of its own, `limits`, which no stream
reports: one document per queue, in which workers book before they claim.

- `slots`: who may run how many. A slot is booked before the claim, and its worker may use it for one task after another, as
  long as it writes down now and then for which. It is removed when its worker gives it back, or when no live entry matches it,
  which anybody may check against the tasks. So the number of running tasks follows from the leases, and a crash cannot make it
  drift.
- `lacking`: the worker that has had less than its share of the slots for some time, and asked in vain last. Workers that have
  more than theirs give back the rest when they have ended a task.
- `starts`: how many starts were booked, and when they leave the window. A booking in progress has an entry of its own, by its
  token; completed ones are merged into buckets of a hundredth of the window, each of which leaves with the last start in it. So
  the document is small whatever rate and window, and no window ever holds more starts than the rate.
- `group_starts`: the same for each group, in buckets of a tenth of the window, or fewer if very many groups start something.

A slot is valid until a time that the claim repeats (`booked_until`), so that a worker that was frozen in between claims nothing
on a slot that others have removed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import NoneType

from bson import ObjectId
from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from taskmesh.store import rules
from taskmesh.store.mongodb.driver import Document, find_and_update
from taskmesh.store.mongodb.server_errors import patiently
from taskmesh.store.pipeline.by_id import own_value
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.store import Store

BOOKED_MS = 3_000
"""How long a slot may be used for a claim after it was booked, or renewed."""
_LANDED_MS = 2_000
"""After this much longer, no claim on the booking can still be on its way (see the claimer's deadline)."""
FREED_AFTER_MS = BOOKED_MS + _LANDED_MS
"""After this long, a check frees a slot that nobody uses."""
_CHECKED_EVERY_MS = 500
"""How often the slots are checked against the leases, at most; with more slots than this, one millisecond per slot, since a
check reads all that runs."""
_BUCKETS = 100
"""So a start counts against its rate for at most a hundredth of the window too long."""
_BUCKETS_OF_A_GROUP = 10
_GROUP_STARTS = 20_000
"""With more groups than a tenth of this in one window, each has fewer buckets, but at least one."""
NO_LIMIT = 2**31 - 1
_LIMITS = ("running", "rate", "group_running", "group_rate", "groups")
WINDOWS = {"per_ms": "starts", "group_per_ms": "group_starts"}
"""The lists of starts, by the fields with the lengths of their windows."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A task that a worker wants to claim. In lists, the best comes first."""

    id: str
    group: str | None


@dataclass(frozen=True, slots=True)
class Booking:
    """What a worker may claim, and until when."""

    token: str
    ids: frozenset[str]
    slots: Mapping[str, str]
    """The slots for those that need one, by `_id`."""
    held: frozenset[str]
    """Of the slots that were to be renewed, those that still exist."""
    until: datetime
    next_start: datetime | None
    """When the rate has room again, if that is what held some back."""
    full_groups: Mapping[str, datetime | None]
    """Groups that had no room for all that was requested, and when their rate has room again, if that is the reason."""
    check: bool
    """Whether the caller has to check now which slots nobody uses any more."""
    canary: bool = False
    """Whether the queue is paused for its failures, and this is the one start that is let through."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of the slots of a worker."""

    held: frozenset[str]
    """Of those that were to be renewed, those that still exist."""
    until: datetime | None
    """Until when these are valid."""
    wanted_at: datetime | None
    """When another worker asked last that has had less than its share for some time. None: never."""


async def set_limits(store: Store, queue: str, limits: Document) -> None:
    """Set the given limits, by the names of `QueueLimits`; None removes one.

    What runs already is counted. So are the starts that were counted so far, for as long as the new window lasts.
    """
    changes = {name: {"$literal": value} for name, value in limits.items()}
    for window, starts in WINDOWS.items():
        if isinstance(limits.get(window), int):
            longer = {"$subtract": [limits[window], {"$ifNull": [f"${window}", limits[window]]}]}
            changes[starts] = leaving_later(starts, longer)
    # The new limits, and with a window its starts.
    await change(store, queue, [{"$set": changes}])


def leaving_later(starts: str, by_ms: rules.Expression) -> rules.Expression:
    """Return the list of these starts, as a window counts them that is so much longer."""
    moved = {"$mergeObjects": ["$$this", {"leaves": {"$add": ["$$this.leaves", by_ms]}}]}
    return {"$map": {"input": stored_list(starts), "in": moved}}


async def set_first_limits(store: Store, queue: str, limits: Document) -> None:
    """Set the given limits, unless somebody has set or removed one of this queue before."""
    own = ("running", "rate", "group_running", "group_rate")
    known = await store.driver.collection(store.limits).find_one({"_id": queue}, dict.fromkeys(own, 1)) or {}
    if any(name in known for name in own):  # the usual case: most starts of a worker write nothing
        return
    first = {"$and": [{"$eq": [{"$type": f"${name}"}, "missing"]} for name in own]}
    # The limits, if they are still the first; else all stays as it is. One update, so that of two that start together one wins.
    stages = [{"$set": {name: {"$cond": [first, {"$literal": limits[name]}, f"${name}"]} for name in limits}}]
    await change(store, queue, stages)


async def read_limits(store: Store, queue: str) -> Document:
    """Return the limits of a queue as they are stored, without its state."""
    fields = dict.fromkeys((*_LIMITS, *WINDOWS), 1)
    limits = store.driver.collection(store.limits)
    return await patiently(lambda: limits.find_one({"_id": queue}, fields | {"_id": 0})) or {}


async def set_group_limit(store: Store, queue: str, group: str, running: int | None) -> None:
    """Set how many tasks of one group may run at once. None: as many as of any other group."""
    entry = [] if running is None else [{"g": group, "n": running}]
    others = {"$filter": {"input": stored_list("groups"), "cond": {"$ne": ["$$this.g", {"$literal": group}]}}}
    # The limit of this group; those of the others stay.
    await change(store, queue, [{"$set": {"groups": {"$concatArrays": [others, {"$literal": entry}]}}}])


async def change(store: Store, queue: str, stages: Sequence[Document]) -> None:
    """Change the limits, count what runs without a slot, and tell the workers: of the newest change, whoever comes last.

    Tries again while the database is unreliable: the `stages` have to be safe to repeat.
    """
    changed = {"$max": [store.now, {"$add": ["$changed", 1]}]}
    document: Document = await patiently(
        lambda: find_and_update(
            store.driver.collection(store.limits),
            {"_id": queue},
            # What changes, and when: a later change has a later time, even within one millisecond.
            [*stages, {"$set": {"changed": changed}}],
            dict.fromkeys((*_LIMITS, *WINDOWS, "changed", "failure_pause", "failing"), 1) | {"_id": 0},
            upsert=True,
            return_document=ReturnDocument.AFTER,
        )
    )
    await patiently(lambda: check(store, queue))
    changed_at = document.pop("changed")
    failures, failing = document.pop("failure_pause", None), document.pop("failing", None)
    limits = {name: value for name, value in document.items() if value not in (None, [])}
    settings: Document = {"limits": limits, "failure_pause": failures, "failing": failing}
    if failing is not None:  # workers of older releases, which know no canaries, ask seldom then
        rate = min(1, limits.get("rate", 1))  # where nothing may start, no canary does
        settings |= {"limits": {**limits, "rate": rate, "per_ms": failures["canary_ms"]}, "own_limits": limits}
    outdated = {"_id": queue, "limits_changed": {"$not": {"$gt": changed_at}}}
    # A plain update of the queue's settings, which every worker's stream shows; not if a newer change was announced.
    told = {"$set": {**settings, "limits_changed": changed_at}}
    queues = store.driver.collection(store.queues)
    with contextlib.suppress(DuplicateKeyError):  # a newer change has been announced already
        await patiently(lambda: queues.update_one(outdated, told, upsert=True))


async def forget(store: Store, queue: str) -> None:
    """Remove all settings of a queue, except for those that somebody makes while this goes on.

    First it is opened and its limits are removed, which is announced to every worker as any change; then both documents are
    removed, each if nobody has changed it since. Safe to repeat, and to die in: what is left is an open queue without limits.
    """
    queues = store.driver.collection(store.queues)
    # A plain update: nothing of it is computed.
    await queues.update_one({"_id": queue}, {"$set": {"paused": False, "paused_until": None, "paused_groups": []}})
    # No limits, and nothing that was counted under them.
    await change(store, queue, [{"$replaceWith": {"_id": "$_id", "changed": "$changed"}}])
    limited = await store.driver.collection(store.limits).find_one({"_id": queue}, {"changed": 1})
    if limited is None:
        return
    as_seen = {"_id": queue, "changed": limited["changed"], **dict.fromkeys(_LIMITS), "failure_pause": None}
    if (await store.driver.collection(store.limits).delete_one(as_seen)).deleted_count:
        told = {"_id": queue, "limits_changed": limited["changed"], "paused": False, "paused_groups": []}
        await queues.delete_one(told)


async def book(
    store: Store,
    queue: str,
    worker_id: str,
    wishes: Sequence[Wish],
    *,
    token: str | None = None,
    free: Collection[str] = (),
    renew: Mapping[str, Wish] | None = None,
    due: int = 0,
) -> Booking | None:
    """Book as many of the wishes as the limits have room for. None if the queue has no limits (any more).

    `free`, `renew`: what `keep` does, done before. `due`: how many slots the worker lacks of its share, and has for some time.
    If there is no room for these, the others are told. If the answer is lost, the booking expires when its time is over, or its
    slots are given back: the `token` of the booking, if one is given, tells which these are (`slots_of`).
    """
    renew = renew or {}
    token = token or new_token()
    by_group: dict[str | None, list[Document]] = {}
    for place, wish in enumerate(wishes):
        by_group.setdefault(wish.group, []).append({"id": wish.id, "g": wish.group, "i": place})
    document = await find_and_update(
        store.driver.collection(store.limits),
        {"_id": queue},
        prepared(booking_pipeline, store.now),
        dict.fromkeys(("booked", "next_start", "full_groups", "checker", "failing", *_LIMITS), 1),
        return_document=ReturnDocument.AFTER,
        let={
            **_keeping(free, renew),
            "token": {"$literal": token},
            "worker_id": {"$literal": worker_id},
            # The wishes by group, each with its place among all.
            "asked": {"$literal": [{"g": group, "of": of} for group, of in by_group.items()]},
            "asked_groups": {"$literal": [group for group in by_group if group is not None]},
            "asked_cnt": len(wishes),
            "lacks": min(due, len(wishes)),
        },
    )
    if document is None or all(document.get(name) in (None, []) for name in (*_LIMITS, "failing")):
        return None
    booked = document["booked"]
    return Booking(
        token=token,
        ids=frozenset(booked["ids"]),
        slots={slot["id"]: slot["t"] for slot in booked["slots"]},
        held=frozenset(booked["held"]),
        until=booked["until"],
        next_start=document.get("next_start"),
        full_groups={full["g"]: full.get("next") for full in document.get("full_groups") or ()},
        check=document.get("checker") == token,
        canary=document.get("failing") is not None,
    )


def new_token() -> str:
    """Return the token of a booking, which no other has."""
    return str(ObjectId())


def slots_of(token: str, wish_cnt: int) -> list[str]:
    """Return the tokens of the slots that a booking of so many wishes may have got."""
    return [f"{token}.{place}" for place in range(wish_cnt)]


def booking_pipeline(now: rules.Expression) -> list[Document]:
    """Return the update that books: first it frees what the worker no longer uses, so that nobody else takes that in between.

    What differs from booking to booking are its variables.
    """
    until = {"$add": [now, BOOKED_MS]}
    # Of all that is counted, which may be thousands, only what concerns these groups is compared with each of them.
    concerned = {"$gte": [_place_in("$$asked_groups", "$$this.g"), 0]}
    in_slots = {"$filter": {"input": "$slots", "cond": concerned}}
    started = {"$filter": {"input": "$group_starts", "cond": concerned}}
    has_rate = {"$gt": ["$group_rate", None]}
    in_slots_of_group = {"$size": {"$filter": {"input": "$$in_slots", "cond": {"$eq": ["$$this.g", "$$ask.g"]}}}}
    started_of_group = {"$filter": {"input": "$$started", "cond": {"$eq": ["$$this.g", "$$ask.g"]}}}
    # What a group has room for: executions at once, and starts in its window. Without a group there is no such limit.
    run_room = {"$subtract": [_limit_of("$$ask.g"), "$$running"]}
    rate_room = {"$cond": [has_rate, {"$subtract": ["$group_rate", {"$sum": "$$started.n"}]}, NO_LIMIT]}
    room = {"$cond": [{"$eq": ["$$ask.g", None]}, NO_LIMIT, {"$min": ["$$run_room", "$$rate_room"]}]}
    # When a start leaves the window, perhaps one of this booking; null if it is not the rate that has no room.
    group_leaves = {"$add": [until, {"$ifNull": ["$group_per_ms", 0]}]}
    leaves_first = {
        "$min": [{"$min": "$$started.leaves"}, {"$cond": [{"$gt": ["$$rate_room", 0]}, group_leaves, None]}]
    }
    used_up = {"$lte": ["$$rate_room", {"$min": ["$$run_room", {"$size": "$$ask.of"}]}]}
    next_start = {"$cond": [used_up, leaves_first, None]}
    reckoned = {"$mergeObjects": ["$$ask", {"room": room, "next": next_start}]}
    of_each = _let(
        {"running": in_slots_of_group, "started": started_of_group},
        _let({"run_room": run_room, "rate_room": rate_room}, reckoned),
    )
    reckoned_of_groups = _let(
        {"in_slots": in_slots, "started": started}, {"$map": {"input": "$$asked", "as": "ask", "in": of_each}}
    )
    # Of each group as many as it has room for, all in one list.
    within_groups = {
        "$reduce": {
            "input": "$_asked",
            "initialValue": [],
            "in": {"$concatArrays": ["$$value", _first("$$this.of", "$$this.room")]},
        }
    }
    # Groups that had no room for all that was requested.
    had_no_room = {"$lt": ["$$this.room", {"$size": "$$this.of"}]}
    full_groups = {
        "$map": {
            "input": {"$filter": {"input": "$_asked", "cond": had_no_room}},
            "in": {"g": "$$this.g", "next": "$$this.next"},
        }
    }
    # What the queue has room for: starts in this window, and executions at once.
    rate = {"$ifNull": ["$rate", NO_LIMIT]}
    rate_room = {"$subtract": [rate, {"$sum": "$starts.n"}]}
    run_room = {"$subtract": [{"$ifNull": ["$running", NO_LIMIT]}, {"$size": "$slots"}]}
    # Where too much fails, one start now and then, a canary; beside the limits, which hold as well.
    is_failing = {"$gt": ["$failing", None]}
    no_canary_yet = {"$and": [is_failing, {"$gt": ["$failing.next", now]}]}
    canary = {"$cond": [no_canary_yet, 0, {"$cond": [is_failing, 1, NO_LIMIT]}]}
    room = {"$min": [rate_room, run_room, canary]}
    # The best of them, in the order of the wishes.
    granted = _first({"$sortArray": {"input": "$_within", "sortBy": {"i": 1}}}, room)
    # Slots count executions: only where a limit on these holds.
    needs_slot = {"$or": [{"$gt": ["$running", None]}, {"$lt": [_limit_of("$$this.g"), NO_LIMIT]}]}
    slots = {
        "$map": {
            "input": {"$filter": {"input": "$_granted", "cond": needs_slot}},
            "in": {
                "t": {"$concat": ["$$token", ".", {"$toString": "$$this.i"}]},
                "id": "$$this.id",
                "g": "$$this.g",
                "w": "$$worker_id",
                "until": until,
            },
        }
    }
    count = {"$size": "$_granted"}
    next_canary = {"$add": [now, {"$ifNull": ["$failure_pause.canary_ms", 0]}]}
    leaves = {"$add": [until, {"$ifNull": ["$per_ms", 0]}]}
    # The window is counted from the end of the booking, its latest possible start, until `confirm` knows better.
    queue_leaves_first = {"$min": [{"$min": "$starts.leaves"}, {"$cond": [{"$gt": [count, 0]}, leaves, None]}]}
    start = [{"t": "$$token", "n": count, "leaves": leaves}]
    granted_of_group = {"$filter": {"input": "$_granted", "cond": {"$eq": ["$$this.g", "$$group"]}}}
    group_start = {
        "t": "$$token",
        "g": "$$group",
        "n": {"$size": granted_of_group},
        "leaves": group_leaves,
    }
    groups_granted = {"$setDifference": ["$_granted.g", [None]]}
    group_starts = {"$map": {"input": groups_granted, "as": "group", "in": group_start}}
    # If some were refused for lack of slots, somebody checks, now and then, which slots are still in use. Not while all are
    # valid: then a check frees none.
    some_expired = {"$lte": [{"$min": "$slots.until"}, {"$subtract": [now, _LANDED_MS]}]}
    no_slots = {"$lt": [{"$min": [run_room, {"$size": "$_within"}]}, "$$asked_cnt"]}
    held_by_slots = {"$and": [no_slots, some_expired]}
    every_ms = {"$max": [_CHECKED_EVERY_MS, {"$size": "$slots"}]}
    due_for_check = {"$lte": [{"$ifNull": ["$checked_time", rules.LONG_AGO]}, {"$subtract": [now, every_ms]}]}
    return [
        *keeping_pipeline(now),
        # Starts whose window is over are removed; a missing list becomes an empty one.
        {
            "$set": {
                "starts": _in_buckets(now, "starts", "per_ms", _BUCKETS),
                "group_starts": {
                    "$cond": [
                        {"$gt": [stored_list("group_starts"), []]},
                        _in_buckets(now, "group_starts", "group_per_ms", _buckets_of_a_group),
                        [],
                    ]
                },
                "groups": stored_list("groups"),
            }
        },
        # What each group has room for.
        {"$set": {"_asked": reckoned_of_groups}},
        # What the limits of groups let through.
        {"$set": {"_within": within_groups, "full_groups": full_groups}},
        # Of these, what the limits of the queue let through.
        {"$set": {"_granted": granted}},
        # Whether this caller has to check the slots: one now and then, whoever comes first.
        {"$set": {"_check": {"$and": [held_by_slots, due_for_check]}}},
        # The slots that are booked now.
        {"$set": {"_slots": slots}},
        # Write the booking down, and the answer to the caller beside it.
        {
            "$set": {
                "booked": {
                    "ids": "$_granted.id",
                    "slots": {"$map": {"input": "$_slots", "in": {"t": "$$this.t", "id": "$$this.id"}}},
                    "held": {"$setIntersection": ["$slots.t", "$$renewed"]},
                    "until": until,
                },
                "next_start": {
                    "$cond": [
                        is_failing,
                        {"$cond": [no_canary_yet, "$failing.next", next_canary]},
                        # Only if it is the rate that has no room left: when running tasks end is unknown.
                        {"$cond": [{"$lte": [rate_room, count]}, queue_leaves_first, None]},
                    ]
                },
                "failing": {
                    "$cond": [
                        {"$and": [is_failing, {"$gt": [count, 0]}]},
                        {"$mergeObjects": ["$failing", {"next": next_canary, "t": "$$token"}]},
                        {"$ifNull": ["$failing", "$$REMOVE"]},
                    ]
                },
                "slots": {"$concatArrays": ["$slots", "$_slots"]},
                "starts": {
                    "$cond": [
                        {"$and": [{"$gt": ["$rate", None]}, {"$gt": [count, 0]}]},
                        {"$concatArrays": ["$starts", start]},
                        "$starts",
                    ]
                },
                "group_starts": {
                    "$cond": [has_rate, {"$concatArrays": ["$group_starts", group_starts]}, "$group_starts"]
                },
                "lacking": {
                    "$cond": [
                        {"$lt": [run_room, "$$lacks"]},
                        {"w": "$$worker_id", "at": now},
                        {"$ifNull": ["$lacking", "$$REMOVE"]},
                    ]
                },
                "checker": {"$cond": ["$_check", "$$token", None]},
                "checked_time": {"$cond": ["$_check", now, {"$ifNull": ["$checked_time", None]}]},
            }
        },
        # Intermediate results are not stored.
        {"$unset": ["_asked", "_within", "_granted", "_check", "_slots"]},
    ]


_buckets_of_a_group: rules.Expression = {
    "$max": [
        1,
        {
            "$min": [
                _BUCKETS_OF_A_GROUP,
                {
                    "$floor": {
                        "$divide": [_GROUP_STARTS, {"$max": [1, {"$size": {"$setUnion": ["$group_starts.g", []]}}]}]
                    }
                },
            ]
        },
    ]
}


def _in_buckets(now: rules.Expression, starts: str, window: str, buckets: rules.Expression) -> rules.Expression:
    """Return the list `starts` of this window: completed ones merged, by group; those in progress as they are.

    A start leaves the window `per_ms` after it at most, one in progress later: so what leaves by then is completed. What an
    older release has left there, one entry for each booking, is merged likewise.
    """
    per_ms = {"$ifNull": [f"${window}", 0]}
    bucket_ms = {"$max": [{"$ceil": {"$divide": [per_ms, buckets]}}, 1]}
    counted = {"$and": [{"$gt": ["$$this.leaves", now]}, {"$gt": ["$$this.n", 0]}]}
    settled = {"$filter": {"input": "$$counted", "cond": {"$lte": ["$$this.leaves", {"$add": [now, per_ms]}]}}}
    on_its_way = {"$filter": {"input": "$$counted", "cond": {"$gt": ["$$this.leaves", {"$add": [now, per_ms]}]}}}
    bucket = {
        "g": {"$ifNull": ["$$this.g", None]},
        "b": {"$floor": {"$divide": [{"$subtract": ["$$this.leaves", rules.LONG_AGO]}, "$$bucket_ms"]}},
    }
    # By place in the sorted list, and not by filtering it for each bucket: an older release may have left 200 000 entries.
    is_last = {
        "$ne": [
            {"$arrayElemAt": ["$$bucket_of", "$$this"]},
            {"$ifNull": [{"$arrayElemAt": ["$$bucket_of", {"$add": ["$$this", 1]}]}, None]},
        ]
    }
    lasts = {"$filter": {"input": {"$range": [0, {"$size": "$$settled"}]}, "cond": is_last}}
    before = {"$cond": ["$$this", {"$arrayElemAt": ["$$lasts", {"$subtract": ["$$this", 1]}]}, -1]}
    in_bucket = {"$slice": ["$$settled", {"$add": ["$$before", 1]}, {"$subtract": ["$$last", "$$before"]}]}
    put_together = _let(
        {"before": before, "last": {"$arrayElemAt": ["$$lasts", "$$this"]}},
        _let(
            {"in_bucket": in_bucket},
            # [G7] With its last start: none is forgotten while its window lasts.
            {
                "g": {"$ifNull": [{"$arrayElemAt": ["$$in_bucket.g", 0]}, "$$REMOVE"]},
                "n": {"$sum": "$$in_bucket.n"},
                "leaves": {"$max": "$$in_bucket.leaves"},
            },
        ),
    )
    in_buckets = {"$map": {"input": {"$range": [0, {"$size": "$$lasts"}]}, "in": put_together}}
    return _let(
        {"counted": {"$filter": {"input": stored_list(starts), "cond": counted}}, "bucket_ms": bucket_ms},
        _let(
            {"settled": {"$sortArray": {"input": settled, "sortBy": {"g": 1, "leaves": 1}}}},
            _let(
                {"bucket_of": {"$map": {"input": "$$settled", "in": bucket}}},
                {"$concatArrays": [_let({"lasts": lasts}, in_buckets), on_its_way]},
            ),
        ),
    )


def _let(variables: Document, result: rules.Expression) -> rules.Expression:
    return {"$let": {"vars": variables, "in": result}}


def _limit_of(group: rules.Expression) -> rules.Expression:
    """Return how many tasks of a group may run: its own limit, else that of every group, else any number."""
    own = {"$filter": {"input": "$groups", "as": "own", "cond": {"$eq": ["$$own.g", group]}}}
    general = {"$ifNull": ["$group_running", NO_LIMIT]}
    limit = {"$ifNull": [{"$arrayElemAt": [{"$map": {"input": own, "as": "own", "in": "$$own.n"}}, 0]}, general]}
    return {"$cond": [{"$gt": [group, None]}, limit, NO_LIMIT]}


def _first(items: rules.Expression, count: rules.Expression) -> rules.Expression:
    """Return the first so many of a list; none if the number is not positive (which `$slice` refuses)."""
    return {"$cond": [{"$gt": [count, 0]}, {"$slice": [items, {"$max": [count, 1]}]}, []]}


def stored_list(name: str) -> rules.Expression:
    """Return the list of this name in the document, empty if it does not exist."""
    return {"$ifNull": [f"${name}", []]}


def booked_until(
    store: Store, until: datetime, booked: Mapping[str, Sequence[Wish]], by_group: Collection[str]
) -> Document:
    """Return the filter for a claim on bookings that are valid until then, of tasks that still stand where they were booked.

    `booked`: what was booked, by queue. `by_group`: the queues in which the group counts, too.
    """
    places = {
        wish.id: [queue, wish.group] if queue in by_group else [queue]
        for queue, wishes in booked.items()
        for wish in wishes
    }
    in_time: rules.Expression = {"$lt": [store.now, {"$literal": until}]}
    first, *others = places.values()
    if all(place == first for place in others):
        return {**dict(zip(("queue", "group"), first, strict=False)), "$expr": in_time}
    # One expression for all: with a branch of the filter for each group, the server would plan each of them by itself.
    with_group = {"$in": ["$queue", {"$literal": sorted(by_group)}]}
    place = {"$cond": [with_group, ["$queue", {"$ifNull": ["$group", None]}], ["$queue"]]}
    return {"$expr": {"$and": [in_time, {"$eq": [place, own_value(list(places), list(places.values()))]}]}}


async def confirm(store: Store, queue: str, token: str, unused: Collection[Wish]) -> None:
    """Note that the claim on a booking was answered: it has started all but the `unused`, and nothing more will follow.

    To be called where starts are counted. It does not concern slots. Safe to repeat: the booking then has no token any more.
    """
    mine = {"$eq": ["$$this.t", token]}
    groups = {"$literal": [wish.group for wish in unused]}
    in_group = {"$filter": {"input": groups, "as": "group", "cond": {"$eq": ["$$group", "$$this.g"]}}}
    fields: Document = {}
    for starts, window, count in (
        ("starts", "$per_ms", len(unused)),
        ("group_starts", "$group_per_ms", {"$size": in_group}),
    ):
        started = {
            "t": None,
            "n": {"$max": [0, {"$subtract": ["$$this.n", count]}]},
            # Counted from now, which is a moment after the starts: so no window can hold too many of them.
            "leaves": {"$add": [store.now, {"$ifNull": [window, 0]}]},
        }
        one = {"$cond": [mine, {"$mergeObjects": ["$$this", started]}, "$$this"]}
        fields[starts] = {"$map": {"input": stored_list(starts), "in": one}}
    if unused:  # a canary that found nothing to try leaves its turn to the next
        free = {"$mergeObjects": ["$failing", {"next": store.now}]}
        was_mine = {"$eq": [{"$ifNull": ["$failing.t", None]}, token]}
        fields["failing"] = {"$cond": [was_mine, free, {"$ifNull": ["$failing", "$$REMOVE"]}]}
    # Both counts in one stage.
    await store.driver.collection(store.limits).update_one({"_id": queue}, [{"$set": fields}])


async def keep(
    store: Store, queue: str, worker_id: str, *, free: Collection[str] = (), renew: Mapping[str, Wish] | None = None
) -> Kept:
    """Give back the slots that are to be freed, by their tokens, and note what the others are used for now."""
    renew = renew or {}
    document = await find_and_update(
        store.driver.collection(store.limits),
        {"_id": queue},
        prepared(keeping_pipeline, store.now),
        {
            "slots": {"$filter": {"input": "$slots", "cond": {"$in": ["$$this.t", {"$literal": list(renew)}]}}},
            "lacking": 1,
        },
        return_document=ReturnDocument.AFTER,
        let=_keeping(free, renew),
    )
    slots, lacking = (document["slots"], document.get("lacking")) if document is not None else ([], None)
    return Kept(
        held=frozenset(slot["t"] for slot in slots),
        until=min((slot["until"] for slot in slots), default=None),
        wanted_at=lacking["at"] if lacking is not None and lacking["w"] != worker_id else None,
    )


def _keeping(free: Collection[str], renew: Mapping[str, Wish]) -> Document:
    """Return the variables of `keeping_pipeline`: which slots are given back, and what the worker says of others of its own."""
    return {
        "freed": {"$literal": list(free)},
        "renewed": {"$literal": list(renew)},
        "uses": {"$literal": [{"id": wish.id, "g": wish.group} for wish in renew.values()]},
    }


def keeping_pipeline(now: rules.Expression) -> list[Document]:
    """Return the update that removes and renews slots. Slots that were booked meanwhile stay."""
    left = {"$filter": {"input": stored_list("slots"), "cond": {"$lt": [_place_in("$$freed", "$$this.t"), 0]}}}
    until = {"until": {"$add": [now, BOOKED_MS]}}
    renewed = {"$mergeObjects": ["$$this", {"$arrayElemAt": ["$$uses", "$$place"]}, until]}
    one = _let({"place": _place_in("$$renewed", "$$this.t")}, {"$cond": [{"$lt": ["$$place", 0]}, "$$this", renewed]})
    # Without those that are given back, and with what their worker uses the others for.
    return [{"$set": {"slots": {"$map": {"input": left, "in": one}}}}]


def _place_in(values: str, value: rules.Expression) -> rules.Expression:
    """Return the place of a value in the list that is this variable of the update, -1 if it is not there.

    Such a variable is a constant, so the server hashes the list once; `$in` would compare with each.
    """
    return {"$indexOfArray": [values, value]}


async def check(store: Store, queue: str) -> int:
    """Make the slots of a queue agree with the leases. Return how many of them were unused.

    Frees slots without a live entry, and adds one for every live entry without a slot: it was claimed before there was a limit,
    or its worker died before it noted that it uses a slot for it.
    """
    fields = {"slots": 1, "group_running": 1, "groups": 1}
    document = await store.driver.collection(store.limits).find_one({"_id": queue}, fields)
    if document is None:
        return 0
    slots = document.get("slots") or []
    live, now = await _live(store, queue, [slot["id"] for slot in slots])
    landed = now - timedelta(milliseconds=_LANDED_MS)
    idle = [slot for slot in slots if (slot["id"], slot["w"]) not in live]
    unused = [slot for slot in idle if slot["until"] <= landed]
    by_group = document.get("group_running") is not None or bool(document.get("groups"))
    # A valid slot may be in use for another task of its worker by now, which will note that in time.
    spare = Counter((slot["w"], slot["g"] if by_group else None) for slot in idle if slot["until"] > landed)
    known = {(slot["id"], slot["w"]) for slot in slots}
    missing = []
    for (id_, worker), group in live.items():
        place = worker, group if by_group else None
        if (id_, worker) in known:
            continue
        if spare[place] > 0:
            spare[place] -= 1
        else:
            missing.append({"id": id_, "w": worker, "g": group})
    if unused or missing:
        await _correct(store, queue, [(slot["t"], slot["id"]) for slot in unused], missing)
    return len(unused)


async def _correct(store: Store, queue: str, unused: Collection[tuple[str, str]], missing: list[Document]) -> None:
    """Free slots, and add some for live entries without one. Much may have happened meanwhile, so the server checks again."""
    gone = {"$literal": [{"t": token, "id": id_} for token, id_ in unused]}
    # Not those that are used for another task by now.
    used = {"$not": [{"$in": [{"t": "$$this.t", "id": "$$this.id"}, gone]}]}
    slot = {"t": {"$concat": ["adopted by check from ", "$$this.w", " for ", "$$this.id"]}, "until": rules.LONG_AGO}
    held = {"$map": {"input": "$slots", "as": "slot", "in": {"id": "$$slot.id", "w": "$$slot.w"}}}
    needed = {
        "$and": [
            {"$not": [{"$in": [{"id": "$$this.id", "w": "$$this.w"}, held]}]},
            {"$or": [{"$gt": ["$running", None]}, {"$lt": [_limit_of("$$this.g"), NO_LIMIT]}]},
        ]
    }
    added = {
        "$map": {
            "input": {"$filter": {"input": {"$literal": missing}, "cond": needed}},
            "in": {"$mergeObjects": ["$$this", slot]},
        }
    }
    stages = [
        # A missing list becomes an empty one: what follows reads both.
        {
            "$set": {
                "slots": {"$filter": {"input": stored_list("slots"), "cond": used}},
                "groups": stored_list("groups"),
            }
        },
        # Those that are missing at this moment, behind the others: in one update, so that nobody books in between.
        {"$set": {"slots": {"$concatArrays": ["$slots", added]}}},
    ]
    await store.driver.collection(store.limits).update_one({"_id": queue}, stages)


async def _live(store: Store, queue: str, ids: Sequence[str]) -> tuple[dict[tuple[str, str], str | None], datetime]:
    """Return the live entries of a queue, as `_id` and worker, with the group; those of `ids` even if cancelled."""
    workers = {"$map": {"input": rules.places(store.now), "in": "$$this.worker_id"}}
    fields = {"group": 1, "now": store.now, "workers": {"$cond": [{"$isArray": [rules.ENTRIES]}, workers, []]}}
    found = await store.find({"status": "RUNNING", "queue": queue}, fields)
    if ids:
        found += await store.find({"_id": {"$in": list(ids)}}, fields)
    now = found[0]["now"] if found else await server_now(store, queue)
    live = {
        (task["_id"], worker): task.get("group")
        for task in found
        for worker in task["workers"]
        if isinstance(worker, str) and isinstance(task["_id"], str) and isinstance(task.get("group"), (str, NoneType))
    }
    return live, now


async def server_now(store: Store, queue: str) -> datetime:
    """Return the server's time, or the literal time of a test."""
    # From the queue's own document, so that nothing else is read: the server's time.
    rows = await store.driver.rows(store.limits, [{"$match": {"_id": queue}}, {"$project": {"now": store.now}}])
    return rows[0]["now"] if rows else rules.LONG_AGO
