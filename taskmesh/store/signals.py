"""Signals: what others tell a task, kept with it until its handler waits for it.

The task itself has a mailbox: sending a signal is one update. If the task is suspended for this very event, that update puts
the signal into the record of the wait, and wakes the task; the next execution finds the wait completed. A signal is recognised
by its id, in the mailbox and in the record that has consumed it: sending it again changes nothing.
"""

from __future__ import annotations

from typing import Any, Literal

from pymongo.errors import OperationFailure

from taskmesh.store import rules
from taskmesh.store.finish import HANDLED_BY_SHORT_SUCCESS
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import DOCUMENT_TOO_LARGE, patiently
from taskmesh.store.pipeline import plain
from taskmesh.store.pipeline.event_stamp import stamp
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.store import Store

MAX_SIGNALS = 1_000
MAX_BYTES = 1_000_000

Answer = Literal["sent", "known", "finished", "full", "absent"]


async def signal(store: Store, id_: str, event: str, signal_id: str, payload: Any, size: int) -> Answer:
    """Put a signal into the record of the wait that it ends, or else into the task's mailbox. Return what became of it.

    `known`: a signal with this id exists, or was consumed, whatever became of the task since. Tries again while the database is
    unreliable. Eligible: the task is not finished, and the mailbox has room. Writes: the record and `steps_bytes`, or `signals`
    and `signals_bytes`; `suspended_until`, the derived fields.
    """
    now = store.now
    unfinished = rules.with_facts(now, {"$in": [rules.status(now), ["INIT", "RUNNING"]]})
    has_room = {
        "$and": [
            {"$lt": [{"$size": rules.SIGNALS}, MAX_SIGNALS]},
            {"$lte": [{"$add": [{"$ifNull": ["$task_state.signals_bytes", 0]}, size]}, MAX_BYTES]},
        ]
    }
    places = ("signals.id", "steps.signal_id", "stages.steps.signal_id")
    unknown = {f"task_state.{place}": {"$ne": signal_id} for place in places}
    query = {"_id": id_, **unknown, "$expr": {"$and": [{"$not": [rules.is_forgotten(now)]}, unfinished, has_room]}}
    sent = {"event": event, "id": signal_id, "payload": payload, "size": size}
    # First as if the task waits for it and for nothing else: then little has to be derived.
    waiting = [
        {"_id": id_, "status": "INIT", "task_state.suspended_for.event": event, **unknown, "$expr": has_room},
        prepared(_waiting, now),
    ]
    # Those that it has consumed, in each stage.
    consumed_before = {"$ifNull": ["$task_state.stages.steps.signal_id", []]}
    told = {
        "forgotten": rules.is_forgotten(now),
        "known": {
            "$or": [
                {"$in": [{"$literal": signal_id}, {"$map": {"input": rules.SIGNALS, "in": "$$this.id"}}]},
                {"$in": [{"$literal": signal_id}, {"$map": {"input": rules.STEPS, "in": "$$this.signal_id"}}]},
                {
                    "$anyElementTrue": {
                        "$map": {"input": consumed_before, "in": {"$in": [{"$literal": signal_id}, "$$this"]}}
                    }
                },
            ]
        },
        "unfinished": unfinished,
        "has_room": has_room,
    }

    async def send() -> Answer:
        while True:
            try:
                for which, pipeline, hint in (({"$and": waiting}, _woken, "_id_"), (query, _signalled, None)):
                    if (await store.update(which, prepared(pipeline, now), constants={"sent": sent}, hint=hint))["n"]:
                        return "sent"
            except OperationFailure as error:
                if error.code not in DOCUMENT_TOO_LARGE:
                    raise
                return "full"
            found = await store.find({"_id": id_}, told, majority=True)
            if not found or found[0]["forgotten"]:
                return "absent"
            if found[0]["known"]:
                return "known"
            if not found[0]["unfinished"]:
                return "finished"
            if not found[0]["has_room"]:
                return "full"

    return await patiently(send)


def _signalled(now: rules.Expression) -> list[Document]:
    """Return the stages that put the signal `$$sent` where it belongs, and wake a task that waits for it."""
    return [*_put(now), *rules.derivation(now)]


def _woken(now: rules.Expression) -> list[Document]:
    """Return what `_signalled` amounts to for a task that is `_waiting` for this event."""
    times = [f"$task_state.{name}" for name in ("create_time", "start_time", "resume_time")]
    # It may be claimed from now on, unless it was put off as well; all else stays as it is.
    return [*_put(now), {"$set": {"next_claim_time": {"$max": [*times, now]}}}]


def _waiting(now: rules.Expression) -> Document:
    """Return the conditions under which an INIT task is held back by what it waits for, and by nothing else."""
    return {
        "task_state.worker_states": {"$size": 0},
        "task_state.steps_bytes": {"$gte": 0},
        # Whatever else the rule reads.
        **plain.without_others(_signalled(now), _HANDLED_BY_SHORT_SIGNAL),
        "$expr": {"$gt": ["$task_state.suspended_until", now]},
    }


_HANDLED_BY_SHORT_SIGNAL = HANDLED_BY_SHORT_SUCCESS.union(
    {"task_option.concurrent_worker_cnt"},
    (f"task_state.{name}" for name in ("has_children", "steps", "signals", "signals_bytes")),
    (f"task_state.{name}" for name in ("suspended_until", "suspended_for")),
)


def _put(now: rules.Expression) -> list[Document]:
    waits = {
        "$and": [
            {"$gt": ["$task_state.suspended_until", now]},
            {"$eq": ["$task_state.suspended_for.event", "$$sent.event"]},
        ]
    }
    # The record of this wait. Not one that has ended: what a wait has returned never changes.
    its = {
        "$and": [
            {"$eq": ["$$this.id", "$task_state.suspended_for.id"]},
            {"$not": [{"$gt": ["$$this.time", None]}]},
        ]
    }
    ended = {
        "value": "$$sent.payload",
        "signal_id": "$$sent.id",
        "time": now,
        "size": {"$add": ["$$this.size", "$$sent.size"]},
    }
    delivered = {
        "steps": {
            "$map": {"input": rules.STEPS, "in": {"$cond": [its, {"$mergeObjects": ["$$this", ended]}, "$$this"]}}
        },
        "steps_bytes": {"$add": ["$task_state.steps_bytes", "$$sent.size"]},
    }
    kept = {
        "signals": {"$concatArrays": [rules.SIGNALS, [{"$mergeObjects": ["$$sent", {"time": now}]}]]},
        "signals_bytes": {"$add": [{"$ifNull": ["$task_state.signals_bytes", 0]}, "$$sent.size"]},
    }
    return [
        # Whether it ends the wait for which the task is suspended.
        {"$set": {"_waits": waits}},
        # A stage of its own: it reads what was found above.
        {"$set": {"_ends": {"$and": ["$_waits", {"$ne": [{"$filter": {"input": rules.STEPS, "cond": its}}, []]}]}}},
        # Then that is over, with this as its value; else it is behind the other signals. The task may be claimed from now on.
        {
            "$set": {
                "task_state": {
                    "$mergeObjects": [
                        "$task_state",
                        {"$cond": ["$_ends", delivered, kept]},
                        {"$cond": ["$_waits", {"suspended_until": now}, {}]},
                    ]
                },
                "event": stamp("signalled", now, recorded="$_ends"),
            }
        },
        # What was found is not stored.
        {"$unset": ["_waits", "_ends"]},
    ]
