"""Room in a limited queue that a worker has in hand is used, wherever the next task for it lies."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest

from taskmesh import Consumer, TaskMesh, current_task
from taskmesh.consumer.candidates import limits, parked, slots, tasks_for_room
from taskmesh.consumer.candidates.backup_claims import BackupClaims
from taskmesh.consumer.candidates.claim_queue import ClaimQueue
from taskmesh.consumer.candidates.limits import Limits
from taskmesh.consumer.listener import Listener
from taskmesh.consumer.scanner import Scanner
from taskmesh.store.queues import limits as store_limits
from taskmesh.store.queues.first_of import first_of
from tests.waiting import eventually
from tests.working import all_working, parts_of, working

QUEUE = "narrow"
PLACE = QUEUE, None


@dataclass
class Work:
    """A task in a queue with room for one. The first execution waits."""

    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    ran: list[tuple[str, str]] = field(default_factory=list)
    """Key and worker of each execution that has ended."""

    async def __call__(self) -> None:
        if not self.ran:
            await self.may_end.wait()
        self.ran.append((current_task().key, current_task().worker_id))


@asynccontextmanager
async def held_by_one(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, running: int = 1
) -> AsyncIterator[tuple[Work, Any, Consumer]]:
    """Two workers, of which one holds a slot. The other is never answered.

    However long a look takes on a busy machine, the slot is kept for what it brings: nobody else would use it here.
    """
    monkeypatch.setattr(slots, "_PROMISED_S", 3_600.0)
    work = Work()
    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, running=running)
    over, book = asyncio.Event(), store_limits.book
    first: list[str] = []

    async def asked(store: Any, queue: str, worker_id: str, *args: Any, **settings: Any) -> Any:
        first.append(worker_id)
        if worker_id != first[0]:
            await over.wait()
        return await book(store, queue, worker_id, *args, **settings)

    monkeypatch.setattr(store_limits, "book", asked)
    async with all_working(mesh, ["a", "b"]) as consumers:
        await eventually(lambda: all(parts_of(consumer).partitions.others_cnt for consumer in consumers))
        await task.publish("first")
        await eventually(lambda: sum(len(consumer.running) for consumer in consumers) == 1)
        [holder] = [consumer for consumer in consumers if consumer.running]
        try:
            yield work, task, holder
        finally:
            work.may_end.set()
            over.set()


async def publish_in_other_lanes(task: Any, holder: Consumer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Publish tasks that this worker does not look for, and does not take over after a while."""

    async def helps_nobody(*_: Any) -> int:
        return 0

    monkeypatch.setattr(Scanner, "_help_others", helps_nobody)
    monkeypatch.setattr(BackupClaims, "add", lambda *_, **__: None)
    keys = keys_in_lanes(holder, 1)
    await task.publish_many({key: {} for key in keys})
    return keys


def keys_in_lanes(consumer: Consumer, place: int) -> list[str]:
    """Return keys of tasks for which so many workers come before this one."""
    lane = parts_of(consumer).partitions.place
    return [key for key in (f"k{n}" for n in range(60)) if lane(f"work:{key}", QUEUE) == place]


@pytest.mark.parametrize("running", [1, 4])
async def test_who_holds_scarce_room_takes_the_tasks_in_the_lanes_of_those_who_do_not(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, running: int
) -> None:
    async with held_by_one(mesh, monkeypatch, running) as (work, task, holder):
        keys = await publish_in_other_lanes(task, holder, monkeypatch)
        work.may_end.set()
        await eventually(lambda: len(work.ran) == 1 + len(keys))
    assert len({worker_id for _, worker_id in work.ran}) == 1
    assert len(keys) > 10


async def test_a_slot_that_comes_into_hand_during_a_look_is_used_for_the_tasks_in_the_lanes_of_others(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def answers_late(*args: Any) -> Any:
        asked.set()
        await may_answer.wait()
        return await first_of(*args)

    async with held_by_one(mesh, monkeypatch) as (work, task, holder):
        keys = await publish_in_other_lanes(task, holder, monkeypatch)
        monkeypatch.setattr(tasks_for_room, "first_of", answers_late)
        parts_of(holder).limits._want_tasks(PLACE)
        await asked.wait()
        work.may_end.set()
        await eventually(lambda: parts_of(holder).slots.has_idle(PLACE))
        may_answer.set()
        await eventually(lambda: len(work.ran) == 1 + len(keys))


async def test_where_there_is_room_for_everybody_tasks_are_left_to_those_in_whose_lanes_they_are(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with held_by_one(mesh, monkeypatch, running=5) as (work, task, holder):
        keys = await publish_in_other_lanes(task, holder, monkeypatch)
        work.may_end.set()
        await eventually(lambda: has_room(mesh))
        assert len(work.ran) == 1
    assert len(keys) > 10


async def has_room(mesh: TaskMesh) -> bool:
    """Whether no worker holds a slot."""
    document = await mesh.store.driver.collection(mesh.store.limits).find_one({"_id": QUEUE})
    return document is not None and document["slots"] == []


@pytest.mark.parametrize("waits", ["nothing", "what it may not claim"])
async def test_room_that_is_of_no_use_here_is_given_back(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    async with held_by_one(mesh, monkeypatch) as (work, task, holder):
        if waits != "nothing":
            holder.pause()
            await task.publish_many({f"k{n}": {} for n in range(40)})
        work.may_end.set()
        await eventually(lambda: has_room(mesh))


async def test_what_others_have_taken_is_not_tried_one_after_the_other(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates wait here for room, and meanwhile somebody else runs them."""
    async with held_by_one(mesh, monkeypatch) as (work, task, holder):
        await task.publish_many({f"k{n}": {} for n in range(40)})
        await eventually(lambda: len(parts_of(holder).limits._parked.get(PLACE, ())) > 10)
        tasks = mesh.store.driver.collection(mesh.store.tasks)
        async for one in mesh.find("work", status="INIT", limit=0):
            # Behind the back of the stream's readers: nobody is told.
            await tasks.update_one(
                {"_id": f"work:{one.key}"}, {"$set": {"status": "SUCCESS"}, "$unset": {"next_claim_time": ""}}
            )
        await task.publish("last")
        tried = parts_of(holder).claimer.tried
        work.may_end.set()
        await eventually(lambda: work.ran and work.ran[-1][0] == "last")
        assert parts_of(holder).claimer.tried - tried < 10


@pytest.mark.parametrize("old", [False, True])
async def test_of_what_is_found_for_room_those_in_the_lanes_of_others_come_last_or_few_at_a_time(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    """If all who have room began with the oldest, they would take them from each other."""
    monkeypatch.setattr(tasks_for_room, "_LEFT_TO_OTHERS", timedelta(0) if old else timedelta(hours=1))
    monkeypatch.setattr(parked, "_AT_MOST", 3)
    # What is looked for without a slot in hand lies in this worker's lanes only.
    monkeypatch.setattr(limits, "_LOOKS_APART_S", 3_600.0)
    monkeypatch.setattr(limits, "_WHILE_ALL_OURS_S", 3_600.0)
    async with held_by_one(mesh, monkeypatch) as (work, task, holder):
        known, *ours = keys_in_lanes(holder, 0)
        await task.publish(known)
        await eventually(lambda: len(parts_of(holder).limits._parked.get(PLACE, ())) == 1)
        # Scans skip the queue now, and nobody hears of what follows.
        monkeypatch.setattr(Listener, "_offer", lambda *_: None)
        theirs = await publish_in_other_lanes(task, holder, monkeypatch)
        await task.publish_many({key: {} for key in ours})
        monkeypatch.setattr(ClaimQueue, "begin_scan", lambda _: 0)
        work.may_end.set()
        await eventually(lambda: len(work.ran) == 2 + len(ours) + len(theirs))
    ran = [key for key, _ in work.ran[2:]]
    if old:
        assert set(ran[:2]) <= set(theirs)
        assert ran[2] in ours
    else:
        assert set(ran[: len(ours)]) == set(ours)
    assert min(len(ours), len(theirs)) > 10


@pytest.mark.parametrize("dropped", ["since others have taken one", "since there are too many"])
async def test_what_was_dropped_is_found_again_before_the_next_scan(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, dropped: str
) -> None:
    too_many = dropped == "since there are too many"
    async with held_by_one(mesh, monkeypatch) as (work, task, holder):
        if too_many:
            monkeypatch.setattr(parked, "_AT_MOST", 3)
        await task.publish_many({f"k{n}": {} for n in range(40)})
        waiting = parts_of(holder).limits._parked
        await eventually(lambda: len(waiting.get(PLACE, ())) == 3 if too_many else len(waiting.get(PLACE, ())) > 10)
        monkeypatch.setattr(ClaimQueue, "begin_scan", lambda _: 0)
        if not too_many:  # behind the back of the stream's readers: the one that is tried next
            await mesh.store.driver.collection(mesh.store.tasks).update_one(
                {"_id": waiting[PLACE]._heap[0][2].id},
                {"$set": {"status": "SUCCESS"}, "$unset": {"next_claim_time": ""}},
            )
        work.may_end.set()
        await eventually(lambda: len(work.ran) == (41 if too_many else 40))


async def test_room_that_becomes_free_while_a_worker_asks_for_some_is_used_for_all_that_waits(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place is open then, and one of those that wait is tried. The next go on when that one has ended."""
    work, book = Work(), store_limits.book
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def answers_late(*args: Any, **settings: Any) -> Any:
        booking = await book(*args, **settings)
        if not asked.is_set():
            assert booking is not None
            assert not booking.ids
            asked.set()
            await may_answer.wait()
        return booking

    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, running=1)
    async with working(mesh, "a") as consumer:
        await task.publish("first")
        await eventually(lambda: consumer.running)
        await task.publish_many({f"k{n}": {} for n in range(5)})
        waiting = parts_of(consumer).limits
        await eventually(lambda: len(waiting._parked.get(PLACE, ())) == 5)
        monkeypatch.setattr(ClaimQueue, "begin_scan", lambda _: 0)  # so that scans bring nothing more
        monkeypatch.setattr(store_limits, "book", answers_late)
        waiting._reopen(PLACE)
        await asked.wait()
        work.may_end.set()
        await eventually(lambda: not consumer.running)
        may_answer.set()
        await eventually(lambda: len(work.ran) == 6)


async def test_tasks_of_all_kinds_are_found_though_each_scan_sees_the_queue_full(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker asks for room now and then. What ends while it asks leaves the rest to a scan, and here no scan sees it.
    monkeypatch.setattr(limits, "_WHILE_ALL_OURS_S", 3_600.0)
    work = Work()
    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, running=1)
    skip_full = Limits.skip_full

    def always_full(limits: Limits) -> frozenset[str]:
        limits._turned_away.add(PLACE)
        return skip_full(limits) | {QUEUE}

    async with working(mesh, "a", listen=False, labels={"disk": "fast"}) as consumer:
        await task.publish_many({"first": {}, "second": {}})
        await eventually(lambda: consumer.running and parts_of(consumer).limits.is_full(*PLACE))
        monkeypatch.setattr(Limits, "skip_full", always_full)
        await task.publish("for anybody")
        await task.configure(specific_worker_ids=["a"]).publish("named")
        await task.configure(needs={"disk": "fast"}).publish("labelled")
        work.may_end.set()
        await eventually(lambda: len(work.ran) == 5)
    assert {key for key, _ in work.ran} == {"first", "second", "for anybody", "named", "labelled"}


@pytest.mark.parametrize("workers", [2, 3])
async def test_a_worker_that_has_no_room_for_a_while_gets_its_share_of_it(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """The first worker has enough to do in its own lanes, and all the room, before there are others."""
    monkeypatch.setattr(limits, "_LACKED_FOR_S", 0.3)
    ran: Counter[str] = Counter()

    async def work() -> None:
        await asyncio.sleep(0.01)
        ran[current_task().worker_id] += 1

    running = 2 * workers
    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, running=running)
    await task.publish_many({f"k{n}": {} for n in range(6_000)})
    async with working(mesh, "first") as first:
        await eventually(lambda: parts_of(first).slots.count(*PLACE) == running)
        async with all_working(mesh, [f"w{n}" for n in range(1, workers)]):
            await eventually(lambda: len(ran) == workers and min(ran.values()) >= 20)
            assert ran.total() < 5_000, "meanwhile the first had more to do"


@asynccontextmanager
async def another_lacks_some(mesh: TaskMesh) -> AsyncIterator[None]:
    """Somebody has asked in vain, and does not take what it is left."""

    async def asks() -> None:
        while True:
            told = {"$set": {"lacking": {"w": "other", "at": mesh.clock.now()}}}
            await mesh.store.driver.collection(mesh.store.limits).update_one({"_id": QUEUE}, told)
            await asyncio.sleep(0.05)

    asking = asyncio.create_task(asks())
    try:
        yield
    finally:
        asking.cancel()


async def test_what_another_lacks_is_left_to_it(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = 0

    async def work() -> None:
        nonlocal ran
        await asyncio.sleep(0.01)
        ran += 1

    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, running=4)
    await task.publish_many({f"k{n}": {} for n in range(4_000)})
    async with working(mesh, "first") as first, working(mesh, "other", queues=["another"]):
        held, book = parts_of(first).slots, store_limits.book
        would_have: list[int] = []

        async def asked(store: Any, queue: str, worker_id: str, wishes: list[Any], **settings: Any) -> Any:
            if held.is_wanted(queue):
                would_have.append(held.count(*PLACE) + len(wishes))
            return await book(store, queue, worker_id, wishes, **settings)

        monkeypatch.setattr(store_limits, "book", asked)
        await eventually(lambda: held.count(*PLACE) == 4)
        async with another_lacks_some(mesh):
            await eventually(lambda: held.count(*PLACE) == 2)
            until = ran + 100
            await eventually(lambda: ran > until)
            assert max(would_have, default=0) <= 2, "it asks for no more than its share"
        await eventually(lambda: held.count(*PLACE) == 4)


async def test_what_another_lacks_is_left_to_it_though_tasks_last_long(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is told when it begins a task, and gives something back when it has ended the next."""
    monkeypatch.setattr(slots, "_TOLD_EVERY_S", 0.05)
    monkeypatch.setattr(slots, "_WANTED_FOR_S", 0.2)
    ends = {f"k{n}": asyncio.Event() for n in range(4)}

    async def work() -> None:
        await ends[current_task().key].wait()

    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, running=2)
    await task.publish_many({key: {} for key in ends})
    async with working(mesh, "first") as first, working(mesh, "other", queues=["another"]):
        held = parts_of(first).slots
        await eventually(lambda: len(first.running) == 2 and parts_of(first).partitions.others_cnt == 1)
        async with another_lacks_some(mesh):
            begun = list(first.running)
            ends[begun[0]].set()
            await eventually(lambda: held.was_wanted(QUEUE))
            await eventually(lambda: len(first.running) == 2 and not held.is_wanted(QUEUE))
            # Nothing to give back in the place, for example since a slot has expired: then it is asked again, as ever.
            waiting = parts_of(first).limits
            await eventually(lambda: PLACE in waiting._shut)
            waiting._use_room(PLACE)
            assert PLACE not in waiting._shut
            monkeypatch.setattr(slots, "_WANTED_FOR_S", 3_600.0)  # so that it does not ask again
            ends[begun[1]].set()
            await eventually(lambda: held.count(*PLACE) == 1)
            assert len(first.running) == 1
        for event in ends.values():
            event.set()


@pytest.mark.parametrize(
    ("lacked_for_s", "asks_often_s", "told"),
    [(0.2, 3_600.0, True), (3_600.0, 3_600.0, False), (0.2, 0.0, False)],
    ids=["long enough", "too short", "too seldom"],
)
async def test_the_others_are_told_of_what_a_worker_has_lacked_for_a_while(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, lacked_for_s: float, asks_often_s: float, told: bool
) -> None:
    monkeypatch.setattr(limits, "_LACKED_FOR_S", lacked_for_s)
    monkeypatch.setattr(limits, "_ASKS_OFTEN_S", asks_often_s)
    due: list[int] = []
    began, book = time.monotonic(), store_limits.book

    async def asked(*args: Any, **settings: Any) -> Any:
        due.append(settings["due"])
        return await book(*args, **settings)

    monkeypatch.setattr(store_limits, "book", asked)
    task = mesh.task(name="work", queue=QUEUE)(Work())
    await mesh.set_limit(QUEUE, running=1)
    wishes = [store_limits.Wish("work:elsewhere", None)]
    assert await book(mesh.store, QUEUE, "has it", wishes) is not None
    async with working(mesh, "lacks some"):
        await task.publish("k")
        await eventually(lambda: any(due) if told else len(due) > 5 and time.monotonic() - began > 1)
    assert due[0] == 0
    assert any(due) == told


async def test_a_worker_that_gets_what_it_asks_for_lacks_nothing(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_LACKED_FOR_S", 0.0)
    monkeypatch.setattr(limits, "_ASKS_OFTEN_S", 3_600.0)
    due: list[int] = []
    book = store_limits.book

    async def asked(*args: Any, **settings: Any) -> Any:
        due.append(settings["due"])
        return await book(*args, **settings)

    monkeypatch.setattr(store_limits, "book", asked)
    work = Work()
    work.may_end.set()
    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, running=2)
    async with working(mesh, "w"):
        for n in range(3):
            await task.publish(f"k{n}")
            await eventually(lambda: work.ran and work.ran[-1][0] == f"k{n}")  # noqa: B023 — asked at once
            await eventually(lambda: has_room(mesh))
    assert len(due) >= 3
    assert not any(due)


async def test_only_others_are_told_of_it_and_only_if_it_asks_in_vain(mesh: TaskMesh) -> None:
    await mesh.set_limit(QUEUE, running=2)
    wishes = [store_limits.Wish(f"work:k{n}", None) for n in range(4)]

    async def got(worker_id: str, due: int) -> int:
        booking = await store_limits.book(mesh.store, QUEUE, worker_id, wishes, due=due)
        assert booking is not None
        return len(booking.ids)

    async def told(worker_id: str) -> datetime | None:
        return (await store_limits.keep(mesh.store, QUEUE, worker_id)).wanted_at

    assert await got("has it all", 0) == 2
    assert await got("wants more", 0) == 0
    assert await told("has it all") is None
    assert await got("lacks some", 1) == 0
    at = await told("has it all")
    assert at is not None
    assert await told("lacks some") is None
    await mesh.set_limit(QUEUE, running=3)
    assert await got("lacks some", 1) == 1
    assert await told("has it all") == at, "it got what it lacked"


async def test_slots_are_not_checked_while_all_of_them_are_valid(mesh: TaskMesh) -> None:
    await mesh.set_limit(QUEUE, running=1)
    begin = mesh.store.now = mesh.clock.now()
    wish = [store_limits.Wish("work:k", None)]
    held = await store_limits.book(mesh.store, QUEUE, "holds", wish)
    assert held is not None
    [token] = held.slots.values()
    checked: list[tuple[int, bool]] = []
    for later_ms in range(1_000, 12_001, 1_000):
        mesh.store.now = begin + timedelta(milliseconds=later_ms)
        if later_ms < 5_000:
            await store_limits.keep(mesh.store, QUEUE, "holds", renew={token: wish[0]})
        refused = await store_limits.book(mesh.store, QUEUE, "waits", [store_limits.Wish("work:other", None)])
        assert refused is not None
        assert not refused.ids
        checked.append((later_ms, refused.check))
    # It was renewed after 4 s, is valid for 3 s, and a claim may be on its way for 2 s more.
    assert [later_ms for later_ms, check in checked if check] == [9_000, 10_000, 11_000, 12_000]
