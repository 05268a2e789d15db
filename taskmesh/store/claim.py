"""Claim: append an entry to every task of a set that this worker may have, atomically for each.

The server judges each task by all gates of the rule; a worker that loses a race changes nothing. One `running_id` serves a
whole set, since a task holds it at most once. A process that dies after the claim leaves leases that run out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pymongo.errors import OperationFailure, WriteConcernError

from taskmesh.model.task import Task
from taskmesh.model.worker import Claimant
from taskmesh.store import rules
from taskmesh.store.malformed import note_refusal
from taskmesh.store.mongodb.driver import CODEC, PLAIN_CODEC, Document, restored
from taskmesh.store.mongodb.server_errors import is_unconfirmed
from taskmesh.store.pipeline import plain
from taskmesh.store.pipeline.event_stamp import stamp
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.store import Store

LOADED_WITH_CLAIM_BYTES = 256_000
"""Records that are larger than this together are not read with the claim, but when the handler first asks for one."""
_ENTRY_FIELDS = {"task_state.worker_states.running_id": 1, "task_state.worker_states.state": 1}
_STATE_FIELDS = {
    f"task_state.{field}": 1
    for field in (
        "dropped_fail_cnt",
        "lost_cnt",
        "conflict_cnt",
        "progress",
        "params_version",
        "steps_bytes",
        "pending",
        "line",
        "has_children",
        "signals_bytes",
    )
}
_FEW_STEPS: Document = {
    # Records come with the claim, so that resuming costs no read; unless they are large (see `steps`).
    "task_state.steps": {
        "$cond": [
            {"$lte": ["$task_state.steps_bytes", LOADED_WITH_CLAIM_BYTES]},
            {"$ifNull": ["$task_state.steps", "$$REMOVE"]},
            "$$REMOVE",
        ]
    }
}
CLAIMED_FIELDS: Document = {
    "name": 1,
    "key": 1,
    "queue": 1,
    "task_option": 1,
    "trace": 1,
    "task_state.after.params": 1,
    "task_state.own_params": 1,
    **_ENTRY_FIELDS,
    **_STATE_FIELDS,
    **_FEW_STEPS,
}
WHOLE_FIELDS: Document = dict.fromkeys(
    ("name", "key", "queue", "group", "tags", "needs", "status", "task_option", "task_state", "trace"), 1
)
_ME = rules.Me("$$worker_id", "$$parent", "$$labels")
_OWN = {"$in": ["$$this.k", {"$literal": sorted(Task.OWN_FIELDS)}]}
_EXTRA = "_extra"
_EXTRA_FIELDS: Document = {
    # Users' own fields at the top, whose names are unknown here. Under one name, until they are read.
    _EXTRA: {"$arrayToObject": {"$filter": {"input": {"$objectToArray": "$$ROOT"}, "cond": {"$not": [_OWN]}}}}
}
# Excludes these fields, so that users' own fields, whose names are unknown, are returned. It costs the server a third
# of what picking fields costs.
_ALL_BUT: Document = dict.fromkeys(sorted(Task.OWN_FIELDS - WHOLE_FIELDS.keys() - {"_id", "params"}), 0)
_ALL_THAT_RUNS_NEED: Document = (
    # Nor large parts of `task_state` that no execution asks for.
    _ALL_BUT | dict.fromkeys((f"task_state.{name}" for name in ("signals", "stages", "dependents", "after.ids")), 0)
)
_FIRST_RUN: Document = {"task_state.worker_states": {"$size": 1}, "task_state.steps_bytes": {"$in": [None, 0]}}
"""Matches tasks without failures (which have logs) and without records. For other tasks, fields are picked."""
_RUNNING_ID = "task_state.worker_states.running_id"
_PUT_OFF_BY = ("start_time", "resume_time", "suspended_until")
_HANDLED_BY_SHORT_CLAIM = {
    # Checked by `_untried`.
    "status",
    "task_state.worker_states",
    "task_state.timeout_cnt",
    *(f"task_state.{name}" for name in _PUT_OFF_BY),
    *(
        f"task_option.{name}"
        for name in (
            "concurrent_worker_cnt",
            "specific_worker_ids",
            "worker_timeout_ms",
            "max_unexpected_retries",
            "max_timeouts",
        )
    ),
    # Written as the rule would, or left as they are.
    "task_state",
    "task_state.create_time",
    "task_state.wanted",
    "task_state.params_version",
    *(f"task_state.{name}" for name in ("parent", "dependents", "has_children")),
    *(f"task_state.{name}" for name in ("line", "place", "on_sequence_failure")),
    "task_state.steps_bytes",
    "task_state.ask_time",
    "event",
    "queue",
    "group",
    "next_claim_time",
    "settle_time",
    "pinned",
    # Without an entry the rule does not look at these.
    *(f"task_option.unexpected_retry_{name}" for name in ("delay_ms", "delay_scope", "backoff", "jitter")),
    "task_option.retain_success_ms",
    "task_option.retain_failed_ms",
    # A claimable task is not a dead letter.
    "task_option.on_fail",
    "task_state.home",
}


async def claim(
    store: Store,
    ids: Sequence[str],
    worker: Claimant | str,
    running_id: str,
    *,
    closed_queues: Collection[str] = (),
    narrowed_by: Mapping[str, Any] | None = None,
    deadline_ms: int = 2_000,
) -> int:
    """Claim as many of `ids` as can be claimed. Return how many were won; `won` reads them.

    Eligible: every gate of the rule is open, and the task matches the filter `narrowed_by`. Writes: the entry, `timeout_cnt`,
    `lost_cnt`, `losses` (for leases found to have run out), the derived fields. Do not simply repeat it: after an error ask
    `won`. An error that `is_unconfirmed` is raised after everything has been tried.
    """
    variables = _claiming(worker, running_id)
    forms = _forms({"$in": list(ids)}, running_id, closed_queues, narrowed_by, store.now)
    count, unconfirmed = await _modified(store, store.update_command(*next(forms), deadline_ms, variables, hint="_id_"))
    if count < len(ids):
        more, late = await _modified(store, store.update_command(*next(forms), deadline_ms, variables))
        count, unconfirmed = count + more, late or unconfirmed
    if unconfirmed is not None:
        raise unconfirmed
    return count


async def _modified(store: Store, command: Document) -> tuple[int, WriteConcernError | None]:
    """Run one part of a claim. Return how many tasks it won, and the error if a majority has not confirmed them in time."""
    try:
        return int((await store.driver.command(command))["nModified"]), None
    except OperationFailure as error:
        if isinstance(error, WriteConcernError) and is_unconfirmed(error):
            return int((error.details or {}).get("nModified", 0)), error
        note_refusal(store, error)
        raise


async def claim_one(
    store: Store,
    id_: str,
    worker: Claimant | str,
    running_id: str,
    *,
    fields: Document,
    closed_queues: Collection[str] = (),
    narrowed_by: Mapping[str, Any] | None = None,
    deadline_ms: int = 2_000,
) -> Document | None:
    """Claim one task and return it, or None. Does what `claim` and `won` do, in one round trip if nobody has tried the task."""
    variables = _claiming(worker, running_id)
    unconfirmed: WriteConcernError | None = None
    for query, pipeline in _forms(id_, running_id, closed_queues, narrowed_by, store.now):
        try:
            document = await store.update_one(query, pipeline, deadline_ms, variables, fields, hint="_id_")
        except OperationFailure as error:
            if isinstance(error, WriteConcernError) and is_unconfirmed(error):
                unconfirmed = error  # what this form has won, the next one leaves as it is
                continue
            note_refusal(store, error)
            raise
        if document is not None and any(
            entry["running_id"] == running_id for entry in document["task_state"]["worker_states"]
        ):
            return document | document.pop(_EXTRA, {}) if _EXTRA in fields else document
    if unconfirmed is not None:
        raise unconfirmed
    return None


def _forms(
    ids: Any,
    running_id: str,
    closed_queues: Collection[str],
    narrowed_by: Mapping[str, Any] | None,
    now: rules.Expression,
) -> Iterator[tuple[Document, list[Document]]]:
    """Yield a claim's two updates, each a filter and a pipeline: the short form, then the whole rule for what that left."""
    yield _plain_candidates(ids, closed_queues, narrowed_by, now), prepared(plain_claim_pipeline, now)
    rest = {"$and": [_candidates(ids, narrowed_by), _never_by(running_id)]}
    yield rest, prepared(claim_pipeline, now, tuple(sorted(closed_queues)))


def _candidates(ids: Any, narrowed_by: Mapping[str, Any] | None) -> Document:
    query: Document = {
        "_id": ids,
        "status": {"$in": ["INIT", "RUNNING"]},
        "task_state.worker_states": {"$type": "array"},
    }
    return {"$and": [query, dict(narrowed_by)]} if narrowed_by else query


def _never_by(running_id: str) -> Document:
    """Match the tasks that this claim has not won already: a fencing token is used once.

    If the server was blocked between the two forms, the lease of a task that the first form won may have run out.
    """
    return {_RUNNING_ID: {"$ne": running_id}, "task_state.losses.running_id": {"$ne": running_id}}


def _plain_candidates(
    ids: Any, closed_queues: Collection[str], narrowed_by: Mapping[str, Any] | None, now: rules.Expression
) -> Document:
    """Match tasks that nobody works on or has failed at, and that nothing holds back: what `plain_claim_pipeline` may claim."""
    conditions: list[Any] = [{"_id": ids, "status": "INIT"}, prepared(_untried, now)]
    if closed_queues:
        conditions.append({"queue": {"$nin": sorted(closed_queues)}})
    return {"$and": [*conditions, dict(narrowed_by)] if narrowed_by else conditions}


def _untried(now: rules.Expression) -> Document:
    """Return the conditions under which all gates are open to every worker, except for a closed queue."""
    return {
        **plain.ALONE,
        "task_option.specific_worker_ids": {"$size": 0},
        "task_option.worker_timeout_ms": {"$gt": 0},
        "task_option.max_unexpected_retries": {"$gte": 0},
        # One lease may run out without finishing the task, so the claim results in no `settle_time`.
        "task_option.max_timeouts": {"$gte": 1},
        "task_state.worker_states": {"$size": 0},
        "task_state.timeout_cnt": 0,
        # Whatever else the rule reads.
        **plain.without_others(claim_pipeline(now), _HANDLED_BY_SHORT_CLAIM),
        "$expr": {"$lte": [{"$max": [f"$task_state.{name}" for name in _PUT_OFF_BY]}, now]},
    }


def _claiming(worker: Claimant | str, running_id: str) -> Document:
    """Return the variables of both pipelines."""
    me = rules.Me.literally(worker)
    return {"worker_id": me.id, "parent": me.parent, "labels": me.labels, "running_id": {"$literal": running_id}}


def plain_claim_pipeline(now: rules.Expression) -> list[Document]:
    """Return what `claim_pipeline` amounts to for `_untried` tasks: the entry, and the fields that follow from it."""
    entry = _entry(now)
    return [
        # All of it at once: the rule has nothing to sort out.
        {
            "$set": {
                # The entry, the only one.
                "task_state.worker_states": [entry],
                "event": stamp("claimed", now, "$$worker_id"),
                # It runs; there is room for another worker when the lease ends, and time alone changes nothing.
                "status": "RUNNING",
                "next_claim_time": {"$max": ["$task_state.create_time", entry["ping_expire_time"]]},
                "settle_time": "$$REMOVE",
            }
        }
    ]


def _entry(now: rules.Expression) -> Document:
    return {
        "running_id": "$$running_id",
        "worker_id": "$$worker_id",
        "parent": {"$ifNull": ["$$parent", "$$REMOVE"]},
        "state": "RUNNING",
        "start_time": now,
        # The lease: as long as the task's option says at this moment.
        "ping_expire_time": {"$add": [now, "$task_option.worker_timeout_ms"]},
        # The requests to run again, and the version of the params, that this execution serves: those made before it.
        "wish": "$task_state.wanted",
        "params_version": "$task_state.params_version",
    }


def claim_pipeline(now: rules.Expression, closed_queues: Collection[str] = ()) -> list[Document]:
    """Append the entry if all gates are open, and drop those whose lease ran out: that is the preemption.

    The variables `$$worker_id`, `$$parent`, `$$labels` and `$$running_id` say who claims, and as what.

    The gates are evaluated here and not in the query: the server takes four times as long to parse an expression there
    (measured: half a millisecond per command), and here gates and new state share facts that are computed once.
    """
    # Entries whose lease ran out leave the list; `counted_losses` counts them in the same write.
    kept = {"$filter": {"input": rules.ENTRIES, "cond": {"$not": [rules.is_lost(now)]}}}
    claimed = {
        "task_state": {
            "$mergeObjects": [
                "$task_state",
                {"$cond": [{"$eq": ["$$lost", []]}, {}, counted_losses()]},
                {"worker_states": {"$concatArrays": [kept, [_entry(now)]]}},
                # Places of stopped handlers: those whose lease ran out are dropped. A task without the field does not get it.
                {"$cond": [{"$gt": ["$task_state.leaving", None]}, {"leaving": "$$leaving"}, {}]},
            ]
        },
        # Change streams tell who claimed it, and from whom it was taken over.
        "event": stamp("claimed", now, "$$worker_id", "$$lost.worker_id"),
    }
    # A refused claim changes nothing: `settle` records what has become of the task by time alone.
    refused = {"task_state": "$task_state", "event": "$event", "refused": True}
    outcome = {"$cond": [rules.all_open(_ME, closed_queues, now), claimed, refused]}
    return [
        # Evaluate all gates once, and keep the result: both fields below depend on it.
        {"$set": {"_claim": rules.with_facts(now, outcome)}},
        # Take it over: the state with the new entry or, if a gate is shut, the state as it was.
        {"$set": {"task_state": "$_claim.task_state", "event": "$_claim.event"}},
        # Status and times follow from the entries; a refused claim leaves them as they were.
        *rules.derivation(now, where={"$ne": ["$_claim.refused", True]}),
        # The result is not stored.
        {"$unset": "_claim"},
    ]


def counted_losses() -> rules.Expression:
    """Return the fields of `task_state` that count `$$lost` and keep the newest as evidence."""
    evidence = {
        "$map": {
            "input": "$$lost",
            "in": {
                "running_id": "$$this.running_id",
                "worker_id": "$$this.worker_id",
                "start_time": "$$this.start_time",
                "ping_expire_time": "$$this.ping_expire_time",
                "wish": "$$this.wish",
            },
        }
    }
    return {
        # Lost in a row: those that were counted, and those found now.
        "timeout_cnt": rules.TIMEOUT_CNT,
        # Lost in the whole life of the task: nothing resets it.
        "lost_cnt": {"$add": [{"$ifNull": ["$task_state.lost_cnt", 0]}, {"$size": "$$lost"}]},
        # The newest losses with their times, a bounded number, so that the document stays small.
        "losses": {
            "$slice": [{"$concatArrays": [{"$ifNull": ["$task_state.losses", []]}, evidence]}, -rules.KEPT_LOSSES]
        },
    }


async def won(
    store: Store,
    ids: Iterable[str],
    running_id: str,
    params_of: Mapping[str, Sequence[str] | None],
    *,
    whole_state: bool = False,
    majority: bool = False,
    count: int | None = None,
) -> list[Document]:
    """Return the tasks among `ids` that `running_id` holds. `majority`: only those that no failover can roll back.

    `params_of`: which params are wanted, by task name (None: all). `whole_state`: with all of `task_state`, for hooks. `count`:
    how many there are, if the claim has told.
    """
    by_projection: dict[tuple[str, ...] | None, list[str]] = {}
    for id_ in ids:
        wanted = params_of.get(id_.partition(":")[0])
        by_projection.setdefault(tuple(wanted) if wanted is not None else None, []).append(id_)
    found: list[Document] = []

    async def read(ids: list[str], fields: Document, which: Document) -> list[Document]:
        query = {"_id": {"$in": ids}, _RUNNING_ID: running_id, **which}
        return await store.find(query, fields, majority=majority, codec=CODEC if whole_state else PLAIN_CODEC)

    for wanted_params, group in by_projection.items():
        left = group
        if wanted_params is None and not whole_state:
            first_runs = await read(group, _ALL_THAT_RUNS_NEED, _FIRST_RUN)
            found += first_runs
            if len(first_runs) == len(group) or len(found) == count:
                continue
            read_already = {document["_id"] for document in first_runs}
            left = [id_ for id_ in group if id_ not in read_already]
        fields = fields_of_claimed(wanted_params, whole_state=whole_state)
        for document in await read(left, fields, {}):
            found.append(document | document.pop(_EXTRA, {}) if _EXTRA in fields else document)
    if not whole_state:
        for document in found:
            document["params"] = restored(document.get("params"))
            for name in document.keys() - Task.OWN_FIELDS:
                document[name] = restored(document[name])
    return found


def fields_of_claimed(wanted_params: Sequence[str] | None, *, whole_state: bool) -> Document:
    """Return the projection for a claimed task."""
    if whole_state and wanted_params is None:
        return _ALL_BUT
    params = {"params": 1} if wanted_params is None else {f"params.{name}": 1 for name in wanted_params}
    return (WHOLE_FIELDS if whole_state else CLAIMED_FIELDS) | params | _EXTRA_FIELDS
