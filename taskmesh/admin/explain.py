"""Why is my task not running? Every gate of the claim rule, for one task and each worker, as the server judges it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from taskmesh.admin.queues import read_queue
from taskmesh.admin.store.gates import Judgement, judge
from taskmesh.admin.store.server_state import waits_for_its_own_line
from taskmesh.client.tasks import no_such_task
from taskmesh.model.dependency import label
from taskmesh.model.queue import QueueInfo
from taskmesh.model.read_only import ReadOnly
from taskmesh.model.task import SuspendedFor, why_no_task
from taskmesh.model.worker import Claimant, WorkerInfo, read_workers
from taskmesh.store import Store, registry
from taskmesh.store.find import get
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.relations.dependencies import open_edges
from taskmesh.store.relations.sequences import head_of
from taskmesh.store.rules import NEVER

NO_WORKER = "(any worker)"
"""Represents a worker while none is live."""
WORKER_KNOWS = "worker runs such tasks"
"""The gate that says whether a worker has the handler, and serves the queue."""


class Gate(ReadOnly):
    """One condition of the claim rule."""

    name: str
    open: bool
    reason: str
    opens_at: datetime | None = None
    """When the gate opens by itself, if it is shut now and ever does."""


class Explanation(ReadOnly):
    """Whether a worker could claim a task, gate by gate."""

    worker_id: str
    claimable: bool
    next_claim_time: datetime | None
    """The earliest time at which this worker could claim it if nobody changes it. None: not by time alone."""
    gates: list[Gate]
    note: str | None = None
    """Says that no such worker is registered (it may not have started yet): then only the gates of the task are evaluated."""


class Waiting(ReadOnly):
    """Waiting tasks of one name for which the same gates are shut, as one worker sees them."""

    name: str
    shut: list[str]
    """The shut gates. Empty: the worker could claim them now."""
    tasks: int
    example_key: str
    reasons: list[str]
    """Why they are shut for the example."""


def not_registered(worker_id: str) -> str:
    """Say that this worker is unknown."""
    return f"no worker with the id {worker_id!r} is registered"


_OPENED_BY_OTHERS: tuple[str, ...] = ("flow", "dependencies", "sequence")
"""Gates that other tasks open, not time: their reasons name those tasks. So does the gate of a task that waits for children."""


async def explain(store: Store, id_: str, worker_id: str | None) -> list[Explanation]:
    """Return the gates of a task for one worker, or for every live one. Raises `TaskNotFound`, `IncompatibleCollection`."""
    return (await judged(store, id_, worker_id))[1]


async def judged(
    store: Store, id_: str, worker_id: str | None, as_if: Sequence[Document] = ()
) -> tuple[Judgement, list[Explanation]]:
    """Evaluate all gates on the server. `as_if`: for the task as these stages would change it.

    Raises `TaskNotFound`; `IncompatibleCollection` for a document that the rule cannot evaluate.
    """
    workers = await _workers(store)
    live = [worker.worker_id for worker in workers.values() if worker.live]
    asked = [worker_id] if worker_id is not None else live or [NO_WORKER]
    found = await judge(store, [id_], [_claimant(each, workers) for each in asked], as_if)
    if not found:
        name, _, key = id_.partition(":")
        stranger = await get(store, [id_], params=False)
        raise why_no_task(stranger[0]) if stranger else no_such_task(name, key)
    queue = await read_queue(store, found[0].task["queue"])
    others = {
        "dependencies": await _left_to_wait_for(store, id_, found[0].task["line"])
        if found[0].task["waits_for"]
        else None,
        "sequence": await _stands_before(store, id_, found[0].task["line"]) if found[0].task["line"] else None,
    }
    return found[0], [_explanation(found[0], n, each, workers.get(each), queue, others) for n, each in enumerate(asked)]


async def _left_to_wait_for(store: Store, id_: str, line: str | None) -> str:
    """Say how many unfinished tasks it waits for, which are the first, and whether it waits in vain."""
    count, first = await open_edges(store, id_)
    if not count:
        return "every task that it waits for is finished"
    named = ", ".join(f"{label(task['_id'])} ({task['status']})" for task in first)
    crossed = await waits_for_its_own_line(store, id_) if line else None
    vain = (
        f"; {label(crossed[1])} is behind it in its own sequence, so neither ever runs: cancel one" if crossed else ""
    )
    return f"waits for {count} unfinished: {named}{' …' if count > len(first) else ''}{vain}"


async def _stands_before(store: Store, id_: str, line: str) -> str:
    """Say which task is at the head of the task's sequence."""
    queue, _, key = line.partition(":")
    head = await head_of(store, line)
    found = await get(store, [head], params=False) if head and head != id_ else []
    if found:
        status = found[0]["status"]
        blocks = "; on_sequence_failure is 'block', so retry or delete it" if status == "FAIL" else ""
        turn = f"at the head is {label(found[0]['_id'])} ({status}{blocks})"
    else:
        turn = "it is at the head" if head == id_ else "the head is being found"
    return f"sequence_key {key!r} in queue {queue}: {turn}"


async def explain_waiting(store: Store, ids: Sequence[str], worker_id: str) -> list[Waiting]:
    """Evaluate all gates of these tasks for one worker, and group them; the largest group first."""
    worker = (await _workers(store)).get(worker_id)
    queues: dict[str, QueueInfo] = {}
    groups: dict[tuple[str, ...], list[tuple[str, list[Gate]]]] = {}
    for found in await judge(store, ids, [Claimant(worker_id) if worker is None else worker.claimant]):
        task = found.task
        queue = queues[task["queue"]] = queues.get(task["queue"]) or await read_queue(store, task["queue"])
        shut = [gate for gate in _explanation(found, 0, worker_id, worker, queue).gates if not gate.open]
        groups.setdefault((task["name"], *(gate.name for gate in shut)), []).append((task["key"], shut))
    waiting = [
        Waiting(
            name=name, shut=names, tasks=len(tasks), example_key=tasks[0][0], reasons=[g.reason for g in tasks[0][1]]
        )
        for (name, *names), tasks in groups.items()
    ]
    return sorted(waiting, key=lambda each: -each.tasks)


def _claimant(worker_id: str, workers: Mapping[str, WorkerInfo]) -> Claimant:
    return workers[worker_id].claimant if worker_id in workers else Claimant(worker_id)


async def _workers(store: Store) -> dict[str, WorkerInfo]:
    return {worker.worker_id: worker for worker in read_workers(await registry.workers(store))}


def _explanation(
    found: Judgement,
    number: int,
    worker_id: str,
    worker: WorkerInfo | None,
    queue: QueueInfo,
    others: Mapping[str, str | None] | None = None,
) -> Explanation:
    """Explain the evaluation for the worker with this number among those requested."""
    now, opens = found.now, found.opens[number]
    told = others or {}
    words = _words(found, number, worker_id, worker) | {
        "dependencies": _dependencies(found.task["waits_for"], told.get("dependencies")),
        "sequence": told.get("sequence") or ("waits for its turn" if found.task["line"] else "has no sequence_key"),
    }
    opened_by_others = _OPENED_BY_OTHERS
    if (found.task.get("suspended_for") or {}).get("kind") == "join":
        opened_by_others += ("suspended",)
        if told.get("dependencies") and (opens["suspended"] or now) > now:
            words["suspended"] = f"{told['dependencies']}, which it has started"
    gates = [
        Gate(
            name=name,
            open=moment is None or moment <= now,
            reason=words.get(name, "") + ("" if name in opened_by_others else _until(moment, now)),
            opens_at=moment if moment is not None and now < moment < NEVER else None,
        )
        for name, moment in opens.items()
    ]
    gates.append(_queue_gate(queue, found.task.get("group")))
    if worker is not None:
        gates += _gates_of(worker, found.task["name"], queue.queue)
    latest = max(
        (moment for moment in (*opens.values(), gates[len(opens)].opens_at) if moment is not None), default=now
    )
    opens_at = max(latest, now)
    # By then it may have expired, or failed by the last lease that was allowed to run out.
    finished_before = found.ended_by_time is not None and found.ended_by_time <= opens_at
    by_time = all(gate.open or gate.opens_at is not None for gate in gates) and not finished_before
    return Explanation(
        worker_id=worker_id,
        claimable=all(gate.open for gate in gates),
        next_claim_time=opens_at if by_time else None,
        gates=gates,
        note=_note(worker_id) if worker is None else None,
    )


def _note(worker_id: str) -> str:
    """Say why nothing is known about a worker, and what was not evaluated."""
    why = "no worker is alive" if worker_id == NO_WORKER else not_registered(worker_id)
    return f"{why}: whether a worker would run such tasks is unknown"


def _words(found: Judgement, number: int, worker_id: str, worker: WorkerInfo | None) -> dict[str, str]:
    """Return, for each gate, the values that the server compared."""
    task, option = found.task, found.task.get("task_option", {})
    leaving = ", ".join(sorted(found.leaving))
    on_their_way_out = f", {len(found.leaving)} stopped but still running ({leaving})" if leaving else ""
    resume_time = found.opens[number]["delay asked for"]
    for_good = f"; FAILed for good: {found.final_because}" if found.final_because else ""
    by = "its loop, Retry or Snooze" if task.get("loop") else "Retry or Snooze"
    wanted = option.get("concurrent_worker_cnt")
    delay = f"delay {option.get('unexpected_retry_delay_ms')} ms for the {option.get('unexpected_retry_delay_scope')}"
    return {
        "unfinished": f"stored status {task.get('status')}, {found.done} of {wanted} SUCCESS{for_good}",
        "unexpired": f"expire_time {task['expire_time'] or 'not set'}",
        "flow": "its flow is not completely published"
        if found.opens[number]["flow"]
        else "not in a flow that is being published",
        "started": f"start_time {found.opens[number]['started'] or 'not set'}",
        "room": f"{len(found.running_on)} running{on_their_way_out} and {found.done} succeeded, "
        f"concurrent_worker_cnt is {wanted}",
        "retries left": f"{found.fail_cnt} FAIL, max_unexpected_retries {option.get('max_unexpected_retries')}",
        "timeouts left": f"{found.timeout_cnt} lost in a row, max_timeouts {option.get('max_timeouts')}",
        "retry delay": f"{found.fail_cnt} FAIL, {delay}",
        "delay asked for": f"requested by {by} until {resume_time}, or delayed because a worker's code or keys do not fit the "
        "task (its log says which)"
        if resume_time
        else "no delay was requested",
        "suspended": _suspended(task.get("suspended_for"), found),
        "worker allowed": f"specific_worker_ids {', '.join(option.get('specific_worker_ids', [])) or 'any'}",
        "labels": _needs(task.get("needs"), worker),
        "not twice": f"{found.entries[number]} live or successful entries of {worker_id}",
    }


def _dependencies(policy: str | None, left: str | None) -> str:
    if policy is None:
        return "waits for no other task"
    return f"{left or 'waits for other tasks'}; on_dependency_failure {policy!r}"


def _suspended(waits_for: Document | None, found: Judgement) -> str:
    """Say what a suspended task waits for."""
    until = found.opens[0]["suspended"]
    if not waits_for or until is None or until <= found.now:
        return "not suspended"
    return SuspendedFor.model_validate(waits_for).sentence


def _needs(needs: Any, worker: WorkerInfo | None) -> str:
    if not needs:
        return "needs no labels"
    has = "are not known" if worker is None else f"are {', '.join(worker.claimant.labels)}"
    return f"needs {', '.join(map(str, needs))}; the worker's labels {has}"


def _until(moment: datetime | None, now: datetime) -> str:
    if moment is None or moment <= now:
        return ""
    return "; that will not change by itself" if moment >= NEVER else f" — opens at {moment.isoformat()}"


def _queue_gate(queue: QueueInfo, group: str | None) -> Gate:
    """Return whether the task's queue, and its group there, has room, according to the fleet's limits and pauses."""
    if reasons := queue.reasons_for(group):
        ends = [until for _, until in reasons if until is not None]
        # A reason that only a person can end keeps the gate shut, even when all others have ended.
        opens_at = max(ends) if len(ends) == len(reasons) else None
        return Gate(name="queue", open=False, reason="; ".join(why for why, _ in reasons), opens_at=opens_at)
    limits = queue.limits
    used = [f"{queue.running} of {limits.running} run"] if limits.running is not None else []
    used += [f"{queue.started} of {limits.rate} starts in {limits.per_ms} ms"] if limits.rate is not None else []
    return Gate(
        name="queue", open=True, reason=f"queue {queue.queue!r} is open" + (f" ({', '.join(used)})" if used else "")
    )


def _gates_of(worker: WorkerInfo, name: str, queue: str) -> list[Gate]:
    """Return whether the worker has the handler and serves the queue, and whether it claims anything at all now."""
    runs = worker.runs(name, queue)
    reason = f"{'runs' if runs else 'does not run'} tasks named {name!r} from queue {queue!r}"
    state = "paused" if worker.paused and worker.state == "running" else worker.state
    gates = [
        Gate(name=WORKER_KNOWS, open=runs, reason=reason),
        Gate(name="worker claims", open=worker.claims, reason=f"worker {worker.worker_id!r} is {state}"),
    ]
    if worker.on_claim is not None:
        said = f"this worker asks its hook on_claim as well, which {worker.on_claim}"
        told = (
            said if worker.on_claim_claims_nothing else f"{said}; whether it would take this task is not checked here"
        )
        gates.append(Gate(name="on_claim", open=not worker.on_claim_claims_nothing, reason=told))
    return gates
