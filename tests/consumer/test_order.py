"""Within one queue and priority, tasks are claimed in the order in which they were published."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pymongo import MongoClient

from taskmesh import Status, TaskDefinition, TaskMesh, current_task
from taskmesh.consumer import scanner
from taskmesh.store.numbers import Numbers, moment_of, number_at
from tests.databases import Databases
from tests.waiting import eventually
from tests.working import all_working, finished, parts_of, working

QUEUES = ("a", "b")


@dataclass(frozen=True)
class Call:
    """One publication: as many tasks of one name, by one call."""

    name: str
    queue: str
    priority: int
    count: int


calls = st.lists(
    st.builds(
        Call,
        name=st.sampled_from(["first", "second"]),
        queue=st.sampled_from(QUEUES),
        priority=st.sampled_from([0, 0, 0, 5]),
        count=st.integers(1, 12),
    ),
    min_size=1,
    max_size=8,
)


def _define(mesh: TaskMesh, ran: list[tuple[str, int, int]]) -> None:
    def one(name: str) -> None:
        @mesh.task(name=name)
        async def _run(queue: str, priority: int, place: int) -> None:
            ran.append((queue, priority, place))

    one("first")
    one("second")


async def _publish(mesh: TaskMesh, calls: Sequence[Call], together: bool) -> None:
    """Publish as called, each task with its place among all; `together`: one call does not wait for the one before."""
    place = 0
    waiting = []
    for call in calls:
        params: dict[str, Any] = {}
        for _ in range(call.count):
            # Keys in no order, so that nothing but the publication can give one.
            params[f"{hash((place, call.count)) % 997}-{place}"] = {
                "queue": call.queue,
                "priority": call.priority,
                "place": place,
            }
            place += 1
        publishing = mesh.publisher.publish_many(call.name, params, queue=call.queue, priority=call.priority)
        if together:
            waiting.append(asyncio.ensure_future(publishing))
        else:
            await publishing
    await asyncio.gather(*waiting)


def _places(ran: Iterable[tuple[str, int, int]], queue: str, priority: int) -> list[int]:
    return [place for in_queue, with_priority, place in ran if (in_queue, with_priority) == (queue, priority)]


@given(calls=calls, page=st.sampled_from([1, 2, 7, 1_000]), together=st.booleans(), listen=st.booleans())
@settings(max_examples=12, deadline=None)
def test_claim_order_is_publication_order_in_every_single_slot_run(
    mongo_uri: str,
    _databases: Databases,  # noqa: PT019 — it has a value: a database for each example
    calls: list[Call],
    page: int,
    together: bool,
    listen: bool,
) -> None:
    async def run(database: str) -> list[tuple[str, int, int]]:
        ran: list[tuple[str, int, int]] = []
        async with TaskMesh(mongo_uri, database=database) as mesh:
            _define(mesh, ran)
            await _publish(mesh, calls, together)
            consumer = mesh.consumer(worker_id="w", concurrency=1, queues=QUEUES, listen=listen)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(scanner, "_USUAL_PAGE", page)
                await consumer.run(until_idle=True)
        return ran

    name = _databases.prepared()
    try:
        ran = asyncio.run(run(name))
    finally:
        _databases.rest(name)
    assert len(ran) == sum(call.count for call in calls)
    for queue in QUEUES:
        for priority in (0, 5):
            places = _places(ran, queue, priority)
            assert places == sorted(places), f"in queue {queue} with priority {priority}"


async def test_while_one_slot_works_off_a_backlog_what_comes_later_goes_behind(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanner, "_USUAL_PAGE", 20)
    ran: list[int] = []

    @mesh.task
    async def job(place: int) -> None:
        ran.append(place)

    await job.publish_many({f"k{n * 37 % 101}": {"place": n} for n in range(101)})
    async with working(mesh, "w", concurrency=1):
        for n in range(101, 131):
            await job.publish(f"later{n * 37 % 101}", place=n)
        await eventually(lambda: len(ran) == 131)
    assert ran == sorted(ran)


async def test_several_of_one_set_start_in_the_order_of_publication(mesh: TaskMesh) -> None:
    claims: defaultdict[str, list[int]] = defaultdict(list)

    @mesh.task
    async def job(place: int) -> None:
        claims[current_task().running_id].append(place)

    await job.publish_many({f"k{n * 37 % 101}": {"place": n} for n in range(101)})
    await mesh.consumer(worker_id="w", concurrency=10).run(until_idle=True)
    # Two claims may be under way at once, and be answered in any order.
    assert max(map(len, claims.values())) > 1, "tasks of one claim have one running_id"
    assert all(one == sorted(one) for one in claims.values()), claims


async def test_what_was_delayed_has_its_place_by_its_publication_when_it_is_due(mesh: TaskMesh) -> None:
    ran: list[str] = []
    holding, go_on = asyncio.Event(), asyncio.Event()

    @mesh.task
    async def job(name: str) -> None:
        ran.append(name)
        if name == "hold":
            holding.set()
            await go_on.wait()

    await job.publish("hold", name="hold")
    async with working(mesh, "w", concurrency=1) as consumer:
        await holding.wait()
        delayed = await job.configure(delay_ms=300).publish("delayed", name="delayed")
        await job.publish("later", name="later")
        due = (await delayed.task()).next_claim_time
        assert due is not None
        await eventually(lambda: datetime.now(UTC) > due + timedelta(milliseconds=100))
        candidates = parts_of(consumer).candidates
        await eventually(lambda: candidates.ready_count(time.monotonic()) == 2, what="both are heard of, and due")
        go_on.set()
        await finished(mesh, "job", "later")
    assert ran == ["hold", "delayed", "later"]


async def test_a_waiting_task_keeps_its_place_and_a_finished_one_is_published_anew(mesh: TaskMesh) -> None:
    ran: list[str] = []

    @mesh.task
    async def job(name: str) -> None:
        ran.append(name)

    await job.publish("done", name="done")
    await mesh.consumer(worker_id="w", concurrency=1).run(until_idle=True)
    for name in ("a", "b", "c"):
        await job.publish(name, name=name)
    await job.configure(run_again=True).publish("done", name="done")
    await job.configure(run_again=True).publish("b", name="b")
    await job.configure(update_existing_params=True).publish("a", name="a, changed")
    await job.publish("d", name="d")
    await mesh.consumer(worker_id="w", concurrency=1).run(until_idle=True)
    assert ran == ["done", "a, changed", "b", "c", "done", "d"]


async def test_retry_by_hand_gives_a_task_its_place_back(mesh: TaskMesh) -> None:
    ran: list[str] = []

    @mesh.task
    async def job(name: str) -> None:
        ran.append(name)

    for name in ("a", "b", "c"):
        await job.publish(name, name=name)
    await mesh.cancel("job", "a")
    assert (await mesh.retry("job", "a")).status is Status.INIT
    await mesh.consumer(worker_id="w", concurrency=1).run(until_idle=True)
    assert ran == ["a", "b", "c"]


async def test_tasks_without_a_number_are_claimed_by_the_time_that_they_came(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    ran: list[str] = []

    @mesh.task
    async def job(name: str) -> None:
        ran.append(name)

    for name in ("a", "b", "c"):
        await job.publish(name, name=name)
    with MongoClient[dict[str, Any]](mongo_uri, tz_aware=True) as client:
        tasks = client[database]["tasks"]
        old = tasks.find_one({"_id": "job:c"}) or {}
        del old["publish_number"]
        earlier = old["next_claim_time"] - timedelta(minutes=1)
        tasks.insert_one(old | {"_id": "job:old", "key": "old", "params": {"name": "old"}, "next_claim_time": earlier})
        tasks.insert_one(old | {"_id": "job:odd", "key": "odd", "params": {"name": "odd"}, "publish_number": "a"})
    await mesh.consumer(worker_id="w", concurrency=1).run(until_idle=True)
    assert ran[0] == "old"
    assert sorted(ran) == ["a", "b", "c", "odd", "old"]
    assert [name for name in ran if len(name) == 1] == ["a", "b", "c"]


async def test_several_workers_lose_none_and_run_none_twice(mesh: TaskMesh) -> None:
    ran: list[int] = []

    @mesh.task
    async def job(place: int) -> None:
        ran.append(place)

    async with all_working(mesh, ["w1", "w2", "w3"], concurrency=2):
        await job.publish_many({f"k{n}": {"place": n} for n in range(150)})
        await eventually(lambda: len(ran) >= 150)
    assert sorted(ran) == list(range(150))


def test_numbers_are_in_the_order_of_the_calls_though_the_clock_is_set_back() -> None:
    numbers, now = Numbers(), datetime(2026, 11, 22, 8, tzinfo=UTC)
    first = numbers.take(3, now)
    assert moment_of(first) == now
    assert numbers.take(1, now) == first + 3
    assert numbers.take(1, now - timedelta(hours=1)) == first + 4
    later = now + timedelta(milliseconds=1)
    assert numbers.take(1, later) == number_at(later)
    assert number_at(datetime(2200, 1, 1, tzinfo=UTC)) < 2**63


@pytest.mark.parametrize("limit", ["running", "group_running"])
async def test_where_one_may_run_at_a_time_order_and_priority_hold_whatever_the_concurrency(
    mesh: TaskMesh, limit: str
) -> None:
    ran: list[str] = []

    @mesh.task
    async def job() -> None:
        ran.append(current_task().key)

    await mesh.set_limit("default", **{limit: 1})  # type: ignore[arg-type]  # mypy does not know which name it is
    of_one = job.configure(group="g") if limit == "group_running" else job
    await of_one.publish_many({f"k{n}": {} for n in range(8)})
    await of_one.configure(priority=5).publish_many({f"first-{n}": {} for n in range(8)})
    await mesh.consumer(worker_id="w", concurrency=20).run(until_idle=True)
    assert ran == [*(f"first-{n}" for n in range(8)), *(f"k{n}" for n in range(8))]


def _held(mesh: TaskMesh, ran: list[str], go_on: asyncio.Event) -> TaskDefinition[[], None]:
    """Define a task that notes its key, and then holds its slot until it may go on."""

    @mesh.task
    async def job() -> None:
        ran.append(current_task().key)
        await go_on.wait()

    return job


@pytest.mark.parametrize(
    ("verb", "crowd"),
    [("set_option", 0), ("update_existing_params", 0), ("set_option", 1_100)],  # more than one scan reads
)
async def test_a_priority_that_was_lowered_counts_for_whoever_knew_the_task_before(
    mesh: TaskMesh, verb: str, crowd: int
) -> None:
    ran: list[str] = []
    go_on = asyncio.Event()
    job = _held(mesh, ran, go_on)
    await job.publish("first")
    async with working(mesh, "w", concurrency=1) as consumer:
        parts = parts_of(consumer)
        await eventually(lambda: ran, what="its slot is taken")
        await job.publish_many({key: {} for key in ("lowered", "second", *map(str, range(crowd)))})
        await eventually(lambda: "job:second" in parts.candidates, what="it knows those that wait")
        scans = parts.scanner.scans
        if verb == "set_option":
            await mesh.set_option("job", "lowered", priority=-1)
        else:
            await job.configure(update_existing_params=True, priority=-1).publish("lowered")
        await eventually(lambda: parts.scanner.scans >= scans + 3, what="it has looked again")
        go_on.set()
        await eventually(lambda: len(ran) >= 3)
    assert ran[1] == "second"


@pytest.mark.parametrize("named", [False, True], ids=["for anybody", "for this worker"])
async def test_an_urgent_task_is_next_though_only_a_part_of_the_backlog_was_read(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Under a backlog new tasks are not announced, and the next scan is up to a second away."""
    ran: list[str] = []
    go_on = asyncio.Event()
    job = _held(mesh, ran, go_on)
    await job.publish_many({str(n): {} for n in range(1_100)})
    async with working(mesh, "w", concurrency=1) as consumer:
        parts = parts_of(consumer)
        await eventually(lambda: ran and not parts.listener.wants_hints, what="there is more than enough to do")
        monkeypatch.setattr(scanner, "SCAN_EVERY_S", 3_600.0)
        scans = parts.scanner.scans
        await eventually(lambda: parts.scanner.scans > scans, what="the last scan for long")
        await job.configure(priority=1, specific_worker_ids=["w"] if named else ()).publish("urgent")
        await eventually(lambda: "job:urgent" in parts.candidates, what="it is known")
        go_on.set()
        await eventually(lambda: len(ran) >= 2)
    assert ran[1] == "urgent"


async def test_an_urgent_task_does_not_wait_for_a_busy_worker_while_others_work_off_a_backlog(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, str]] = []
    go_on = {"a": asyncio.Event(), "b": asyncio.Event()}

    @mesh.task
    async def job() -> None:
        me = current_task().worker_id
        ran.append((me, current_task().key))
        await go_on[me].wait()

    await job.publish_many({str(n): {} for n in range(2_500)})
    async with all_working(mesh, ["a", "b"], concurrency=1) as (_, b):
        parts = parts_of(b)
        await eventually(
            lambda: len(ran) == 2 and not parts.listener.wants_hints, what="both are busy, and have enough"
        )
        await eventually(lambda: not parts.partitions.alone, what="it knows of the other")
        monkeypatch.setattr(scanner, "SCAN_EVERY_S", 3_600.0)
        scans = parts.scanner.scans
        await eventually(lambda: parts.scanner.scans > scans, what="the last scan for long")
        key = next(key for n in range(1_000) if parts.partitions.place(f"job:{(key := f'urgent-{n}')}", "default"))
        await job.configure(priority=1).publish(key)
        await eventually(lambda: f"job:{key}" in parts.candidates, what="it is known")
        go_on["b"].set()
        await eventually(lambda: len(ran) >= 3)
    assert ran[2] == ("b", key)
