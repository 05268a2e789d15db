"""When tasks start, and in which order. Times are the server's, read from the entries."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from datetime import timedelta
from typing import Any

import pytest

from taskmesh import Retry, Snooze, Status, Task, TaskMesh, TaskOption, current_task
from taskmesh.store import change_stream
from taskmesh.store.find import Claimable, Page, look_up, scan
from tests.waiting import eventually, slowness_of_the_machine
from tests.working import finished, parts_of, working

AT_ONCE = TaskOption(unexpected_retry_delay_ms=0, unexpected_retry_jitter=0.0)


def started_late_by_s(task: Task) -> float:
    """How long after its `start_time` (or else its publishing) a task was claimed first."""
    due = task.task_state.start_time or task.task_state.create_time
    started = task.task_state.worker_states[0].start_time
    assert started is not None
    return (started - due).total_seconds()


@pytest.mark.timed
async def test_m7_delayed_tasks_start_on_time_and_never_before(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    async with working(mesh):
        for i in range(20):
            await job.configure(delay_ms=100 + 150 * i).publish(f"delayed {i}")
            await job.configure(start_time=mesh.clock.now() + timedelta(milliseconds=200 + 140 * i)).publish(
                f"timed {i}"
            )
        tasks = [await finished(mesh, "job", f"{kind} {i}") for i in range(20) for kind in ("delayed", "timed")]

    late_s = [started_late_by_s(task) for task in tasks]
    assert min(late_s) >= 0
    assert statistics.median(late_s) < 0.1
    assert max(late_s) < 3, "with room for a busy machine"


@pytest.mark.timed
@pytest.mark.parametrize("queue", ["default", "letters"])
async def test_a_delayed_task_in_a_queue_that_was_empty_starts_on_time(
    mesh: TaskMesh, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has looked round before there was anything, and no event tells of what is so far away."""
    monkeypatch.setattr(change_stream, "HORIZON_OF_NEW_MS", 1_000)

    @mesh.task(queue=queue)
    async def job() -> None: ...

    async with working(mesh) as consumer, slowness_of_the_machine(mesh) as slowness:
        await eventually(lambda: parts_of(consumer).scanner.scans > 0)
        handle = await job.configure(delay_ms=2_500).publish("k")
        task = await finished(mesh, "job", handle.key)
    assert 0 <= started_late_by_s(task) < 1.5 + slowness.allows.total_seconds()


@pytest.mark.timed
async def test_a_delayed_task_that_is_the_first_in_a_queue_of_no_definition_starts_on_time(mesh: TaskMesh) -> None:
    """The stream tells of it: the scan learns of such a queue only after some seconds."""

    @mesh.task
    async def job() -> None: ...

    async with working(mesh) as consumer, slowness_of_the_machine(mesh) as slowness:
        await eventually(lambda: parts_of(consumer).scanner.scans > 0)
        handle = await job.configure(queue="letters", delay_ms=2_500).publish("k")
        task = await finished(mesh, "job", handle.key)
    assert 0 <= started_late_by_s(task) < 1.5 + slowness.allows.total_seconds()


@pytest.mark.timed
async def test_a_delayed_task_that_is_far_away_when_published_starts_on_time_too(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No event announces it (its time lies beyond the stream's horizon): the scan knows it in time."""
    monkeypatch.setattr(change_stream, "HORIZON_OF_NEW_MS", 1_000)

    @mesh.task
    async def job() -> None: ...

    async with working(mesh):
        handles = [await job.configure(delay_ms=2_800 + 150 * i).publish(f"k{i}") for i in range(5)]
        assert await handles[0].status() is Status.INIT
        late_s = [started_late_by_s(await finished(mesh, "job", handle.key)) for handle in handles]
    assert min(late_s) >= 0
    assert statistics.median(late_s) < 0.5


@pytest.mark.timed
async def test_tasks_due_now_start_within_milliseconds(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    async with working(mesh):
        for i in range(50):
            await job.publish(f"k{i}")
            await asyncio.sleep(0.005)
        tasks = [await finished(mesh, "job", f"k{i}") for i in range(50)]
    assert statistics.median(started_late_by_s(task) for task in tasks) < 0.1


@pytest.mark.timed  # a second attempt is in its place if the stream reports the failure before the tasks in between have run
async def test_m8_tasks_run_by_priority_then_attempts_then_as_published(mesh: TaskMesh) -> None:
    ran: list[tuple[str, int]] = []
    numbers = random.Random(7)
    failing: set[str] = set()

    @mesh.task(option=AT_ONCE)
    async def job() -> None:
        task = current_task()
        ran.append((task.key, task.attempt))
        if task.key in failing and task.attempt == 1:
            raise ValueError("once")

    priority: dict[str, int] = {}
    for i in range(100):
        priority[f"k{i:02}"] = numbers.choice([-1, 0, 0, 5, 2**31 - 1, -(2**31)])
        if numbers.random() < 0.2:
            failing.add(f"k{i:02}")
        await job.configure(priority=priority[f"k{i:02}"]).publish(f"k{i:02}")
        await asyncio.sleep(0.001)  # so that each has a millisecond of its own
    await mesh.consumer(concurrency=1).run(until_idle=True)

    expected = [(key, 1) for key in priority] + [(key, 2) for key in sorted(failing)]
    expected.sort(key=lambda run: (-priority[run[0]], run[1], run[0]))
    assert ran == expected


async def test_m8_what_a_scan_saw_before_a_task_failed_does_not_put_it_before_fresh_ones(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers come so late that much of what they tell of has run and failed meanwhile."""
    ran: list[tuple[int, str]] = []

    async def late_scan(*args: Any, **options: Any) -> Page:
        page = await scan(*args, **options)
        await asyncio.sleep(0.15)
        return page

    async def late_look(*args: Any) -> list[Claimable]:
        rows = await look_up(*args)
        await asyncio.sleep(0.15)
        return rows

    monkeypatch.setattr("taskmesh.consumer.scanner.scan", late_scan)
    monkeypatch.setattr("taskmesh.consumer.listener.look_up", late_look)

    @mesh.task(option=AT_ONCE)
    async def job() -> None:
        ran.append((current_task().attempt, current_task().key))
        await asyncio.sleep(0.02)
        if current_task().attempt == 1:
            raise ValueError("once")

    await job.publish_many({f"k{i:02}": {} for i in range(80)})
    await mesh.consumer(concurrency=1).run(until_idle=True)
    assert ran == [(attempt, f"k{i:02}") for attempt in (1, 2) for i in range(80)]


async def test_m8_a_task_that_failed_stands_behind_a_fresh_one_though_it_was_due_before(mesh: TaskMesh) -> None:
    ran: list[str] = []
    release = asyncio.Event()

    @mesh.task
    async def job() -> None:
        ran.append(current_task().key)
        if ran == ["failing"]:
            raise Retry(delay_ms=200)
        if current_task().key == "holding":
            await release.wait()

    await job.publish("failing")
    async with working(mesh, concurrency=1) as consumer:
        await eventually(lambda: ran == ["failing"])
        await job.configure(priority=1).publish("holding")
        await eventually(lambda: ran == ["failing", "holding"])
        failing = await mesh.get("job", "failing")
        assert failing.next_claim_time is not None
        due = failing.next_claim_time
        await eventually(lambda: mesh.clock.now() > due + timedelta(milliseconds=100))
        await job.publish("fresh")
        candidates = parts_of(consumer).candidates
        await eventually(lambda: candidates.ready_count(time.monotonic()) == 2, what="both are heard of")
        release.set()
        await eventually(lambda: len(ran) == 4)
    assert ran == ["failing", "holding", "fresh", "failing"]


async def test_m8_an_urgent_task_overtakes_a_backlog_that_is_being_worked_on(mesh: TaskMesh) -> None:
    ran: list[str] = []
    go_on = asyncio.Event()
    go_on.set()

    @mesh.task
    async def job() -> None:
        ran.append(current_task().key)
        await asyncio.sleep(0.02)
        await go_on.wait()

    await job.publish_many({f"k{i}": {} for i in range(60)})
    async with working(mesh, concurrency=2) as consumer:
        await eventually(lambda: len(ran) > 4)
        go_on.clear()  # however late the stream is, no more than two begin before it tells of the urgent one
        published_after = len(ran)
        await job.configure(priority=9).publish("urgent")
        await eventually(
            lambda: "job:urgent" in parts_of(consumer).candidates or "urgent" in ran, what="it is heard of"
        )
        go_on.set()
        await eventually(lambda: len(ran) == 61)
    assert ran.index("urgent") - published_after < 12


async def test_expired_tasks_do_not_start(mesh: TaskMesh) -> None:
    ran: list[str] = []

    @mesh.task
    async def job() -> None:
        ran.append(current_task().key)

    soon = mesh.clock.now() + timedelta(milliseconds=300)
    handle = await job.configure(expire_time=soon, delay_ms=10_000).publish("late")
    assert any("expires" in warning for warning in handle.warnings)
    await job.configure(expire_time=mesh.clock.now() + timedelta(hours=1)).publish("in time")
    async with working(mesh):
        assert (await finished(mesh, "job", "in time")).status is Status.SUCCESS
        assert (await finished(mesh, "job", "late")).status is Status.EXPIRED
    assert ran == ["in time"]


async def test_snoozed_tasks_come_back_exactly_then_and_nothing_is_counted(mesh: TaskMesh) -> None:
    attempts: list[int] = []

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def job() -> None:
        attempts.append(current_task().attempt)
        if len(attempts) < 4:
            raise Snooze(delay_ms=250)

    await job.publish("k")
    began = mesh.clock.now()
    async with working(mesh):
        task = await finished(mesh, "job", "k")
    assert task.status is Status.SUCCESS
    assert attempts == [1, 1, 1, 1]
    assert len(task.task_state.worker_states) == 1
    started = task.task_state.worker_states[0].start_time
    assert started is not None
    assert timedelta(milliseconds=750) <= started - began < timedelta(seconds=5)


@pytest.mark.parametrize("ending", [Snooze(delay_ms=0), Retry(), ValueError()], ids=["Snooze", "Retry", "ValueError"])
async def test_a_task_that_comes_back_is_claimed_again_at_once_and_not_by_the_next_scan(
    mesh: TaskMesh, ending: Exception
) -> None:
    attempts = 0

    @mesh.task(option=TaskOption(max_unexpected_retries=30, unexpected_retry_delay_ms=0, unexpected_retry_jitter=0.0))
    async def job() -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 30:
            raise ending

    handle = await job.publish("k")
    async with working(mesh):
        await handle.result(timeout=25)  # by scans alone it would take 30 s


async def test_until_idle_returns_at_once_when_there_is_nothing(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    async with asyncio.timeout(60):
        await mesh.consumer().run(until_idle=True)
        await mesh.consumer(names=[]).run(until_idle=True)


async def test_until_idle_runs_all_that_is_due_and_what_it_publishes_and_leaves_the_rest(mesh: TaskMesh) -> None:
    @mesh.task
    async def leaf(n: int) -> int:
        return n

    @mesh.task(option=AT_ONCE)
    async def root(n: int) -> None:
        for i in range(3):
            await current_task().publish(leaf, f"{n} {i}", n=i)
        if current_task().attempt == 1:
            raise ValueError("once")

    await root.publish_many({f"{n}": {"n": n} for n in range(20)})
    await leaf.configure(delay_ms=60_000).publish("tomorrow", n=1)
    await mesh.publish("unknown", "k")
    async with asyncio.timeout(60):
        await mesh.consumer(concurrency=3).run(until_idle=True)

    assert [task.status async for task in mesh.find("root")] == [Status.SUCCESS] * 20
    leaves = {task.key: task.status async for task in mesh.find("leaf")}
    assert leaves.pop("tomorrow") is Status.INIT
    assert list(leaves.values()) == [Status.SUCCESS] * 60


async def test_until_idle_waits_for_what_runs_elsewhere_and_may_come_back(mesh: TaskMesh) -> None:
    release = asyncio.Event()
    ran: list[str] = []

    @mesh.task(option=AT_ONCE)
    async def job() -> None:
        ran.append(current_task().worker_id)
        await release.wait()
        if current_task().attempt == 1:
            raise ValueError("once")

    await job.publish("k")
    async with working(mesh, "w1") as first:
        await eventually(lambda: first.running == ["k"])
        first.pause()
        second: asyncio.Task[Any] = asyncio.create_task(mesh.consumer(worker_id="w2").run(until_idle=True))
        finished_early, _ = await asyncio.wait([second], timeout=1.0)
        assert not finished_early
        release.set()
        async with asyncio.timeout(60):
            await second
    assert ran == ["w1", "w2"]
    assert (await mesh.get("job", "k")).status is Status.SUCCESS
