"""Retry, cancel and delete do to a task in each state what the table in docs/tasks.md says, cell by cell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskmesh import (
    Consumer,
    Snooze,
    Status,
    Task,
    TaskFailed,
    TaskMesh,
    TaskNotFound,
    TaskOption,
    TaskRunning,
    current_task,
)
from taskmesh.client.definition import TaskDefinition
from taskmesh.store.claim import claim
from taskmesh.store.settle import settle
from tests.docs.tables import table
from tests.waiting import eventually
from tests.working import finished, status_is, working

VERBS = ("retry", "cancel", "delete")
ROWS = {row["the task"]: row for row in table("docs/tasks.md", "the task", *(f"`{verb}`" for verb in VERBS))}
SLOW_TO_COME_BACK = TaskOption(unexpected_retry_delay_ms=60_000, unexpected_retry_jitter=0.0)
SOON_S = 10.0

Job = TaskDefinition[Any, Any]
Bring = Callable[[TaskMesh, Job, str], Awaitable[Any]]
STATES: dict[str, tuple[Status, Bring]] = {}
BEGUN: set[str] = set()
"""The keys under which a handler waits to be stopped, or did."""


def state(row: str, status: Status) -> Callable[[Bring], Bring]:
    """Enter a way to bring a task into the state of a row."""

    def enter(bring: Bring) -> Bring:
        STATES[row] = status, bring
        return bring

    return enter


@state("is due", Status.INIT)
async def due(_: TaskMesh, job: Job, key: str) -> None:
    await job.configure(queue="nobody").publish(key, "return")


@state("waits for its `start_time`", Status.INIT)
async def delayed(_: TaskMesh, job: Job, key: str) -> None:
    await job.configure(queue="nobody", delay_ms=60_000).publish(key, "return")


@state("waits for a retry delay", Status.INIT)
async def failed_once(mesh: TaskMesh, job: Job, key: str) -> None:
    await job.publish(key, "raise")
    await eventually(lambda: _has_ended(mesh, key))


@state("waits for a `Snooze`", Status.INIT)
async def snoozed(mesh: TaskMesh, job: Job, key: str) -> None:
    await job.publish(key, "snooze")
    await eventually(lambda: _resumes(mesh, key))


@state("runs", Status.RUNNING)
async def running(mesh: TaskMesh, job: Job, key: str) -> None:
    await job.publish(key, "wait")
    await status_is(mesh, "job", key, Status.RUNNING)
    await eventually(lambda: key in BEGUN, what="its handler has begun")


@state("ran, and its lease has run out", Status.INIT)
async def lost(mesh: TaskMesh, job: Job, key: str) -> None:
    await job.configure(queue="nobody", ping_interval_ms=10, worker_timeout_ms=50).publish(key, "return")
    assert await claim(mesh.store, [f"job:{key}"], "a worker that died", "r1") == 1
    await status_is(mesh, "job", key, Status.INIT)


@state("is SUCCESS", Status.SUCCESS)
async def succeeded(mesh: TaskMesh, job: Job, key: str) -> None:
    await job.publish(key, "return")
    await finished(mesh, "job", key)


@state("is FAIL", Status.FAIL)
async def failed(mesh: TaskMesh, job: Job, key: str) -> None:
    await job.publish(key, "fail")
    await finished(mesh, "job", key)


@state("is CANCELLED", Status.CANCELLED)
async def cancelled(mesh: TaskMesh, job: Job, key: str) -> None:
    await job.publish(key, "raise")
    await eventually(lambda: _has_ended(mesh, key))
    await mesh.cancel("job", key)


@state("is EXPIRED", Status.EXPIRED)
async def expired(mesh: TaskMesh, job: Job, key: str) -> None:
    await job.configure(queue="nobody", expire_time=datetime.now(UTC) + timedelta(milliseconds=200)).publish(
        key, "return"
    )
    await status_is(mesh, "job", key, Status.EXPIRED)
    await settle(mesh.store)  # or a worker writes it down while the verb is asked


async def _has_ended(mesh: TaskMesh, key: str) -> bool:
    return [entry.state for entry in (await mesh.get("job", key)).task_state.worker_states] == ["FAIL"]


async def _resumes(mesh: TaskMesh, key: str) -> bool:
    return (await mesh.get("job", key)).task_state.resume_time is not None


def define(mesh: TaskMesh, stopped: list[str]) -> Job:
    @mesh.task(option=SLOW_TO_COME_BACK)
    async def job(then: str) -> str:
        if then == "wait":
            BEGUN.add(current_task().key)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                stopped.append(current_task().key)
                raise
        if then == "raise":
            raise ValueError("as asked")
        if then == "fail":
            raise TaskFailed("as asked")
        if then == "snooze":
            raise Snooze(delay_ms=60_000)
        return "done"

    return job


def test_the_table_has_every_state_and_no_other() -> None:
    assert list(ROWS) == list(STATES)


@pytest.mark.parametrize("verb", VERBS)
async def test_every_cell_of_the_table_is_true(mesh: TaskMesh, verb: str) -> None:
    stopped: list[str] = []
    BEGUN.clear()
    job = define(mesh, stopped)
    async with working(mesh, "w", queues=["default"]) as consumer:
        # All states at once: what one of them waits for, the others need not.
        await asyncio.gather(*(_check_cell(mesh, job, consumer, stopped, row, verb) for row in ROWS))


async def _check_cell(mesh: TaskMesh, job: Job, consumer: Consumer, stopped: list[str], row: str, verb: str) -> None:
    status, bring = STATES[row]
    cell = ROWS[row][f"`{verb}`"]
    key = f"{list(ROWS).index(row)}"
    await bring(mesh, job, key)
    before = await mesh.get("job", key)
    assert before.status is status, row
    if cell == "`TaskRunning`":
        with pytest.raises(TaskRunning):
            await mesh.retry("job", key)
        assert (await mesh.get("job", key)).status is Status.RUNNING
        return
    result: Task = await getattr(mesh, verb)("job", key)
    if cell.startswith("gone"):
        assert result == before, "it is returned as it was"
        with pytest.raises(TaskNotFound):
            await mesh.get("job", key)
    elif cell == "unchanged":
        assert result == before
    elif cell.startswith("CANCELLED"):
        assert (result.status, result.next_claim_time) == (Status.CANCELLED, None)
        assert (await mesh.get("job", key)).status is Status.CANCELLED
    else:
        await _check_retried(mesh, before, result, afresh={"INIT, due": False, "INIT, afresh": True}[cell])
    if cell.endswith("stopped"):
        await eventually(lambda: key in stopped and key not in consumer.running, SOON_S, what="its handler is stopped")


async def _check_retried(mesh: TaskMesh, before: Task, after: Task, *, afresh: bool) -> None:
    state = after.task_state
    # Those of the queue of nobody stay; the others may have been claimed already.
    assert after.status in (Status.INIT, Status.RUNNING) or after.queue == "default"
    if afresh:
        assert [e for e in state.worker_states if e in before.task_state.worker_states] == [], (
            "the old entries are gone"
        )
        assert (state.timeout_cnt, state.lost_cnt) == (0, 0)
    else:
        kept = {entry.running_id for entry in before.task_state.worker_states}
        assert kept <= {entry.running_id for entry in state.worker_states}
    assert state.expire_time is None or state.expire_time > datetime.now(UTC)
    if after.queue == "nobody":
        [explanation] = await mesh.explain(after.name, after.key, "any worker")
        assert explanation.claimable, [gate for gate in explanation.gates if not gate.open]
    else:
        await eventually(lambda: _runs_once_more(mesh, before), SOON_S, what=f"{before.key} runs once more")


async def _runs_once_more(mesh: TaskMesh, before: Task) -> bool:
    """Whether there is an execution that was not there before; a snoozed one leaves another moment to come back."""
    state = (await mesh.get(before.name, before.key)).task_state
    known = {entry.running_id for entry in before.task_state.worker_states}
    again = state.resume_time is not None and state.resume_time != before.task_state.resume_time
    return again or bool({entry.running_id for entry in state.worker_states} - known)


@pytest.mark.parametrize("verb", VERBS)
async def test_a_key_that_is_not_there_is_an_error_and_nothing_is_left_behind(mesh: TaskMesh, verb: str) -> None:
    with pytest.raises(TaskNotFound):
        await getattr(mesh, verb)("job", "k")
    assert [task async for task in mesh.find()] == []


async def test_an_option_changed_while_it_runs_disturbs_nothing_and_counts_from_the_next_claim(mesh: TaskMesh) -> None:
    changes: dict[str, Any] = {
        "priority": 7,
        "concurrent_worker_cnt": 2,
        "worker_timeout_ms": 70_000,
        "ping_interval_ms": 20_000,
        "max_unexpected_retries": 1,
        "unexpected_retry_delay_ms": 0,
        "unexpected_retry_delay_scope": "worker",
        "unexpected_retry_backoff": 2.0,
        "unexpected_retry_jitter": 0.0,
        "max_timeouts": 9,
        "run_timeout_ms": 30_000,
        "retain_success_ms": None,
        "retain_failed_ms": None,
        "on_fail": "dead",
        "specific_worker_ids": ("w", "somebody else"),
    }
    assert set(changes) == set(TaskOption.model_fields)
    seen: dict[str, list[Any]] = {field: [] for field in changes}
    release = asyncio.Event()

    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=100))
    async def job() -> None:
        field = current_task().key
        seen[field].append(getattr(current_task().option, field))
        await release.wait()
        if len(seen[field]) == 1:
            raise ValueError("so that it is claimed once more")
        seen[field].append(getattr(current_task().option, field))

    await job.publish_many({field: {} for field in changes})
    async with working(mesh, "w"):
        await eventually(lambda: all(seen.values()))
        for field, value in changes.items():
            assert (await mesh.set_option("job", field, **{field: value})).status is Status.RUNNING
        release.set()
        await eventually(lambda: all(len(options) == 3 for options in seen.values()))
    for field, value in changes.items():
        assert seen[field] == [getattr(TaskOption(unexpected_retry_delay_ms=100), field), value, value]


async def test_a_finished_task_goes_on_when_its_new_option_says_that_it_is_not_finished(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=0, max_unexpected_retries=0))
    async def job(fails: int) -> int:
        if current_task().attempt <= fails:
            raise ValueError
        return int(current_task().attempt)

    await job.publish_many({"failed": {"fails": 1}, "succeeded": {"fails": 0}})
    async with working(mesh, "w1"):
        assert (await finished(mesh, "job", "failed")).status is Status.FAIL
        assert (await finished(mesh, "job", "succeeded")).status is Status.SUCCESS
        await mesh.set_option("job", "failed", max_unexpected_retries=1)
        await mesh.set_option("job", "succeeded", concurrent_worker_cnt=2)
        assert (await finished(mesh, "job", "failed")).status is Status.SUCCESS
        assert (await mesh.get("job", "succeeded")).status is Status.INIT
        async with working(mesh, "w2"):
            task = await finished(mesh, "job", "succeeded")
    assert {entry.worker_id for entry in task.successes} == {"w1", "w2"}
