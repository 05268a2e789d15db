"""Whoever was told to stop has not succeeded: that `cancelled` is true, and how the execution is judged, are one decision."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from taskmesh import Retry, Snooze, Status, TaskFailed, TaskMesh, TaskOption, current_blocking_task, current_task
from tests.consumer import process_handlers
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import finished, working

BRIEF = TaskOption(ping_interval_ms=300, worker_timeout_ms=2_000, unexpected_retry_delay_ms=0)
PING_HANGS_MS = 3_500
DEADLINE_S = 60.0


@pytest.mark.parametrize("kind", ["async", "thread", "process"])
async def test_a_handler_that_obeys_cancelled_when_its_lease_is_over_is_lost_not_successful(
    mesh: TaskMesh, mongo_uri: str, kind: str
) -> None:
    """The first ping hangs: so `cancelled` is true before the pinger says so, and before the server's lease is over."""
    begun: list[str] = []

    if kind == "async":

        @mesh.task(option=BRIEF, name="polls")
        async def polls() -> str:
            task = current_task()
            begun.append(task.running_id)
            while task.attempt == 1 and not task.cancelled:  # noqa: ASYNC110 -- polling is what the test is about
                await asyncio.sleep(0.001)
            return "half" if task.attempt == 1 else "whole"

        job: Any = polls
    elif kind == "thread":

        @mesh.task(option=BRIEF, name="polls")
        def polls_in_a_thread() -> str:
            task = current_task()
            begun.append(task.running_id)
            while task.attempt == 1 and not task.cancelled:
                time.sleep(0.001)
            return "half" if task.attempt == 1 else "whole"

        job = polls_in_a_thread
    else:
        job = mesh.task(process_handlers.half_if_told, option=BRIEF, name="polls", run="process")

    handles = [await job.publish(f"k{i}") for i in range(4)]
    async with working(mesh):

        async def all_run() -> bool:
            logs = [(await handle.task()).task_state for handle in handles]
            ran = len(begun) if kind != "process" else sum(state.progress is not None for state in logs)
            return ran == len(handles)

        await eventually(all_run)
        namespace = f"{mesh.store.driver.database.name}.tasks"
        async with failing_commands(
            mongo_uri, ["update"], times=1, namespace=namespace, blockConnection=True, blockTimeMS=PING_HANGS_MS
        ) as has_failed:
            await has_failed()
            assert [await handle.result(60) for handle in handles] == ["whole"] * len(handles)
    states = [(await handle.task()).task_state for handle in handles]
    assert all(state.lost_cnt >= 1 for state in states), "a second child may be lost too, while the ping still hangs"
    assert [[entry.state for entry in state.worker_states] for state in states] == [["SUCCESS"]] * len(handles)


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
