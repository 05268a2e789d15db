"""`run_timeout_ms`: what it bounds, the hook `before` and the handler together, and what it does not, the start of a child."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta
from typing import Any

import pytest

from taskmesh import Status, Task, TaskMesh, TaskOption, current_task
from taskmesh.consumer.subprocess import processes
from taskmesh.consumer.subprocess.processes import Child
from tests.consumer import process_handlers
from tests.waiting import eventually
from tests.working import finished, working

SLOW_START_S = 1.5


def once(limit_ms: int) -> TaskOption:
    return TaskOption(run_timeout_ms=limit_ms, max_unexpected_retries=0)


async def test_a_hook_before_that_hangs_is_ended(mesh: TaskMesh) -> None:
    started: list[str] = []

    async def before(_: Task) -> None:
        await asyncio.sleep(60)

    @mesh.task(option=once(300))
    async def job() -> None:
        started.append(current_task().key)

    await job.publish("k")
    async with working(mesh, before=before) as consumer:
        task = await finished(mesh, "job", "k", 30)
        await eventually(lambda: not consumer.running, what="its slot is free")
    assert (task.status, started) == (Status.FAIL, [])
    assert "run_timeout_ms: the execution took more than 300 ms" in task.fail_reasons[0]


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_the_hook_and_the_handler_have_the_time_together(mesh: TaskMesh, kind: str) -> None:
    deadlines: list[timedelta] = []

    async def before(_: Task) -> None:
        await asyncio.sleep(0.6)

    @mesh.task(option=once(1_000))
    async def in_loop() -> None:
        deadlines.append(_left(mesh, current_task().deadline))
        await asyncio.sleep(0.6)

    @mesh.task(option=once(1_000))
    def in_thread() -> None:
        deadlines.append(_left(mesh, current_task().deadline))
        time.sleep(0.6)

    job: Any = in_loop if kind == "async" else in_thread
    await job.publish("k")
    async with working(mesh, before=before):
        task = await finished(mesh, job.name, "k", 30)
    assert task.status is Status.FAIL
    assert "run_timeout_ms: the execution took more than 1000 ms" in task.fail_reasons[0]
    assert all(left <= timedelta(seconds=0.41) for left in deadlines), "it is told how much is left"


async def test_the_start_of_a_child_is_not_in_it_and_the_hook_before_is(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_to_start() -> Child:
        time.sleep(SLOW_START_S)
        return Child()

    monkeypatch.setattr(processes, "Child", slow_to_start)
    job = mesh.task(process_handlers.tell_deadline_after, run="process", option=once(2_000))
    published = await job.publish_many({"quick": {"seconds": 0.0}, "slow": {"seconds": 30.0}})
    async with working(mesh):
        begun, deadline = await published[0].result(60)
        assert isinstance(begun, datetime)
        assert deadline > begun + timedelta(seconds=0.8), "it is counted from the handler's start, not from the child's"
        task = await finished(mesh, job.name, "slow", 60)
    assert "run_timeout_ms: the execution took more than 2000 ms" in task.fail_reasons[0]

    async def before(_: Task) -> None:
        await asyncio.sleep(1.1)

    handle = await job.publish("with a hook", seconds=1.1)
    async with working(mesh, before=before):
        task = await finished(mesh, job.name, handle.key, 60)
    assert "run_timeout_ms: the execution took more than 2000 ms" in task.fail_reasons[0]


def _left(mesh: TaskMesh, deadline: datetime | None) -> timedelta:
    assert deadline is not None
    return deadline - mesh.clock.now()
