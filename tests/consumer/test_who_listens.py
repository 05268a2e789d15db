"""Of many workers some listen and the others ask: each change stream costs the server something at every write."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskmesh import Consumer, TaskDefinition, TaskMesh, TaskOption, WorkerInfo, current_task
from taskmesh.consumer.candidates import listening
from taskmesh.consumer.candidates.partitions import Partitions
from taskmesh.consumer.candidates.queues import ASK_AT_LEAST_EVERY_S
from taskmesh.store.publication import LANES
from tests.consumer.sampling import starts_of
from tests.faults import another_mesh
from tests.waiting import eventually, slowness_of_the_machine
from tests.working import all_working, parts_of, working

WORKERS = ["w1", "w2", "w3", "w4"]


@pytest.fixture
def only_one_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream can be afforded but one."""
    monkeypatch.setattr(listening, "AFFORDABLE_CORES", 0.0)
    monkeypatch.setattr(listening, "LEAST", 1)


async def _listening(mesh: TaskMesh) -> list[str]:
    return [worker.worker_id for worker in await mesh.workers() if worker.live and worker.listens]


async def _one_listens(mesh: TaskMesh, among: list[str] = WORKERS) -> str:
    """Wait until it is so; return which."""

    async def one() -> bool:
        found = await _listening(mesh)
        return len(found) == 1 and found[0] in among

    await eventually(one, 20, what="one worker listens")
    return (await _listening(mesh))[0]


def _of(consumers: list[Consumer], worker_id: str) -> Consumer:
    return next(consumer for consumer in consumers if consumer.worker_id == worker_id)


@pytest.mark.usefixtures("only_one_listens")
async def test_the_first_worker_listens_and_the_others_work_too(mesh: TaskMesh) -> None:
    ran_by: set[str] = set()

    @mesh.task
    async def job() -> None:
        ran_by.add(current_task().worker_id)
        if len(ran_by) < len(WORKERS):
            await eventually(lambda: len(ran_by) == len(WORKERS), what="each worker has run one")

    async with all_working(mesh, WORKERS, concurrency=1):
        assert await _one_listens(mesh) == "w1"
        # Each has one slot, so that the first is done only when all four have found one.
        handles = [await job.publish(str(n)) for n in range(len(WORKERS))]
        for handle in handles:
            await handle.result(20)
    assert ran_by == set(WORKERS)


@pytest.mark.usefixtures("only_one_listens")
async def test_a_worker_that_asks_hears_within_a_second_or_so_that_its_task_was_cancelled(mesh: TaskMesh) -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    @mesh.task(option=TaskOption(ping_interval_ms=60_000, worker_timeout_ms=300_000))
    async def job() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    async with all_working(mesh, WORKERS):
        listener = await _one_listens(mesh)
        asks = next(worker_id for worker_id in WORKERS if worker_id != listener)
        handle = await job.configure(specific_worker_ids=(asks,)).publish("a")
        await asyncio.wait_for(started.wait(), 20)
        await handle.cancel()
        await asyncio.wait_for(stopped.wait(), 20)  # the next ping is a minute away


@pytest.mark.usefixtures("only_one_listens")
async def test_when_the_one_that_listens_is_gone_another_begins_to(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    async with all_working(mesh, WORKERS) as consumers:
        first = await _one_listens(mesh)
        await _of(consumers, first).stop()
        second = await _one_listens(mesh, [worker_id for worker_id in WORKERS if worker_id != first])
        assert second != first
        await (await job.publish("a")).result(20)


@pytest.mark.usefixtures("only_one_listens")
async def test_tasks_that_come_one_by_one_are_heard_of_whoever_would_come_first_in_their_lanes(mesh: TaskMesh) -> None:
    ran_by: list[str] = []

    @mesh.task
    async def job() -> None:
        ran_by.append(current_task().worker_id)

    async with all_working(mesh, WORKERS):
        listener = await _one_listens(mesh)
        # (Until each knows that no other listens.)
        await eventually(_is_heard_by(listener, job, ran_by), what="ten in a row are heard by the one that listens")


def _is_heard_by(
    listener: str, job: TaskDefinition[..., None], ran_by: list[str]
) -> Callable[[], Coroutine[Any, Any, bool]]:
    async def all_ten() -> bool:
        ran_by.clear()
        for n in range(10):
            await (await job.publish(f"{datetime.now(UTC).timestamp()}-{n}")).result(20)
        return ran_by == [listener] * 10

    return all_ten


async def test_workers_that_hold_more_than_they_can_start_poll_until_the_backlog_is_gone(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "AFFORDABLE_CORES", 0.0)  # but the two that come first would listen all the same
    may_end, stopped = asyncio.Event(), asyncio.Event()

    @mesh.task(option=TaskOption(ping_interval_ms=60_000, worker_timeout_ms=300_000))
    async def job() -> None:
        try:
            await may_end.wait()
        except asyncio.CancelledError:
            stopped.set()
            raise

    @mesh.task
    async def single() -> None: ...

    await job.publish_many({str(n): {} for n in range(300)})
    async with all_working(mesh, ["w1", "w2"], concurrency=10) as consumers:

        def listeners() -> int:
            return sum(parts_of(consumer).listener.listens for consumer in consumers)

        await eventually(lambda: listeners() == 0, 20, what="no worker listens")
        running = [task async for task in mesh.find(name="job", status="RUNNING", limit=1)]
        await mesh.cancel("job", running[0].key)
        await asyncio.wait_for(stopped.wait(), 20)  # the next ping is a minute away
        may_end.set()
        await eventually(lambda: listeners() == 2, 30, what="both listen again")
        await eventually(lambda: sum(consumer.finished for consumer in consumers) >= 299, 30, what="all have run")
        await (await single.publish("a")).result(20)


async def test_a_lone_worker_listens_whatever_it_holds(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "AFFORDABLE_CORES", 0.0)
    may_end = asyncio.Event()

    @mesh.task
    async def job() -> None:
        await may_end.wait()

    await job.publish_many({str(n): {} for n in range(100)})
    async with working(mesh, "w1", concurrency=10) as consumer:
        scanner = parts_of(consumer).scanner
        before = scanner.scans
        await eventually(lambda: scanner.scans >= before + 3, 20, what="it has scanned with more than it can start")
        assert parts_of(consumer).listener.listens
        may_end.set()


async def test_a_few_workers_all_listen(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    async with all_working(mesh, WORKERS), working(mesh, "never", listen=False):
        await eventually(lambda: _all_registered(mesh), what="all five are registered")
        found = {worker.worker_id: (worker.listens, worker.may_listen) for worker in await mesh.workers()}
    assert found == {**dict.fromkeys(WORKERS, (True, True)), "never": (False, False)}


async def test_who_is_to_ask_from_now_on_hears_until_the_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = _fleet(1_000)
    settings = TaskMesh("mongodb://localhost:1", database="d").consumer(worker_id="w999")._settings
    one = listening.Listening(settings)
    assert one.learn(fleet, {worker.worker_id for worker in fleet}), "there are too many"
    assert not one.wanted
    assert one.hears
    assert not one.learn(fleet, {worker.worker_id for worker in fleet}), "that is known"
    later = time.monotonic() + 2.5
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert not one.hears


async def test_many_workers_hear_of_what_is_new_in_their_lanes_alone_and_of_those_of_who_leaves(
    mesh: TaskMesh, mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @mesh.task
    async def job() -> None: ...

    async def with_a_feed_of_its_own(stack: AsyncExitStack, worker_id: str) -> tuple[TaskMesh, Consumer]:
        its_own = await stack.enter_async_context(another_mesh(mongo_uri, database, worker_id))
        its_own.task(name="job")(job.fn)
        return its_own, await stack.enter_async_context(working(its_own, worker_id))

    def is_heard_by_two_of(fleet: list[tuple[TaskMesh, Consumer]]) -> bool:
        heard = [parts_of(consumer).listener.lanes for _, consumer in fleet]
        return all(sum(lanes is None or lane in lanes for lanes in heard) == 2 for lane in range(LANES))

    monkeypatch.setattr("taskmesh.consumer.listener.LETS_GO_AFTER_S", 0.5)
    async with AsyncExitStack() as stack:
        fleet = [await with_a_feed_of_its_own(stack, f"w{n}") for n in range(8)]
        await eventually(lambda: is_heard_by_two_of(fleet), what="two hear of what is new in each lane")
        before = sum(each.feed.delivered for each, _ in fleet)
        for n in range(40):
            await (await job.publish(f"first-{n}")).result(20)
        assert sum(each.feed.delivered for each, _ in fleet) - before <= 5 * 40 + 20, (
            "of 8 * 40; and few orders and settings"
        )

        _, leaver = fleet.pop()
        await leaver.stop()
        await eventually(lambda: is_heard_by_two_of(fleet), what="others hear of what is new in its lanes")
        for n in range(40):
            await (await job.publish(f"second-{n}")).result(20)
        assert sum(consumer.finished for _, consumer in fleet) >= 40


async def _all_registered(mesh: TaskMesh) -> bool:
    return len(await mesh.workers()) == len(WORKERS) + 1


def _fleet(size: int, finished_per_s: float = 0.0) -> list[WorkerInfo]:
    now = datetime.now(UTC)
    common = {"host": "h", "pid": 1, "version": "0", "state": "running", "names": ["job"], "queues": None}
    counts = {"concurrency": 1, "running": 0, "last_seen": now, "start_time": now}
    return [
        WorkerInfo.model_validate(
            {"worker_id": f"w{n}", **common, **counts, "finished_per_s": finished_per_s / size if size else 0}
        )
        for n in range(size)
    ]


@pytest.mark.parametrize(
    ("size", "finished_per_s", "all_listen"),
    [(1, 3_000, True), (4, 1_000, True), (8, 100, True), (64, 0, True), (64, 5_000, False), (1_000, 0, False)],
)
def test_how_many_listen_hangs_on_how_many_there_are_and_on_how_much_is_written(
    size: int, finished_per_s: float, *, all_listen: bool
) -> None:
    fleet = _fleet(size, finished_per_s)
    affordable = listening.affordable_to(fleet, {worker.worker_id for worker in fleet})
    assert (2 * affordable >= size) is all_listen  # twice: who listens already goes on so long


@pytest.mark.usefixtures("only_one_listens")
@pytest.mark.parametrize("special", ["names", "queues", "labels"])
async def test_who_alone_can_run_some_tasks_leaves_the_listening_to_nobody(mesh: TaskMesh, special: str) -> None:
    others: dict[str, dict[str, Any]] = {"names": {"names": ["easy"]}, "queues": {"queues": ["default"]}, "labels": {}}
    labels: dict[str, Any] = {"labels": {"gpu": True}} if special == "labels" else {}

    @mesh.task
    async def easy() -> None: ...

    @mesh.task
    async def hard() -> None: ...

    async with AsyncExitStack() as fleet:
        for worker_id in ("w1", "w2", "w3"):
            await fleet.enter_async_context(working(mesh, worker_id, **others[special]))
        await _one_listens(mesh, ["w1", "w2", "w3"])
        consumer = await fleet.enter_async_context(working(mesh, "special", **labels))
        await eventually(lambda: len(parts_of(consumer).registration.fleet) == 4, what="it knows the others")
        seen = {worker.worker_id: worker.last_seen for worker in await mesh.workers()}

        async def all_have_decided_anew() -> bool:
            return all(worker.last_seen > seen[worker.worker_id] for worker in await mesh.workers())

        await eventually(all_have_decided_anew)
        assert set(await _listening(mesh)) > {"special"}
        assert parts_of(consumer).listening.wanted


async def test_who_asks_seldom_looks_as_far_ahead_as_the_next_look_is(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of very many would."""
    monkeypatch.setattr(Partitions, "in_turn", lambda _self, every_s: 10 * every_s)

    @mesh.task
    async def job() -> None: ...

    async with working(mesh, "w", listen=False) as consumer, slowness_of_the_machine(mesh) as slowness:
        scanner = parts_of(consumer).scanner

        async def seconds_to_the_next_look() -> float:
            scans, began = scanner.scans, time.monotonic()
            await eventually(lambda: scanner.scans > scans, what="another look")
            return time.monotonic() - began

        while await seconds_to_the_next_look() < 0.9 * ASK_AT_LEAST_EVERY_S:
            """It found something a moment ago."""
        # The next look comes 2 s or more before it is due, and the one after that when it is late already.
        due = mesh.clock.now() + timedelta(seconds=1.65 * ASK_AT_LEAST_EVERY_S)
        handle = await job.configure(start_time=due).publish("k")
        await handle.result(60)
    ((started, _),) = await starts_of(mesh, "job")
    assert timedelta(0) <= started - due < timedelta(seconds=0.3) + slowness.allows


def test_of_many_idle_workers_a_few_listen_and_more_the_more_they_run() -> None:
    def listeners(size: int, *, concurrency: int, running: int = 0) -> float:
        fleet = [worker.model_copy(update={"concurrency": concurrency, "running": running}) for worker in _fleet(size)]
        return listening.enough_for(fleet, {worker.worker_id for worker in fleet})

    assert listeners(8, concurrency=100) == math.inf, "a few all listen"
    assert listeners(16, concurrency=100) == 1, "and one more, in case it dies"
    assert listeners(16, concurrency=100, running=20) == 7, "twice the 320 slots that are in use"
    assert listeners(16, concurrency=100, running=90) == math.inf
    assert listeners(16, concurrency=1) == math.inf, "a burst finds a slot at once"
    assert listeners(100, concurrency=1) == listening.SLOTS_THAT_LISTEN
