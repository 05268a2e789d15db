"""Finish: record how executions ended, many in one update: SUCCESS, FAIL, or given back.

Every outcome names its `running_id`, and counts only while that entry holds a live lease on a RUNNING task: a worker that was
preempted, or whose task was cancelled, changes nothing any more (fencing). All verbs are safe to repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from taskmesh.store import rules
from taskmesh.store.apart import Apart
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.pipeline import plain
from taskmesh.store.pipeline.by_id import own_value
from taskmesh.store.pipeline.event_stamp import stamp
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.pipeline.restart import OWN_PARAMS, STAGED, fresh_state, reopened_if_requested
from taskmesh.store.store import WRITE_DEADLINE_MS, Store

Kind = Literal[
    "succeeded",
    "failed",
    "released",
    "snoozed",
    "suspended",
    "conflicted",
    "moved",
    "stopped",
    "looped",
    "stepped",
    "reported",
]
"""The last two are no ends: the execution goes on, and has recorded something (`store.steps`) or reports (`report`)."""
Recorded = Literal["recorded", "held", "lost"]
"""What became of a write whose answer is missing: see `whether_recorded`."""
_GIVEN_BACK: tuple[Kind, ...] = ("released", "snoozed", "suspended", "conflicted")
KEPT_STAGES = 100
_ANNOUNCED_AS: dict[Kind, str] = {"conflicted": "snoozed", "looped": "succeeded"}
_STATE_OF: dict[Kind, str] = {"succeeded": "SUCCESS", "failed": "FAIL", "stopped": "FAIL"}
_OF_OTHERS = {f"task_state.{name}" for name in ("parent", "dependents", "line", "has_children")}
HANDLED_BY_SHORT_SUCCESS = _OF_OTHERS | {
    # Checked by `_single`.
    "status",
    "task_option.concurrent_worker_cnt",
    "task_state.worker_states",
    # Written as the rule would, or left as they are.
    "task_state",
    "task_state.timeout_cnt",
    "task_state.conflict_cnt",
    "task_state.progress",
    "task_state.ask_time",
    "task_option.retain_success_ms",
    "task_option.on_fail",
    "task_state.home",
    "event",
    "queue",
    "group",
    "params",
    "next_claim_time",
    "settle_time",
    "needs",
    "pinned",
    # In a finished task the rule does not look at these.
    *(f"task_state.{name}" for name in ("after", "stages", "own_params", "detached", "place", "on_sequence_failure")),
    *(f"task_state.{name}" for name in ("create_time", "start_time", "expire_time", "resume_time", "params_version")),
    "task_state.steps_bytes",
    *(f"task_state.{name}" for name in ("debounced_since", "throttled_since")),
    *(f"task_state.{name}" for name in ("dropped_fail_cnt", "lost_cnt", "losses")),
    *(f"task_option.unexpected_retry_{name}" for name in ("delay_ms", "delay_scope", "backoff", "jitter")),
    *(
        f"task_option.{name}"
        for name in (
            "specific_worker_ids",
            "worker_timeout_ms",
            "max_unexpected_retries",
            "max_timeouts",
            "retain_failed_ms",
        )
    ),
}
_HANDLED_BY_SHORT_GIVING_BACK = HANDLED_BY_SHORT_SUCCESS.union({"task_state.suspended_until"}).difference(
    # These might finish a task without a live entry.
    {"task_state.expire_time", "task_state.dropped_fail_cnt"}
)


@dataclass(slots=True, eq=False)
class Outcome:
    """How one execution ended, or what it writes while it goes on."""

    id: str
    running_id: str
    kind: Kind
    entry: Mapping[str, Any] = field(default_factory=dict)
    """Fields for the worker's entry: `returns`, `fail_reason`, `fail_type`, `fail_frame`, `final`, `final_because`,
    `retry_jitter`, `logs`. Checked to be storable."""
    delay_ms: int | None = None
    """For `Retry` and `Snooze`: no worker claims the task before this has passed. For a record: when its wait is over."""
    progress: Document | None = None
    progress_unannounced: bool = False
    """Whether no report has written this progress, so that readers of events have not been told of it."""
    size: int = 0
    """About how many bytes `entry` needs, so that a batch stays within one message."""
    step: Document | None = None
    """`stepped`: the record. `suspended`: what is waited for, with `id` of its record, `kind`, `name`, and for a signal
    `event`."""
    lease_ms: int = 0
    """`stepped`: how long the lease has to last from then on, at least."""
    made_at: datetime | None = None
    """`stepped`: when the record was made, by the worker's idea of the server's clock; later than earlier records of its task.
    None if the worker has no reliable idea of it."""
    bytes_before: int = 0
    """`stepped`: how many bytes the records before it have, as far as the execution knows."""
    apart: Sequence[Apart] = ()
    """Values that are stored separately, and have to be written first."""
    concerns_others: bool = True
    """Whether another task may wait for this one: as it was at the claim, True if unknown. `finish` sets it to True
    where dependents may have been added since."""


async def finish(
    store: Store,
    worker_id: str,
    outcomes: Sequence[Outcome],
    *,
    session: Any = None,
    deadline_ms: int = WRITE_DEADLINE_MS,
) -> int:
    """Record outcomes of one kind. Return how many counted; if fewer than given, ask `whether_recorded`.

    Eligible: the entry with this `running_id` is live and the task RUNNING. Writes: the entry (`released`, `snoozed`,
    `suspended` and `conflicted` remove it), `resume_time`, `suspended_until`, `suspended_for`, `timeout_cnt`, `conflict_cnt`,
    the derived fields; reopens the task if `run_again` was requested meanwhile.
    """
    kind = outcomes[0].kind
    if kind == "stopped":
        return await _note_stopped(store, outcomes)
    counted = 0
    if kind == "succeeded":
        alone = [outcome for outcome in outcomes if not outcome.concerns_others]
        watched = [outcome for outcome in outcomes if outcome.concerns_others]
        counted = await _finish_plain(store, worker_id, alone, session, deadline_ms, alone=True)
        if counted < len(alone):  # perhaps because one of them has dependents by now, and it is unknown which
            for outcome in alone:
                outcome.concerns_others = True
        counted += await _finish_plain(store, worker_id, watched, session, deadline_ms, alone=False)
    elif kind in _GIVEN_BACK:
        counted = await _give_back_plain(store, worker_id, outcomes, session, deadline_ms)
    if counted == len(outcomes):
        return counted
    query = still_held_by(outcomes, store.now)
    if kind == "looped":
        stages = _looped(outcomes, store.now)
    elif kind == "moved":
        stages = _moved(outcomes, store.now)
    else:
        stages = _given_back(outcomes, store.now) if kind in _GIVEN_BACK else _ended(outcomes, store.now)
    pipeline = [
        *stages,
        # Announce how it ended. A conflict is announced as a snooze: readers see a task that runs again later.
        {"$set": {"event": _announcement(_ANNOUNCED_AS.get(kind, kind), worker_id, outcomes, store.now)}},
        # Status and times follow.
        *prepared(rules.derivation, store.now),
    ]
    reply = await store.update(query, pipeline, deadline_ms, session)
    return counted + int(reply["n"])


async def _finish_plain(
    store: Store, worker_id: str, outcomes: Sequence[Outcome], session: Any, deadline_ms: int, *, alone: bool
) -> int:
    """Record SUCCESS by the short form (see `plain`), where the execution is the only one of its task.

    `alone`: only where the task has no dependents and no children, and stands in no line, so that nobody has to be told.
    """
    if not outcomes:
        return 0
    now = store.now
    retained_ms = "$task_option.retain_success_ms"
    is_waited_for = {"$or": [rules.HAS_DEPENDENTS, {"$gt": [rules.LINE, None]}]}
    goes = {"$and": [{"$gt": [retained_ms, None]}, {"$not": [is_waited_for]}]}
    ended = [{"$arrayElemAt": [rules.ENTRIES, 0]}, {"state": "SUCCESS", "success_time": now}]
    pipeline = [
        # All of it at once: the rule has nothing to sort out.
        {
            "$set": {
                # The entry is a SUCCESS, and the counters that it ends are 0 again.
                "task_state": {
                    "worker_states": [{"$mergeObjects": [*ended, per_outcome([o.entry for o in outcomes], outcomes)]}],
                    "timeout_cnt": 0,
                    "conflict_cnt": "$$REMOVE",
                    # Its dependents and its line have to be told, and it is kept for them. Its children are kept no longer.
                    "pending": "$$REMOVE",
                    "ask_time": {
                        "$cond": [
                            {"$or": [is_waited_for, rules.HAS_CHILDREN]},
                            rules.next_mark(now),
                            {"$ifNull": [rules.ASK_TIME, "$$REMOVE"]},
                        ]
                    },
                    **_progress(outcomes),
                },
                "event": _announcement("succeeded", worker_id, outcomes, now),
                # The task is finished, and is kept for as long as its option says.
                "status": "SUCCESS",
                "next_claim_time": "$$REMOVE",
                "settle_time": "$$REMOVE",
                "finish_time": now,
                "delete_time": {"$cond": [goes, {"$add": [now, retained_ms]}, "$$REMOVE"]},
            }
        }
    ]
    query = {"$and": [*of_these(outcomes), prepared(_single, now, alone)]}
    reply = await store.update(query, pipeline, deadline_ms, session, hint="_id_")
    return int(reply["n"])


async def _give_back_plain(
    store: Store, worker_id: str, outcomes: Sequence[Outcome], session: Any, deadline_ms: int
) -> int:
    """Remove the entries by the short form (see `plain`), where each is the only one, and nothing failed or was lost before."""
    now = store.now
    event = _announcement(_ANNOUNCED_AS.get(outcomes[0].kind, outcomes[0].kind), worker_id, outcomes, now)
    stages: list[Document] = [
        *_given_back(outcomes, now),
        # It waits, as a task that nobody has tried.
        {
            "$set": {
                "event": event,
                "status": "INIT",
                "next_claim_time": plain.CLAIMABLE_FROM,
                "settle_time": "$$REMOVE",
            }
        },
    ]
    query = {"$and": [*of_these(outcomes), {"task_state.timeout_cnt": 0}, prepared(_given_back_alone, now)]}
    reply = await store.update(query, stages, deadline_ms, session, hint="_id_")
    return int(reply["n"])


def _given_back_alone(now: rules.Expression) -> Document:
    """Return the conditions under which a task without its only entry is INIT, for whatever worker may have it."""
    return {
        "task_state.worker_states": {"$size": 1},
        # Whatever else the rule reads.
        **plain.without_others(rules.derivation(now), _HANDLED_BY_SHORT_GIVING_BACK),
        "$expr": _its_only_entry_is_live(now),
    }


def of_these(outcomes: Sequence[Outcome]) -> list[Document]:
    """Return the conditions that a task is one of these, and RUNNING by the same execution."""
    held = _of_each_claim(outcomes)
    return [
        {"_id": {"$in": [outcome.id for outcome in outcomes]}, "status": "RUNNING"},
        # A double `$nor` is an `$or` that uses no index: with one, the server may read each document twice.
        *(held if len(held) == 1 else [{"$nor": [{"$nor": held}]}]),
    ]


def _its_only_entry_is_live(now: rules.Expression) -> rules.Expression:
    return {"$gt": [{"$arrayElemAt": [f"{rules.ENTRIES}.ping_expire_time", 0]}, now]}


def _single(now: rules.Expression, alone: bool) -> Document:
    """Return the conditions under which the SUCCESS of a task's only entry finishes it.

    `_finish_plain` checks that the entry is RUNNING.
    """
    whole = [*_ended([Outcome("", "", "succeeded")], now), *rules.derivation(now)]
    handled = HANDLED_BY_SHORT_SUCCESS - _OF_OTHERS if alone else HANDLED_BY_SHORT_SUCCESS
    return {
        **plain.ALONE,
        "task_state.worker_states": {"$size": 1},
        # Whatever else the rule reads.
        **plain.without_others(whole, handled),
        "$expr": _its_only_entry_is_live(now),
    }


def ids_by_claim(outcomes: Iterable[Outcome]) -> dict[str, list[str]]:
    """Return the tasks by `running_id`. Several claims may be in one batch."""
    ids_of: dict[str, list[str]] = {}
    for outcome in outcomes:
        ids_of.setdefault(outcome.running_id, []).append(outcome.id)
    return ids_of


def _of_each_claim(outcomes: Sequence[Outcome]) -> list[Document]:
    """Return, for each claim, the condition that a task is one of its own, and has its entry, RUNNING."""
    return [
        {"_id": {"$in": ids}, "task_state.worker_states": at_work(running_id)}
        for running_id, ids in ids_by_claim(outcomes).items()
    ]


def at_work(running_id: str) -> Document:
    """Match a list that contains the entry of this execution, RUNNING."""
    return {"$elemMatch": {"running_id": running_id, "state": "RUNNING"}}


async def _note_stopped(store: Store, outcomes: Sequence[Outcome]) -> int:
    """Note that handlers that were stopped from outside have ended: their places are free. This counts for nothing else.

    The entry of a cancelled task shows it; a place that was kept after a retry, an exclusion or a deletion is removed.
    """
    pairs = [f"{outcome.id}\0{outcome.running_id}" for outcome in outcomes]
    running_ids = sorted({outcome.running_id for outcome in outcomes})
    # The pair counts: another task of the same batch may hold the same `running_id`.
    mine = {"$in": [{"$concat": ["$_id", "\0", "$$this.running_id"]}, {"$literal": pairs}]}
    cancelled = {"$and": [{"$eq": ["$status", "CANCELLED"]}, {"$eq": ["$$this.state", "RUNNING"]}, mine]}
    ended = {
        "$mergeObjects": [
            "$$this",
            {"state": "FAIL", "fail_time": store.now},
            per_outcome([o.entry for o in outcomes], outcomes),
        ]
    }
    entries = {"$map": {"input": rules.ENTRIES, "in": {"$cond": [cancelled, ended, "$$this"]}}}
    leaving = rules.if_any({"$filter": {"input": rules.LEAVING, "cond": {"$not": [mine]}}})
    # If it made room for somebody, that has to be announced.
    claimable = {"$in": ["$status", ["INIT", "RUNNING"]]}
    event = {"$cond": [claimable, stamp("stopped", store.now), {"$ifNull": ["$event", "$$REMOVE"]}]}
    at_work = {"$elemMatch": {"running_id": {"$in": running_ids}, "state": "RUNNING"}}
    query = {
        "_id": {"$in": [outcome.id for outcome in outcomes]},
        "$or": [
            {"status": "CANCELLED", "task_state.worker_states": at_work},
            {"task_state.leaving.running_id": {"$in": running_ids}},
        ],
    }
    # The ended entries, the places without these, and an announcement where that made room.
    stages: list[Document] = [{"$set": {"task_state": {"worker_states": entries, "leaving": leaving}, "event": event}}]
    await store.update(query, [*stages, *prepared(rules.derivation, store.now)])
    return len(outcomes)


def still_held_by(outcomes: Sequence[Outcome], now: rules.Expression) -> Document:
    """Match the tasks whose own entry, by its `running_id`, is live."""
    per_claim = _of_each_claim(outcomes)
    running_ids = list(dict.fromkeys(outcome.running_id for outcome in outcomes))
    mine = {"$and": [{"$in": ["$$this.running_id", {"$literal": running_ids}]}, rules.is_live(now)]}
    live = {"$expr": {"$anyElementTrue": [{"$map": {"input": rules.ENTRIES, "in": mine}}]}}
    held = per_claim[0] if len(per_claim) == 1 else {"$or": per_claim}
    return {"status": "RUNNING", **held, **live}


def _ended(outcomes: Sequence[Outcome], now: rules.Expression) -> list[Document]:
    """Turn the RUNNING entries into SUCCESS or FAIL. FAIL entries go to the end of the list: the last is the newest."""
    state = _STATE_OF[outcomes[0].kind]
    moment = "success_time" if state == "SUCCESS" else "fail_time"
    fields: Document = {"state": state, moment: now}
    updates: list[rules.Expression] = ["$$this", fields, per_outcome([outcome.entry for outcome in outcomes], outcomes)]
    if any(outcome.delay_ms is not None for outcome in outcomes):
        updates.append({"retry_time": {"$ifNull": [asked_for(outcomes, now), "$$REMOVE"]}})
    ended = {"$mergeObjects": updates}
    mine = held_entry(outcomes)
    task_state: Document
    if state == "SUCCESS":
        mapped = {"$map": {"input": rules.ENTRIES, "in": {"$cond": [mine, ended, "$$this"]}}}
        task_state = {"worker_states": mapped}
    else:
        others = {"$filter": {"input": rules.ENTRIES, "cond": {"$not": [mine]}}}
        failed = {"$map": {"input": {"$filter": {"input": rules.ENTRIES, "cond": mine}}, "in": ended}}
        task_state = {"worker_states": {"$concatArrays": [others, failed]}} | _resume_time(outcomes, now)
    task_state |= {"timeout_cnt": 0, "conflict_cnt": "$$REMOVE"} | _progress(outcomes)
    # The ended entry, and what it resets: an execution that ended was not lost.
    stages: list[Document] = [{"$set": {"task_state": task_state}}]
    if state == "FAIL":
        stages.append(_oldest_fails_dropped())
    return [*stages, reopened_if_requested(now, per_outcome([outcome.running_id for outcome in outcomes], outcomes))]


def _given_back(outcomes: Sequence[Outcome], now: rules.Expression) -> list[Document]:
    """Remove the entries, as if the claim had not happened: nothing is counted."""
    others = {"$filter": {"input": rules.ENTRIES, "cond": {"$not": [held_entry(outcomes)]}}}
    state: Document = {"worker_states": others} | _resume_time(outcomes, now) | _progress(outcomes)
    kind = outcomes[0].kind
    if kind != "released":
        state["timeout_cnt"] = 0  # its worker lives: a later loss is not in a row with earlier ones
        conflicts = {"$add": [{"$ifNull": ["$task_state.conflict_cnt", 0]}, 1]}
        state["conflict_cnt"] = conflicts if kind == "conflicted" else "$$REMOVE"
    if kind == "suspended":
        state |= _suspended(outcomes, now)
    # The list without the entry, and the time before which no worker may claim the task.
    return [{"$set": {"task_state": state}}]


def _looped(outcomes: Sequence[Outcome], now: rules.Expression) -> list[Document]:
    """Remove the entries, and let the tasks rest until they run again: what ended well was one round of many.

    Failures remain visible, and are counted from zero, so that a backoff grows with failures in a row. Records belonged to this
    round; signals that were not consumed are for the next.
    """
    mine = held_entry(outcomes)
    others = {"$filter": {"input": rules.ENTRIES, "cond": {"$not": [mine]}}}
    fails = {"$filter": {"input": others, "cond": {"$eq": ["$$this.state", "FAIL"]}}}
    entry = {"$first": {"$filter": {"input": rules.ENTRIES, "cond": mine}}}
    rounds = {
        "cnt": {"$add": [{"$ifNull": ["$task_state.rounds.cnt", 0]}, 1]},
        "start_time": "$$entry.start_time",
        "end_time": now,
        "worker_id": "$$entry.worker_id",
    }
    recorded = ("steps", "steps_bytes", "suspended_until", "suspended_for")
    state: Document = {
        "worker_states": others,
        # The rule adds the entries that are kept: together they come to none.
        "dropped_fail_cnt": {"$subtract": [0, {"$size": fails}]},
        "timeout_cnt": 0,
        "conflict_cnt": "$$REMOVE",
        "rounds": {"$let": {"vars": {"entry": entry}, "in": rounds}},
        # Not the latest of all delays: this one was requested by the execution that has just ended.
        "resume_time": asked_for(outcomes, now),
        **dict.fromkeys(recorded, "$$REMOVE"),
        **_progress(outcomes),
    }
    # The list without the entry, the round counted, and the time before which no worker may claim the task.
    return [{"$set": {"task_state": state}}]


def _suspended(outcomes: Sequence[Outcome], now: rules.Expression) -> Document:
    """Shut the gate until what is waited for has happened: for ever, or until the time that its record has fixed.

    A signal that has come since the execution looked for it is seen here, in the same update: the gate stays open. A wait that
    comes with its `record` is recorded here, too, with the end of its `timeout_ms`.
    """
    waits = [outcome.step or {} for outcome in outcomes]
    mine = {
        "$filter": {
            "input": rules.STEPS,
            "cond": {"$eq": ["$$this.id", per_outcome([w.get("id") for w in waits], outcomes)]},
        }
    }
    until: rules.Expression = {"$getField": {"field": "until", "input": {"$ifNull": [{"$first": mine}, {}]}}}
    recorded: Document = {}
    if any("record" in wait for wait in waits):
        until = {"$ifNull": [until, {"$add": [now, per_outcome([wait.get("timeout_ms") for wait in waits], outcomes)]}]}
        made = per_outcome([wait.get("record") for wait in waits], outcomes)
        fixed = {"$mergeObjects": [made, {"until": {"$ifNull": [until, "$$REMOVE"]}}]}
        longer = {
            "steps": {"$concatArrays": [rules.STEPS, [fixed]]},
            "steps_bytes": {
                "$add": [{"$ifNull": ["$task_state.steps_bytes", 0]}, {"$getField": {"field": "size", "input": made}}]
            },
        }
        # Another task of the same set may have its record already.
        recorded = {
            name: {"$cond": [{"$gt": [made, None]}, value, {"$ifNull": [f"$task_state.{name}", "$$REMOVE"]}]}
            for name, value in longer.items()
        }
    events = {"$map": {"input": rules.SIGNALS, "in": "$$this.event"}}
    arrived = {"$in": [per_outcome([wait.get("event") for wait in waits], outcomes), events]}
    told = per_outcome(
        [{name: wait[name] for name in ("id", "kind", "name", "event") if name in wait} for wait in waits], outcomes
    )
    # Waiting for children is waiting for dependencies: the gate shuts, and the mark has it checked whether any is left.
    joins = {"$eq": [per_outcome([wait.get("kind") for wait in waits], outcomes), "join"]}
    return recorded | {
        "waits_for": {"$cond": [joins, "run", {"$ifNull": ["$task_state.waits_for", "$$REMOVE"]}]},
        "ask_time": {"$cond": [joins, now, {"$ifNull": [rules.ASK_TIME, "$$REMOVE"]}]},
        "suspended_until": {"$cond": [arrived, now, {"$ifNull": [until, rules.NEVER]}]},
        "suspended_for": {"$mergeObjects": [told, {"until": {"$ifNull": [until, "$$REMOVE"]}}]},
    }


def _moved(outcomes: Sequence[Outcome], now: rules.Expression) -> list[Document]:
    """Restart the task in the queue that its handler named, with the params it gave. What ended here is a stage of it."""
    mine = held_entry(outcomes)
    entry = {"$first": {"$filter": {"input": rules.ENTRIES, "cond": mine}}}
    # The first stage is where the task starts when it is restarted: where a publication meanwhile has put it.
    begins_in = {"$cond": [STAGED, "$queue", {"$ifNull": [f"{rules.MOVES_TO}.queue", "$queue"]}]}
    stage = {
        "queue": begins_in,
        "params": "$params",
        "worker_id": "$$entry.worker_id",
        "running_id": "$$entry.running_id",
        "wish": {"$ifNull": ["$$entry.wish", 0]},
        "steps": rules.STEPS,
        "start_time": "$$entry.start_time",
        "end_time": now,
    }
    ended = {"$let": {"vars": {"entry": entry}, "in": [stage]}}
    stages = {"$ifNull": ["$task_state.stages", []]}
    first_and_newest = {"$concatArrays": [{"$slice": [stages, 1]}, {"$slice": [stages, -(KEPT_STAGES - 2)]}]}
    before = {"$cond": [{"$lt": [{"$size": stages}, KEPT_STAGES]}, stages, first_and_newest]}
    version = {"$add": [{"$ifNull": ["$task_state.params_version", 0]}, 1]}
    restarted = fresh_state(
        now,
        {
            "stages": {"$concatArrays": [before, ended]},
            "params_version": {"$cond": [{"$gt": ["$_next.params", None]}, version, "$task_state.params_version"]},
            "leaving": rules.sent_away(now, {"$not": [mine]}),
            "moves_to": "$$REMOVE",  # this `Next` replaces an earlier request for a queue
            "own_params": {"$cond": [{"$gt": ["$_next.params", None]}, True, OWN_PARAMS]},
            # It has begun, and signals may have come for what is still to be done.
            "steps_bytes": 0,
            **{name: f"$task_state.{name}" for name in ("signals", "signals_bytes")},
        },
    )
    wanted_group = {"$ifNull": [f"{rules.MOVES_TO}.group", "$$REMOVE"]}
    return [
        # What the handler said.
        {"$set": {"_next": per_outcome([outcome.entry for outcome in outcomes], outcomes)}},
        # The state of a task that nobody has tried in that queue.
        {
            "$set": {
                "task_state": {"$mergeObjects": [restarted]},
                "queue": "$_next.queue",
                "group": {"$cond": [{"$gt": [rules.MOVES_TO, None]}, wanted_group, "$group"]},
                "params": {"$ifNull": ["$_next.params", "$params"]},
            }
        },
        # The helper field is not stored.
        {"$unset": "_next"},
    ]


def held_entry(outcomes: Iterable[Outcome]) -> rules.Expression:
    """Whether the entry `$$this` belongs to one of these executions."""
    running_ids = sorted({outcome.running_id for outcome in outcomes})
    return {"$and": [{"$eq": ["$$this.state", "RUNNING"]}, {"$in": ["$$this.running_id", {"$literal": running_ids}]}]}


def per_outcome(values: Sequence[Any], outcomes: Sequence[Outcome]) -> rules.Expression:
    """Return, for each document, the value at the place of its outcome: user data, so it stands in a `$literal`."""
    first = values[0]
    same = all(value == first and type(value) is type(first) for value in values)
    # Nested values may be equal and still differ: 1 and True.
    if len(values) == 1 or (
        same and (first is None or isinstance(first, (int, str)) or first in ({}, {"returns": None}))
    ):
        return {"$literal": first}
    return own_value([outcome.id for outcome in outcomes], values)


def asked_for(outcomes: Sequence[Outcome], now: rules.Expression) -> rules.Expression:
    """Return the time before which `Retry` or `Snooze` want no worker to claim the task; null if nothing was requested."""
    return {"$add": [now, per_outcome([outcome.delay_ms for outcome in outcomes], outcomes)]}


def _resume_time(outcomes: Sequence[Outcome], now: rules.Expression) -> Document:
    """Return `resume_time`, the latest that was asked for: another worker's execution that ends must not shorten it."""
    if all(outcome.delay_ms is None for outcome in outcomes):
        return {}
    latest = {"$max": ["$task_state.resume_time", asked_for(outcomes, now)]}
    return {"resume_time": {"$ifNull": [latest, "$$REMOVE"]}}


def _announcement(kind: str, worker_id: str, outcomes: Sequence[Outcome], now: rules.Expression) -> rules.Expression:
    """Return the stamp of how executions ended, and of their progress, if they bring any."""
    unannounced = [outcome.progress_unannounced for outcome in outcomes]
    progressed = per_outcome(unannounced, outcomes) if any(unannounced) else False
    return stamp(kind, now, {"$literal": worker_id}, progressed=progressed)


def _progress(outcomes: Sequence[Outcome]) -> Document:
    if all(outcome.progress is None for outcome in outcomes):
        return {}
    newest = per_outcome([outcome.progress for outcome in outcomes], outcomes)
    return {"progress": {"$ifNull": [newest, {"$ifNull": ["$task_state.progress", "$$REMOVE"]}]}}


def _progressed(outcomes: Sequence[Outcome]) -> Document:
    """Return the fields that progress sets while an execution goes on: it gets somewhere, so it does not kill its workers."""
    if not (fields := _progress(outcomes)):
        return {}
    got_on = {"$ne": [per_outcome([outcome.progress for outcome in outcomes], outcomes), None]}
    return fields | {"timeout_cnt": {"$cond": [got_on, 0, "$task_state.timeout_cnt"]}}


def _oldest_fails_dropped() -> Document:
    """Keep the newest FAIL entries and count the others, so that no document grows without end.

    An entry that says "for good" stays: it alone keeps the task from being claimed again.
    """
    droppable = {"$and": [{"$eq": ["$$this.state", "FAIL"]}, {"$ne": ["$$this.final", True]}]}
    fails = {"$filter": {"input": rules.ENTRIES, "cond": droppable}}
    others = {"$filter": {"input": rules.ENTRIES, "cond": {"$not": [droppable]}}}
    too_many = {"$gt": [{"$size": fails}, rules.KEPT_FAILS]}
    dropped = {
        "$add": [{"$ifNull": ["$task_state.dropped_fail_cnt", 0]}, {"$subtract": [{"$size": fails}, rules.KEPT_FAILS]}]
    }
    # Both in one stage, which sees the list as it was: else the count would be taken of the shortened list.
    return {
        "$set": {
            "task_state.worker_states": {
                "$cond": [too_many, {"$concatArrays": [others, {"$slice": [fails, -rules.KEPT_FAILS]}]}, rules.ENTRIES]
            },
            "task_state.dropped_fail_cnt": {
                "$cond": [too_many, dropped, {"$ifNull": ["$task_state.dropped_fail_cnt", "$$REMOVE"]}]
            },
        }
    }


def cancel_pipeline(now: rules.Expression) -> list[Document]:
    """Cancel an unfinished task."""
    return [
        # The time makes it CANCELLED; the stamp reaches the worker that has to stop the handler.
        {"$set": {"task_state": {"cancel_time": now}, "event": stamp("cancelled", now)}},
        # Status and times follow.
        *prepared(rules.derivation, now),
    ]


async def report(store: Store, worker_id: str, outcomes: Sequence[Outcome]) -> int:
    """Write progress and logs of executions that go on. Return how many counted.

    Progress resets `timeout_cnt`. Logs do not: a line that a handler logs before it kills its worker is no progress.
    """
    mine = held_entry(outcomes)
    with_news = {"$mergeObjects": ["$$this", per_outcome([outcome.entry for outcome in outcomes], outcomes)]}
    entries = {"$map": {"input": rules.ENTRIES, "in": {"$cond": [mine, with_news, "$$this"]}}}
    stages: list[Document] = [
        # Logs go into the execution's entry, progress beside it.
        {"$set": {"task_state": {"worker_states": entries} | _progressed(outcomes)}},
        # This announces it to readers of events and the dashboard.
        {"$set": {"event": stamp("progressed", store.now, {"$literal": worker_id})}},
    ]
    reply = await store.update(still_held_by(outcomes, store.now), [*stages, *prepared(rules.derivation, store.now)])
    return int(reply["n"])


async def whether_recorded(store: Store, outcomes: Sequence[Outcome]) -> dict[Outcome, Recorded]:
    """Return what became of outcomes whose write was not answered, or did not count for all.

    `recorded`: it is written. `held`: the entry is still live, so write it again. `lost`: somebody else has the task, or it is
    cancelled, finished or gone.
    """
    mine = {"$in": ["$$this.running_id", {"$literal": sorted({outcome.running_id for outcome in outcomes})}]}
    fields = {
        "reopened_by": "$task_state.reopened_by",
        "status": 1,
        "entries": {
            "$map": {
                "input": {"$filter": {"input": rules.ENTRIES, "cond": mine}},
                "in": {"running_id": "$$this.running_id", "state": "$$this.state", "live": rules.is_live(store.now)},
            }
        },
    }
    found = await store.find({"_id": {"$in": [outcome.id for outcome in outcomes]}}, fields, majority=True)
    entries = {(task["_id"], entry["running_id"]): entry for task in found for entry in task["entries"]}
    tasks = {task["_id"]: task for task in found}
    return {
        outcome: _whether_recorded(outcome, tasks.get(outcome.id), entries.get((outcome.id, outcome.running_id)))
        for outcome in outcomes
    }


def _whether_recorded(outcome: Outcome, task: Document | None, entry: Document | None) -> Recorded:
    if task is None:
        return "lost"
    if entry is None:
        return (
            "recorded"
            if outcome.kind in (*_GIVEN_BACK, "moved", "looped") or task.get("reopened_by") == outcome.running_id
            else "lost"
        )
    if entry["state"] == _STATE_OF.get(outcome.kind):
        return "recorded"
    return "held" if entry["live"] and task["status"] == "RUNNING" else "lost"
