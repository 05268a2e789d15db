"""How many workers run a task, and which: `concurrent_worker_cnt`, `specific_worker_ids`, never twice the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest

from taskmesh import Status, Task, TaskMesh, TaskOption, current_task
from taskmesh.store.claim import claim
from tests.consumer.limits_held import LimitsHeld, watched
from tests.waiting import eventually
from tests.working import all_working, finished, parts_of, status_is, working

FIVE = ["w1", "w2", "w3", "w4", "w5"]


@dataclass
class History:
    """What handlers noted of themselves, by key."""

    ran: dict[str, list[str]] = field(default_factory=dict)
    now: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note the execution at hand."""
        task = current_task()
        self.ran.setdefault(task.key, []).append(task.worker_id)
        self.now[task.key] += 1
        self.most[task.key] = max(self.most[task.key], self.now[task.key])
        try:
            yield
        finally:
            self.now[task.key] -= 1


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_exactly_so_many_different_workers_of_five_run_a_task_to_success(mesh: TaskMesh, count: int) -> None:
    history = History()

    @mesh.task(option=TaskOption(concurrent_worker_cnt=count))
    async def job() -> Any:
        with history.running():
            await asyncio.sleep(0.01)
            return current_task().worker_id

    handles = await job.publish_many({f"k{i}": {} for i in range(30)})
    async with all_working(mesh, FIVE, concurrency=10):
        for handle in handles:
            results = await handle.results(timeout=60)
            assert len(results) == count
            assert results == {worker: worker for worker in results}

    assert set(history.most.values()) <= set(range(1, count + 1))
    for key, workers in history.ran.items():
        assert len(workers) == len(set(workers)) == count, key
        task = await mesh.get("job", key)
        assert sorted(entry.worker_id for entry in task.task_state.worker_states) == sorted(workers)
        assert task.status is Status.SUCCESS


@pytest.mark.parametrize("workers", [3, 6])
async def test_a_new_task_for_several_workers_is_run_by_so_many_as_they_hear_of_it(
    mesh: TaskMesh, workers: int
) -> None:
    """Three hear of everything. Of six, each hears of the lanes in which it is first or second."""

    @mesh.task(option=TaskOption(concurrent_worker_cnt=3))
    async def job() -> None:
        return None

    async with all_working(mesh, [f"w{n}" for n in range(workers)]) as consumers:
        parts = [parts_of(consumer) for consumer in consumers]
        await eventually(lambda: all(each.partitions.others_cnt == workers - 1 for each in parts))
        await eventually(lambda: all((each.listener.lanes is None) == (workers == 3) for each in parts))
        for each in parts:
            each.scanner.open = False
        handles = await job.publish_many({f"k{n}": {} for n in range(20)})
        for handle in handles:
            assert len(await handle.results(timeout=60)) == 3


async def test_a_backlog_of_tasks_for_several_workers_is_not_worked_off_by_one_set_of_slots_in_each_scan(
    mesh: TaskMesh,
) -> None:
    @mesh.task(option=TaskOption(concurrent_worker_cnt=3))
    async def job() -> None:
        return None

    handles = await job.publish_many({f"k{n}": {} for n in range(60)})
    async with all_working(mesh, ["w1", "w2", "w3"], concurrency=2) as consumers:
        for handle in handles:
            assert len(await handle.results(timeout=60)) == 3
        scans = [parts_of(consumer).scanner.scans for consumer in consumers]
    assert sum(scans) < 45, f"each worker had 40 tasks of others' lanes to run: {scans}"


async def test_m37_one_worker_alone_never_takes_a_second_place(mesh: TaskMesh) -> None:
    history = History()

    @mesh.task(option=TaskOption(concurrent_worker_cnt=2))
    async def job() -> int:
        with history.running():
            return 1

    handle = await job.publish("k")
    async with working(mesh, "w1") as first:
        await eventually(lambda: not first.running and history.ran, what="the first has run it")
        await job.publish("another")
        await eventually(lambda: "another" in history.ran)
        assert (await handle.status()) is Status.INIT, "one of two"
        async with working(mesh, "w2"):
            assert await handle.results(timeout=60) == {"w1": 1, "w2": 1}
    assert history.ran["k"] == ["w1", "w2"]


async def test_m1_a_task_for_five_workers_goes_on_after_three_successes(mesh: TaskMesh) -> None:
    history = History()

    @mesh.task(option=TaskOption(concurrent_worker_cnt=5, max_unexpected_retries=3))
    async def job() -> None:
        with history.running():
            pass

    handle = await job.publish("k")
    async with all_working(mesh, FIVE[:3]):
        await eventually(lambda: len(history.ran.get("k", [])) == 3)
    async with all_working(mesh, FIVE[3:]):
        assert set(await handle.results(timeout=60)) == set(FIVE)
        assert await claim(mesh.store, ["job:k"], "w6", "a late claim") == 0
    assert sorted(history.ran["k"]) == FIVE


async def test_t12_eight_workers_some_failing_fill_exactly_five_places(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    """Also M1 and M37: no write, with failures, takeovers and eight workers, gives it more live and successful entries."""
    history = History()
    option = TaskOption(
        concurrent_worker_cnt=5, max_unexpected_retries=100, unexpected_retry_delay_ms=0, unexpected_retry_jitter=0.0
    )
    failing = {"w1", "w5"}

    @mesh.task(option=option)
    async def job() -> Any:
        with history.running():
            await asyncio.sleep(0.005)
            task = current_task()
            if task.worker_id in failing and task.attempt <= 12:
                raise ValueError("not me")
            return task.worker_id

    eight = [f"w{i}" for i in range(1, 9)]
    held = LimitsHeld()
    with watched(mongo_uri, database, held):
        handles = await job.publish_many({f"k{i}": {} for i in range(10)})
        async with all_working(mesh, eight, concurrency=5):
            for handle in handles:
                assert len(await handle.results(timeout=60)) == 5
    held.check()
    assert held.findings.checked["C1"] >= 50, "each place that was filled"
    assert max(history.most.values()) <= 5
    for handle in handles:
        for worker_id in eight:
            assert await claim(mesh.store, [f"job:{handle.key}"], worker_id, "a late claim") == 0


async def test_only_specific_workers_run_a_task(mesh: TaskMesh) -> None:
    history = History()

    @mesh.task(option=TaskOption(specific_worker_ids=("w4",)))
    async def job() -> Any:
        with history.running():
            return current_task().worker_id

    async with all_working(mesh, FIVE[:3]):
        handles = await job.publish_many({f"k{i}": {} for i in range(20)})
        both = await job.configure(specific_worker_ids=("w5", "w4"), concurrent_worker_cnt=2).publish("both")
        mine = await job.configure(specific_worker_ids=("w2",)).publish("mine")
        assert await mine.result(timeout=60) == "w2"
        assert [task.status async for task in mesh.find("job", Status.INIT)] == [Status.INIT] * 21
        async with all_working(mesh, FIVE[3:]):
            assert {await handle.result(timeout=60) for handle in handles} == {"w4"}
            assert set(await both.results(timeout=60)) == {"w4", "w5"}
    assert all(len(workers) == len(set(workers)) for workers in history.ran.values())


@pytest.mark.parametrize(
    "change", ["option", "success", "cancel", "expiry", "pause", "delete", "deferred", "run by me", "used up"]
)
async def test_t11_m2_the_claim_asks_every_gate_again(mesh: TaskMesh, change: str) -> None:
    """A key that W was right to try is refused when something changed before its claim arrives."""

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def job() -> None:
        if change == "used up":
            raise ValueError

    await job.publish("k")
    closed: list[str] = []
    match change:
        case "option":
            await mesh.set_option("job", "k", specific_worker_ids=("another",))
        case "success" | "used up":
            await mesh.consumer(worker_id="another").run(until_idle=True)
        case "run by me":
            await mesh.set_option("job", "k", concurrent_worker_cnt=2)
            await mesh.consumer(worker_id="w").run(until_idle=True)
            assert (await mesh.get("job", "k")).status is Status.INIT
        case "cancel":
            await mesh.cancel("job", "k")
        case "expiry":
            soon = mesh.clock.now()
            await job.configure(update_existing_params=True, expire_time=soon).publish("k")
        case "deferred":
            await job.configure(update_existing_params=True, delay_ms=60_000).publish("k")
        case "pause":
            await mesh.pause("default")
            closed.append("default")
        case "delete":
            await mesh.delete("job", "k")
    before = await mesh.store.driver.collection("tasks").find_one({"_id": "job:k"})

    assert await claim(mesh.store, ["job:k"], "w", "late", closed_queues=closed) == 0

    after = await mesh.store.driver.collection("tasks").find_one({"_id": "job:k"})
    assert (before or {}).get("task_state", {}).get("worker_states") == (
        (after or {}).get("task_state", {}).get("worker_states")
    )


async def test_t17_a_worker_claims_no_more_than_it_runs(mesh: TaskMesh) -> None:
    release = asyncio.Event()
    history = History()

    @mesh.task
    async def job() -> None:
        with history.running():
            await release.wait()

    await job.publish_many({f"k{i}": {} for i in range(50)})
    async with working(mesh, "a", concurrency=2) as a:
        await eventually(lambda: len(a.running) == 2)
        async with working(mesh, "b", concurrency=3) as b:
            await eventually(lambda: len(b.running) == 3, what="B has work at once")
            running = [task async for task in mesh.find("job", Status.RUNNING)]
            assert Counter(entry.worker_id for task in running for entry in task.task_state.worker_states) == {
                "a": 2,
                "b": 3,
            }
            release.set()
            for i in range(50):
                await finished(mesh, "job", f"k{i}")
    assert max(history.most.values()) == 1


async def test_m24_an_option_that_excludes_the_running_worker_stops_it_and_frees_the_task(mesh: TaskMesh) -> None:
    begun = asyncio.Event()
    ended: list[str] = []

    @mesh.task
    async def job() -> Any:
        begun.set()
        try:
            if current_task().worker_id == "w1":
                await asyncio.sleep(60)
            return current_task().worker_id
        finally:
            ended.append(current_task().worker_id)

    handle = await job.publish("k")
    async with working(mesh, "w1"):
        await eventually(begun.is_set)
        async with working(mesh, "w2"):
            await mesh.set_option("job", "k", specific_worker_ids=("w2",))
            assert await handle.result(timeout=60) == "w2"
            await eventually(lambda: sorted(ended) == ["w1", "w2"])
    task = await handle.task()
    assert [(entry.worker_id, entry.state) for entry in task.task_state.worker_states] == [("w2", "SUCCESS")]
    assert (task.task_state.timeout_cnt, task.task_state.lost_cnt) == (0, 0)


async def test_an_interval_nearly_as_long_as_the_lease_does_not_lose_it(mesh: TaskMesh) -> None:
    renewed_s: list[float] = []

    @mesh.task(option=TaskOption(ping_interval_ms=3_900, worker_timeout_ms=4_000))
    async def job() -> int:
        async def is_renewed() -> bool:
            entry = (await mesh.get("job", "k")).task_state.worker_states[0]
            assert entry.ping_expire_time is not None
            assert entry.start_time is not None
            renewed_s.append((entry.ping_expire_time - entry.start_time).total_seconds())
            return renewed_s[-1] > 4.5

        await eventually(is_renewed, 10, what="a ping before the lease is over")
        return int(current_task().attempt)

    handle = await job.publish("k")
    async with working(mesh):
        assert await handle.result(30) == 1


@asynccontextmanager
async def _running(mesh: TaskMesh, option: TaskOption) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """A task that runs during the block, and then ends well; yields what tells by how many seconds its lease was renewed."""
    release = asyncio.Event()

    @mesh.task(option=option)
    async def job() -> None:
        await release.wait()

    def lease_end(task: Task) -> datetime:
        end = task.task_state.worker_states[0].ping_expire_time
        assert end is not None
        return end

    await job.publish("k")
    async with working(mesh):
        first = lease_end(await status_is(mesh, "job", "k", Status.RUNNING))

        async def renewed_s() -> float:
            return (lease_end(await mesh.get("job", "k")) - first).total_seconds()

        yield renewed_s
        release.set()
        assert (await finished(mesh, "job", "k")).status is Status.SUCCESS


async def test_a_changed_worker_timeout_counts_from_the_next_claim(mesh: TaskMesh) -> None:
    async with _running(mesh, TaskOption(ping_interval_ms=100, worker_timeout_ms=60_000)) as renewed_s:
        await mesh.set_option("job", "k", worker_timeout_ms=500)

        async def is_pinged() -> bool:
            by_s = await renewed_s()
            assert by_s >= 0, "the lease is as long as it was claimed"
            return by_s > 0.3

        await eventually(is_pinged, 5, what="pings after the change")


async def test_m24_a_changed_ping_interval_counts_from_the_next_ping(mesh: TaskMesh) -> None:
    async with _running(mesh, TaskOption(ping_interval_ms=30_000, worker_timeout_ms=60_000)) as renewed_s:
        await mesh.set_option("job", "k", ping_interval_ms=100)

        async def is_pinged() -> bool:
            return await renewed_s() > 0.3

        await eventually(is_pinged, 20, what="it pings ten times a second")


async def test_explain_says_if_nothing_is_known_of_the_worker_that_it_is_asked_about(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    await job.publish("k")
    await mesh.pause("default")  # it is to wait
    [nobody] = await mesh.explain("job", "k")
    assert "no worker is alive" in (nobody.note or "")
    async with working(mesh, "w1"):
        [typo] = await mesh.explain("job", "k", worker_id="typo")
        assert "no worker with the id 'typo' is registered" in (typo.note or "")
        [known] = await mesh.explain("job", "k", worker_id="w1")
        assert known.note is None
        assert [each.note for each in await mesh.explain("job", "k")] == [None]
