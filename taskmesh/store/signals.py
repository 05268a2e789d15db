"""Signals: what others tell a task, kept with it until its handler waits for it.

The task itself has a mailbox: sending a signal is one update. If the task is suspended for this very event, that update puts
the signal into the record of the wait, and wakes the task; the next execution finds the wait completed. A signal is recognised
by its id, in the mailbox and in the record that has consumed it: sending it again changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pymongo.errors import OperationFailure, PyMongoError

from taskmesh.store import rules
from taskmesh.store.finish import HANDLED_BY_SHORT_SUCCESS
from taskmesh.store.grouped import Grouped
from taskmesh.store.mongodb.driver import TOGETHER_DEADLINE_MS, Document
from taskmesh.store.mongodb.server_errors import DOCUMENT_TOO_LARGE, is_passing, patiently
from taskmesh.store.pipeline import plain
from taskmesh.store.pipeline.by_id import own_value
from taskmesh.store.pipeline.event_stamp import stamp
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.store import WRITE_DEADLINE_MS, Store

MAX_SIGNALS = 1_000
MAX_BYTES = 1_000_000
_AT_ONCE = 50
"""How many signals go in one command."""
_LARGE = 40_000
"""A signal of more bytes goes alone."""
_OPEN_SETS = 20

Answer = Literal["sent", "known", "finished", "full", "absent"]


@dataclass(frozen=True, slots=True, eq=False)
class Signal:
    """What somebody tells a task. `size`: about how many bytes it has."""

    task_id: str
    event: str
    id: str
    payload: Any
    size: int


class Signals(Grouped[Signal, Answer]):
    """Sends signals: those of one moment together, if they are for different tasks."""

    async def send(self, signal: Signal) -> Answer:
        """Put a signal into the record of the wait that it ends, or else into the task's mailbox. Return what became of it.

        `known`: a signal with this id exists, or was consumed, whatever became of the task since. Tries again while the
        database is unreliable.
        """

        async def send() -> Answer:
            together = await self.of([signal])
            return together[signal] if signal in together else await signal_alone(self._store, signal)

        return await patiently(send)

    async def call(self, signals: Sequence[Signal]) -> Mapping[Signal, Answer]:
        """Send them. Return those of which it is known what became of them."""
        answers: dict[Signal, Answer] = {}
        for some in _for_different_tasks(signals):
            try:
                answers |= await _send_together(self._store, some)
            except PyMongoError as error:
                if is_passing(error):
                    raise
                # One is locked, full or malformed. Others may have got theirs: then they are recognised.
        return answers


def _for_different_tasks(signals: Sequence[Signal]) -> Iterator[list[Signal]]:
    """Divide them into sets that may go together. What is large or alone is left out."""
    sets: list[dict[str, Signal]] = []
    for signal in signals:
        if signal.size > _LARGE:
            continue
        for some in sets[-_OPEN_SETS:]:
            if signal.task_id not in some and len(some) < _AT_ONCE:
                some[signal.task_id] = signal
                break
        else:
            sets.append({signal.task_id: signal})
    return (list(some.values()) for some in sets if len(some) > 1)


async def _send_together(store: Store, signals: Sequence[Signal]) -> dict[Signal, Answer]:
    """Send signals to different tasks, in few commands. Return those of which it is known what became of them."""
    ids = _ids(signals)
    # Only what exists: what is missing afterwards was told before it was deleted.
    fields = {"forgotten": rules.is_forgotten(store.now), "waits_for": "$task_state.suspended_for.event"}
    found = {task["_id"]: task for task in await store.find({"_id": {"$in": ids}}, fields) if not task["forgotten"]}
    told = [signal for signal in signals if signal.task_id in found]
    waiting = [signal for signal in told if found[signal.task_id].get("waits_for") == signal.event]
    deadline_ms = TOGETHER_DEADLINE_MS + 10 * len(told)
    sent = await _update(store, _waking(waiting, store.now), deadline_ms) if waiting else 0
    if sent < len(told):
        sent += await _update(store, _delivering(told, store.now), deadline_ms)
    if sent < len(told):
        after = await store.find({"_id": {"$in": _ids(told)}}, {"known": _is_known(told)}, majority=True)
        untold = {task["_id"] for task in after if not task["known"]}
        told = [signal for signal in told if signal.task_id not in untold]
    return dict.fromkeys(told, "sent")


async def signal_alone(store: Store, signal: Signal) -> Answer:
    """Send one. Return what became of it."""
    now = store.now
    fields = {
        "forgotten": rules.is_forgotten(now),
        "known": _is_known([signal]),
        "unfinished": _is_unfinished(now),
        "has_room": _has_room([signal]),
    }
    while True:
        try:
            for update in (_waking, _delivering):
                if await _update(store, update([signal], now)):
                    return "sent"
        except OperationFailure as error:
            if error.code not in DOCUMENT_TOO_LARGE:
                raise
            return "full"
        found = await store.find({"_id": signal.task_id}, fields, majority=True)
        if not found or found[0]["forgotten"]:
            return "absent"
        if found[0]["known"]:
            return "known"
        if not found[0]["unfinished"]:
            return "finished"
        if not found[0]["has_room"]:
            return "full"


# --- the update: of as many tasks as there are signals, each another ---


_Update = tuple[Document, Sequence[Document], str | None]
"""Which tasks, what is done to them, and the index by which to find them, if the server might try others."""


async def _update(store: Store, update: _Update, deadline_ms: int = WRITE_DEADLINE_MS) -> int:
    query, stages, hint = update
    return int((await store.update(query, stages, deadline_ms, hint=hint))["n"])


def _waking(signals: Sequence[Signal], now: rules.Expression) -> _Update:
    """Return the update for tasks that wait for these signals and for nothing else: then little has to be derived."""
    waits = {"$eq": ["$task_state.suspended_for.event", _of_each(signals, "event")]}
    query: Document = {
        "$and": [
            {"_id": {"$in": _ids(signals)}, "status": "INIT"},
            {"$expr": {"$and": [waits, {"$not": [_is_known(signals)]}, _has_room(signals)]}},
            prepared(_waiting, now),
        ]
    }
    return query, [_sent(signals), *prepared(_woken, now)], "_id_"


def _delivering(signals: Sequence[Signal], now: rules.Expression) -> _Update:
    """Return the update for any tasks.

    Eligible: the task is not finished, and the mailbox has room. Writes: the record and `steps_bytes`, or `signals` and
    `signals_bytes`; `suspended_until`, the derived fields.
    """
    may = [{"$not": [rules.is_forgotten(now)]}, _is_unfinished(now), {"$not": [_is_known(signals)]}, _has_room(signals)]
    query = {"_id": {"$in": _ids(signals)}, "$expr": {"$and": may}}
    return query, [_sent(signals), *prepared(_signalled, now)], None


def _sent(signals: Sequence[Signal]) -> Document:
    """Return the stage that puts the task's own signal where the others find it."""
    each = [{"event": s.event, "id": s.id, "payload": s.payload, "size": s.size} for s in signals]
    return {"$set": {"_sent": own_value(_ids(signals), each)}}


def _ids(signals: Sequence[Signal]) -> list[str]:
    return [signal.task_id for signal in signals]


def _of_each(signals: Sequence[Signal], field: str) -> rules.Expression:
    return own_value(_ids(signals), [getattr(signal, field) for signal in signals])


def _is_known(signals: Sequence[Signal]) -> rules.Expression:
    """Whether the task's own signal is in its mailbox, or was consumed, in whichever stage."""
    of_stages = {"$ifNull": ["$task_state.stages.steps.signal_id", []]}
    known = [
        {"$in": ["$$id", {"$map": {"input": rules.SIGNALS, "in": "$$this.id"}}]},
        {"$in": ["$$id", {"$map": {"input": rules.STEPS, "in": "$$this.signal_id"}}]},
        {"$anyElementTrue": {"$map": {"input": of_stages, "in": {"$in": ["$$id", "$$this"]}}}},
    ]
    return {"$let": {"vars": {"id": _of_each(signals, "id")}, "in": {"$or": known}}}


def _is_unfinished(now: rules.Expression) -> rules.Expression:
    return rules.with_facts(now, {"$in": [rules.status(now), ["INIT", "RUNNING"]]})


def _has_room(signals: Sequence[Signal]) -> rules.Expression:
    """Whether the task's own signal fits into its mailbox."""
    size = {"$add": [{"$ifNull": ["$task_state.signals_bytes", 0]}, _of_each(signals, "size")]}
    return {"$and": [{"$lt": [{"$size": rules.SIGNALS}, MAX_SIGNALS]}, {"$lte": [size, MAX_BYTES]}]}


def _signalled(now: rules.Expression) -> list[Document]:
    """Return the stages that put `_sent` where it belongs, and wake a task that waits for it."""
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
    (f"task_state.{name}" for name in ("steps", "signals", "signals_bytes")),
    (f"task_state.{name}" for name in ("suspended_until", "suspended_for")),
)


def _put(now: rules.Expression) -> list[Document]:
    waits = {
        "$and": [
            {"$gt": ["$task_state.suspended_until", now]},
            {"$eq": ["$task_state.suspended_for.event", "$_sent.event"]},
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
        "value": "$_sent.payload",
        "signal_id": "$_sent.id",
        "time": now,
        "size": {"$add": ["$$this.size", "$_sent.size"]},
    }
    delivered = {
        "steps": {
            "$map": {"input": rules.STEPS, "in": {"$cond": [its, {"$mergeObjects": ["$$this", ended]}, "$$this"]}}
        },
        "steps_bytes": {"$add": ["$task_state.steps_bytes", "$_sent.size"]},
    }
    kept = {
        "signals": {"$concatArrays": [rules.SIGNALS, [{"$mergeObjects": ["$_sent", {"time": now}]}]]},
        "signals_bytes": {"$add": [{"$ifNull": ["$task_state.signals_bytes", 0]}, "$_sent.size"]},
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
        {"$unset": ["_sent", "_waits", "_ends"]},
    ]
