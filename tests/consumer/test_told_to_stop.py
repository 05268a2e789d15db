"""Whoever was told to stop has not succeeded: that `cancelled` is true, and how the execution is judged, are one decision."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from taskmesh import Retry, Snooze, Status, TaskFailed, TaskMesh, TaskOption, current_blocking_task, current_task
from taskmesh.model.task import TaskState
from tests.consumer import process_handlers
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import finished, working

# However often a busy machine loses a lease by itself, the task goes on.
BRIEF = TaskOption(ping_interval_ms=300, worker_timeout_ms=2_000, unexpected_retry_delay_ms=0, max_timeouts=100)
PING_HANGS_MS = 3_500
DEADLINE_S = 60.0


def poller(mesh: TaskMesh, kind: str, opened: asyncio.Event) -> Any:
    """Define a task that works until the door is open, and returns early as soon as it is told to stop."""
    if kind == "process":
        return mesh.task(process_handlers.half_if_told, option=BRIEF, name="polls", run="process")

    @mesh.task(option=BRIEF, name="polls")
    def polls_in_a_thread(door: str) -> str:
        return process_handlers.half_if_told(door)

    if kind == "thread":
        return polls_in_a_thread

    async def polls(door: str) -> str:
        del door  # a look at a file would block the loop
        task = current_task()
        await task.progress(0.1)
        while not opened.is_set():
            if task.cancelled:
                return "half"
            await asyncio.sleep(0.001)
        return "whole"

    return mesh.task(polls, option=BRIEF, name="polls_in_the_loop")


@pytest.mark.parametrize("kind", ["async", "thread", "process"])
async def test_a_handler_that_obeys_cancelled_when_its_lease_is_over_is_lost_not_successful(
    mesh: TaskMesh, mongo_uri: str, tmp_path: Path, kind: str
) -> None:
    """Pings hang: so `cancelled` is true before the pinger says so, and before the server's lease is over."""
    door, opened = tmp_path / "door", asyncio.Event()
    job = poller(mesh, kind, opened)
    handles = [await job.publish(f"k{i}", door=str(door)) for i in range(2 if kind == "process" else 4)]

    async def states() -> list[TaskState]:
        return [(await handle.task()).task_state for handle in handles]

    async def all_run() -> bool:
        return all(state.progress is not None for state in await states())

    async def all_lost() -> bool:
        return all(state.lost_cnt >= 1 for state in await states())

    async with working(mesh):
        await eventually(all_run)
        namespace = f"{mesh.store.driver.database.name}.tasks"
        async with failing_commands(
            mongo_uri, ["update"], namespace=namespace, blockConnection=True, blockTimeMS=PING_HANGS_MS
        ):
            await eventually(all_lost, what="all have lost their leases")
        door.touch()
        opened.set()
        assert [await handle.result(60) for handle in handles] == ["whole"] * len(handles)
    for state in await states():
        assert [entry.state for entry in state.worker_states] == ["SUCCESS"]


@pytest.mark.parametrize("how", ["returns", "raises"])
async def test_a_handler_that_swallows_its_cancellation_when_the_worker_stops_is_released(
    mesh: TaskMesh, how: str
) -> None:
    begun = asyncio.Event()
    told: list[bool] = []

    @mesh.task
    async def job() -> str:
        task = current_task()
        begun.set()
        try:
            await asyncio.sleep(DEADLINE_S)
        except asyncio.CancelledError:
            told.append(task.cancelled)
            if how == "raises":
                raise ConnectionError("the connection was closed while it was in use") from None
        return "half"

    handle = await job.publish("k")
    async with working(mesh) as consumer:
        await begun.wait()
        await consumer.stop(grace_ms=0)
    task = await handle.task()
    assert told == [True]
    assert (task.status, task.task_state.worker_states, task.task_state.lost_cnt) == (Status.INIT, [], 0)


@pytest.mark.parametrize(
    ("said", "entries"),
    [(TaskFailed("no such customer"), ["FAIL"]), (Retry(delay_ms=60_000), ["FAIL"]), (Snooze(delay_ms=60_000), [])],
    ids=["TaskFailed", "Retry", "Snooze"],
)
async def test_what_a_handler_says_of_its_task_while_the_worker_stops_is_heard(
    mesh: TaskMesh, said: Exception, entries: list[str]
) -> None:
    begun = asyncio.Event()

    @mesh.task
    async def job() -> None:
        begun.set()
        try:
            await asyncio.sleep(DEADLINE_S)
        except asyncio.CancelledError:
            raise said from None

    handle = await job.publish("k")
    async with working(mesh) as consumer:
        await begun.wait()
        await consumer.stop(grace_ms=0)
    task = await handle.task()
    assert [entry.state for entry in task.task_state.worker_states] == entries
    assert task.status is (Status.FAIL if isinstance(said, TaskFailed) else Status.INIT)
    assert task.next_claim_time is None or task.next_claim_time > mesh.clock.now(), "the delay asked for is kept"


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_transaction_that_ends_early_because_it_was_told_to_leaves_nothing(mesh: TaskMesh, kind: str) -> None:
    begun = threading.Event()
    written = mesh.store.driver.database["written"]

    @mesh.task(name="job")
    async def in_loop() -> None:
        task = current_task()
        async with task.transaction() as session:
            begun.set()
            for n in range(100_000):
                if task.cancelled:
                    break
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    continue
                if n < 3:
                    await written.insert_one({"n": n}, session=session)
            task.set_result("half")

    def in_thread() -> None:
        task = current_blocking_task()
        with task.transaction() as session:
            session.client[written.database.name]["written"].insert_one({"n": 1}, session=session)
            begun.set()
            while not task.cancelled:
                time.sleep(0.001)
            task.set_result("half")

    job: Any = in_loop if kind == "async" else mesh.task(in_thread, name="job_in_thread")
    handle = await job.publish("k")
    async with working(mesh) as consumer:
        await eventually(begun.is_set)
        await consumer.stop(grace_ms=0)
    task = await handle.task()
    assert (task.status, task.task_state.worker_states) == (Status.INIT, [])
    assert await written.count_documents({}) == 0


async def test_a_handler_that_was_not_told_succeeds_whatever_it_swallowed(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> bool:
        inner = asyncio.current_task()
        assert inner is not None
        inner.cancel()  # its own doing
        try:
            await asyncio.sleep(DEADLINE_S)
        except asyncio.CancelledError:
            inner.uncancel()
        return bool(current_task().cancelled)

    await job.publish("k")
    async with working(mesh):
        task = await finished(mesh, "job", "k")
    assert (task.status, [entry.returns for entry in task.task_state.worker_states]) == (Status.SUCCESS, [False])
