"""T40: limits do not drift, whoever dies. Real processes, killed at random, while somebody counts.

solid_queue's limit of one once ran eleven at a time, since a counter was added to and subtracted from.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import anyio
import pytest
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern

from taskmesh import TaskMesh, TaskOption
from taskmesh.store.claim import claim
from taskmesh.store.finish import Outcome, finish
from taskmesh.store.queues import limits
from tests.consumer.limits_held import LimitsHeld, watched
from tests.processes.fleet import Fleet, Worker
from tests.processes.handlers import Handlers, define
from tests.waiting import eventually

_SEED = 40


@pytest.fixture
def handlers(mesh: TaskMesh) -> Handlers:
    """The definitions of the tasks that the workers run."""
    return define(mesh)


@pytest.fixture
def tasks(mongo_uri: str, database: str) -> Iterator[Collection[dict[str, Any]]]:
    """The stored tasks, as of one moment at each look."""
    with MongoClient[dict[str, Any]](mongo_uri, tz_aware=True) as client:
        yield client[database].get_collection("tasks", read_concern=ReadConcern("snapshot"))


def live_now(tasks: Collection[dict[str, Any]], queue: str) -> list[tuple[str, str | None]]:
    """Return all live entries of a queue, as worker and group, by one look at one moment."""
    live = {"$and": [{"$eq": ["$$this.state", "RUNNING"]}, {"$gt": ["$$this.ping_expire_time", "$$NOW"]}]}
    entries = {"$filter": {"input": "$task_state.worker_states", "cond": live}}
    stages: list[dict[str, Any]] = [
        {"$match": {"queue": queue}},
        {"$project": {"group": 1, "live": entries}},
        {"$unwind": "$live"},
    ]
    return [(row["live"]["worker_id"], row.get("group")) for row in tasks.aggregate(stages)]


async def kill_some(fleet: Fleet, workers: list[Worker], chance: random.Random, seconds: float) -> None:
    """Kill a worker now and then, and start another in its place."""
    end = anyio.current_time() + seconds
    while anyio.current_time() < end:
        await anyio.sleep(chance.uniform(0.3, 1.2))  # that is the fault's own pace, nothing is waited for
        place = chance.randrange(len(workers))
        await anyio.to_thread.run_sync(workers[place].kill)
        workers[place] = await anyio.to_thread.run_sync(fleet.start)


FLEETS = pytest.mark.parametrize(
    ("processes", "seconds"),
    [pytest.param(4, 10.0, marks=pytest.mark.slow), pytest.param(8, 60.0, marks=pytest.mark.slow)],
    ids=["short", "long"],
)


@FLEETS
async def test_t40_running_limits_hold_while_workers_are_killed(
    mesh: TaskMesh,
    handlers: Handlers,
    fleet: Fleet,
    tasks: Collection[dict[str, Any]],
    mongo_uri: str,
    database: str,
    processes: int,
    seconds: float,
) -> None:
    held = LimitsHeld(running=3, group_running=2)
    await mesh.set_limit("narrow", running=3, group_running=2)
    work = handlers.work.configure(queue="narrow")
    with watched(mongo_uri, database, held):
        for group in ("a", "b", "c"):
            await work.configure(group=group).publish_many({f"{group}{n}": {"ms": 150} for n in range(2_000)})
        workers = await anyio.to_thread.run_sync(lambda: fleet.start_many(processes))
        await kill_some(fleet, workers, random.Random(_SEED), seconds)
        # Nothing has drifted: as soon as the last leases of the dead have ended, three can run again.
        await eventually(lambda: len(live_now(tasks, "narrow")) == 3, what="three run again")
        for worker in workers:
            await anyio.to_thread.run_sync(worker.kill)
    held.check()
    assert held.most == 3, "the limit was never used up"
    await mesh.set_limit("narrow", running=None, group_running=None)
    await anyio.to_thread.run_sync(fleet.start)
    await eventually(lambda: len(live_now(tasks, "narrow")) > 3, what="without a limit more run")


@FLEETS
async def test_t40_no_window_holds_more_starts_than_the_rate_while_workers_are_killed(
    mesh: TaskMesh, handlers: Handlers, fleet: Fleet, mongo_uri: str, database: str, processes: int, seconds: float
) -> None:
    held = LimitsHeld(rate=8, per_ms=1_000)
    await mesh.set_limit("slow", rate=8, per_ms=1_000)
    with watched(mongo_uri, database, held):
        await handlers.work.configure(queue="slow").publish_many({f"k{n}": {"ms": 20} for n in range(2_000)})
        fast = fleet.start(clock_offset_s=7_200)
        workers = [fast, *await anyio.to_thread.run_sync(lambda: fleet.start_many(processes - 1))]
        await kill_some(fleet, workers, random.Random(_SEED), seconds)
        for worker in workers:
            await anyio.to_thread.run_sync(worker.kill)
    held.check()
    assert len(held.starts) > 3 * seconds, "the rate was hardly used"


@FLEETS
async def test_t40_the_limits_of_groups_hold_while_workers_are_killed_and_nothing_of_a_paused_one_starts(
    mesh: TaskMesh,
    handlers: Handlers,
    fleet: Fleet,
    mongo_uri: str,
    database: str,
    processes: int,
    seconds: float,
) -> None:
    held = LimitsHeld(group_running=2, group_rate=6, per_ms=1_000)
    await mesh.set_limit("tenants", group_running=2, group_rate=6, group_per_ms=1_000)
    await mesh.pause("tenants", group="paused")
    work = handlers.work.configure(queue="tenants")
    with watched(mongo_uri, database, held):
        for group in ("a", "b", "c", "paused"):
            await work.configure(group=group).publish_many({f"{group}{n}": {"ms": 100} for n in range(1_000)})
        workers = await anyio.to_thread.run_sync(lambda: fleet.start_many(processes))
        await kill_some(fleet, workers, random.Random(_SEED), seconds)
        for worker in workers:
            await anyio.to_thread.run_sync(worker.kill)
    held.check()
    assert not held.starts_of["paused"]
    # Little, since a worker that is killed keeps its room until its leases end, and one is killed every second.
    used = {group: len(held.starts_of[group]) for group in ("a", "b", "c")}
    assert min(used.values()) > seconds / 2, used


@pytest.mark.parametrize(
    ("count", "groups", "kills_s"),
    [pytest.param(600, 12, 8.0, marks=pytest.mark.slow), pytest.param(20_000, 200, 120.0, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
async def test_t40_at_the_end_every_counter_equals_the_truth(
    mesh: TaskMesh,
    handlers: Handlers,
    fleet: Fleet,
    tasks: Collection[dict[str, Any]],
    mongo_uri: str,
    database: str,
    count: int,
    groups: int,
    kills_s: float,
) -> None:
    held = LimitsHeld(running=30, group_running=2)
    await mesh.set_limit("tenants", running=30, group_running=2)
    work = handlers.work.configure(queue="tenants")
    with watched(mongo_uri, database, held):
        for group in range(groups):
            many = {f"{group}-{n}": {"ms": 5} for n in range(count // groups)}
            await work.configure(group=f"g{group}").publish_many(many)
        workers = await anyio.to_thread.run_sync(lambda: fleet.start_many(4))
        await kill_some(fleet, workers, random.Random(_SEED), kills_s)

        async def all_done() -> bool:
            return not await mesh.listing.count("queue:tenants status:INIT,RUNNING")

        await eventually(all_done, 240.0, what="all tasks are done")
        for worker in workers:
            await anyio.to_thread.run_sync(worker.kill)
    held.check()
    assert live_now(tasks, "tenants") == []

    async def nothing_is_held() -> bool:
        await limits.check(mesh.store, "tenants")
        document = await mesh.store.driver.collection("limits").find_one({"_id": "tenants"})
        return document is not None and document["slots"] == []

    await eventually(nothing_is_held, 60.0, what="every slot of the dead is written off")
    (queue,) = [queue for queue in await mesh.queues.all() if queue.queue == "tenants"]
    assert (queue.running, queue.running_by_group) == (0, {})


async def test_t40_who_dies_without_saying_what_a_slot_was_used_for_leaves_no_room_too_many(mesh: TaskMesh) -> None:
    """The slot was booked for one task and used for the next: whoever checks sees which one runs, at one room and not two."""

    @mesh.task(queue="narrow", option=TaskOption(worker_timeout_ms=600_000))
    async def work() -> None: ...

    await mesh.set_limit("narrow", running=1)
    await work.publish_many({"first": {}, "second": {}})
    begin = mesh.clock.now()
    mesh.store.now = begin
    booking = await limits.book(mesh.store, "narrow", "dying", [limits.Wish("work:first", None)])
    assert booking is not None
    assert await claim(mesh.store, ["work:first"], "dying", "r1") == 1
    await mesh.cancel("work", "first")
    outcome = Outcome("work:first", "r1", "stopped")
    assert await finish(mesh.store, "dying", [outcome], deadline_ms=5_000) == 1
    booked = {"narrow": [limits.Wish("work:second", None)]}
    good_until = limits.booked_until(mesh.store, booking.until, booked, by_group=())
    assert await claim(mesh.store, ["work:second"], "dying", "r2", narrowed_by=good_until) == 1
    for later_ms in (10, 2_000, 4_900, 5_100, 300_000):
        mesh.store.now = begin + timedelta(milliseconds=later_ms)
        await limits.check(mesh.store, "narrow")
        other = await limits.book(mesh.store, "narrow", "other", [limits.Wish("work:third", None)])
        assert other is not None
        assert not other.ids, f"after {later_ms} ms"
        document = await mesh.store.driver.collection("limits").find_one({"_id": "narrow"})
        assert document is not None
        assert len(document["slots"]) == 1
    assert document["slots"][0]["id"] == "work:second"
    mesh.store.now = begin + timedelta(milliseconds=600_100)
    await limits.check(mesh.store, "narrow")
    other = await limits.book(mesh.store, "narrow", "other", [limits.Wish("work:third", None)])
    assert other is not None
    assert other.ids == {"work:third"}


async def test_t40_a_lost_booking_is_written_off(mesh: TaskMesh, handlers: Handlers, fleet: Fleet) -> None:
    """A worker that dies between its booking and its claim takes no room for longer than a booking is good."""
    await mesh.set_limit("narrow", running=1)
    booking = await limits.book(mesh.store, "narrow", "dead", [limits.Wish("work:nobody", None)])
    assert booking is not None
    assert booking.ids == {"work:nobody"}
    handle = await handlers.work.configure(queue="narrow").publish("k")
    worker = await anyio.to_thread.run_sync(lambda: fleet.start().wait_ready())
    assert await handle.result(timeout=60) == worker.worker_id


async def test_t40_nothing_is_claimed_on_a_booking_that_was_written_off(mesh: TaskMesh) -> None:
    """A worker that was frozen after its booking claims nothing when it goes on."""

    @mesh.task(queue="narrow")
    async def work() -> None:
        return None

    await mesh.set_limit("narrow", running=1)
    await work.publish("k")
    booking = await limits.book(mesh.store, "narrow", "frozen", [limits.Wish("work:k", None)])
    assert booking is not None
    booked = {"narrow": [limits.Wish("work:k", None)]}
    in_time = limits.booked_until(mesh.store, booking.until, booked, by_group=())

    async def written_off() -> bool:
        await limits.check(mesh.store, "narrow")
        other = await limits.book(mesh.store, "narrow", "other", [limits.Wish("work:k", None)])
        return other is not None and bool(other.ids)

    await eventually(written_off, what="the booking of the frozen worker is written off")
    assert await claim(mesh.store, ["work:k"], "frozen", "r1", narrowed_by=in_time) == 0
    assert await claim(mesh.store, ["work:k"], "other", "r2") == 1
