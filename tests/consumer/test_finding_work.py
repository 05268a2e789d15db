"""How work is found: by the stream at once, by the scan for certain, and with bounded memory."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
import pytest
from pymongo import MongoClient

import taskmesh.consumer.candidates.claim_queue
import taskmesh.consumer.candidates.queues
import taskmesh.consumer.listener
import taskmesh.consumer.scanner
from taskmesh import Status, TaskMesh, TaskOption, current_task
from taskmesh.consumer.listener import Listener
from taskmesh.consumer.worker import Consumer
from taskmesh.store import change_stream
from taskmesh.store.change_stream import Change
from taskmesh.store.find import unfinished_left
from tests.waiting import eventually, slowness_of_the_machine
from tests.working import finished, parts_of, working

SCAN_FINDS_WITHIN_S = 30.0
"""The scan comes about once a second; the rest is room for a busy machine."""


def deafen(mesh: TaskMesh) -> None:
    """Let every event of the mesh's stream, which stays open, get lost on its last step."""

    def lose(change: Change) -> None: ...

    mesh.feed._hand_out = lose  # type: ignore[method-assign]


def between_stream_and_scan(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[None]]) -> None:
    """Let something happen after a consumer has opened its stream, and before its first scan."""
    original = Listener.open

    async def open_then(self: Listener) -> None:
        await original(self)
        await happens()

    monkeypatch.setattr(Listener, "open", open_then)


async def test_a_task_published_between_the_opening_of_the_stream_and_the_scan_is_found_by_the_stream(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taskmesh.consumer.listener, "_TOO_LATE_S", 60.0)  # what comes late is else left to the scan
    consumers: list[Consumer] = []
    published = asyncio.Event()

    @mesh.task
    async def job() -> str:
        return "done"

    async def publish_and_never_scan() -> None:
        parts_of(consumers[0]).scanner.open = False
        await job.publish("k")
        published.set()

    between_stream_and_scan(monkeypatch, publish_and_never_scan)
    consumers.append(mesh.consumer())
    running = asyncio.create_task(consumers[0].run())
    await published.wait()
    assert (await finished(mesh, "job", "k")).status is Status.SUCCESS
    assert parts_of(consumers[0]).scanner.scans == 0
    await consumers[0].stop()
    await running


async def test_a_task_published_between_the_opening_of_the_stream_and_the_scan_is_found_by_the_scan(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = asyncio.Event()

    @mesh.task
    async def job() -> str:
        return "done"

    async def publish() -> None:
        await job.publish("k")
        published.set()

    deafen(mesh)
    between_stream_and_scan(monkeypatch, publish)
    async with working(mesh):
        await published.wait()
        assert (await finished(mesh, "job", "k", SCAN_FINDS_WITHIN_S)).status is Status.SUCCESS


@pytest.mark.parametrize("how", ["no stream", "a stream that delivers nothing"])
async def test_what_no_event_announces_is_found_by_the_scan_alone(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(
        taskmesh.consumer.candidates.queues, "_QUEUES_EVERY_S", 1.0
    )  # how often it looks for new queues
    attempts: dict[str, int] = {}

    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=0, worker_timeout_ms=1_000, ping_interval_ms=200))
    async def job() -> None:
        key = current_task().key
        attempts[key] = attempts.get(key, 0) + 1
        if key == "failing" and attempts[key] < 2:
            raise ValueError("once")

    await job.publish("there before")
    if how != "no stream":
        deafen(mesh)
    async with working(mesh, listen=how != "no stream"):
        await finished(mesh, "job", "there before", SCAN_FINDS_WITHIN_S)
        await job.publish("published later")
        await job.publish("failing")
        await job.configure(delay_ms=500).publish("delayed")
        await job.configure(queue="new").publish("elsewhere")
        await job.configure(specific_worker_ids=("somebody else",)).publish("set free")
        await mesh.set_option("job", "set free", specific_worker_ids=())
        for key in ("published later", "failing", "delayed", "set free", "elsewhere"):
            assert (await finished(mesh, "job", key, SCAN_FINDS_WITHIN_S)).status is Status.SUCCESS


async def test_a_task_that_is_set_free_for_all_workers_starts_before_any_scan(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    @mesh.task
    async def job() -> None:
        return None

    await job.publish("there before")
    async with working(mesh) as consumer:
        await finished(mesh, "job", "there before")
        await job.configure(specific_worker_ids=("somebody else",)).publish("set free")
        monkeypatch.setattr(taskmesh.consumer.scanner, "SCAN_EVERY_S", 3_600.0)
        scanner = parts_of(consumer).scanner
        scans = scanner.scans
        await eventually(lambda: scanner.scans > scans)  # it has rested for the last time
        await mesh.set_option("job", "set free", specific_worker_ids=())
        await finished(mesh, "job", "set free")


async def test_a_consumer_that_does_not_listen_hears_of_cancellations_by_its_pings(mesh: TaskMesh) -> None:
    stopped: list[str] = []

    @mesh.task(option=TaskOption(worker_timeout_ms=60_000, ping_interval_ms=300))
    async def job() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(current_task().key)

    await job.publish("k")
    async with working(mesh, listen=False) as consumer:
        await eventually(lambda: consumer.running == ["k"])
        await mesh.cancel("job", "k")
        await eventually(lambda: stopped == ["k"])


@pytest.mark.timed
async def test_t25_m6_a_stream_that_has_been_open_for_longer_than_its_horizon_announces_what_is_due(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    horizon_ms = 1_000
    monkeypatch.setattr(change_stream, "HORIZON_OF_NEW_MS", horizon_ms)
    monkeypatch.setattr(taskmesh.consumer.listener, "_TOO_LATE_S", 60.0)  # what comes late is else left to the scan

    @mesh.task
    async def job() -> None: ...

    async with working(mesh) as consumer, slowness_of_the_machine(mesh) as slowness:
        opened = mesh.clock.now()
        await eventually(lambda: mesh.clock.now() > opened + timedelta(milliseconds=horizon_ms + 300))
        parts_of(consumer).scanner.open = False
        await job.publish("due now")
        await job.configure(delay_ms=horizon_ms // 2).publish("within")
        for key in ("due now", "within"):
            assert (await finished(mesh, "job", key, SCAN_FINDS_WITHIN_S)).status is Status.SUCCESS
        parts_of(consumer).scanner.open = True
        await job.configure(delay_ms=horizon_ms + 500).publish("beyond")
        task = await finished(mesh, "job", "beyond")
    late_s = []
    for key in ("due now", "within", "beyond"):
        task = await mesh.get("job", key)
        started = task.task_state.worker_states[0].start_time
        assert started is not None
        late_s.append((started - (task.task_state.start_time or task.task_state.create_time)).total_seconds())
    assert min(late_s) >= 0
    assert statistics.median(late_s) < 0.5 + slowness.allows.total_seconds()


async def test_m31_idle_consumers_hear_nothing_of_renewals_claims_and_progress(mongo_uri: str, database: str) -> None:
    """Trap T24, in one process. With real processes: tests/processes."""
    busy, idle = TaskMesh(mongo_uri, database=database), TaskMesh(mongo_uri, database=database)
    reported = 0

    @busy.task(option=TaskOption(worker_timeout_ms=60_000, ping_interval_ms=100))
    async def job() -> None:
        nonlocal reported
        for step in range(15):
            await current_task().progress(step / 15)
            current_task().log(f"step {step}")
            await asyncio.sleep(0.1)
            reported += 1

    @idle.task(name="job")
    async def same_job() -> None: ...

    async with busy, idle:
        await job.publish_many({f"k{i}": {} for i in range(20)})
        async with working(busy, "busy", concurrency=20) as consumer:
            await eventually(lambda: len(consumer.running) == 20)
            async with working(idle, "idle"):
                heard = idle.feed.delivered
                await eventually(lambda: reported > 200)
                assert idle.feed.delivered == heard
                await finished(busy, "job", "k0")


@pytest.mark.parametrize("count", [600, pytest.param(5_000, marks=pytest.mark.slow)])
async def test_t27_m16_m17_m19_a_burst_while_all_slots_are_busy_is_worked_off_without_another_event(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(taskmesh.consumer.candidates.claim_queue, "queue_limit", lambda _: 50)
    release = asyncio.Event()
    ran: set[str] = set()

    @mesh.task
    async def job() -> None:
        ran.add(current_task().key)
        await release.wait()

    async with working(mesh, concurrency=2) as consumer:
        await job.publish_many({"a": {}, "b": {}})
        await eventually(lambda: len(consumer.running) == 2)
        for start in range(0, count, 200):  # each of them more than it remembers
            await job.publish_many({f"k{n}": {} for n in range(start, start + 200)})
            assert len(parts_of(consumer).candidates) <= 50 * 5 // 4
        deafen(mesh)  # silence from here on
        consumer.concurrency = 200
        release.set()
        await eventually(lambda: len(ran) == count + 2, 60, what="all have run")
        assert len(parts_of(consumer).candidates) <= 50 * 5 // 4


async def test_t27_m18_what_is_published_while_a_consumer_starts_is_not_left_behind(mesh: TaskMesh) -> None:
    ran: set[str] = set()

    @mesh.task
    async def job() -> None:
        ran.add(current_task().key)

    stop = asyncio.Event()
    published = 0

    async def publish() -> None:
        nonlocal published
        while not stop.is_set():
            await job.publish_many({f"k{published + n}": {} for n in range(20)})
            published += 20

    publishing = asyncio.create_task(publish())
    await eventually(lambda: published > 100)
    async with working(mesh):
        await eventually(lambda: len(ran) > 400)
        stop.set()
        await publishing
        await eventually(lambda: len(ran) == published, what="all have run")


def _fill(uri: str, database: str, count: int) -> None:
    """Make a backlog of `count` due tasks, as copies of one that was published."""
    with MongoClient[dict[str, Any]](uri, tz_aware=True) as client:
        tasks = client[database]["tasks"]
        template = tasks.find_one({}) or {}
        for start in range(0, count, 10_000):
            copies = [
                template | {"_id": f"job:{n}", "key": str(n), "lane": n % 64, "params": {"payload": "x" * 200}}
                for n in range(start, min(start + 10_000, count))
            ]
            tasks.insert_many(copies, ordered=False)


@pytest.mark.parametrize("count", [16_000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_memory_is_bounded_whatever_the_backlog(
    mesh: TaskMesh, mongo_uri: str, database: str, count: int
) -> None:
    release = asyncio.Event()

    @mesh.task
    async def job(**_: Any) -> None:
        await release.wait()

    await job.publish("template")
    await asyncio.to_thread(_fill, mongo_uri, database, count)
    before = psutil.Process().memory_info().rss
    async with working(mesh, concurrency=5) as consumer:
        limit = taskmesh.consumer.candidates.claim_queue.queue_limit(consumer.concurrency)
        assert limit < count / 3
        await eventually(lambda: len(consumer.running) == 5)
        await job.publish_many({f"more {n}": {} for n in range(2_000)})
        scans = parts_of(consumer).scanner.scans
        await eventually(lambda: parts_of(consumer).scanner.scans >= scans + 3)
        queue = parts_of(consumer).candidates
        assert len(queue) <= limit * 5 // 4
        assert len(queue._ready) + len(queue._later) <= limit * 3
        assert psutil.Process().memory_info().rss - before < 60_000_000
        assert len(consumer.running) == 5


async def test_t45_tasks_of_unknown_names_are_left_alone_and_that_is_said_once(
    mesh: TaskMesh, caplog: pytest.LogCaptureFixture
) -> None:
    @mesh.task
    async def known() -> str:
        return "done"

    handles = [await mesh.publish("only.new-code.has-it", f"k{i}", {"n": i}) for i in range(5)]
    assert handles[0].warnings == ["no worker is alive: start one with `taskmesh worker MODULE:MESH`"]
    before = [await handle.task() for handle in handles]

    async with working(mesh, "old"), working(mesh, "other", queues=["unrelated"]):
        mine = await known.publish("k")
        assert await mine.result(timeout=60) == "done"

        async def is_warned() -> bool:  # the registry is read anew after a moment
            late = await mesh.publish("only.new-code.has-it", "late")
            return late.warnings == ["no live worker runs tasks named 'only.new-code.has-it' from queue 'default'"]

        await eventually(is_warned)
        by_worker = {e.worker_id: e for e in await mesh.explain("only.new-code.has-it", "k0")}
        assert not any(explanation.claimable for explanation in by_worker.values())
        (gate,) = [gate for gate in by_worker["old"].gates if not gate.open]
        assert gate.reason == "does not run tasks named 'only.new-code.has-it' from queue 'default'"
        await eventually(lambda: "they stay unclaimed" in caplog.text)
        assert not await unfinished_left(mesh.store, "old", ["known"], None)
    assert [await handle.task() for handle in handles] == before
    told = [record.getMessage() for record in caplog.records if "they stay unclaimed" in record.getMessage()]
    assert set(told) == {
        "no live worker runs tasks named 'only.new-code.has-it' from queue 'default': they stay unclaimed"
    }
    assert len(told) <= 2, "once by each of the two workers"


async def test_documents_that_are_no_tasks_harm_nobody(mesh: TaskMesh) -> None:
    tasks = mesh.store.driver.collection("tasks")

    @mesh.task
    async def job() -> str:
        return "done"

    strangers: list[dict[str, Any]] = [
        {"_id": 17},
        {"_id": "job:half", "name": "job", "queue": "default", "pinned": False, "next_claim_time": datetime.now(UTC)},
        {"_id": "job:worse", "name": "job", "queue": 5, "pinned": False, "next_claim_time": "soon", "status": "INIT"},
        {"_id": "job:list", "name": "job", "queue": ["default"], "task_state": {"worker_states": "none"}},
    ]
    await tasks.insert_many(strangers[:2])
    async with working(mesh):
        assert await (await job.publish("a")).result(timeout=60) == "done"
        await tasks.insert_many(strangers[2:])
        assert await (await job.publish("b")).result(timeout=60) == "done"
    for stranger in strangers:
        assert await tasks.find_one({"_id": stranger["_id"]}) is not None
