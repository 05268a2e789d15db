"""Steps: what an execution records while it goes on, and the signals that it consumes.

Records stand in the task itself, in the order in which they were made: so they arrive with the claim, whoever resumes
the task. Each is written once, by the execution that holds the lease, and counts as progress. The fields of a record:

| field | says |
| --- | --- |
| `id` | kind, number and name: unique in the task |
| `kind` | `step`, `sleep`, `wait`, `start` or `join` |
| `name` | its name; the second of one name is `name#2` |
| `names` | of `start`: the `_id`s of the children, since what is started together, or one after the other, is one record |
| `value`, or `error` | what came of it; with neither, a wait has not come to its end |
| `fingerprint` | which function with which arguments made it |
| `until` | when a sleep or a wait is over |
| `signal_id` | which signal a wait has consumed |
| `time`, `worker_id`, `running_id`, `attempt` | when it was recorded, and by which execution |
| `size` | about how many bytes it has; `task_state.steps_bytes` is the sum |
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pymongo import ReturnDocument

from taskmesh.store import rules
from taskmesh.store.finish import (
    HANDLED_BY_SHORT_SUCCESS,
    Outcome,
    Recorded,
    asked_for,
    held_entry,
    of_these,
    per_outcome,
    still_held_by,
)
from taskmesh.store.mongodb.driver import CODEC, Document, find_and_update
from taskmesh.store.pipeline import plain
from taskmesh.store.pipeline.event_stamp import RECORD_EVENT, stamp, stamped
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.store import WRITE_DEADLINE_MS, Store

_FEW = 4


def record_id(kind: str, number: int, name: str) -> str:
    """Return the id of a record."""
    return f"{kind}:{number}:{name}"


async def record(
    store: Store,
    worker_id: str,
    outcomes: Sequence[Outcome],
    *,
    session: Any = None,
    deadline_ms: int = WRITE_DEADLINE_MS,
) -> int:
    """Add a record to each of these tasks, all different. Return how many counted; if fewer than given, ask `whether_recorded`.

    Eligible: the execution's entry is live, the task RUNNING, and no record has this id. Writes: the record, `steps_bytes`,
    `timeout_cnt`, the lease (renewed by `lease_ms`), the derived fields.
    """
    counted = 0
    if all(outcome.delay_ms is None for outcome in outcomes):
        counted = await _record_plain(store, worker_id, outcomes, session, deadline_ms)
        if counted == len(outcomes):
            return counted
    now = store.now
    query = still_held_by(outcomes, now)
    query["$expr"] = {"$and": [query["$expr"], _is_new(outcomes)]}
    until = {} if all(outcome.delay_ms is None for outcome in outcomes) else {"until": asked_for(outcomes, now)}
    state = _longer(outcomes, now, until) | {"timeout_cnt": 0, "worker_states": _renewed(outcomes, now)}
    stages: list[Document] = [
        # The record, behind the others; the lease is renewed as by a ping.
        {"$set": {"task_state": state, RECORD_EVENT: stamp("step_recorded", now, {"$literal": worker_id})}},
        *prepared(rules.derivation, now),
    ]
    reply = await store.update(query, stages, deadline_ms, session)
    return counted + int(reply["n"])


async def _record_plain(
    store: Store, worker_id: str, outcomes: Sequence[Outcome], session: Any, deadline_ms: int
) -> int:
    """Add the record where nothing else changes: the lease is young, and the execution the only one of its task.

    Then everything that follows from the entries stays as it is: see `plain`. A few records have modifiers of their own, which
    cost the server least; for many, one statement for all costs least (measured).
    """
    if len(outcomes) <= _FEW and all(outcome.made_at is not None for outcome in outcomes):
        return await store.modify([_by_modifiers(worker_id, outcome) for outcome in outcomes], deadline_ms, session)
    now = store.now
    told = stamp("step_recorded", now, {"$literal": worker_id})
    # The record, behind the others.
    stages: list[Document] = [{"$set": {"task_state": _longer(outcomes, now, {}), RECORD_EVENT: told}}]
    reply = await store.update(_nothing_else_changes(outcomes, now), stages, deadline_ms, session, hint="_id_")
    return int(reply["n"])


def _nothing_else_changes(outcomes: Sequence[Outcome], now: rules.Expression) -> Document:
    """Match the tasks in which nothing but the record changes: see `_record_plain`."""
    until = {"$arrayElemAt": [f"{rules.ENTRIES}.ping_expire_time", 0]}
    left_ms = per_outcome([_young_ms(outcome.lease_ms) for outcome in outcomes], outcomes)
    is_young = {"$gt": [until, {"$add": [now, left_ms]}]}
    return {
        "$and": [
            *of_these(outcomes),
            {"task_state.timeout_cnt": 0},
            prepared(_undisturbed, now),
            {"$expr": {"$and": [is_young, _is_new(outcomes)]}},
        ]
    }


def _undisturbed(now: rules.Expression) -> Document:
    """Return the conditions under which time alone changes nothing in a task whose only entry is live."""
    return {
        "task_state.worker_states": {"$size": 1},
        # Whatever else the rule reads.
        **plain.without_others(rules.derivation(now), _HANDLED_BY_SHORT_RECORD),
    }


_HANDLED_BY_SHORT_RECORD = HANDLED_BY_SHORT_SUCCESS.union(
    # A record does not change what follows from these. `expire_time` is not known: it ends with the first record.
    {"task_option.concurrent_worker_cnt", "task_state.flow", "task_state.suspended_until"}
).difference({"task_state.expire_time"})


def _by_modifiers(worker_id: str, outcome: Outcome) -> tuple[Document, Document]:
    """Return which task is modified, and how.

    The time is the worker's idea of the server's: it decides whether a lease is young, which only saves renewing it, and is
    shown in the record. Whether the lease has run out makes no difference: as long as the entry exists, nobody else has the
    task, and whoever takes it over finds the record.
    """
    made, now = outcome.step or {}, outcome.made_at
    assert now is not None, "asked by `_record_plain`"
    young = {"$gt": now + timedelta(milliseconds=_young_ms(outcome.lease_ms))}
    query: Document = {
        "_id": outcome.id,
        "status": "RUNNING",
        "task_state.worker_states": {
            "$size": 1,
            "$elemMatch": {"running_id": outcome.running_id, "ping_expire_time": young},
        },
        # Adding the record changes this sum, so it cannot be added twice.
        "task_state.steps_bytes": outcome.bytes_before or None,
        # What the whole form would change as well: a count, what ends with the first record, places that are free by now.
        "task_state.timeout_cnt": 0,
        "task_state.expire_time": None,
        "task_state.leaving": None,
    }
    changes = {
        "$push": {"task_state.steps": made | {"time": now}},
        "$inc": {"task_state.steps_bytes": made["size"]},
        "$set": {RECORD_EVENT: stamped("step_recorded", now, worker_id)},
    }
    return query, changes


def _is_new(outcomes: Sequence[Outcome]) -> rules.Expression:
    """Return whether no record of the task has this id."""
    ids = per_outcome([(outcome.step or {})["id"] for outcome in outcomes], outcomes)
    return {"$not": [{"$in": [ids, {"$map": {"input": rules.STEPS, "in": "$$this.id"}}]}]}


def _longer(outcomes: Sequence[Outcome], now: rules.Expression, until: Document) -> Document:
    """Return the records with one more, and how many bytes they have."""
    records = [outcome.step or {} for outcome in outcomes]
    made = {"$mergeObjects": [per_outcome(records, outcomes), {"time": now}, _present(until)]}
    return {
        "steps": {"$concatArrays": [rules.STEPS, [made]]},
        "steps_bytes": {"$add": [_bytes, per_outcome([made["size"] for made in records], outcomes)]},
    }


async def record_starts(store: Store, worker_id: str, outcomes: Sequence[Outcome], session: Any) -> int:
    """Record that children were started, in the transaction that inserts them; each outcome is that of another parent.

    Return how many counted; if fewer than given, ask `whether_recorded`. Children that an execution has started just before are
    in the same record, so that ten thousand of them cost only their names.

    Eligible: the execution's entry is live, the task RUNNING, and no record has the first name. Writes: the record,
    `has_children`, `steps_bytes`, `timeout_cnt`, the lease, the derived fields.
    """
    now = store.now
    starting = _starting(worker_id, outcomes, now)
    plain_ones = {"$and": [_nothing_else_changes(outcomes, now), {"$expr": _starts_none_of(outcomes)}]}
    counted = int((await store.update(plain_ones, starting, WRITE_DEADLINE_MS, session, hint="_id_"))["n"])
    if counted == len(outcomes):
        return counted
    query = still_held_by(outcomes, now)
    query["$expr"] = {"$and": [query["$expr"], _is_new(outcomes), _starts_none_of(outcomes)]}
    stages: list[Document] = [
        *starting,
        # The executions are alive, and keep the lease for as long as their next write needs.
        {"$set": {"task_state": {"timeout_cnt": 0, "worker_states": _renewed(outcomes, now)}}},
        *prepared(rules.derivation, now),
    ]
    return counted + int((await store.update(query, stages, WRITE_DEADLINE_MS, session))["n"])


def _starting(worker_id: str, outcomes: Sequence[Outcome], now: rules.Expression) -> list[Document]:
    """Return the stages that record what each has started."""
    records = [outcome.step or {} for outcome in outcomes]
    made = per_outcome(records, outcomes)
    names = per_outcome([record["names"] for record in records], outcomes)
    size = per_outcome([record["size"] for record in records], outcomes)
    goes_on = {
        "$and": [
            {"$eq": ["$_last.kind", "start"]},
            {"$eq": ["$_last.running_id", per_outcome([outcome.running_id for outcome in outcomes], outcomes)]},
            {"$isArray": ["$_last.names"]},
        ]
    }
    longer = {
        "names": {"$concatArrays": ["$_last.names", names]},
        "size": {"$add": ["$_last.size", size]},
        "time": now,
    }
    others = {"$filter": {"input": rules.STEPS, "cond": {"$ne": ["$$this.id", "$_last.id"]}}}
    state: Document = {
        "steps": {
            "$cond": [
                goes_on,
                {"$concatArrays": [others, [{"$mergeObjects": ["$_last", longer]}]]},
                {"$concatArrays": [rules.STEPS, [{"$mergeObjects": [made, {"time": now}]}]]},
            ]
        },
        "steps_bytes": {"$add": [_bytes, size]},
        "has_children": True,
    }
    return [
        # The record before it, which may be one of starts.
        {"$set": {"_last": {"$last": rules.STEPS}}},
        # That one with these names, too, or a new one. From the first child on the task's end concerns others.
        {"$set": {"task_state": state, RECORD_EVENT: stamp("step_recorded", now, {"$literal": worker_id})}},
        # What was looked at is not stored.
        {"$unset": "_last"},
    ]


def _starts_none_of(outcomes: Sequence[Outcome]) -> rules.Expression:
    """Return whether no record of the task has the name of the first child that is started."""
    first = per_outcome([(outcome.step or {})["names"][0] for outcome in outcomes], outcomes)
    has_it = {"$in": [first, {"$ifNull": ["$$this.names", []]}]}
    return {"$not": [{"$anyElementTrue": [{"$map": {"input": rules.STEPS, "in": has_it}}]}]}


_bytes: rules.Expression = {"$ifNull": ["$task_state.steps_bytes", 0]}


def _present(fields: Document) -> Document:
    return {name: {"$ifNull": [value, "$$REMOVE"]} for name, value in fields.items()}


def _renewed(outcomes: Sequence[Outcome], now: rules.Expression) -> rules.Expression:
    """Return the entries; those of the executions with a lease of `lease_ms` from now, if a quarter of theirs is over or more.

    (More often, each record would move the task in every index that contains the end of the lease.)
    """
    leases = [outcome.lease_ms for outcome in outcomes]
    later = {"$add": [now, per_outcome(leases, outcomes)]}
    aged = {
        "$lte": ["$$this.ping_expire_time", {"$add": [now, per_outcome([_young_ms(ms) for ms in leases], outcomes)]}]
    }
    longer = {"$mergeObjects": ["$$this", {"ping_expire_time": later}]}
    mine = {"$and": [held_entry(outcomes), aged]}
    return {"$map": {"input": rules.ENTRIES, "in": {"$cond": [mine, longer, "$$this"]}}}


def _young_ms(lease_ms: int) -> int:
    """Return how much of a lease is left when a quarter of it is over."""
    return lease_ms - lease_ms // 4


async def whether_recorded(store: Store, outcomes: Sequence[Outcome]) -> dict[Outcome, Recorded]:
    """Return what became of records whose write was not answered, or did not count for all: see `finish.whether_recorded`."""
    running_ids = {"$literal": sorted({outcome.running_id for outcome in outcomes})}
    mine = {"$and": [{"$in": ["$$this.running_id", running_ids]}, rules.is_live(store.now)]}
    fields: Document = {
        "status": 1,
        "task_state.steps.id": 1,
        "task_state.steps.names": 1,
        "task_state.steps.running_id": 1,
        "held": {"$map": {"input": {"$filter": {"input": rules.ENTRIES, "cond": mine}}, "in": "$$this.running_id"}},
    }
    found = await store.find({"_id": {"$in": [outcome.id for outcome in outcomes]}}, fields, majority=True)
    tasks = {task["_id"]: task for task in found}
    return {outcome: _stands(outcome, tasks.get(outcome.id)) for outcome in outcomes}


def _stands(outcome: Outcome, task: Document | None) -> Recorded:
    if task is None or outcome.step is None:
        return "lost"
    wanted = outcome.step
    started = wanted["names"][0] if "names" in wanted else None
    records = task["task_state"].get("steps") or ()
    made = next(
        (each for each in records if each["id"] == wanted["id"] or (started and started in each.get("names", ()))), None
    )
    if made is not None:
        return "recorded" if made.get("running_id") == outcome.running_id else "lost"
    return "held" if task["status"] == "RUNNING" and outcome.running_id in task["held"] else "lost"


async def read(store: Store, id_: str) -> list[Document]:
    """Return the records of a task, in order."""
    found = await store.find({"_id": id_}, {"task_state.steps": 1}, codec=CODEC)
    return list(found[0]["task_state"].get("steps") or ()) if found else []


async def take_signal(store: Store, outcome: Outcome, event: str, timeout_ms: int | None) -> Document | None:
    """Look whether what a wait waits for has happened. Return its record as it is after that; None: the lease is lost.

    In one update: the oldest signal for this event is moved into the record; or the record's deadline is over, which is
    recorded; or there is nothing yet, and the record keeps when the wait ends. Safe to repeat: what has come stays.

    Eligible: the execution's entry is live, the task RUNNING. Writes: the record, `steps_bytes`, `signals`, `signals_bytes`,
    `timeout_cnt`, the lease, the derived fields.
    """
    now, made = store.now, outcome.step or {}
    id_ = {"$literal": made["id"]}
    oldest = {"$first": {"$filter": {"input": rules.SIGNALS, "cond": {"$eq": ["$$this.event", {"$literal": event}]}}}}
    known = {"$first": {"$filter": {"input": rules.STEPS, "cond": {"$eq": ["$$this.id", id_]}}}}
    ends = None if timeout_ms is None else {"$add": [now, timeout_ms]}
    until = {"$cond": [{"$gt": ["$_wait.known", None]}, "$_wait.known.until", ends]}
    over = {"$and": [{"$gt": ["$_until", None]}, {"$lte": ["$_until", now]}]}
    came = {"$gt": ["$_wait.oldest", None]}
    decided = {"$or": [came, over]}
    value = {"$cond": [came, "$_wait.oldest.payload", None]}
    of_signal = {"value": value, "signal_id": {"$cond": [came, "$_wait.oldest.id", "$$REMOVE"]}, "time": now}
    ended = {"$cond": [decided, of_signal, {}]}
    size = {"$add": [{"$literal": made["size"]}, {"$cond": [came, "$_wait.oldest.size", 0]}]}
    kept = {"until": {"$ifNull": ["$_until", "$$REMOVE"]}, "size": size}
    others = {"$filter": {"input": rules.STEPS, "cond": {"$ne": ["$$this.id", id_]}}}
    signals = {"$filter": {"input": rules.SIGNALS, "cond": {"$ne": ["$$this.id", "$_wait.oldest.id"]}}}
    size_before = {"$ifNull": ["$_wait.known.size", 0]}
    state: Document = {
        "steps": {"$concatArrays": [others, [{"$mergeObjects": [{"$literal": made}, kept, ended]}]]},
        "steps_bytes": {"$add": [_bytes, {"$subtract": [size, size_before]}]},
        "signals": {"$cond": [came, signals, {"$ifNull": ["$task_state.signals", "$$REMOVE"]}]},
        "signals_bytes": {
            "$cond": [
                came,
                {"$subtract": ["$task_state.signals_bytes", "$_wait.oldest.size"]},
                {"$ifNull": ["$task_state.signals_bytes", "$$REMOVE"]},
            ]
        },
        "timeout_cnt": {"$cond": [decided, 0, "$task_state.timeout_cnt"]},
        "worker_states": _renewed([outcome], now),
    }
    is_over = {"$gt": ["$_wait.known.time", None]}
    changes = {
        name: {"$cond": [is_over, {"$ifNull": [f"$task_state.{name}", "$$REMOVE"]}, new]} for name, new in state.items()
    }
    told = stamp("step_recorded", now, {"$literal": made["worker_id"]})
    unsaid = {"$ifNull": [f"${RECORD_EVENT}", "$$REMOVE"]}
    stages: list[Document] = [
        # What is known of this wait, the oldest signal that would end it, and then when it ends by itself.
        {"$set": {"_wait": {"known": known, "oldest": oldest}}},
        # A stage of its own: it reads what was found above.
        {"$set": {"_until": until}},
        # What came of it; a wait that has ended before stays as it is.
        {
            "$set": {
                "task_state": changes,
                RECORD_EVENT: {"$cond": [{"$and": [{"$not": [is_over]}, decided]}, told, unsaid]},
            }
        },
        # What was found is not stored.
        {"$unset": ["_wait", "_until"]},
        # Status and times follow.
        *prepared(rules.derivation, now),
    ]
    fields = {"record": {"$first": {"$filter": {"input": rules.STEPS, "cond": {"$eq": ["$$this.id", id_]}}}}}
    # The driver's own method: it would not decode nested Decimals in the reply of a raw command.
    document = await find_and_update(
        store.driver.collection(store.tasks),
        still_held_by([outcome], now),
        stages,
        projection=fields,
        return_document=ReturnDocument.AFTER,
        maxTimeMS=WRITE_DEADLINE_MS,
    )
    if document is None:
        return None
    if "record" in document:
        return document["record"]  # type: ignore[no-any-return]  # a record
    # The driver has repeated it after a lost reply. Then the server returns the document that it has kept, and computes nothing.
    steps: list[Document] = document["task_state"]["steps"]
    return next(each for each in steps if each["id"] == made["id"])
