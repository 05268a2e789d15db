"""A backlog is read page by page, and from its start once a second, or less often if there are many workers.

Nothing is read again and again, or passed over for good.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from taskmesh import TaskMesh
from taskmesh.consumer import scanner
from taskmesh.consumer.candidates import claim_queue
from taskmesh.consumer.candidates.claim_queue import Candidate
from taskmesh.consumer.candidates.partitions import Partitions
from taskmesh.consumer.worker import Consumer
from taskmesh.store.find import OpenScan, Page
from tests.faults import failing_commands
from tests.mongods import ThreeNodes
from tests.waiting import eventually
from tests.working import parts_of, working

NEVER_S = 3_600.0
PAGE = 1_000


class _Reads(CommandListener):
    """How many rows scans of a backlog have read, which of their cursors are open, and the lanes that the last one asked for."""

    def __init__(self) -> None:
        self.rows = 0
        self.lanes: Any = None
        self.cursors: set[int] = set()
        self._asked: dict[int, int] = {}

    def started(self, event: CommandStartedEvent) -> None:
        command = event.command
        if (
            event.command_name == "find"
            and command.get("hint") == "taskmesh_waiting_in_order"
            and "limit" not in command
        ):
            self._asked[event.request_id] = 0
            if "queue" in command["filter"]:  # not what is behind refused tasks, of all lanes
                self.lanes = command["filter"].get("lane")
        elif event.command_name == "getMore" and command["getMore"] in self.cursors:
            self._asked[event.request_id] = command["getMore"]
        elif event.command_name == "killCursors":
            self.cursors.difference_update(command["cursors"])

    def succeeded(self, event: CommandSucceededEvent) -> None:
        if event.request_id in self._asked:
            cursor = event.reply["cursor"]
            self.rows += len(cursor.get("firstBatch", cursor.get("nextBatch", ())))
            self.cursors.discard(self._asked[event.request_id])
            self.cursors.update({cursor["id"]} - {0})

    def failed(self, event: CommandFailedEvent) -> None: ...


@pytest.fixture
async def watched(mongo_uri: str, database: str) -> AsyncIterator[tuple[TaskMesh, _Reads]]:
    """A mesh whose scans are counted."""
    reads = _Reads()
    async with (
        AsyncMongoClient[dict[str, Any]](mongo_uri, event_listeners=[reads]) as client,
        TaskMesh(client, database=database) as mesh,
    ):
        yield mesh, reads


async def test_a_backlog_is_read_once_and_what_comes_meanwhile_is_found_behind_it(
    watched: tuple[TaskMesh, _Reads], monkeypatch: pytest.MonkeyPatch
) -> None:
    _read_on_for_ever(monkeypatch)
    mesh, reads = watched
    count, more = 6 * PAGE + PAGE // 2, PAGE // 2
    started: list[str] = []

    @mesh.task
    async def job() -> None: ...

    @mesh.task
    async def lasting() -> None:
        started.append("")
        await asyncio.Event().wait()

    await job.publish_many({f"k{n}": {} for n in range(count)})
    async with working(mesh, "w", concurrency=50, listen=False) as consumer:
        await eventually(lambda: consumer.finished > PAGE)
        await job.publish_many({f"later{n}": {} for n in range(more)})
        await eventually(lambda: consumer.finished == count + more)
        assert reads.rows < (count + more) * 1.1
        await lasting.publish_many({f"k{n}": {} for n in range(2 * PAGE)})
        await eventually(lambda: len(started) == 50)
        assert reads.cursors
    assert not reads.cursors, "none is left open on the server"


def _read_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner, "SCAN_EVERY_S", NEVER_S)
    monkeypatch.setattr(scanner, "_READ_ON_AT_MOST_S", NEVER_S)


@pytest.fixture
def one_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers do what one of many does in turn with the others, and no limit cuts that."""
    monkeypatch.setattr(Partitions, "in_turn", lambda _self, every_s: NEVER_S * every_s)
    monkeypatch.setattr(scanner, "_READ_ON_AT_MOST_S", NEVER_S)


@pytest.mark.usefixtures("one_of_many")
async def test_one_of_many_workers_reads_on_and_leaves_it_to_the_others_to_scan_each_second(
    watched: tuple[TaskMesh, _Reads],
) -> None:
    mesh, reads = watched
    count = 6 * PAGE + PAGE // 2

    @mesh.task
    async def job() -> None:
        await asyncio.sleep(0.03)  # of 50 slots, this takes four seconds

    await job.publish_many({f"k{n}": {} for n in range(count)})
    async with working(mesh, "w", concurrency=50) as consumer:
        await eventually(lambda: consumer.finished == count)
    assert reads.rows < count * 1.1


@pytest.mark.usefixtures("one_of_many")
async def test_one_of_many_workers_scans_at_once_when_lanes_change_hands(watched: tuple[TaskMesh, _Reads]) -> None:
    mesh, reads = watched

    @mesh.task
    async def job() -> None:
        await asyncio.Event().wait()

    async with AsyncExitStack() as other, working(mesh, "stays", concurrency=5):
        await other.enter_async_context(working(mesh, "goes", concurrency=5))
        await job.publish_many({f"k{n}": {} for n in range(8 * PAGE)})
        await eventually(lambda: reads.lanes is not None and len(reads.cursors) > 1, what="both read on in their lanes")
        await other.aclose()
        await eventually(lambda: reads.lanes is None, what="a scan of all lanes")


async def test_whether_other_workers_listen_leaves_lanes_as_they_are(mesh: TaskMesh) -> None:
    """In a large fleet that changes all the time, and until a scan has looked no new task goes first."""

    @mesh.task
    async def job() -> None: ...

    async with working(mesh, "other"), working(mesh, "w") as consumer:
        parts, workers = parts_of(consumer), mesh.store.driver.collection(mesh.store.workers)
        await eventually(lambda: parts.partitions.others_cnt == 1 and parts.scanner.scans > 2, what="no scan is due")
        for change in ({"listens": False}, {"listens": True}):
            await workers.update_one({"_id": "other"}, {"$set": change})
            parts.candidates.scan_wanted.clear()
            await parts.registration.run_once()
            assert not parts.candidates.scan_wanted.is_set()

        async def scans_when_it_is_gone() -> bool:  # it registers again with its next heartbeat
            await workers.delete_one({"_id": "other"})
            await parts.registration.run_once()
            return parts.candidates.scan_wanted.is_set()

        await eventually(scans_when_it_is_gone)


@pytest.mark.usefixtures("one_of_many")
async def test_one_of_many_workers_that_may_have_nothing_of_a_page_looks_again_soon(
    watched: tuple[TaskMesh, _Reads],
) -> None:
    mesh, reads = watched
    allowed: dict[str, Any] = {"params.place": -1}

    @mesh.task
    async def job(place: int) -> None: ...

    async with working(mesh, "w", listen=False, on_claim=lambda _: allowed) as consumer:
        before = parts_of(consumer).scanner.scans
        await eventually(lambda: parts_of(consumer).scanner.scans > before + 1, what="looks by the clock alone")
        await job.publish_many({f"k{n}": {"place": n} for n in range(3 * PAGE)})
        await eventually(lambda: len(reads.cursors) > 0)
        allowed.clear()
        await eventually(lambda: consumer.finished == 3 * PAGE)


async def test_a_worker_that_stops_leaves_no_scan_behind_refused_tasks_open(
    watched: tuple[TaskMesh, _Reads], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanner, "_READ_BEHIND_S", 0.0)
    mesh, reads = watched

    @mesh.task
    async def job(place: int) -> None: ...

    await job.publish_many({f"k{n}": {"place": n} for n in range(6 * PAGE)})
    async with working(mesh, "w", listen=False, on_claim=lambda _: {"params.place": -1}) as consumer:
        # By the second scan it knows that the first page has nothing for it, and leaves only what is behind open.
        await eventually(lambda: parts_of(consumer).scanner.scans > 1 and len(reads.cursors) > 0)
    assert not reads.cursors


async def test_what_stands_before_an_open_page_is_found_while_there_is_more_behind_it(mesh: TaskMesh) -> None:
    """A task that was for another worker is for anybody now, and this worker does not hear of it."""
    ran: list[str] = []
    count = 15_000

    @mesh.task
    async def job(key: str) -> None:
        ran.append(key)
        await asyncio.sleep(0.02)

    await job.configure(specific_worker_ids=["another"]).publish("first", key="first")
    await job.publish_many({f"k{n}": {"key": f"k{n}"} for n in range(count)})
    async with working(mesh, "w", concurrency=100, listen=False):
        await eventually(lambda: len(ran) > 2 * PAGE)
        await mesh.set_option("job", "first", specific_worker_ids=[])
        # Without sleeping, 15 000 would take 100 slots three seconds, so they are scanned from the start twice at least.
        await eventually(lambda: "first" in ran)
    assert ran.index("first") < 0.8 * count


async def test_urgent_tasks_that_are_more_than_one_look_finds_go_before_the_rest_of_a_page(mesh: TaskMesh) -> None:
    ran: list[str] = []
    count, urgent = 6 * PAGE, 400

    @mesh.task
    async def job(key: str) -> None:
        ran.append(key)

    await job.publish_many({f"k{n}": {"key": "usual"} for n in range(count)})
    async with working(mesh, "w", concurrency=10, listen=False):
        await eventually(lambda: len(ran) > PAGE)
        await job.configure(priority=5).publish_many({f"u{n}": {"key": "urgent"} for n in range(urgent)})
        await eventually(lambda: ran.count("urgent") == urgent)
    first, last = ran.index("urgent"), max(n for n, key in enumerate(ran) if key == "urgent")
    # Looks alone bring 50 each tenth of a second, in which more than twice as many start.
    assert ran[first:last].count("usual") < urgent / 4


@pytest.mark.parametrize("read", [1, 2], ids=["from the start", "the next page"])
async def test_a_scan_that_is_asked_for_during_another_begins_from_the_start(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, read: int
) -> None:
    """As after a gap in the stream: what came in between is in neither."""
    _read_on_for_ever(monkeypatch)
    monkeypatch.setattr(scanner, "_URGENT_EVERY_S", NEVER_S)
    ran: list[str] = []
    consumers: list[Consumer] = []
    pages: list[Page] = []
    original = OpenScan.next_page

    @mesh.task
    async def job(key: str) -> None:
        ran.append(key)

    async def read_and_miss(self: OpenScan) -> Page:
        page = await original(self)
        if page.full:
            pages.append(page)
            if len(pages) == read:
                await job.configure(priority=5).publish("urgent", key="urgent")
                parts_of(consumers[0]).candidates.order_scan()
        return page

    monkeypatch.setattr(OpenScan, "next_page", read_and_miss)
    async with working(mesh, "w", concurrency=10, listen=False) as consumer:
        consumers.append(consumer)
        await job.publish_many({f"k{n}": {"key": "usual"} for n in range(4 * PAGE)})
        await eventually(lambda: "urgent" in ran)
    assert ran.index("urgent") < read * PAGE


async def test_the_next_page_is_narrowed_by_the_hook_on_claim(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    _read_on_for_ever(monkeypatch)
    count = 6 * PAGE

    @mesh.task
    async def job(place: int) -> None: ...

    await job.publish_many({f"k{n}": {"place": n} for n in range(count)})
    async with working(mesh, "w", concurrency=50, on_claim=lambda _: {"params.place": {"$mod": [2, 0]}}) as consumer:
        await eventually(lambda: consumer.finished == count / 2)
        assert parts_of(consumer).claimer.tried < 0.75 * count, "the others are not tried in vain"


async def test_tasks_that_name_the_worker_keep_their_place_among_those_for_anybody(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan of these cannot be read on."""
    _read_on_for_ever(monkeypatch)
    monkeypatch.setattr(scanner, "_USUAL_PAGE", 20)
    ran: list[int] = []

    @mesh.task
    async def job(place: int) -> None:
        ran.append(place)

    await job.configure(specific_worker_ids=["w"]).publish_many({f"n{n}": {"place": n} for n in range(70)})
    await job.publish_many({f"k{n}": {"place": 70 + n} for n in range(70)})
    await mesh.consumer(worker_id="w", concurrency=1).run(until_idle=True)
    assert ran == list(range(140))


async def test_what_had_to_be_dropped_for_want_of_memory_keeps_its_place(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    _read_on_for_ever(monkeypatch)
    monkeypatch.setattr(scanner, "_USUAL_PAGE", 20)
    monkeypatch.setattr(claim_queue, "queue_limit", lambda _: 30)
    ran: list[int] = []
    held, go_on = asyncio.Event(), asyncio.Event()

    @mesh.task
    async def job(place: int) -> None:
        ran.append(place)
        if len(ran) == 30:
            held.set()
            await go_on.wait()

    await job.publish_many({f"k{n * 37 % 101}": {"place": n} for n in range(101)})
    async with working(mesh, "w", concurrency=1) as consumer:
        await held.wait()
        candidates = parts_of(consumer).candidates
        await job.configure(priority=1).publish_many({f"urgent{n}": {"place": -1} for n in range(40)})
        await eventually(lambda: candidates.overflowed, what="some were dropped")
        go_on.set()
        await eventually(lambda: len(ran) == 141)
    usual = [place for place in ran if place >= 0]
    assert usual == sorted(usual)


def _candidates(count: int, priority: int) -> list[Candidate]:
    now = time.monotonic()
    return [Candidate(f"job:{priority}-{n}", "default", now, now, n, priority) for n in range(count)]


async def test_of_more_than_it_may_keep_a_worker_drops_what_is_least_urgent(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    async with working(mesh, "w", concurrency=1) as consumer:
        candidates, usual, urgent = parts_of(consumer).candidates, _candidates(5_500, 0), _candidates(1_000, 5)
        # Nothing is awaited, so nobody else takes any.
        candidates.know_to(None)
        assert all(map(candidates.offer, usual))
        candidates.ready_count(time.monotonic())
        assert all(map(candidates.offer, urgent))
        assert candidates.take(1_000, time.monotonic()) == urgent
        assert len(candidates) < 5_500, "some were dropped"


async def test_what_is_found_again_behind_what_was_not_read_is_not_tried_again_once_it_was_taken(
    mesh: TaskMesh,
) -> None:
    """It would be claimed in vain. On a busy machine that happened to most of a backlog."""

    @mesh.task
    async def job() -> None: ...

    async with working(mesh, "w", concurrency=100) as consumer:
        candidates, found = parts_of(consumer).candidates, _candidates(10, 0)
        # Nothing is awaited, so nobody else takes any.
        candidates.begin_scan()
        candidates.know_to(None)
        assert all(map(candidates.offer, found))
        candidates.begin_scan()
        candidates.know_to(found[4].rank)  # this one has read fewer
        assert not any(map(candidates.offer, found))
        assert candidates.take(10, time.monotonic()) == found
        candidates.begin_scan()
        candidates.know_to(None)
        assert candidates.take(10, time.monotonic()) == []


async def test_a_scan_that_found_little_while_there_was_enough_delays_none(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    async with working(mesh, "w", concurrency=100) as consumer:
        candidates = parts_of(consumer).candidates
        candidates.begin_scan()
        candidates.know_to(None)
        assert all(map(candidates.offer, _candidates(1_000, 0)))
        candidates.unread = True
        candidates.scanned(1, took_s=60.0)
        assert not candidates.scan_wanted.is_set()
        assert len(candidates.take(1_000, time.monotonic())) == 1_000
        candidates.want_more()
        assert candidates.scan_wanted.is_set()


@pytest.mark.parametrize("how", [{"errorCode": 43}, {"errorCode": 237}, {"closeConnection": True}])
async def test_a_page_that_cannot_be_continued_is_read_from_the_start(
    mesh: TaskMesh,
    mongo_uri: str,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: dict[str, Any],
) -> None:
    """As after a failover: the cursor is gone (43), killed (237), or the connection is."""
    _read_on_for_ever(monkeypatch)
    count = 4 * PAGE

    @mesh.task
    async def job() -> None: ...

    await job.publish_many({f"k{n}": {} for n in range(count)})
    with caplog.at_level(logging.WARNING, "taskmesh.scanner"):
        async with (
            failing_commands(mongo_uri, ["getMore"], times=1, namespace=f"{database}.tasks", **how) as has_failed,
            working(mesh, "w", concurrency=50) as consumer,
        ):
            await has_failed()
            await eventually(lambda: consumer.finished == count)
    assert "taskmesh.scanner" not in {record.name for record in caplog.records}, "nobody has to act"


@pytest.mark.failover
async def test_a_failover_does_not_hold_up_what_is_read_next(replica_set: ThreeNodes, database: str) -> None:
    """The cursor is lost with its server, and nobody waits until that server is back."""
    async with TaskMesh(replica_set.uri, database=database) as mesh:

        @mesh.task
        async def job() -> None:
            await asyncio.sleep(0.02)

        await job.publish_many({f"k{n}": {} for n in range(20 * PAGE)})
        async with working(mesh, "w", concurrency=50, listen=False) as consumer:
            await eventually(lambda: consumer.finished > PAGE + PAGE // 2)
            await asyncio.to_thread(replica_set.primary_goes, killed=True)
            done, began = consumer.finished, time.monotonic()
            await eventually(lambda: consumer.finished > done + 3 * PAGE)
            assert time.monotonic() - began < 20.0, "the driver waits for thirty seconds for a server"
    await asyncio.to_thread(replica_set.heal)
