"""What is kept of a rate is small, whatever rate and window; and no window holds more starts than the rate all the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import bson
import pytest
from bson import ObjectId

from taskmesh import TaskMesh
from taskmesh.admin.store.limit_usage import usage
from taskmesh.store import Store
from taskmesh.store.queues import limits
from tests.consumer.sampling import most_starts_within
from tests.waiting import eventually
from tests.working import working

DAY_MS = 86_400_000
_MOST_ENTRIES = 110
"""A hundred buckets, those that the window's ends cut, and a few bookings on their way."""
_MOST_BYTES = 16_384
_BEGIN = datetime(2030, 1, 1, tzinfo=UTC)


async def _document(mesh: TaskMesh, queue: str = "q") -> dict[str, Any]:
    stored = await mesh.store.driver.collection("limits").find_one({"_id": queue})
    assert stored is not None
    return dict(stored)


class Clock:
    """Lets a test say what time it is."""

    def __init__(self, mesh: TaskMesh, queue: str = "q") -> None:
        self.now = _BEGIN
        self._mesh, self._queue = mesh, queue
        self.starts: list[datetime] = []

    @property
    def store(self) -> Store:
        """The store, at this time."""
        self._mesh.store.now = self.now
        return self._mesh.store

    async def book(self, count: int) -> limits.Booking:
        """Ask for so many starts."""
        wishes = [limits.Wish(f"job:{n}", None) for n in range(count)]
        booking = await limits.book(self.store, self._queue, "w", wishes)
        assert booking is not None
        return booking

    async def start(self, count: int, *, used: int | None = None, confirmed: bool = True) -> int:
        """Book so many starts, make `used` of those granted, and return how many were granted."""
        booking = await self.book(count)
        granted = sorted(booking.ids)
        used = len(granted) if used is None else min(used, len(granted))
        self.starts += [self.now] * used
        if confirmed:
            await limits.confirm(
                self.store, self._queue, booking.token, [limits.Wish(id_, None) for id_ in granted[used:]]
            )
        return len(granted)

    def pass_(self, ms: int) -> None:
        """Let time pass."""
        self.now += timedelta(milliseconds=ms)


async def test_after_200_000_starts_in_a_day_as_little_is_kept_as_after_ten(mesh: TaskMesh) -> None:
    await mesh.set_limit("q", rate=200_000, per_ms=DAY_MS)
    clock = Clock(mesh)
    started, sizes = 0, []
    while started < 200_000:
        started += await clock.start(1_000)
        clock.pass_(400_000)
        document = await _document(mesh)
        del document["booked"]  # what was booked last
        sizes.append((len(document["starts"]), len(bson.encode(document))))
    assert started == 200_000
    assert max(entries for entries, _ in sizes) <= _MOST_ENTRIES
    assert max(size for _, size in sizes) <= _MOST_BYTES
    assert (await clock.book(1)).ids == frozenset(), "the rate is used up"
    assert (await usage(clock.store, ["q"]))["q"].starts == 200_000


async def test_single_starts_that_no_other_follows_are_put_together_too(mesh: TaskMesh) -> None:
    await mesh.set_limit("q", rate=1_000_000, per_ms=7 * DAY_MS)
    clock = Clock(mesh)
    for _ in range(150):
        await clock.start(1)
        clock.pass_(10)
    assert len((await _document(mesh))["starts"]) <= 5


async def test_bookings_that_are_never_confirmed_are_put_together_and_count_as_used(mesh: TaskMesh) -> None:
    await mesh.set_limit("q", rate=1_000, per_ms=DAY_MS)
    clock = Clock(mesh)
    for _ in range(200):
        await clock.start(2, confirmed=False)
        clock.pass_(500)
    assert len((await _document(mesh))["starts"]) <= _MOST_ENTRIES
    assert (await usage(clock.store, ["q"]))["q"].starts == 400


@pytest.mark.parametrize(("rate", "per_ms"), [(1, 1), (3, 7), (10, 100), (50, 1_000), (500, 60_000), (5_000, DAY_MS)])
async def test_whatever_happens_no_window_holds_more_starts_than_the_rate_and_nearly_all_can_be_used(
    mesh: TaskMesh, rate: int, per_ms: int
) -> None:
    await mesh.set_limit("q", rate=rate, per_ms=per_ms)
    clock, chance = Clock(mesh), random.Random(f"{rate} {per_ms}")
    for _ in range(150):
        await clock.start(chance.randrange(1, max(2, rate // 20)), used=chance.randrange(0, 50))
        clock.pass_(chance.choice((0, 1, per_ms // 500, per_ms // 50, per_ms // 10)))
    assert most_starts_within(clock.starts, per_ms) <= rate
    assert len((await _document(mesh))["starts"]) <= _MOST_ENTRIES
    # All that has left the window can be used again, a hundredth of the window later at most.
    clock.pass_(per_ms + per_ms // 100 + 2)
    assert len((await clock.book(rate)).ids) == rate


async def test_the_rate_has_room_again_when_it_says(mesh: TaskMesh) -> None:
    await mesh.set_limit("q", rate=300, per_ms=60_000)
    clock = Clock(mesh)
    for _ in range(100):
        await clock.start(3)
        clock.pass_(60)
    refused = await clock.book(1)
    assert refused.ids == frozenset()
    assert refused.next_start is not None
    assert _BEGIN + timedelta(minutes=1) <= refused.next_start <= _BEGIN + timedelta(minutes=1, seconds=0.6)
    clock.now = refused.next_start - timedelta(milliseconds=1)
    assert (await clock.book(1)).ids == frozenset()
    clock.now = refused.next_start
    assert len((await clock.book(1)).ids) == 1


async def test_who_uses_up_a_rate_is_told_when_the_first_start_leaves_at_the_latest(mesh: TaskMesh) -> None:
    await mesh.set_limit("q", rate=2, per_ms=1_000, group_rate=1, group_per_ms=300)
    clock = Clock(mesh)
    wishes = [limits.Wish(f"job:{n}", group) for n, group in enumerate(("a", "a", "b", "c"))]
    booking = await limits.book(clock.store, "q", "w", wishes)
    assert booking is not None
    assert booking.ids == {"job:0", "job:2"}
    assert booking.next_start == booking.until + timedelta(seconds=1)
    assert booking.full_groups == {"a": booking.until + timedelta(seconds=0.3)}
    await limits.confirm(clock.store, "q", booking.token, [])
    again = await clock.book(1)
    assert again.ids == frozenset()
    assert again.next_start == _BEGIN + timedelta(seconds=1)


def _by_an_older_release(starts: Sequence[tuple[datetime, int]], per_ms: int) -> list[dict[str, Any]]:
    """One element for each booking, as 0.x kept them."""
    return [{"t": str(ObjectId()), "n": n, "leaves": time + timedelta(milliseconds=per_ms)} for time, n in starts]


async def test_what_an_older_release_has_kept_is_counted_and_put_together(mesh: TaskMesh) -> None:
    await mesh.set_limit("q", rate=200_000, per_ms=DAY_MS)
    clock = Clock(mesh)
    times = [(_BEGIN + timedelta(milliseconds=n * 400), 1) for n in range(150_000)]
    kept = _by_an_older_release(times, DAY_MS)
    await mesh.store.driver.collection("limits").update_one({"_id": "q"}, {"$set": {"starts": kept}})
    clock.now = times[-1][0]
    assert (await usage(clock.store, ["q"]))["q"].starts == 150_000
    assert await clock.start(200) == 200
    document = await _document(mesh)
    assert len(document["starts"]) <= _MOST_ENTRIES
    assert len(bson.encode(document)) <= _MOST_BYTES
    assert (await usage(clock.store, ["q"]))["q"].starts == 150_200
    # The first bucket has left a hundredth of a day, and a moment, after the first start has.
    clock.now = _BEGIN + timedelta(milliseconds=DAY_MS - 1)
    assert (await usage(clock.store, ["q"]))["q"].starts == 150_200
    clock.pass_(DAY_MS // 100 + 1)
    assert 147_000 < (await usage(clock.store, ["q"]))["q"].starts < 150_200


async def test_a_worker_of_an_older_release_can_book_beside(mesh: TaskMesh) -> None:
    """It sums `n` of all entries, lets each go at its `leaves`, and finds its own by its token."""
    await mesh.set_limit("q", rate=100, per_ms=DAY_MS)
    clock = Clock(mesh)
    for _ in range(30):
        await clock.start(1)
        clock.pass_(1_000)
    kept = (await _document(mesh))["starts"]
    assert all(set(entry) - {"t"} == {"n", "leaves"} for entry in kept)
    assert sum(entry["n"] for entry in kept) == 30
    # On its way: it leaves the window later than any start that was made already.
    on_its_way = _by_an_older_release([(clock.now + timedelta(seconds=3), 5)], DAY_MS)
    await mesh.store.driver.collection("limits").update_one({"_id": "q"}, {"$push": {"starts": on_its_way[0]}})
    assert await clock.start(100) == 65
    tokens = [entry.get("t") for entry in (await _document(mesh))["starts"]]
    assert on_its_way[0]["t"] in tokens, "it will still be confirmed"


@pytest.mark.parametrize("longer", [True, False])
async def test_a_window_that_is_changed_goes_on_with_what_was_counted(mesh: TaskMesh, longer: bool) -> None:
    await mesh.set_limit("q", rate=10, per_ms=60_000)
    clock = Clock(mesh)
    await clock.start(6)
    new_ms = 120_000 if longer else 30_000
    await mesh.set_limit("q", rate=10, per_ms=new_ms)
    clock.pass_(new_ms - 1)
    assert len((await clock.book(10)).ids) == 4
    clock.pass_(2)
    assert len((await clock.book(10)).ids) == 6


async def test_a_worker_starts_as_many_as_a_day_allows(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a claim that the server gives up has booked counts as started: on a busy machine too, none is given up here.
    monkeypatch.setattr("taskmesh.consumer.claimer._LEAST_DEADLINE_MS", 30_000)

    @mesh.task(queue="daily")
    async def job() -> None: ...

    await mesh.set_limit("daily", rate=30, per_ms=DAY_MS)
    await job.publish_many({f"k{n:02}": {} for n in range(40)})
    async with working(mesh, concurrency=5) as consumer:
        await eventually(lambda: consumer.finished == 30)
    document = await _document(mesh, "daily")
    assert sum(entry["n"] for entry in document["starts"]) == 30
    assert len(document["starts"]) <= 10
