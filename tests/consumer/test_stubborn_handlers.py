"""Async handlers that ignore their cancellation: the outcome is recorded without them; they hold their slot to their end."""

from __future__ import annotations

import asyncio

import pytest

from taskmesh import LeaseLost, Status, TaskMesh, TaskOption, current_task
from taskmesh.consumer import executor
from tests.waiting import eventually
from tests.working import finished, working


class Stubborn:
    """What a handler waits for that ends when the test says so, and not before."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = 0

    async def wait(self) -> None:
        self.begun.set()
        while not self.release.is_set():
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_CANCELLED_ENDS_WITHIN_S", 0.3)


async def test_past_run_timeout_it_has_failed_runs_elsewhere_and_keeps_its_slot_here(mesh: TaskMesh) -> None:
    stubborn = Stubborn()
    refused: list[str] = []

    @mesh.task(option=TaskOption(run_timeout_ms=300, unexpected_retry_delay_ms=0))
    async def job() -> str:
        task = current_task()
        if task.worker_id == "another":
            return "done"
        await stubborn.wait()
        try:
            await task.publish("next", "k", n=1)
        except LeaseLost as error:
            refused.append(str(error))
        return "too late"

    handle = await job.publish("k")
    async with working(mesh, "first", concurrency=1) as first:
        await eventually(lambda: stubborn.cancelled)
        async with working(mesh, "another"):
            assert await handle.result(60) == "done"
        failed, done = (await handle.task()).task_state.worker_states
        assert (failed.worker_id, failed.state) == ("first", "FAIL")
        assert (failed.fail_reason or "").startswith("run_timeout_ms: the execution took more than 300 ms")
        assert (done.worker_id, done.state) == ("another", "SUCCESS")
        assert first.running == ["k"], "it is shown, and holds its slot"
        stubborn.release.set()
        await eventually(lambda: not first.running)
    assert (stubborn.cancelled, len(refused)) == (1, 1)
    assert (await handle.task()).task_state.worker_states == [failed, done], "its late result is ignored"


async def test_a_clean_up_within_the_time_is_waited_for(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_CANCELLED_ENDS_WITHIN_S", 60.0)
    cleaned_up: list[str] = []

    @mesh.task(option=TaskOption(run_timeout_ms=200, max_unexpected_retries=0))
    async def job() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.5)
            cleaned_up.append(str((await mesh.get("job", "k")).status))

    await job.publish("k")
    async with working(mesh) as consumer:
        assert (await finished(mesh, "job", "k")).status is Status.FAIL
        await eventually(lambda: not consumer.running)
    assert cleaned_up == [str(Status.RUNNING)]


@pytest.mark.parametrize("verb", ["cancel", "delete"])
async def test_of_a_cancelled_task_nothing_is_left_but_its_slot_until_it_ends(
    mesh: TaskMesh, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    stubborn = Stubborn()

    @mesh.task
    async def job() -> None:
        await stubborn.wait()

    await job.publish("k")
    async with working(mesh, concurrency=1) as consumer:
        await eventually(stubborn.begun.is_set)
        await getattr(mesh, verb)("job", "k")
        await eventually(lambda: "is still running after its execution has ended" in caplog.text)
        assert (stubborn.cancelled, consumer.running) == (1, ["k"])
        if verb == "delete":
            await job.publish("k2")
        stubborn.release.set()
        await eventually(lambda: "k" not in consumer.running)
        if verb == "cancel":

            async def has_ended() -> bool:
                task = await mesh.get("job", "k")
                return [entry.state for entry in task.task_state.worker_states] == ["FAIL"]

            await eventually(has_ended)
            assert (await mesh.get("job", "k")).status is Status.CANCELLED
        else:
            assert (await finished(mesh, "job", "k2")).status is Status.SUCCESS
