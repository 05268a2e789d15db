"""Room in a limited queue that a worker has in hand is used, wherever the next task for it lies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from taskmesh import Consumer, TaskMesh, current_task
from taskmesh.consumer.candidates import slots
from taskmesh.consumer.candidates.backup_claims import BackupClaims
from taskmesh.consumer.candidates.limits import Limits
from taskmesh.consumer.scanner import Scanner
from taskmesh.store.queues import limits as store_limits
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
async def held_by_one(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Work, Any, Consumer]]:
    """Two workers, of which one holds the room. The other never asks for it again."""
    work = Work()
    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, running=1)
    over, book = asyncio.Event(), store_limits.book
    async with all_working(mesh, ["a", "b"]) as consumers:
        await eventually(lambda: all(parts_of(consumer).partitions.others_cnt for consumer in consumers))
        await task.publish("first")
        await eventually(lambda: sum(len(consumer.running) for consumer in consumers) == 1)
        [holder] = [consumer for consumer in consumers if consumer.running]

        async def asked(store: Any, queue: str, worker_id: str, *args: Any, **settings: Any) -> Any:
            if worker_id != holder.worker_id:
                await over.wait()
            return await book(store, queue, worker_id, *args, **settings)

        monkeypatch.setattr(store_limits, "book", asked)
        try:
            yield work, task, holder
        finally:
            work.may_end.set()
            over.set()


async def test_who_holds_the_room_takes_the_tasks_in_the_lanes_of_those_who_do_not(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def helps_nobody(*_: Any) -> int:
        return 0

    monkeypatch.setattr(Scanner, "_help_others", helps_nobody)
    monkeypatch.setattr(BackupClaims, "add", lambda *_, **__: None)
    async with held_by_one(mesh, monkeypatch) as (work, task, holder):
        lane = parts_of(holder).partitions.place
        keys = [key for key in (f"k{n}" for n in range(60)) if lane(f"work:{key}", QUEUE) == 1]
        await task.publish_many({key: {} for key in keys})
        work.may_end.set()
        await eventually(lambda: len(work.ran) == 1 + len(keys))
    assert len({worker_id for _, worker_id in work.ran}) == 1
    assert len(keys) > 10


@pytest.mark.parametrize("waits", ["nothing", "what it may not claim"])
async def test_room_that_is_of_no_use_here_is_given_back(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    monkeypatch.setattr(slots, "_PROMISED_S", 3_600.0)
    async with held_by_one(mesh, monkeypatch) as (work, task, holder):
        if waits != "nothing":
            holder.pause()
            await task.publish_many({f"k{n}": {} for n in range(40)})
        work.may_end.set()

        async def has_room() -> bool:
            document = await mesh.store.driver.collection(mesh.store.limits).find_one({"_id": QUEUE})
            return document is not None and document["slots"] == []

        await eventually(has_room)


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


async def test_tasks_of_all_kinds_are_found_though_each_scan_sees_the_queue_full(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            await store_limits.keep(mesh.store, QUEUE, renew={token: wish[0]})
        refused = await store_limits.book(mesh.store, QUEUE, "waits", [store_limits.Wish("work:other", None)])
        assert refused is not None
        assert not refused.ids
        checked.append((later_ms, refused.check))
    # It was renewed after 4 s, is valid for 3 s, and a claim may be on its way for 2 s more.
    assert [later_ms for later_ms, check in checked if check] == [9_000, 10_000, 11_000, 12_000]
