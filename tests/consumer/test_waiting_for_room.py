"""What waits for room under a limit keeps its order: urgent tasks first, groups in turn, and all workers have some of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import pytest

from taskmesh import Consumer, TaskMesh, current_task
from taskmesh.consumer.candidates import limits, parked
from taskmesh.consumer.candidates.backup_claims import BackupClaims
from taskmesh.consumer.candidates.claim_queue import Candidate
from taskmesh.consumer.candidates.parked import Parked
from taskmesh.consumer.scanner import Scanner
from taskmesh.store.queues import limits as store_limits
from tests.waiting import eventually
from tests.working import all_working, parts_of, working

QUEUE = "narrow"
LIMITS: dict[str, dict[str, Any]] = {"running": {"running": 2}, "rate": {"rate": 4, "per_ms": 50}}


class Work:
    """A task that notes, in the order of the starts, what was started by whom."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.workers: list[str] = []

    async def __call__(self) -> None:
        self.ran.append(current_task().key)
        self.workers.append(current_task().worker_id)
        await asyncio.sleep(0.01)  # that is the task's own length

    def place_of(self, keys: Iterable[str]) -> int:
        """Return how many started before the last of these."""
        return max(map(self.ran.index, keys))


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("workers", [1, 2])
async def test_groups_take_turns_for_the_room_of_their_queue(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, kind: str, workers: int
) -> None:
    # Each worker takes turns by itself: so that each has its share soon.
    monkeypatch.setattr(limits, "_LACKED_FOR_S", 0.2)
    work = Work()
    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, **LIMITS[kind])
    for group, count in (("big", 800), ("small", 10), ("other", 10)):
        await task.configure(group=group).publish_many({f"{group}-{n}": {} for n in range(count)})
    few = [f"{group}-{n}" for group in ("small", "other") for n in range(10)]
    async with all_working(mesh, [f"w{n}" for n in range(workers)], concurrency=10):
        await eventually(lambda: set(few) <= set(work.ran))
    assert work.place_of(few) < (60 if workers == 1 else 600), "they came after eight hundred"
    for group in ("small", "other", "big") if workers == 1 else ():
        of_group = [int(key.partition("-")[2]) for key in work.ran if key.startswith(group)]
        assert of_group == sorted(of_group)


@pytest.mark.parametrize("listen", [True, False])
@pytest.mark.parametrize("kind", LIMITS)
async def test_a_group_has_its_turn_though_more_waits_for_room_than_is_read(
    mesh: TaskMesh, kind: str, listen: bool
) -> None:
    work = Work()
    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, **LIMITS[kind])
    await task.configure(group="big").publish_many({f"big-{n}": {} for n in range(3_000)})
    async with working(mesh, "w", concurrency=10, listen=listen):
        await eventually(lambda: work.ran)
        await task.configure(group="small").publish("small")
        await eventually(lambda: "small" in work.ran)
    assert len(work.ran) < 1_500


@pytest.mark.parametrize("kind", LIMITS)
async def test_all_groups_have_their_turn_though_most_stand_behind_what_is_read(mesh: TaskMesh, kind: str) -> None:
    work = Work()
    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, **LIMITS[kind])
    groups = {f"g{n}" for n in range(60)}
    await task.configure(group="first").publish_many({f"first-{n}": {} for n in range(900)})
    async with working(mesh, "w", concurrency=10, listen=False) as consumer:
        # From now on, no scan looks into the queue.
        await eventually(lambda: len(parts_of(consumer).limits._parked.get((QUEUE, None), ())) > 20)
        for group in sorted(groups):
            await task.configure(group=group).publish_many({f"{group}-{n}": {} for n in range(30)})
        await eventually(lambda: groups <= {key.partition("-")[0] for key in work.ran})
    assert len(work.ran) < 850


@pytest.mark.parametrize("kind", LIMITS)
async def test_what_is_urgent_goes_before_all_that_waits_for_room(mesh: TaskMesh, kind: str) -> None:
    """The worker does not hear of it."""
    work = Work()
    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, **LIMITS[kind])
    await task.publish_many({f"k{n}": {} for n in range(1_500)})
    async with working(mesh, "w", concurrency=10, listen=False) as consumer:
        await eventually(lambda: len(parts_of(consumer).limits._parked.get((QUEUE, None), ())) > 20)
        await task.configure(priority=5).publish("urgent")
        await eventually(lambda: "urgent" in work.ran)
    assert len(work.ran) < 500


@asynccontextmanager
async def one_that_starts(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, work: Work, rate: int
) -> AsyncIterator[tuple[Any, Consumer]]:
    """Two workers, of which one has the starts of a rate. The other is never answered. Nobody takes over a neglected lane."""

    async def helps_nobody(*_: Any) -> int:
        return 0

    monkeypatch.setattr(Scanner, "_help_others", helps_nobody)
    monkeypatch.setattr(BackupClaims, "add", lambda *_, **__: None)
    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, rate=rate, per_ms=100)
    over, book = asyncio.Event(), store_limits.book

    async def asked(store: Any, queue: str, worker_id: str, *args: Any, **settings: Any) -> Any:
        if worker_id != "a":
            await over.wait()
        return await book(store, queue, worker_id, *args, **settings)

    monkeypatch.setattr(store_limits, "book", asked)
    async with all_working(mesh, ["a", "b"]) as (one, other):
        known = [parts_of(each).partitions for each in (one, other)]
        await eventually(lambda: all(each.others_cnt for each in known), what="they know each other")
        try:
            yield task, one
        finally:
            over.set()


@pytest.mark.parametrize("rate", [1, 7])
async def test_who_has_the_starts_of_a_rate_takes_the_oldest_of_all_lanes(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, rate: int
) -> None:
    work = Work()
    async with one_that_starts(mesh, monkeypatch, work, rate) as (task, one):
        place = parts_of(one).partitions.place
        theirs = {f"k{n}" for n in range(150) if place(f"work:k{n}", QUEUE) == 1}
        await task.publish_many({f"k{n}": {} for n in range(150)})
        await eventually(lambda: len(theirs & set(work.ran)) >= 10)
    assert set(work.workers) == {"a"}
    started = [int(key[1:]) for key in work.ran if key in theirs]
    assert started == sorted(started), "the oldest first"


async def test_where_more_may_start_than_one_asks_for_each_worker_keeps_to_its_lanes(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_LARGEST_WISH", 4)
    work = Work()
    async with one_that_starts(mesh, monkeypatch, work, 5) as (task, one):
        ours = [n for n in range(60) if parts_of(one).partitions.place(f"work:k{n}", QUEUE) == 0]
        await task.publish_many({f"k{n}": {} for n in range(60)})
        await eventually(lambda: len(work.ran) >= len(ours))
        await task.configure(specific_worker_ids=["a"]).publish("last")
        await eventually(lambda: "last" in work.ran)
    assert {int(key[1:]) for key in work.ran if key != "last"} == set(ours)


async def test_nobody_asks_for_a_start_of_which_it_knows_that_there_is_none(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[str] = Counter()
    book = store_limits.book

    async def counted(store: Any, queue: str, *args: Any, **settings: Any) -> Any:
        asked[queue] += 1
        return await book(store, queue, *args, **settings)

    monkeypatch.setattr(store_limits, "book", counted)
    work = Work()
    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, rate=1, per_ms=600_000)
    async with working(mesh, "w") as consumer:
        await task.publish("first")
        await eventually(lambda: work.ran)
        await task.publish("second")
        await eventually(lambda: parts_of(consumer).limits._parked.get((QUEUE, None)))
    assert asked == {QUEUE: 1}


def candidate(n: int, group: str | None, priority: int = 0) -> Candidate:
    return Candidate(f"k{n}", QUEUE, due=0.0, since=0.0, number=n, priority=priority, group=group)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_tried_in_vain_keeps_its_place(seed: int) -> None:
    """However many are tried at a time, groups take turns over those that start, and within a group the oldest goes first."""
    chance = random.Random(seed)
    waiting = Parked(in_turn=True)
    held: dict[str, Candidate] = {}
    started_since: dict[str | None, Counter[str | None]] = {}
    """Of each group that waits: what others have started since it joined or started something."""
    for step in range(2_000):
        if chance.random() < 0.6:
            new = candidate(step, chance.choice(["a", "a", "a", f"g{chance.randrange(8)}"]))
            assert waiting.add(new) == []
            held[new.id] = new
            started_since.setdefault(new.group, Counter())
            continue
        tried = list(islice(waiting, chance.randrange(1, 20)))
        assert bool(tried) == bool(held)
        room = chance.randrange(0, 3)
        for each in tried[:room]:
            assert each.number == min(other.number for other in held.values() if other.group == each.group)
            del held[each.id]
            for group, others in started_since.items():
                others[each.group] += 1
                assert group == each.group or others[each.group] <= 2, f"{group} waited: {others}"
            started_since[each.group] = Counter()
            if all(other.group != each.group for other in held.values()):
                del started_since[each.group]
        for each in tried[room:]:
            assert waiting.add(each) == []
        assert len(waiting) == len(held)
    assert len(held) > 20


def test_tasks_without_a_group_keep_their_places_beside_groups_though_they_are_tried_in_vain() -> None:
    waiting = Parked(in_turn=True)
    for n in range(60):
        waiting.add(candidate(n, (None, f"g{n}", "big")[n % 3]))
    ran: list[str] = []
    while tried := list(islice(waiting, 7)):
        ran.append(tried[0].id)
        for each in tried[1:]:
            waiting.add(each)
    places = [place for place, id_ in enumerate(ran) if int(id_[1:]) % 3 == 0]
    assert places == list(range(0, 60, 3))


def test_the_best_stay_parked_if_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)
    many = [candidate(n, chance.choice([None, "a", "a", "b"]), chance.choice([0, 0, 0, 5])) for n in range(1_000)]
    unlimited, limited = Parked(in_turn=True), Parked(in_turn=True)
    for each in many:
        unlimited.add(each)
    monkeypatch.setattr(parked, "_AT_MOST", 100)
    dropped: list[str] = []
    for each in many:
        dropped += [gone.id for gone in limited.add(each)]
        assert len(limited) <= 125
    in_groups = limited.count_of("a") + limited.count_of("b")
    assert in_groups == sum(each.group is not None and each.id not in dropped for each in many)
    kept = [each.id for each in limited]
    assert sorted(kept + dropped) == sorted(each.id for each in many)
    # (Of a group that comes to wait anew, a few more or less may be among the worst.)
    best = [each.id for each in islice(unlimited, 80)]
    assert len(set(best) & set(kept)) == len(best)


def test_a_task_is_parked_once_as_it_was_found_last() -> None:
    waiting = Parked(in_turn=True)
    waiting.add(candidate(1, None))
    waiting.add(candidate(2, None))
    waiting.add(candidate(2, None))
    waiting.add(candidate(3, None))
    waiting.add(candidate(3, None, priority=5))
    waiting.add(candidate(2, "moved"))
    waiting.add(candidate(2, "moved"))
    assert (len(waiting), waiting.count_of("moved")) == (3, 1)
    assert [(each.id, each.group) for each in waiting] == [("k3", None), ("k1", None), ("k2", "moved")]
    assert len(waiting) == 0
    assert not waiting.has_groups
