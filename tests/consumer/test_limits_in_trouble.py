"""Room in a limited queue is used again after a write that failed or had no reply, without waiting until others miss it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pymongo.errors import AutoReconnect, OperationFailure

from taskmesh import Status, TaskMesh, TaskOption
from taskmesh.consumer import claimer
from taskmesh.consumer.candidates import limits, slots
from taskmesh.consumer.candidates.limits import Limits
from taskmesh.consumer.claimer import Claimed, Claimer
from taskmesh.store.claim import claim, claim_one
from taskmesh.store.queues import limits as store_limits
from taskmesh.store.queues.limits import Wish
from tests.consumer.test_limits import all_finished
from tests.waiting import eventually
from tests.working import finished, parts_of, working

QUEUE = "narrow"
KEYS = [f"k{n}" for n in range(6)]
REFUSED = OperationFailure("a reply that says nothing of another try", 8)
NO_REPLY = AutoReconnect("connection closed")
UNCHARGED = TaskOption(max_unexpected_retries=0, max_timeouts=0)


def fails_once(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, error: Exception, *, applied: bool, times: int = 1
) -> list[Exception]:
    """Let a function of the store fail the first time, or so many times. `applied`: though it has done what it does."""
    whole: Callable[..., Awaitable[Any]] = getattr(module, name)
    failed: list[Exception] = []

    async def failing(*args: Any, **settings: Any) -> Any:
        if len(failed) >= times:
            return await whole(*args, **settings)
        failed.append(error)
        if applied:
            await whole(*args, **settings)
        raise error

    monkeypatch.setattr(module, name, failing)
    return failed


@pytest.fixture
def missed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots each check has found unused: room that nobody could use until then."""
    found: list[int] = []
    check = store_limits.check

    async def checked(*args: Any) -> int:
        found.append(await check(*args))
        return found[-1]

    monkeypatch.setattr(store_limits, "check", checked)
    return found


async def _all_run(mesh: TaskMesh) -> None:
    """Run some tasks in a queue with room for one, each once."""

    @mesh.task(queue=QUEUE, option=UNCHARGED)
    async def work() -> None: ...

    await mesh.set_limit(QUEUE, running=1)
    await work.publish_many({key: {} for key in KEYS})
    async with working(mesh, listen=False):
        await all_finished(mesh, "work", len(KEYS))
    assert {task.status async for task in mesh.find("work")} == {Status.SUCCESS}


@pytest.mark.parametrize("name", ["claim_one", "won"])
async def test_the_room_of_a_claim_that_was_refused_is_used_at_once(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, missed: list[int], name: str
) -> None:
    failed = fails_once(monkeypatch, claimer, name, REFUSED, applied=False)
    if name == "won":  # a claim of several has to be read
        monkeypatch.setattr(claimer, "claim_one", _as_several)
    await _all_run(mesh)
    assert failed
    assert sum(missed) == 0


async def _as_several(store: Any, id_: str, worker: Any, running_id: str, **settings: Any) -> Any:
    """Claim one task as several would be claimed."""
    del settings["fields"]
    count = await claim(store, [id_], worker, running_id, **settings)
    return (await vars(claimer)["won"](store, [id_], running_id, {}))[0] if count else None


async def test_what_a_claim_has_won_is_given_back_if_it_cannot_be_read(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, missed: list[int]
) -> None:
    """Its lease would last for a minute, in which its room is used by nobody."""
    failed = fails_once(monkeypatch, claimer, "won", REFUSED, applied=False, times=2)
    monkeypatch.setattr(claimer, "claim_one", _as_several)
    await _all_run(mesh)
    assert len(failed) == 2
    assert sum(missed) == 0


async def test_what_a_claim_without_a_limit_has_won_is_given_back_if_it_cannot_be_read(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fails_once(monkeypatch, claimer, "won", REFUSED, applied=False, times=2)

    @mesh.task(option=UNCHARGED)
    async def work() -> None: ...

    await work.publish_many({key: {} for key in KEYS})
    async with working(mesh):
        await all_finished(mesh, "work", len(KEYS))
    assert len(failed) == 2
    assert {task.status async for task in mesh.find("work")} == {Status.SUCCESS}


async def test_a_claim_that_ends_in_an_error_of_our_own_leaves_no_slot_behind(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim_set, failed = Claimer._claim_set, asyncio.Event()

    async def fails(self: Claimer, *args: Any) -> Claimed:
        if failed.is_set():
            return await claim_set(self, *args)
        failed.set()
        raise RuntimeError("a mistake")

    monkeypatch.setattr(Claimer, "_claim_set", fails)

    @mesh.task(queue=QUEUE)
    async def work() -> None: ...

    await mesh.set_limit(QUEUE, running=1)
    async with working(mesh) as consumer:
        claims = parts_of(consumer).claimer
        await work.publish("k")
        await failed.wait()
        await eventually(lambda: claims.idle)
        assert parts_of(consumer).slots.count(QUEUE, None) == 0


async def test_who_has_lost_track_of_a_slot_asks_again_soon(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the claim was under way, the worker's own slot was all that could run: then it need not ask for long."""
    monkeypatch.setattr(store_limits, "_LANDED_MS", 0)  # who checks the slots waits less
    for name in ("_WHILE_ALL_OURS_S", "_WHILE_SHUT_S"):
        monkeypatch.setattr(limits, name, 3_600.0)
    may_fail = asyncio.Event()
    claims: list[str] = []

    async def unanswered(store: Any, id_: str, *args: Any, **settings: Any) -> Any:
        claims.append(id_)
        if len(claims) > 1:
            return await claim_one(store, id_, *args, **settings)
        await may_fail.wait()
        raise NO_REPLY

    monkeypatch.setattr(claimer, "claim_one", unanswered)

    @mesh.task(queue=QUEUE)
    async def work() -> None: ...

    await mesh.set_limit(QUEUE, running=1)
    async with working(mesh) as consumer:
        await work.publish("first")
        await eventually(lambda: claims)
        await work.publish("second")
        await eventually(lambda: (QUEUE, None) in parts_of(consumer).limits._shut)
        may_fail.set()
        await all_finished(mesh, "work", 2)


@pytest.mark.parametrize("name", ["book", "keep"])
@pytest.mark.parametrize("applied", [True, False])
async def test_slots_are_given_back_though_the_write_had_no_reply(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, missed: list[int], name: str, *, applied: bool
) -> None:
    failed = fails_once(monkeypatch, store_limits, name, NO_REPLY, applied=applied)
    monkeypatch.setattr(slots, "_TOLD_EVERY_S", 0.05)

    @mesh.task(queue=QUEUE)
    async def work() -> None: ...

    await mesh.set_limit(QUEUE, running=1)
    async with working(mesh) as consumer:
        for key in KEYS:
            await work.publish(key)
            assert (await finished(mesh, "work", key)).status is Status.SUCCESS
        await eventually(lambda: failed and parts_of(consumer).slots.count(QUEUE, None) == 0)
        await eventually(lambda: _no_slots(mesh))
    assert sum(missed) == 0


async def test_a_slot_is_given_back_whose_booking_had_no_reply_though_nothing_runs_in_it_any_more(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, missed: list[int]
) -> None:
    booked, may_fail = asyncio.Event(), asyncio.Event()

    async def unanswered(*args: Any, **settings: Any) -> Any:
        await book(*args, **settings)
        booked.set()
        await may_fail.wait()
        raise NO_REPLY

    book = store_limits.book
    monkeypatch.setattr(store_limits, "book", unanswered)

    @mesh.task(queue=QUEUE)
    async def work() -> None: ...

    await mesh.set_limit(QUEUE, running=1)
    async with working(mesh) as consumer:
        await eventually(lambda: parts_of(consumer).scanner.scans)
        handle = await work.publish("k")
        await booked.wait()
        await handle.cancel()
        may_fail.set()
        await eventually(lambda: _no_slots(mesh))
    assert sum(missed) == 0


async def test_a_slot_is_given_back_though_the_booking_that_was_to_give_it_back_has_failed(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, missed: list[int]
) -> None:
    monkeypatch.setattr(slots, "_IDLE_S", 3_600.0)

    @mesh.task(queue=QUEUE)
    async def work() -> None: ...

    await mesh.set_limit(QUEUE, group_running=1)
    async with working(mesh) as consumer:
        await work.configure(group="a").publish("a")
        await eventually(lambda: parts_of(consumer).slots.has_idle((QUEUE, "a")))
        failed = fails_once(monkeypatch, store_limits, "book", NO_REPLY, applied=False)
        await work.configure(group="b").publish("b")
        await finished(mesh, "work", "b")
        assert failed
        assert [slot["g"] for slot in (await _document(mesh))["slots"]] == ["b"]
    assert sum(missed) == 0


async def _no_slots(mesh: TaskMesh) -> bool:
    return not (await _document(mesh)).get("slots")


async def _document(mesh: TaskMesh) -> dict[str, Any]:
    """Return the state of the queue's limits."""
    document: dict[str, Any] | None = await mesh.store.driver.collection(mesh.store.limits).find_one({"_id": QUEUE})
    assert document is not None
    return document


async def test_what_has_ended_before_the_rest_of_its_claim_is_answered_counts_as_started(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims: list[str] = []

    async def the_second_waits(store: Any, id_: str, *args: Any, **settings: Any) -> Any:
        claims.append(id_)
        if len(claims) == 2:
            await finished(mesh, "work", claims[0].partition(":")[2])
        return await claim_one(store, id_, *args, **settings)

    failed = fails_once(monkeypatch, claimer, "claim", REFUSED, applied=False)
    monkeypatch.setattr(claimer, "claim_one", the_second_waits)

    @mesh.task(queue=QUEUE)
    async def work() -> None: ...

    await mesh.set_limit(QUEUE, rate=2, per_ms=3_600_000)
    await work.publish_many({"a": {}, "b": {}})
    async with working(mesh, listen=False) as consumer:
        await all_finished(mesh, "work", 2)
        await eventually(lambda: parts_of(consumer).claimer.idle)
    assert failed
    assert sum(start["n"] for start in (await _document(mesh))["starts"]) == 2


async def test_a_start_whose_booking_had_no_reply_is_not_counted_for_a_whole_window(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fails_once(monkeypatch, store_limits, "book", NO_REPLY, applied=True)

    @mesh.task(queue=QUEUE)
    async def work() -> None: ...

    await mesh.set_limit(QUEUE, rate=1, per_ms=3_600_000)
    async with working(mesh):
        await work.publish("k")
        assert (await finished(mesh, "work", "k")).status is Status.SUCCESS
    assert failed


async def test_a_start_whose_confirmation_had_no_reply_is_confirmed_again(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fails_once(monkeypatch, store_limits, "confirm", NO_REPLY, applied=False)
    counted = Limits._counted
    calls: list[str] = []

    def noted(self: Limits, queue: str, *args: Any) -> None:
        calls.append(queue)
        counted(self, queue, *args)

    monkeypatch.setattr(Limits, "_counted", noted)

    @mesh.task(queue=QUEUE)
    async def work() -> None: ...

    await mesh.set_limit(QUEUE, rate=1, per_ms=100)
    async with working(mesh):
        await work.publish("k")
        await eventually(lambda: calls)
    assert failed


async def test_to_confirm_a_booking_twice_changes_nothing(mesh: TaskMesh) -> None:
    await mesh.set_limit(QUEUE, rate=5, per_ms=3_600_000, group_rate=5, group_per_ms=3_600_000)
    wishes = [Wish("work:a", "g"), Wish("work:b", "g"), Wish("work:c", None)]
    booking = await store_limits.book(mesh.store, QUEUE, "w", wishes)
    assert booking is not None
    assert booking.ids == {"work:a", "work:b", "work:c"}
    for _ in range(3):
        await store_limits.confirm(mesh.store, QUEUE, booking.token, [wishes[0]])
    document = await _document(mesh)
    assert [start["n"] for start in document["starts"]] == [2]
    assert {start["g"]: start["n"] for start in document["group_starts"]} == {"g": 1}


async def test_a_booking_of_which_nothing_is_used_leaves_no_start(mesh: TaskMesh) -> None:
    """Nor less than none, if it had room for a part of what was requested, and its caller was not told for which."""
    await mesh.set_limit(QUEUE, rate=1, per_ms=3_600_000)
    wishes = [Wish("work:a", None), Wish("work:b", None)]
    booking = await store_limits.book(mesh.store, QUEUE, "w", wishes)
    assert booking is not None
    assert len(booking.ids) == 1
    await store_limits.confirm(mesh.store, QUEUE, booking.token, wishes)
    assert [start["n"] for start in (await _document(mesh))["starts"]] == [0]


@pytest.mark.parametrize(("module", "name"), [(claimer, "claim_one"), (store_limits, "book")])
async def test_what_had_no_reply_is_tried_again_before_the_next_scan(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    @mesh.task(queue=QUEUE)
    async def work() -> None: ...

    if name == "book":
        await mesh.set_limit(QUEUE, running=1)
    async with working(mesh) as consumer:
        scanner = parts_of(consumer).scanner
        await eventually(lambda: scanner.scans)
        failed = fails_once(monkeypatch, module, name, NO_REPLY, applied=False, times=3)
        monkeypatch.setattr(scanner, "run_once", _never)
        await work.publish("k")
        assert (await finished(mesh, "work", "k")).status is Status.SUCCESS
    assert len(failed) == 3


async def _never() -> float:
    await asyncio.Event().wait()
    raise AssertionError
