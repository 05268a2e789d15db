"""Signals: what others tell a task, kept with it until its handler waits for it.

A mailbox in the task itself: who signals writes one update, which also wakes a task that waits for this very event. A signal is
known by its id, in the mailbox and in the record that has consumed it: to send it again changes nothing.
"""

from __future__ import annotations

from typing import Any, Literal

from taskmesh.store import rules
from taskmesh.store.driver import Document
from taskmesh.store.event_stamp import stamp
from taskmesh.store.prepared import prepared
from taskmesh.store.server_errors import patiently
from taskmesh.store.store import Store

MAX_SIGNALS = 1_000
MAX_BYTES = 1_000_000

Answer = Literal["sent", "known", "finished", "full", "absent"]


async def signal(store: Store, id_: str, event: str, signal_id: str, payload: Any, size: int) -> Answer:
    """Put a signal into the task's mailbox, and wake the task if it waits for this event; say what became of it.

    `known`: a signal of this id is there, or was consumed, whatever became of the task since. Goes on while the database
    falters. Eligible: the task is not finished, and the mailbox has room. Writes: `signals`, `signals_bytes`,
    `suspended_until`, the derived fields.
    """
    now = store.now
    unfinished = rules.with_facts(now, {"$in": [rules.status(now), ["INIT", "RUNNING"]]})
    has_room = {
        "$and": [
            {"$lt": [{"$size": rules.SIGNALS}, MAX_SIGNALS]},
            {"$lte": [{"$add": [{"$ifNull": ["$task_state.signals_bytes", 0]}, size]}, MAX_BYTES]},
        ]
    }
    unknown = {"task_state.signals.id": {"$ne": signal_id}, "task_state.steps.signal_id": {"$ne": signal_id}}
    query = {"_id": id_, **unknown, "$expr": {"$and": [{"$not": [rules.is_forgotten(now)]}, unfinished, has_room]}}
    sent = {
        "$mergeObjects": [
            {"$literal": {"event": event, "id": signal_id, "payload": payload, "size": size}},
            {"time": now},
        ]
    }
    waits_for_it = {
        "$and": [
            {"$gt": ["$task_state.suspended_until", now]},
            {"$eq": ["$task_state.suspended_for.event", {"$literal": event}]},
        ]
    }
    until = {"$ifNull": ["$task_state.suspended_until", "$$REMOVE"]}
    stages: list[Document] = [
        # The signal, behind the others; a task that is suspended until this event comes may be claimed from now on.
        {
            "$set": {
                "task_state": {
                    "signals": {"$concatArrays": [rules.SIGNALS, [sent]]},
                    "signals_bytes": {"$add": [{"$ifNull": ["$task_state.signals_bytes", 0]}, size]},
                    "suspended_until": {"$cond": [waits_for_it, now, until]},
                },
                "event": stamp("signalled", now),
            }
        },
        *prepared(rules.derivation, now),
    ]
    told = {
        "forgotten": rules.is_forgotten(now),
        "known": {
            "$or": [
                {"$in": [{"$literal": signal_id}, {"$map": {"input": rules.SIGNALS, "in": "$$this.id"}}]},
                {"$in": [{"$literal": signal_id}, {"$map": {"input": rules.STEPS, "in": "$$this.signal_id"}}]},
            ]
        },
        "unfinished": unfinished,
        "has_room": has_room,
    }

    async def send() -> Answer:
        while True:
            if (await store.update(query, stages))["n"]:
                return "sent"
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
