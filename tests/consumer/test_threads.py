"""Plain functions in threads: told to stop, fenced when they do not, and counted until they have really ended (T33)."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from taskmesh import LeaseLost, Status, TaskMesh, TaskOption, current_blocking_task
from tests.waiting import eventually
from tests.working import finished, parts_of, working

DEADLINE_S = 60.0


async def test_t33_past_run_timeout_it_has_failed_and_its_slot_stays_taken_until_the_thread_is_free(
    mesh: TaskMesh,
) -> None:
    release = threading.Event()
    ran: list[str] = []

    @mesh.task(run="thread", option=TaskOption(run_timeout_ms=500, max_unexpected_retries=0))
    def stubborn() -> str:
        ran.append("stubborn")
        release.wait(DEADLINE_S)
        return "too late"

    @mesh.task(run="thread")
    def next_one() -> str:
        ran.append("next")
        return "done"

    try:
        async with working(mesh, concurrency=1) as consumer:
            await stubborn.publish("k")
            await eventually(lambda: ran)
            await next_one.publish("k")
            task = await finished(mesh, "stubborn", "k")
            [entry] = task.task_state.worker_states
            assert (task.status, entry.returns) == (Status.FAIL, None)
            assert (entry.fail_reason or "").startswith("run_timeout_ms: the execution took more than 500 ms")

            assert consumer.running == ["k"], "a thread that goes on is shown, and holds its slot"
            assert (await mesh.get("next_one", "k")).status is Status.INIT
            release.set()
            assert (await finished(mesh, "next_one", "k")).status is Status.SUCCESS
            assert ran == ["stubborn", "next"]
            assert await mesh.get("stubborn", "k") == task, "its late result is ignored"
    finally:
        release.set()


@pytest.mark.parametrize("verb", ["cancel", "delete"])
async def test_a_thread_is_told_by_cancelled_and_what_it_writes_after_is_refused(mesh: TaskMesh, verb: str) -> None:
    refused: list[str] = []
    begun = threading.Event()

    @mesh.task(run="thread")
    def job() -> str:
        begun.set()
        task = current_blocking_task()
        give_up = time.monotonic() + DEADLINE_S
        while not task.cancelled and time.monotonic() < give_up:
            time.sleep(0.005)  # a plain function has nothing else to wait by
        try:
            task.progress(0.9)
        except LeaseLost:
            refused.append("progress")
        try:
            task.publish("job", "k2")
        except LeaseLost:
            refused.append("publish")
        task.log("too late")
        return "too late"

    await job.publish("k")
    async with working(mesh) as consumer:
        await eventually(begun.is_set, DEADLINE_S)
        await getattr(mesh, verb)("job", "k")
        await eventually(lambda: not consumer.running, DEADLINE_S)
    assert refused == ["progress", "publish"]
    left = {task.key: (task.status, task.successes) async for task in mesh.find()}
    assert left == ({"k": (Status.CANCELLED, [])} if verb == "cancel" else {})


async def test_the_entry_of_a_cancelled_thread_shows_whether_it_is_still_on_its_way_out(mesh: TaskMesh) -> None:
    begun, release = threading.Event(), threading.Event()

    @mesh.task(run="thread", option=TaskOption(ping_interval_ms=100, worker_timeout_ms=20_000))
    def job() -> None:
        begun.set()
        release.wait(DEADLINE_S)

    async def state() -> tuple[str, str | None]:
        task = await mesh.get("job", "k")
        [entry] = task.task_state.worker_states
        assert task.status is Status.CANCELLED
        return entry.state, entry.fail_reason

    async def has_ended() -> bool:
        return await state() == ("FAIL", "the task was cancelled")

    try:
        await job.publish("k")
        async with working(mesh) as consumer:
            await eventually(begun.is_set)
            await mesh.cancel("job", "k")
            await eventually(lambda: parts_of(consumer).executions["job:k"].ended, what="it is told")
            assert await state() == ("RUNNING", None)
            assert consumer.running == ["k"]
            release.set()
            await eventually(has_ended)
            await eventually(lambda: not consumer.running)
    finally:
        release.set()


async def test_current_task_works_in_a_thread(mesh: TaskMesh) -> None:
    seen: dict[str, Any] = {}

    @mesh.task(option=TaskOption(priority=4, run_timeout_ms=60_000))
    def job() -> None:
        task = current_blocking_task()
        task.progress(0.5, "half way")
        task.log("a line")
        seen.update(name=task.name, key=task.key, worker=task.worker_id, attempt=task.attempt, option=task.option)
        seen.update(thread=threading.current_thread() is not threading.main_thread(), deadline=task.deadline)
        assert not task.cancelled

    await job.publish("k")
    async with working(mesh, "w"):
        task = await finished(mesh, "job", "k")
    assert task.status is Status.SUCCESS
    assert (seen["name"], seen["key"], seen["worker"], seen["attempt"]) == ("job", "k", "w", 1)
    assert seen["option"].priority == 4
    assert seen["thread"]
    [entry] = task.task_state.worker_states
    assert entry.start_time is not None
    assert 50 < (seen["deadline"] - entry.start_time).total_seconds() < 70
    assert [line.message for line in entry.logs] == ["a line"]
    assert task.task_state.progress is not None
    assert task.task_state.progress.message == "half way"
