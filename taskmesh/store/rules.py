"""The claim rule, written once, as expressions that MongoDB evaluates.

Every gate is an expression that says **when** it opens: null (it stands open), a time, or `NEVER` (not unless
somebody changes the task). A worker may claim a task when the latest of its gates is not later than now. All else
follows from that:

- a claim asks whether all gates are open (`all_open`), scans ask when they will be (`claim_time`), `explain` asks each;
- `next_claim_time`, by which tasks are found, is the latest of the gates that do not depend on the worker;
- `status` is read off the same facts.

Python holds no second copy of the rule. "Now" is an expression too: `$$NOW`, the server's clock, in production; a
literal in tests, which can thus move time on a real database.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from taskmesh.model.worker import Claimant

Expression = Any
"""A MongoDB aggregation expression."""

Stage = dict[str, Any]

NOW: Expression = "$$NOW"
NEVER = datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)

ENTRIES = "$task_state.worker_states"
LEAVING: Expression = {"$cond": [{"$isArray": ["$task_state.leaving"]}, "$task_state.leaving", []]}
"""The executions of earlier lives of the task that may not have ended yet: `running_id`, worker and lease of each.

A task that is restarted (retried, published again) while a handler of it cleans up, or that excludes its worker, keeps
the handler's place here. It counts for room and for "not twice", and for nothing else, until its worker says that it has
ended, or its lease has."""
MOVES_TO = "$task_state.moves_to"
"""The `queue` and `group` that a publication wants the task to have, and `held`, the executions that were at work then.

Limits count an execution where it was claimed, so the task moves with the first write, possibly a claim, that finds these
ended."""
HOME = "$task_state.home"
"""The queue that a dead letter has come from. A task that is FAIL is in the queue that its option names (`on_fail`), and has
this field for as long as it is there."""
DEPENDENTS = "$task_state.dependents"
"""The `_id`s of the tasks that wait for this one, or have waited for it, listed from their publication on."""
HAS_DEPENDENTS: Expression = {"$or": [{"$gt": [DEPENDENTS, []]}, {"$gt": ["$task_state.parent", None]}]}
"""Whether it has, or had, dependents. The handler that started it (`parent`) may ask for its result at any time."""
HAS_CHILDREN: Expression = {"$eq": ["$task_state.has_children", True]}
"""Whether a handler of it has started others: they are kept until it is finished, or cancelled with it."""
ASK_TIME = "$task_state.ask_time"
"""The mark of a task: something happened that concerns its dependents or dependencies. Its value is the time since when
a check is due (`store/relations/dependencies.py`); whoever makes the check removes the mark. In a finished task that is kept for
its dependents: when to check again."""
LINE = "$task_state.line"
"""The line that the task stands in, if it has a sequence key (`store/relations/sequences.py`). While its gate is shut it is
`in_line`; `place` is a different number each time."""
NEXT_PLACE: Expression = {"$add": [{"$ifNull": ["$task_state.place", 0]}, 1]}
"""The place of a task that joins its line again."""
STEPS: Expression = {"$ifNull": ["$task_state.steps", []]}
"""What executions have recorded: values of steps, sleeps, waits. The field `steps_bytes` exists from the first record on."""
SIGNALS: Expression = {"$ifNull": ["$task_state.signals", []]}
"""The signals that have not been consumed, in the order in which they came; `signals_bytes` is their size."""
KEPT_FAILS = 32
"""FAIL entries kept in a document; older ones are only counted, so that it stays small."""
KEPT_LOSSES = 8
_ONE_DAY_MS = 86_400_000


# --- facts: what the entries say at a moment -------------------------------------------------------------------------


def with_facts(now: Expression, result: Expression) -> Expression:
    """Evaluate `result` with `$$live`, `$$lost`, `$$done` and `$$fails`: the entries, sorted out; and `$$leaving`."""
    return {
        "$let": {
            "vars": {
                "live": _entries(is_live(now)),
                "lost": _entries(is_lost(now)),
                "done": _entries({"$eq": ["$$this.state", "SUCCESS"]}),
                "fails": _entries({"$eq": ["$$this.state", "FAIL"]}),
                "leaving": {"$filter": {"input": LEAVING, "cond": holds_its_lease(now)}},
            },
            "in": result,
        }
    }


def is_live(now: Expression) -> Expression:
    """Whether the entry `$$this` holds a lease: nobody else may take its place."""
    return {"$and": [{"$eq": ["$$this.state", "RUNNING"]}, holds_its_lease(now)]}


def holds_its_lease(now: Expression) -> Expression:
    """Whether the lease of `$$this`, an entry that is RUNNING or still ending, has not run out."""
    return {"$gt": ["$$this.ping_expire_time", now]}


def is_lost(now: Expression) -> Expression:
    """Whether the entry `$$this` held a lease that ran out. It is dead for good: no write of its worker counts."""
    return {"$and": [{"$eq": ["$$this.state", "RUNNING"]}, {"$lte": ["$$this.ping_expire_time", now]}]}


def _entries(condition: Expression) -> Expression:
    return {"$filter": {"input": ENTRIES, "cond": condition}}


def sent_away(now: Expression, which: Expression = True) -> Expression:
    """Return `task_state.leaving` for when the live entries that satisfy `which` are removed: they keep their places there."""
    entry = {name: f"$$this.{name}" for name in ("running_id", "worker_id", "ping_expire_time")}
    entries = {"$cond": [{"$isArray": [ENTRIES]}, ENTRIES, []]}  # a foreign document is replaced like any other
    removed = {"$map": {"input": {"$filter": {"input": entries, "cond": {"$and": [is_live(now), which]}}}, "in": entry}}
    kept = {"$filter": {"input": LEAVING, "cond": holds_its_lease(now)}}
    return if_any({"$concatArrays": [kept, removed]})


def places(now: Expression) -> Expression:
    """Return every lease that is not over: of live entries, and of those still ending."""
    leaving = {"$filter": {"input": LEAVING, "cond": holds_its_lease(now)}}
    return {"$concatArrays": [_entries(is_live(now)), leaving]}


def if_any(entries: Expression) -> Expression:
    """Return these, or remove the field if there are none."""
    return {"$let": {"vars": {"any": entries}, "in": {"$cond": [{"$eq": ["$$any", []]}, "$$REMOVE", "$$any"]}}}


def _never_if(condition: Expression) -> Expression:
    return {"$cond": [condition, NEVER, None]}


FAIL_CNT = {"$add": [{"$size": "$$fails"}, {"$ifNull": ["$task_state.dropped_fail_cnt", 0]}]}
TIMEOUT_CNT = {"$add": ["$task_state.timeout_cnt", {"$size": "$$lost"}]}

_deleted = {"$gt": ["$task_state.deleted_time", None]}
_cancelled = {"$gt": ["$task_state.cancel_time", None]}
_succeeded = {"$gte": [{"$size": "$$done"}, "$task_option.concurrent_worker_cnt"]}
_failed_for_good = {"$in": [True, "$$fails.final"]}
_dependency_failed = {"$gt": ["$task_state.dependency_failure", None]}
_waits_for_others = {"$gt": ["$task_state.waits_for", None]}
_retries_used_up = {"$gt": [FAIL_CNT, "$task_option.max_unexpected_retries"]}
_timeouts_used_up = {"$gt": [TIMEOUT_CNT, "$task_option.max_timeouts"]}


BEGUN = {"$gt": ["$task_state.steps_bytes", None]}
"""Whether an execution has recorded anything: then the task has started, and `expire_time` no longer applies."""


def _expired(now: Expression) -> Expression:
    return {"$and": [{"$lte": [{"$ifNull": ["$task_state.expire_time", NEVER]}, now]}, {"$not": [BEGUN]}]}


# --- gates -----------------------------------------------------------------------------------------------------------


def task_gates(now: Expression) -> dict[str, Expression]:
    """Return the gates that are the same for every worker."""
    return {
        "unfinished": _never_if({"$or": [_deleted, _cancelled, _succeeded, _failed_for_good, _dependency_failed]}),
        "unexpired": _never_if(_expired(now)),
        "started": "$task_state.start_time",
        "room": _room_opens,
        "retries left": _never_if(_retries_used_up),
        "timeouts left": _never_if(_timeouts_used_up),
        "delay asked for": "$task_state.resume_time",
        "dependencies": _never_if(_waits_for_others),
        "suspended": "$task_state.suspended_until",
        "flow": _never_if({"$gt": ["$task_state.flow", None]}),
        "sequence": _never_if({"$eq": ["$task_state.in_line", True]}),
    }


@dataclass(frozen=True, slots=True)
class Me:
    """The claiming worker, as expressions for what a `Claimant` has."""

    id: Expression
    parent: Expression = None
    labels: Expression = ()

    @classmethod
    def literally(cls, worker: Claimant | str) -> Me:
        """Return the expressions for this worker. If only its id is known, it has no labels."""
        claimant = Claimant(worker) if isinstance(worker, str) else worker
        return cls({"$literal": claimant.id}, {"$literal": claimant.parent}, {"$literal": list(claimant.labels)})


def worker_gates(me: Me | Expression) -> dict[str, Expression]:
    """Return the gates that depend on the worker: `me` is an expression for its id, or all that is asked of it."""
    me = me if isinstance(me, Me) else Me(me)
    return {
        "worker allowed": _never_if(
            {
                "$and": [
                    {"$ne": ["$task_option.specific_worker_ids", []]},
                    {"$not": [{"$in": [me.id, "$task_option.specific_worker_ids"]}]},
                    {"$not": [{"$in": [me.parent, "$task_option.specific_worker_ids"]}]},
                ]
            }
        ),
        "labels": _never_if({"$and": [{"$gt": ["$needs", None]}, {"$not": [_has_all_of(me.labels)]}]}),
        "not twice": _own_entry_ends(me.id),
        "retry delay": _retry_opens(me.id),
    }


def _has_all_of(labels: Expression) -> Expression:
    """Whether everything that the task needs is among these labels. In a foreign document `needs` may be no list."""
    return {"$and": [{"$isArray": ["$needs"]}, {"$setIsSubset": ["$needs", labels]}]}


def queue_gate(closed_queues: Iterable[str]) -> dict[str, Expression]:
    """Return the gate of the task's queue: `closed_queues` are paused, or have no room under their limits."""
    return {"queue": _never_if({"$in": ["$queue", [{"$literal": queue} for queue in closed_queues]]})}


_room_opens: Expression = {
    # With too many that are live, still ending or successful, room appears when enough of the leases have run out.
    "$let": {
        "vars": {
            "leases": {"$concatArrays": ["$$live.ping_expire_time", "$$leaving.ping_expire_time"]},
            "over": {
                "$subtract": [
                    {"$add": [{"$size": "$$live"}, {"$size": "$$leaving"}, {"$size": "$$done"}]},
                    "$task_option.concurrent_worker_cnt",
                ]
            },
        },
        "in": {
            "$cond": [
                {"$lt": ["$$over", 0]},
                None,
                {
                    "$ifNull": [
                        {"$arrayElemAt": [{"$sortArray": {"input": "$$leases", "sortBy": 1}}, "$$over"]},
                        NEVER,
                    ]
                },
            ]
        },
    }
}


def _own_entry_ends(worker: Expression) -> Expression:
    """Return when the lease of `worker` runs out, live or still ending; never, if it has had its SUCCESS."""
    leases = {"$concatArrays": ["$$live", "$$leaving"]}
    mine = {"$filter": {"input": leases, "cond": {"$eq": ["$$this.worker_id", worker]}}}
    ends = {"$max": {"$map": {"input": mine, "in": "$$this.ping_expire_time"}}}
    return {"$cond": [{"$in": [worker, "$$done.worker_id"]}, NEVER, ends]}


def _retry_opens(worker: Expression) -> Expression:
    """Return when the delay after the last failure is over: of any worker with scope "task", of `worker` with scope "worker".

    `Retry` sets an exact time; otherwise the option determines it. Null if there is no such failure.
    """
    # Whose failures count: everybody's, or this worker's alone.
    for_all = {"$eq": ["$task_option.unexpected_retry_delay_scope", "task"]}
    own = {"$filter": {"input": "$$fails", "cond": {"$eq": ["$$this.worker_id", worker]}}}
    delay = "$task_option.unexpected_retry_delay_ms"
    failures = {"$cond": [for_all, FAIL_CNT, {"$size": "$$counted"}]}
    # The delay grows with each failure, up to a day, or to the delay itself where that is longer.
    growth = {"$pow": ["$task_option.unexpected_retry_backoff", {"$min": [{"$subtract": [failures, 1]}, 100]}]}
    grown = {"$min": [{"$max": [_ONE_DAY_MS, delay]}, {"$multiply": [delay, growth]}]}
    # The random share was drawn when the failure was written, so that every reader computes the same moment.
    jitter = {"$multiply": ["$task_option.unexpected_retry_jitter", {"$ifNull": ["$$last.retry_jitter", 0]}]}
    ordinary = {"$add": ["$$last.fail_time", {"$toLong": {"$multiply": [grown, {"$add": [1, jitter]}]}}]}
    # An exact time from `Retry` takes precedence over the option.
    opens = {
        "$let": {
            "vars": {"last": {"$arrayElemAt": ["$$counted", -1]}},
            "in": {"$cond": [{"$eq": ["$$counted", []]}, None, {"$ifNull": ["$$last.retry_time", ordinary]}]},
        }
    }
    counted = {"$let": {"vars": {"counted": {"$cond": [for_all, "$$fails", own]}}, "in": opens}}
    return {"$cond": [{"$eq": ["$$fails", []]}, None, counted]}


_opens_for_some_worker: Expression = {
    # The first of those that may; if that is anybody, a worker that has no entry in this task yet.
    "$min": {
        "$map": {
            "input": {
                "$cond": [
                    {"$eq": ["$task_option.specific_worker_ids", []]},
                    [None],
                    "$task_option.specific_worker_ids",
                ]
            },
            "as": "worker",
            "in": {"$ifNull": [{"$max": [_own_entry_ends("$$worker"), _retry_opens("$$worker")]}, LONG_AGO]},
        }
    }
}


def claim_time(worker: Claimant | str, now: Expression = NOW) -> Expression:
    """Return when this worker may claim the task, as things stand: null (at once), a time, or `NEVER`."""
    gates = {**task_gates(now), **worker_gates(Me.literally(worker))}
    return with_facts(now, {"$max": list(gates.values())})


def claimable(worker: Claimant | str, closed_queues: Iterable[str] = (), now: Expression = NOW) -> Expression:
    """Whether this worker may claim the task now."""
    return with_facts(now, all_open(Me.literally(worker), closed_queues, now))


def may_become_claimable(worker: Claimant | str) -> Expression:
    """Whether the worker is allowed and has not had its SUCCESS: no gate of its own stays shut. For use inside `with_facts`."""
    return {"$not": [{"$in": [NEVER, list(worker_gates(Me.literally(worker)).values())]}]}


def all_open(me: Me | Expression, closed_queues: Iterable[str], now: Expression) -> Expression:
    """Whether all gates are open to the worker `me`. For use inside `with_facts`."""
    gates = {**task_gates(now), **worker_gates(me)}
    closed = list(closed_queues)
    if closed:
        gates |= queue_gate(closed)
    return {"$lte": [{"$max": list(gates.values())}, now]}


# --- what is derived ---------------------------------------------------------------------------------------------------


def status(now: Expression) -> Expression:
    """Return where the task stands now. For use inside `with_facts`."""
    return {
        "$switch": {
            "branches": [
                {"case": _deleted, "then": "DELETED"},  # no reader sees it: see `is_forgotten`
                {"case": _cancelled, "then": "CANCELLED"},
                {"case": _succeeded, "then": "SUCCESS"},
                {"case": {"$ne": ["$$live", []]}, "then": "RUNNING"},
                {
                    "case": {"$or": [_failed_for_good, _retries_used_up, _timeouts_used_up, _dependency_failed]},
                    "then": "FAIL",
                },
                {"case": _expired(now), "then": "EXPIRED"},
            ],
            "default": "INIT",
        }
    }


def status_on_reading(now: Expression = NOW) -> Expression:
    """Return `status` for a document that may not be one of ours: the stored status if it cannot be derived."""
    return {"$cond": [_ours(), with_facts(now, status(now)), "$status"]}


def standing_on_reading(now: Expression = NOW) -> Expression:
    """Return what INIT means: `ready` (some worker may claim it now), `retrying` (it ran, and waits), `scheduled`; else null.

    The stored `next_claim_time` is the latest of the gates, absent if one never opens; evaluating them again would fail for the
    option of a foreign document.
    """
    opens = {"$ifNull": ["$next_claim_time", NEVER]}
    # A resting loop is not retried: it runs when its interval is over.
    put_off = {"$and": [{"$gt": ["$task_state.resume_time", None]}, {"$not": [{"$gt": ["$loop", None]}]}]}
    has_run = {"$or": [{"$gt": [FAIL_CNT, 0]}, {"$gt": [TIMEOUT_CNT, 0]}, put_off]}
    waits = {"$cond": [{"$lte": [opens, now]}, "ready", {"$cond": [has_run, "retrying", "scheduled"]}]}
    return {"$cond": [_ours(), with_facts(now, {"$cond": [{"$eq": [status(now), "INIT"]}, waits, None]}), None]}


def _ours() -> Expression:
    """Whether the status can be derived."""
    dropped_fail_cnt = {"$ifNull": ["$task_state.dropped_fail_cnt", 0]}
    countable = [{"$isNumber": "$task_state.timeout_cnt"}, {"$isNumber": dropped_fail_cnt}]
    return {"$and": [{"$isArray": [ENTRIES]}, *countable]}


def is_forgotten(now: Expression = NOW) -> Expression:
    """Whether the task is gone for all readers, and its key free, though its document is not removed yet.

    It is past its retention, and the TTL monitor has not removed it; or it was deleted while a handler of it was at work, whose
    place the document keeps.
    """
    return {"$or": [{"$lte": [{"$ifNull": ["$delete_time", NEVER]}, now]}, _deleted]}


def ended_by_time() -> Expression:
    """Return when time alone finishes the task: null, if it does not. For use inside `with_facts`."""
    # If its worker dies, this is when the last lease is over.
    lease_end = {"$max": "$$live.ping_expire_time"}
    # Whether it is FAIL once the executions that are live now are lost.
    would_fail = {
        "$or": [
            _failed_for_good,
            _retries_used_up,
            _dependency_failed,
            {"$gt": [{"$add": [TIMEOUT_CNT, {"$size": "$$live"}]}, "$task_option.max_timeouts"]},
        ]
    }
    return {
        "$min": [
            {
                "$cond": [
                    {"$and": [{"$gt": ["$task_state.expire_time", None]}, {"$not": [BEGUN]}]},
                    {"$max": ["$task_state.expire_time", lease_end]},
                    None,
                ]
            },
            {"$cond": [would_fail, lease_end, None]},
        ]
    }


def _settle_time() -> Expression:
    """Return when the stored status, or place, becomes wrong by time alone, so that somebody has to write it again."""
    # What moves with this very write need not be moved later.
    to_move = {"$and": [{"$gt": [MOVES_TO, None]}, {"$not": [_moves]}]}
    return {"$min": [ended_by_time(), {"$cond": [to_move, {"$max": "$$live.ping_expire_time"}, None]}]}


PINNED: Expression = {"$or": [{"$ne": ["$task_option.specific_worker_ids", []]}, {"$gt": ["$needs", []]}]}
"""Whether the task is for some workers alone: it names them, or needs labels. Such tasks have indexes of their own."""
_moves: Expression = {
    "$and": [
        {"$gt": [MOVES_TO, None]},
        {"$eq": [{"$setIntersection": ["$$live.running_id", f"{MOVES_TO}.held"]}, []]},
    ]
}
"""Whether the task moves to another place now. For use inside `with_facts`."""


def derivation(now: Expression = NOW, *, where: Expression = True) -> list[Stage]:
    """Return the last stages of every update: they set `status` and all that follows from the entries.

    Nothing else writes these fields, so they cannot drift, except for inserts, whose values are trivial, and the short
    forms (`plain`), which write what this would. An unfinished task for which `where` is false keeps its fields.
    """
    stored = {field: f"${field}" for field in ("status", "next_claim_time", "settle_time", "pinned")}
    was_finished = {"$not": [{"$in": [{"$ifNull": ["$status", "INIT"]}, ["INIT", "RUNNING"]]}]}
    # A finished task has left its line: restarted, it joins it again, at another place.
    back_in_line = {"$and": [was_finished, {"$gt": [LINE, None]}]}
    unfinished = {
        "status": "$$status",
        # The latest gate; the creation where all are open, so that the older task comes first.
        "next_claim_time": {
            "$max": [
                "$task_state.create_time",
                *task_gates(now).values(),
                _never_if(back_in_line),
                _opens_for_some_worker,
            ]
        },
        "settle_time": _settle_time(),
    }
    # A finished task has a gate that never opens: so the gates need not be evaluated, nor what time would do.
    leases_end = {"$max": {"$concatArrays": ["$$live.ping_expire_time", "$$leaving.ping_expire_time"]}}
    settled = {"status": "$$status", "next_claim_time": NEVER, "settle_time": None, "leases_end": leases_end}
    facts = {
        "$let": {
            "vars": {"status": status(now)},
            "in": {
                "$mergeObjects": [
                    {"$cond": [{"$in": ["$$status", ["INIT", "RUNNING"]]}, unfinished, settled]},
                    {"moves": _moves, "pinned": PINNED},
                ]
            },
        }
    }
    finished = {"$not": [{"$in": ["$_derived.status", ["INIT", "RUNNING"]]}]}
    # Somebody has to check when a task with dependents is finished, or no longer is; or one with dependencies restarts.
    waits_anew = {"$and": [was_finished, _waits_for_others]}
    concerns_others = {"$or": [HAS_DEPENDENTS, HAS_CHILDREN, waits_anew, {"$gt": [LINE, None]}]}
    is_deleted_now = {"$and": [{"$eq": ["$_derived.status", "DELETED"]}, {"$ne": ["$status", "DELETED"]}]}
    ask = {"$and": [{"$or": [{"$ne": [finished, was_finished]}, is_deleted_now]}, concerns_others]}
    mark = next_mark(now)
    # How long to keep a finished task: by its status; null: for ever.
    retained_ms = {
        "$cond": [
            {"$eq": ["$_derived.status", "SUCCESS"]},
            "$task_option.retain_success_ms",
            "$task_option.retain_failed_ms",
        ]
    }
    # When it was finished first: later writes to a finished task do not prolong its retention.
    finish_time = {"$ifNull": ["$finish_time", now]}
    # A task with dependents is kept until none of them waits; a deleted one, until they know. Then its retention begins.
    released_time = {"$max": [finish_time, "$task_state.released_time"]}
    kept_for_dependents = {
        "$and": [
            HAS_DEPENDENTS,
            {
                "$cond": [
                    {"$eq": ["$_derived.status", "DELETED"]},
                    {"$or": [ask, {"$gt": [ASK_TIME, None]}]},
                    {"$not": [{"$gt": ["$task_state.released_time", None]}]},
                ]
            },
        ]
    }
    # The tasks behind it in line have to be checked first; and a FAIL that blocks the line does so until somebody acts.
    blocks = {
        "$and": [
            {"$eq": ["$_derived.status", "FAIL"]},
            {"$eq": ["$task_state.on_sequence_failure", "block"]},
        ]
    }
    kept_for_line = {"$and": [{"$gt": [LINE, None]}, {"$or": [ask, {"$gt": [ASK_TIME, None]}, blocks]}]}
    # The document stays for as long as it keeps a place: a later publisher would not know of the handler at work.
    delete_time = {
        "$max": [
            {"$cond": [{"$eq": ["$_derived.status", "DELETED"]}, now, {"$add": [released_time, retained_ms]}]},
            "$_derived.leases_end",
        ]
    }
    kept_for_ever = {"$and": [{"$ne": ["$_derived.status", "DELETED"]}, {"$not": [{"$gt": [retained_ms, None]}]}]}
    # Where it stands, except for a dead letter.
    home = {"$cond": ["$_derived.moves", f"{MOVES_TO}.queue", {"$ifNull": [HOME, "$queue"]}]}
    is_dead = {"$and": [{"$eq": ["$_derived.status", "FAIL"]}, {"$gt": ["$task_option.on_fail", None]}]}
    return [
        # Sort the entries once, and keep all that follows: every field below is derived from the same facts.
        {
            "$set": {
                "_derived": with_facts(now, facts)
                if where is True
                else {"$cond": [where, with_facts(now, facts), stored]}
            }
        },
        # Store it, each field only where it has a value: the partial indexes hold what has the field.
        {
            "$set": {
                "status": "$_derived.status",
                "pinned": "$_derived.pinned",
                "next_claim_time": _present_if(
                    {"$lt": ["$_derived.next_claim_time", NEVER]}, "$_derived.next_claim_time"
                ),
                "settle_time": _present_if(
                    {"$and": [{"$not": [finished]}, {"$gt": ["$_derived.settle_time", None]}]}, "$_derived.settle_time"
                ),
                "finish_time": _present_if(finished, finish_time),
                "delete_time": _present_if(
                    {
                        "$and": [
                            finished,
                            {"$not": [{"$or": [kept_for_ever, kept_for_dependents, kept_for_line]}]},
                        ]
                    },
                    delete_time,
                ),
                "queue": {"$cond": [is_dead, "$task_option.on_fail", home]},
                "task_state.home": _present_if(is_dead, home),
                "group": {"$cond": ["$_derived.moves", {"$ifNull": [f"{MOVES_TO}.group", "$$REMOVE"]}, "$group"]},
                "task_state.moves_to": {"$cond": ["$_derived.moves", "$$REMOVE", MOVES_TO]},
                "task_state.pending": _present_if({"$and": [{"$not": [finished]}, HAS_DEPENDENTS]}, True),
                # A task that blocks its line keeps its place there even if it FAILs before it is the head.
                "task_state.in_line": _present_if(
                    {
                        "$or": [
                            {"$and": [{"$not": [finished]}, back_in_line]},
                            {"$and": [{"$or": [{"$not": [finished]}, blocks]}, {"$eq": ["$task_state.in_line", True]}]},
                        ]
                    },
                    True,
                ),
                "task_state.place": {
                    "$cond": [
                        {"$and": [{"$not": [finished]}, back_in_line]},
                        NEXT_PLACE,
                        {"$ifNull": ["$task_state.place", "$$REMOVE"]},
                    ]
                },
                "task_state.ask_time": {"$cond": [ask, mark, {"$ifNull": [ASK_TIME, "$$REMOVE"]}]},
                "_derived": "$$REMOVE",
            }
        },
    ]


def next_mark(now: Expression) -> Expression:
    """Return `ask_time` for what happens now. Two marks are never equal, so that whoever has acted on one removes no other."""
    return {"$cond": [{"$eq": [ASK_TIME, now]}, {"$add": [now, 1]}, now]}


def _present_if(condition: Expression, value: Expression) -> Expression:
    return {"$cond": [condition, value, "$$REMOVE"]}
