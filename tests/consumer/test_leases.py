"""Leases: as long as a worker lives its tasks are its own, and no longer."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import datetime, timedelta
from typing import Any

import pytest

from taskmesh import Snooze, Status, TaskMesh, TaskOption, WorkerIdTaken, current_task
from taskmesh.store.claim import claim
from tests.faults import failing_commands
from tests.waiting import eventually, slowness_of_the_machine, wait_until
from tests.working import finished, status_is, working, working_in_a_thread


async def test_m5_the_first_lease_is_as_long_as_the_option_says(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(worker_timeout_ms=45_000, ping_interval_ms=10_000))
    async def job() -> None:
        await asyncio.sleep(60)

    await job.publish("k")
    async with working(mesh):
        (entry,) = (await status_is(mesh, "job", "k", Status.RUNNING)).task_state.worker_states
    assert entry.start_time is not None
    assert entry.ping_expire_time == entry.start_time + timedelta(seconds=45)


@pytest.mark.timed
async def test_m5_a_worker_that_dies_at_once_is_followed_right_after_its_lease(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(worker_timeout_ms=1_500, ping_interval_ms=500))
    async def job() -> str:
        return "done"

    handle = await job.publish("k")
    assert await claim(mesh.store, ["job:k"], "it dies now", "r1") == 1
    async with working(mesh, "w"), slowness_of_the_machine(mesh) as slowness:
        assert await handle.result(timeout=60) == "done"
    state = (await handle.task()).task_state
    (loss,), (entry,) = state.losses, state.worker_states
    assert (loss.worker_id, entry.worker_id, state.lost_cnt, state.timeout_cnt) == ("it dies now", "w", 1, 0)
    assert loss.start_time is not None
    assert loss.ping_expire_time == loss.start_time + timedelta(milliseconds=1_500)
    assert entry.start_time is not None
    assert timedelta(0) <= entry.start_time - loss.ping_expire_time < timedelta(seconds=1.5) + slowness.allows


async def test_m3_running_ids_are_unique_per_task_among_all_workers(mesh: TaskMesh) -> None:
    seen: dict[str, list[str]] = {}

    @mesh.task
    async def job() -> None:
        task = current_task()
        ids = seen.setdefault(task.key, [])
        ids.append(task.running_id)
        if len(ids) < 10:
            raise Snooze

    await job.publish_many({f"k{i}": {} for i in range(8)})
    async with working(mesh), working(mesh):
        await eventually(lambda: len(seen) == 8 and all(len(ids) == 10 for ids in seen.values()))
    assert all(len(set(ids)) == 10 for ids in seen.values())


@pytest.mark.lasting
async def test_t8_a_task_that_runs_for_many_leases_is_left_to_its_worker(mesh: TaskMesh) -> None:
    ran: list[str] = []

    @mesh.task(option=TaskOption(worker_timeout_ms=2_500, ping_interval_ms=250, max_timeouts=0))
    async def job() -> str:
        ran.append(current_task().worker_id)
        await asyncio.sleep(9)
        return "done"

    handle = await job.publish("k")
    async with working(mesh, "w1"):
        await eventually(lambda: ran == ["w1"])
        async with working(mesh, "w2"):
            # The registry never frees a task; only its lease does.
            await mesh.store.driver.collection("workers").delete_one({"_id": "w1"})
            assert await handle.result(timeout=60) == "done"
    assert ran == ["w1"]
    assert (await handle.task()).task_state.lost_cnt == 0


@pytest.mark.lasting
async def test_t4_m23_failed_renewals_cost_nothing_while_the_lease_lasts_and_the_handler_when_it_ends(
    mongo_uri: str, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled_at: dict[str, datetime] = {}
    mesh = TaskMesh(mongo_uri, database=database)

    # Of a lease of eight seconds the last 0.8 are kept as a margin: this loop may be late by that.
    @mesh.task(option=TaskOption(worker_timeout_ms=8_000, ping_interval_ms=200, max_timeouts=100))
    async def job() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled_at.setdefault(current_task().key, mesh.clock.now())
            raise

    def failures() -> int:
        return sum("a ping of" in record.message for record in caplog.records)

    async with mesh, working(mesh, "w", listen=False) as consumer:
        await job.publish_many({f"k{i}": {} for i in range(50)})
        await eventually(lambda: len(consumer.running) == 50)
        for round_ in range(10):
            how: dict[str, Any] = {"errorCode": 6} if round_ % 2 else {"closeConnection": True}
            before = failures()
            async with failing_commands(mongo_uri, ["update"], **how):
                await eventually(lambda before=before: failures() >= before + 2)  # type: ignore[misc]  # a default
            before_s = await _soonest_lease_end_s(mesh)
            await eventually(lambda before_s=before_s: _lease_ends_later(mesh, before_s))  # type: ignore[misc]
        assert not cancelled_at

        async with failing_commands(mongo_uri, ["update"], closeConnection=True):
            await eventually(lambda: len(cancelled_at) == 50)
            tasks = {task.key: task async for task in mesh.find("job")}
        for key, moment in cancelled_at.items():
            end = tasks[key].task_state.worker_states[0].ping_expire_time
            assert end is not None
            assert moment < end, "the handler ends before the database lets another in"
            assert end - moment < timedelta(seconds=1.5)


async def _soonest_lease_end_s(mesh: TaskMesh) -> float:
    ends = [task.task_state.worker_states[0].ping_expire_time async for task in mesh.find("job")]
    return min(end.timestamp() for end in ends if end is not None)


async def _lease_ends_later(mesh: TaskMesh, than_s: float) -> bool:
    return await _soonest_lease_end_s(mesh) > than_s


TWENTY = [f"k{i}" for i in range(20)]


@pytest.mark.blocks_the_loop
async def test_t2_a_handler_that_blocks_the_loop_costs_no_other_its_lease_and_is_named(
    mongo_uri: str, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[tuple[str, str]] = []
    gate = asyncio.Event()
    mesh = TaskMesh(mongo_uri, database=database)

    @mesh.task(name="job", option=TaskOption(worker_timeout_ms=4_000, ping_interval_ms=600))
    async def block_one() -> str:
        task = current_task()
        ran.append((task.key, task.worker_id))
        await gate.wait()
        if task.key == "k7":
            time.sleep(5)  # noqa: ASYNC251  # that is the point
        return str(task.worker_id)

    def define(other: TaskMesh) -> None:
        @other.task
        async def job() -> str:
            ran.append((current_task().key, current_task().worker_id))
            return "taken over"

    async with mesh:
        handles = await block_one.publish_many({key: {} for key in TWENTY})
        async with working(mesh, "first"):
            await eventually(lambda: len(ran) == 20)
            with working_in_a_thread(mongo_uri, database, define, "second"):
                gate.set()
                assert [await handle.result(timeout=60) for handle in handles] == ["first"] * 20
        tasks = [await handle.task() for handle in handles]

    assert sorted(ran) == sorted((key, "first") for key in TWENTY)
    assert all(task.task_state.lost_cnt == 0 for task in tasks)
    # A machine that stood still may have been warned of as well, before or after, but then of nobody's handler.
    blocked = [record.message for record in caplog.records if "the event loop is blocked" in record.message]
    warnings = [message for message in blocked if "task job:k7" in message]
    assert len(warnings) == 1, blocked
    assert "test_leases.py" in warnings[0]
    assert "in block_one" in warnings[0]


@pytest.mark.lasting
@pytest.mark.blocks_the_loop
async def test_t3_a_loop_that_stands_still_past_the_limit_loses_its_tasks_and_shows_all_stacks(
    mongo_uri: str, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[tuple[str, str]] = []
    gate = asyncio.Event()
    mesh = TaskMesh(mongo_uri, database=database)

    @mesh.task(name="job", option=TaskOption(worker_timeout_ms=1_500, ping_interval_ms=300))
    async def block_one() -> str:
        task = current_task()
        ran.append((task.key, task.worker_id))
        await gate.wait()
        if task.key == "k7":
            # Until the other worker has done them all: this loop is dead for it.
            wait_until(lambda: len([1 for _, worker in ran if worker == "second"]) == 20)
        await asyncio.sleep(60)
        return "never"

    def define(other: TaskMesh) -> None:
        @other.task
        async def job() -> str:
            ran.append((current_task().key, current_task().worker_id))
            return "taken over"

    async with mesh:
        handles = await block_one.publish_many({key: {} for key in TWENTY})
        async with working(mesh, "first", stall_limit_ms=1_500):
            await eventually(lambda: len(ran) == 20)
            with working_in_a_thread(mongo_uri, database, define, "second"):
                gate.set()
                assert [await handle.result(timeout=60) for handle in handles] == ["taken over"] * 20
        tasks = [await handle.task() for handle in handles]

    for task in tasks:
        assert [(entry.worker_id, entry.state) for entry in task.task_state.worker_states] == [("second", "SUCCESS")]
        assert task.task_state.losses[0].worker_id == "first"
    (verdict,) = [record for record in caplog.records if "treating this worker as dead" in record.message]
    assert verdict.levelno == logging.ERROR
    assert "--- MainThread" in verdict.message
    assert "in block_one" in verdict.message


async def test_t7_a_second_worker_with_the_same_id_is_refused(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> int:
        return 1

    async with working(mesh, "w1"):
        with pytest.raises(WorkerIdTaken, match="worker id 'w1' is in use by process"):
            await mesh.consumer(worker_id="w1").run()
        assert await (await job.publish("k")).result(timeout=60) == 1, "the first goes on"
    async with asyncio.timeout(6):  # its name is free again, at once
        await mesh.consumer(worker_id="w1").run(until_idle=True)


async def test_t7_the_id_of_a_process_that_is_gone_is_taken_over_at_once(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    async with working(mesh, "w1"):
        workers = mesh.store.driver.collection("workers")
        crashed = await workers.find_one({"_id": "w1"})
    assert crashed is not None
    crashed |= {"pid": process.pid, "state": "running", "last_seen": mesh.clock.now(), "instance": "another"}
    await workers.replace_one({"_id": "w1"}, crashed)
    async with asyncio.timeout(6):
        await mesh.consumer(worker_id="w1").run(until_idle=True)


async def test_t7_m34_workers_without_an_id_get_one_each(mesh: TaskMesh) -> None:
    ids = {mesh.consumer().worker_id for _ in range(100)}
    assert len(ids) == 100
    assert all(ids)


@pytest.mark.lasting
async def test_t5_leases_are_renewed_to_the_very_end_of_a_graceful_stop(mesh: TaskMesh) -> None:
    ran: list[str] = []

    @mesh.task(option=TaskOption(worker_timeout_ms=3_000, ping_interval_ms=300))
    async def job() -> str:
        ran.append(current_task().worker_id)
        await asyncio.sleep(7)
        return str(current_task().worker_id)

    handle = await job.publish("k")
    async with working(mesh, "first") as first:
        await eventually(lambda: ran == ["first"])
        async with working(mesh, "second"):
            await first.stop(grace_ms=30_000)
            assert first.state == "stopped"
            assert await handle.result(timeout=60) == "first"
    assert ran == ["first"]
    (entry,) = (await handle.task()).task_state.worker_states
    assert (entry.worker_id, entry.state) == ("first", "SUCCESS")


async def test_a_late_success_is_refused_and_said_aloud(mesh: TaskMesh, caplog: pytest.LogCaptureFixture) -> None:
    """The rest of fencing, with real processes, is in tests/processes."""
    release = asyncio.Event()

    @mesh.task
    async def job() -> str:
        await release.wait()
        return "late"

    handle = await job.publish("k")
    async with working(mesh, "w"):
        await status_is(mesh, "job", "k", Status.RUNNING)
        tasks = mesh.store.driver.collection("tasks")
        long_ago = mesh.clock.now() - timedelta(hours=1)
        await tasks.update_one({}, {"$set": {"task_state.worker_states.0.ping_expire_time": long_ago}})
        assert await claim(mesh.store, ["job:k"], "another", "r2") == 1
        release.set()
        await eventually(lambda: "came too late" in caplog.text)
        await mesh.cancel("job", "k")
        task = await finished(mesh, "job", "k")
    assert [(entry.worker_id, entry.state) for entry in task.task_state.worker_states] == [("another", "RUNNING")]
    assert await handle.status() is Status.CANCELLED
