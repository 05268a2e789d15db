"""Stopping: what can end ends, the rest is handed back uncharged, and nothing runs on unseen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from taskmesh import Consumer, Ending, LeaseLost, Status, Task, TaskMesh, TaskOption, current_task
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import finished, parts_of, status_is, working


async def test_m20_a_stop_lets_short_tasks_end_and_hands_long_ones_back_uncharged(mesh: TaskMesh) -> None:
    """Also T34, as far as one process goes."""
    ran: list[tuple[str, str]] = []
    cancelled: list[str] = []

    @mesh.task
    async def job(seconds: float) -> Any:
        task = current_task()
        ran.append((task.key, task.worker_id))
        try:
            await asyncio.sleep(seconds if task.worker_id == "first" else 0)
        except asyncio.CancelledError:
            cancelled.append(task.key)
            raise
        return task.worker_id

    short = await job.publish_many({f"short {i}": {"seconds": 0.5} for i in range(5)})
    long = await job.publish_many({f"long {i}": {"seconds": 60} for i in range(5)})
    first = mesh.consumer(worker_id="first", concurrency=20)
    running = asyncio.create_task(first.run())
    await eventually(lambda: len(ran) == 10)
    await job.publish("too late for the first", seconds=0)

    await first.stop(grace_ms=1_500)

    assert first.state == "stopped"
    assert first.running == []
    await running
    assert sorted(cancelled) == [f"long {i}" for i in range(5)]
    for handle in short:
        assert await handle.result(timeout=60) == "first"
    for handle in long:
        task = await handle.task()
        assert (task.status, task.task_state.worker_states) == (Status.INIT, [])
        assert (task.task_state.timeout_cnt, task.task_state.lost_cnt) == (0, 0)
    await mesh.consumer(worker_id="second").run(until_idle=True)
    for handle in long:
        assert await handle.result(timeout=60) == "second"
        (entry,) = (await handle.task()).task_state.worker_states
        assert entry.worker_id == "second"


@pytest.mark.timed
async def test_what_a_stopping_worker_gives_back_starts_elsewhere_at_once(mesh: TaskMesh) -> None:
    ran: list[str] = []

    @mesh.task(option=TaskOption(worker_timeout_ms=60_000))
    async def job() -> None:
        ran.append(current_task().worker_id)
        if current_task().worker_id == "first":
            await asyncio.sleep(60)

    await job.publish("k")
    async with working(mesh, "first") as first:
        await eventually(lambda: ran == ["first"])
        async with working(mesh, "second"):
            await first.stop(grace_ms=0)
            await eventually(lambda: ran == ["first", "second"], 20, what="long before the end of its lease")
            task = await finished(mesh, "job", "k")
    assert [(entry.worker_id, entry.state) for entry in task.task_state.worker_states] == [("second", "SUCCESS")]


@asynccontextmanager
async def _busy(mesh: TaskMesh) -> AsyncIterator[Consumer]:
    """A consumer that runs something long, which it has given back when the block ends."""

    @mesh.task
    async def job() -> None:
        await asyncio.sleep(60)

    await job.publish("k")
    async with working(mesh) as consumer:
        await eventually(lambda: consumer.running == ["k"])
        yield consumer
    assert (await mesh.get("job", "k")).status is Status.INIT


async def test_a_shorter_grace_hastens_a_stop_that_is_under_way(mesh: TaskMesh) -> None:
    async with _busy(mesh) as consumer:
        patient = asyncio.create_task(consumer.stop(grace_ms=60_000))
        await eventually(lambda: consumer.state == "stopping")
        async with asyncio.timeout(30):
            await consumer.stop(grace_ms=0)
            await patient


async def test_a_shorter_grace_is_heard_while_claims_are_still_on_their_way(mesh: TaskMesh) -> None:
    """A second SIGTERM right after the first was lost now and then."""
    async with _busy(mesh) as consumer:
        claimer = parts_of(consumer).claimer
        drain = claimer.drain

        async def drain_slowly() -> None:
            consumer.begin_stop(0)
            await drain()

        claimer.drain = drain_slowly  # type: ignore[method-assign]
        async with asyncio.timeout(30):
            await consumer.stop(grace_ms=60_000)


async def test_a_cancelled_run_cancels_and_releases_what_it_ran(mesh: TaskMesh) -> None:
    happened: list[str] = []

    @mesh.task
    async def job() -> None:
        happened.append("started")
        try:
            await asyncio.sleep(60)
        finally:
            happened.append("ended")

    await job.publish("k")
    consumer = mesh.consumer()
    running = asyncio.create_task(consumer.run())
    await eventually(lambda: happened)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (happened, consumer.state, consumer.running) == (["started", "ended"], "stopped", [])
    task = await mesh.get("job", "k")
    assert (task.status, task.task_state.worker_states) == (Status.INIT, [])


async def test_a_handler_that_ignores_its_cancellation_does_not_keep_its_task(mesh: TaskMesh) -> None:
    release = asyncio.Event()

    @mesh.task
    async def job() -> None:
        if current_task().worker_id == "stubborn":
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

    await job.publish("k")
    async with working(mesh, "stubborn") as consumer:
        await status_is(mesh, "job", "k", Status.RUNNING)
        async with asyncio.timeout(60):
            await consumer.stop(grace_ms=0)
    assert (await mesh.get("job", "k")).status is Status.INIT
    await mesh.consumer(worker_id="another").run(until_idle=True)
    release.set()
    task = await mesh.get("job", "k")
    assert [(entry.worker_id, entry.state) for entry in task.task_state.worker_states] == [("another", "SUCCESS")]


async def test_a_consumer_that_never_ran_can_be_stopped_and_runs_no_more(mesh: TaskMesh) -> None:
    consumer = mesh.consumer()
    await consumer.stop()
    assert consumer.state == "stopped"
    with pytest.raises(RuntimeError, match="this consumer is stopped: a consumer runs once, make another"):
        await consumer.run()


async def test_a_paused_worker_claims_nothing_and_what_it_runs_runs_on(mesh: TaskMesh) -> None:
    release = asyncio.Event()

    @mesh.task
    async def job() -> None:
        await release.wait()

    await job.publish("running")
    async with working(mesh) as consumer:
        await eventually(lambda: consumer.running == ["running"])
        consumer.pause()
        await job.publish("waiting")
        release.set()
        await finished(mesh, "job", "running")
        assert await (await job.publish("waiting")).status() is Status.INIT
        consumer.resume()
        await finished(mesh, "job", "waiting")


async def test_slots_can_be_changed_while_the_consumer_runs(mesh: TaskMesh) -> None:
    release = asyncio.Event()

    @mesh.task
    async def job() -> None:
        await release.wait()

    await job.publish_many({f"k{i}": {} for i in range(30)})
    async with working(mesh, concurrency=2) as consumer:
        await eventually(lambda: len(consumer.running) == 2)
        consumer.concurrency = 10
        await eventually(lambda: len(consumer.running) == 10)
        consumer.concurrency = 3
        assert len(consumer.running) == 10, "what runs, runs on"
        release.set()
        for i in range(30):
            await finished(mesh, "job", f"k{i}")


@pytest.mark.parametrize("verb", ["cancel", "delete"])
async def test_a_running_task_that_is_cancelled_or_deleted_stops_at_once(mesh: TaskMesh, verb: str) -> None:
    begun = asyncio.Event()
    stopped: list[BaseException] = []

    @mesh.task
    async def job() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            stopped.append(error)
            with pytest.raises(LeaseLost):
                await current_task().progress(0.5)
            raise

    await job.publish("k")
    async with working(mesh) as consumer:
        await eventually(begun.is_set)
        task = await getattr(mesh, verb)("job", "k")
        assert task.status is (Status.CANCELLED if verb == "cancel" else Status.RUNNING)
        await eventually(lambda: stopped and not consumer.running, 20, what="it stops, and not by a ping")
        if verb == "cancel":
            assert (await mesh.get("job", "k")).status is Status.CANCELLED
        else:
            assert [task async for task in mesh.find()] == []


async def test_workers_can_be_stopped_paused_and_resized_from_afar(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    async with working(mesh, "w1") as consumer:
        await mesh.pause_worker("w1")
        await eventually(lambda: consumer.paused)
        await mesh.resume_worker("w1")
        await eventually(lambda: not consumer.paused)
        await mesh.fleet.set_concurrency("w1", 7)
        await eventually(lambda: consumer.concurrency == 7)
        await mesh.stop_worker("w1", grace_ms=0)
        await eventually(lambda: consumer.state == "stopped")
    (worker,) = await mesh.workers()
    assert (worker.worker_id, worker.state, worker.names) == ("w1", "stopped", ["job"])


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_a_stop_at_once_records_what_has_ended_though_its_hook_still_runs(mesh: TaskMesh, how: str) -> None:
    in_hook, release = asyncio.Event(), asyncio.Event()

    async def after(_: Task, __: Ending) -> None:
        in_hook.set()
        await release.wait()

    @mesh.task
    async def job() -> int:
        return 7

    handle = await job.publish("k")
    consumer = mesh.consumer(after=after)
    running = asyncio.create_task(consumer.run())
    await in_hook.wait()
    if how == "stop":
        consumer.begin_stop(0)
    else:
        running.cancel()
    ended, _ = await asyncio.wait([running], timeout=1)
    release.set()
    assert not ended, "there is still an outcome to record"
    await asyncio.wait([running])
    task = await handle.task()
    assert (task.status, [entry.returns for entry in task.task_state.worker_states]) == (Status.SUCCESS, [7])


@pytest.mark.slow
async def test_a_hook_that_never_ends_is_cut_short_by_a_stop_and_the_outcome_recorded(mesh: TaskMesh) -> None:
    in_hook = asyncio.Event()

    async def after(_: Task, __: Ending) -> None:
        in_hook.set()
        await asyncio.sleep(600)

    @mesh.task
    async def job() -> int:
        return 7

    handle = await job.publish("k")
    async with working(mesh, after=after) as consumer:
        await in_hook.wait()
        async with asyncio.timeout(60):
            await consumer.stop(grace_ms=0)
    assert (await handle.task()).status is Status.SUCCESS


@pytest.mark.slow
async def test_a_stop_at_once_waits_for_a_success_that_is_recorded_with_what_was_published(
    mesh: TaskMesh, mongo_uri: str
) -> None:
    @mesh.task
    async def job() -> None:
        await current_task().publish("another", "published", n=1)

    async with working(mesh, names=["job"]) as consumer:
        slow: dict[str, Any] = {"blockConnection": True, "blockTimeMS": 3_000}
        async with failing_commands(mongo_uri, ["commitTransaction"], times=1, **slow) as have_failed:
            handle = await job.publish("k")
            await have_failed()
            await consumer.stop(grace_ms=0)
            assert (await handle.task()).status is Status.SUCCESS
    assert [task.key async for task in mesh.find("another")] == ["published"]
