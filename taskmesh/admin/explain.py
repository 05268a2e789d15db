"""Why is my task not running? Every gate of the claim rule, for one task and each worker, as the server judges it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from taskmesh.admin.queues import read_queue
from taskmesh.model.errors import TaskNotFound
from taskmesh.model.queue import QueueInfo
from taskmesh.store import Store, registry, rules
from taskmesh.store.driver import Document
from taskmesh.store.rules import NEVER

NO_WORKER = "(any worker)"
"""Who is asked about when no worker is alive."""
WORKER_KNOWS = "worker runs such tasks"
"""The gate that says whether a worker has the handler, and takes from the queue."""


class Gate(BaseModel):
    """One condition of the claim rule."""

    model_config = ConfigDict(frozen=True)

    name: str
    open: bool
    reason: str
    opens_at: datetime | None = None
    """When the gate opens by itself, if it is shut now and ever does."""


class Explanation(BaseModel):
    """Whether a worker could claim a task, gate by gate."""

    model_config = ConfigDict(frozen=True)

    worker_id: str
    claimable: bool
    next_claim_time: datetime | None
    """The earliest time at which this worker could claim it if nobody touches it; None: not by time alone."""
    gates: list[Gate]


class Waiting(BaseModel):
    """Tasks that wait, as one worker sees them: those of one name for which the same gates are shut."""

    model_config = ConfigDict(frozen=True)

    name: str
    shut: list[str]
    """Which gates; none: the worker could claim them now."""
    tasks: int
    example_key: str
    reasons: list[str]
    """Why they are shut for the example."""


async def explain(store: Store, id_: str, worker_id: str | None, as_if: Sequence[Document] = ()) -> list[Explanation]:
    """Evaluate all gates on the server. `as_if`: of the task as these stages would change it. Raises `TaskNotFound`."""
    workers = {worker["_id"]: worker for worker in await registry.workers(store)}
    asked = [worker_id] if worker_id is not None else [w for w, d in workers.items() if d.get("live")] or [NO_WORKER]
    explanations = []
    queue: QueueInfo | None = None
    for worker in asked:
        found = await _judged(store, [id_], worker, as_if)
        if not found:
            raise TaskNotFound(f"there is no task {id_!r}")
        task, opens, now = found[0]
        if queue is None or queue.queue != task["queue"]:
            queue = await read_queue(store, task["queue"])
        explanations.append(_explanation(worker, workers.get(worker), opens, task, _queue_gate(queue, task), now))
    return explanations


async def explain_waiting(store: Store, ids: Sequence[str], worker_id: str) -> list[Waiting]:
    """Evaluate all gates of these tasks for one worker, and group them; the largest group first."""
    workers = {worker["_id"]: worker for worker in await registry.workers(store)}
    queues: dict[str, QueueInfo] = {}
    groups: dict[tuple[str, ...], list[tuple[str, list[Gate]]]] = {}
    for task, opens, now in await _judged(store, ids, worker_id):
        queue = queues[task["queue"]] = queues.get(task["queue"]) or await read_queue(store, task["queue"])
        judged = _explanation(worker_id, workers.get(worker_id), opens, task, _queue_gate(queue, task), now)
        shut = [gate for gate in judged.gates if not gate.open]
        groups.setdefault((task["name"], *(gate.name for gate in shut)), []).append((task["key"], shut))
    found = [
        Waiting(
            name=name, shut=names, tasks=len(tasks), example_key=tasks[0][0], reasons=[g.reason for g in tasks[0][1]]
        )
        for (name, *names), tasks in groups.items()
    ]
    return sorted(found, key=lambda waiting: -waiting.tasks)


async def _judged(
    store: Store, ids: Sequence[str], worker_id: str, as_if: Sequence[Document] = ()
) -> list[tuple[Document, dict[str, Any], datetime]]:
    """Return each task that is there, when each gate opens for this worker, and the server's time."""
    gates = {**rules.task_gates(store.now), **rules.worker_gates({"$literal": worker_id})}
    evaluated = {f"g{i}": {"$ifNull": [gate, None]} for i, gate in enumerate(gates.values())}
    fields: Document = {"now": store.now, "gates": rules.with_facts(store.now, evaluated), "task": "$$ROOT"}
    cursor = await store.driver.aggregate(
        store.tasks,
        [
            {"$match": {"_id": {"$in": list(ids)}, "$expr": {"$not": [rules.is_forgotten(store.now)]}}},
            *as_if,
            {"$project": fields},
            {"$unset": "task.params"},
        ],
    )
    return [
        (found["task"], {name: found["gates"].get(f"g{i}") for i, name in enumerate(gates)}, found["now"])
        for found in await cursor.to_list(None)
    ]


def _queue_gate(queue: QueueInfo, task: Document) -> Gate:
    """Whether the task's queue, and its group in there, has room: what the fleet's limits and pauses say."""
    group = task.get("group")
    limit = queue.limits.of_group(group)
    running = queue.running_by_group.get(group, 0) if group is not None else 0
    if (why := queue.shut_because) is not None:
        opens_at = queue.paused_until if queue.paused else queue.next_start
        return Gate(name="queue", open=False, reason=f"queue {queue.queue!r} is shut: {why}", opens_at=opens_at)
    if limit is not None and running >= limit:
        return Gate(name="queue", open=False, reason=f"{running} of at most {limit} executions of group {group!r} run")
    return Gate(name="queue", open=True, reason=f"queue {queue.queue!r} is open{_room(queue)}")


def _room(queue: QueueInfo) -> str:
    limits = queue.limits
    parts = []
    if limits.running is not None:
        parts.append(f"{queue.running} of {limits.running} run")
    if limits.rate is not None:
        parts.append(f"{queue.started} of {limits.rate} starts in {limits.per_ms} ms")
    return f" ({', '.join(parts)})" if parts else ""


def _explanation(
    worker_id: str, worker: Document | None, opens: dict[str, Any], task: Document, queue: Gate, now: datetime
) -> Explanation:
    gates = [
        Gate(
            name=name,
            open=moment is None or moment <= now,
            reason=_reason(name, task, worker_id, moment, now),
            opens_at=moment if moment is not None and now < moment < NEVER else None,
        )
        for name, moment in opens.items()
    ]
    gates.append(queue)
    if worker is not None:
        knows = task["name"] in worker.get("names", ()) and (
            worker.get("queues") is None or task["queue"] in worker["queues"]
        )
        reason = f"{'runs' if knows else 'does not run'} tasks named {task['name']!r} from queue {task['queue']!r}"
        gates.append(Gate(name=WORKER_KNOWS, open=knows, reason=reason))
        gates.append(_worker_gate(worker))
    claimable = all(gate.open for gate in gates)
    latest = max((moment for moment in (*opens.values(), queue.opens_at) if moment is not None), default=now)
    opens_at = max(latest, now)
    # By then it may have expired, or failed by the last lease that was allowed to run out.
    finished_before = task.get("settle_time") is not None and task["settle_time"] <= opens_at
    by_time = all(gate.open or gate.opens_at is not None for gate in gates) and not finished_before
    return Explanation(
        worker_id=worker_id, claimable=claimable, next_claim_time=opens_at if by_time else None, gates=gates
    )


def _on_their_way_out(leaving: list[Document]) -> str:
    workers = ", ".join(sorted(entry["worker_id"] for entry in leaving))
    return f", {len(leaving)} stopped and on their way out ({workers})" if leaving else ""


def _worker_gate(worker: Document) -> Gate:
    """Whether the worker claims anything at all now."""
    state = worker.get("state", "stopped") if worker.get("live") else "gone"
    if worker.get("paused") and state == "running":
        state = "paused"
    return Gate(name="worker claims", open=state == "running", reason=f"worker {worker['_id']!r} is {state}")


def _reason(gate: str, task: Document, worker_id: str, moment: datetime | None, now: datetime) -> str:
    """Say in words which values the server compared."""
    option, state = task.get("task_option", {}), task.get("task_state", {})
    entries = state.get("worker_states", [])
    live = [e for e in entries if e["state"] == "RUNNING" and e["ping_expire_time"] > now]
    leaving = [e for e in state.get("leaving") or () if e["ping_expire_time"] > now]
    done = [e for e in entries if e["state"] == "SUCCESS"]
    fails = sum(e["state"] == "FAIL" for e in entries) + state.get("dropped_fail_cnt", 0)
    lost = sum(e["state"] == "RUNNING" and e["ping_expire_time"] <= now for e in entries)
    delay = f"delay {option.get('unexpected_retry_delay_ms')} ms for the {option.get('unexpected_retry_delay_scope')}"
    texts = {
        "unfinished": f"stored status {task.get('status')}, {len(done)} of {option.get('concurrent_worker_cnt')} SUCCESS",
        "unexpired": f"expire_time {state.get('expire_time') or 'not set'}",
        "started": f"start_time {state.get('start_time') or 'not set'}",
        "room": f"{len(live)} running{_on_their_way_out(leaving)} and {len(done)} succeeded, concurrent_worker_cnt is "
        f"{option.get('concurrent_worker_cnt')}",
        "retries left": f"{fails} FAIL, max_unexpected_retries {option.get('max_unexpected_retries')}",
        "timeouts left": f"{state.get('timeout_cnt', 0) + lost} lost in a row, max_timeouts {option.get('max_timeouts')}",
        "retry delay": f"{fails} FAIL, {delay}",
        "delay asked for": f"asked for by Retry or Snooze until {state['resume_time']}"
        if state.get("resume_time")
        else "none asked for",
        "worker allowed": f"specific_worker_ids {', '.join(option.get('specific_worker_ids', [])) or 'any'}",
        "not twice": f"{sum(e['worker_id'] == worker_id for e in live + leaving + done)} live or successful entries of "
        f"{worker_id}",
    }
    shut = (
        ""
        if moment is None or moment <= now
        else "; that will not change by itself"
        if moment >= NEVER
        else f" — opens at {moment.isoformat()}"
    )
    return texts.get(gate, "") + shut
