"""The gates that keep a task back because of others: its dependencies, its line, its flow. How they are opened."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from taskmesh.store import rules
from taskmesh.store.finish import HANDLED_BY_SHORT_SUCCESS
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.pipeline import plain
from taskmesh.store.pipeline.event_stamp import stamp
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.relations.around_locks import update_around_locks
from taskmesh.store.store import Store


class Gate(StrEnum):
    """The field by which a gate is shut."""

    DEPENDENCIES = "task_state.waits_for"
    SEQUENCE = "task_state.in_line"
    FLOW = "task_state.flow"


async def open_gate(store: Store, gate: Gate, ids: Sequence[str], where: Document | None = None) -> bool:
    """Open a gate of these tasks, where it is shut and they match `where`.

    False if somebody's open transaction held one of them, so that a sweep has to do it again.

    Most of them nobody has tried: those take the short form (see `plain`), and the whole rule what that has left.
    """
    now = store.now
    shut = {gate.value: {"$exists": True}, **(where or {})}
    plain_ones = {"$and": [shut, prepared(_held_back, now, gate)]}
    short = await update_around_locks(store, ids, plain_ones, prepared(_opening_plain, now, gate))
    if short == len(ids):
        return True
    whole = await update_around_locks(store, ids, shut, prepared(_opening, now, gate))
    return short is not None and whole is not None


def _opening(now: rules.Expression, gate: Gate) -> list[Document]:
    return [*_opened(now, gate), *rules.derivation(now)]


def _opened(now: rules.Expression, gate: Gate) -> list[Document]:
    goes_on = {"$cond": [_joins, now, {"$ifNull": [_suspended_until, "$$REMOVE"]}]}
    return [
        # That is the gate.
        {"$unset": gate.value},
        # Announced to workers. A handler that is suspended until its children are finished may go on.
        {
            "$set": {
                "event": stamp("opened", now),
                **({"task_state.suspended_until": goes_on} if gate is Gate.DEPENDENCIES else {}),
            }
        },
    ]


_suspended_until = "$task_state.suspended_until"
_joins: rules.Expression = {
    "$and": [{"$gt": [_suspended_until, None]}, {"$eq": ["$task_state.suspended_for.kind", "join"]}]
}


def _opening_plain(now: rules.Expression, gate: Gate) -> list[Document]:
    """Return what `_opening` amounts to for tasks that are `_held_back`: when they may be claimed, and nothing else."""
    return [
        *_opened(now, gate),
        # Unless another gate is shut.
        {"$set": {"next_claim_time": plain.CLAIMABLE_FROM}},
    ]


def _held_back(now: rules.Expression, gate: Gate) -> Document:
    """Return the conditions under which an INIT task has nothing but these gates, and times, that keep it from every worker."""
    return {
        "task_state.worker_states": {"$size": 0},
        # Whatever else the rule reads; `finish_time`, too, so it is not finished.
        **plain.without_others(_opening(now, gate), _HANDLED),
    }


_HANDLED = HANDLED_BY_SHORT_SUCCESS.union(
    Gate,
    # Of a task without entries nothing follows from these.
    {"task_option.concurrent_worker_cnt", "task_state.pending", "task_state.released_time"},
    # They say when it may be claimed.
    {"task_state.suspended_until", "task_state.suspended_for"},
).difference({"task_state.expire_time"})
