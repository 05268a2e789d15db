"""Limits over several consumers of one process: what they promise, and that they hold up nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import anyio
import pytest

import taskmesh.consumer.candidates.limits
from taskmesh import InvalidOption, Status, TaskMesh, current_task
from taskmesh.consumer.candidates.claim_queue import Candidate
from taskmesh.consumer.candidates.limits import Limits
from taskmesh.consumer.claimer import Claimed, Claimer
from taskmesh.store import Store
from taskmesh.store.queues import limits as store_limits
from tests.consumer.sampling import Span, most_running, most_starts_within, starts_of
from tests.waiting import eventually
from tests.working import all_working, finished, parts_of, working


async def all_finished(mesh: TaskMesh, name: str, count: int, deadline_s: float = 120.0) -> None:
    async def as_many() -> bool:
        counts = (await mesh.stats()).counts.get(name, {})
        return sum(counts.get(status, 0) for status in ("SUCCESS", "FAIL", "CANCELLED", "EXPIRED")) == count

    await eventually(as_many, deadline_s, what=f"{count} tasks are finished")


async def all_over(mesh: TaskMesh) -> None:
    async def none_left() -> bool:
        return not [task async for task in mesh.find() if task.status in (Status.INIT, Status.RUNNING)]

    await eventually(none_left, 120, what="no task is left to run")


async def test_no_more_than_running_run_at_once_over_all_consumers(mesh: TaskMesh) -> None:
    @mesh.task(queue="narrow")
    async def work(n: int) -> int:
        await anyio.sleep(0.03)
        return n

    await mesh.set_limit("narrow", running=3)
    await work.publish_many({f"k{n}": {"n": n} for n in range(30)})
    async with all_working(mesh, ["w1", "w2", "w3"], concurrency=10):
        await all_finished(mesh, "work", 30)
    assert most_running(await starts_of(mesh, "work")) == 3


async def test_what_has_room_in_hand_is_claimed_together_whatever_its_queue(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    @mesh.task
    async def work() -> None: ...

    queues, each = 20, 10
    for n in range(queues):
        await mesh.set_limit(f"narrow-{n}", running=1)
        await work.configure(queue=f"narrow-{n}").publish_many({f"{n}-{m}": {} for m in range(each)})
    claims: list[int] = []
    claim_set = Claimer._claim_set

    async def counted(claimer: Claimer, candidates: list[Candidate], narrowed_by: Any) -> Claimed:
        claims.append(len(candidates))
        return await claim_set(claimer, candidates, narrowed_by)

    monkeypatch.setattr(Claimer, "_claim_set", counted)
    async with working(mesh):
        await all_finished(mesh, "work", queues * each)
    assert len(claims) < queues * each / 2, "one for each task, if each queue were claimed from by itself"
    spans: dict[str, list[Span]] = {}
    async for task in mesh.find("work", limit=0):
        [entry] = task.successes
        assert entry.start_time is not None
        spans.setdefault(task.queue, []).append((entry.start_time, entry.success_time))
    assert [most_running(spans[f"narrow-{n}"]) for n in range(queues)] == [1] * queues


async def test_who_waits_for_room_in_many_queues_does_not_ask_all_the_time(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    @mesh.task
    async def work() -> None:
        await anyio.sleep(60)

    queues = 12
    for n in range(queues):
        await mesh.set_limit(f"narrow-{n}", running=1)
        await work.configure(queue=f"narrow-{n}").publish_many({f"{n}-{m}": {} for m in range(8)})
    book, took_s = store_limits.book, list[float]()

    async def slow(*arguments: Any, **settings: Any) -> Any:
        began = time.monotonic()
        try:
            await anyio.sleep(0.02)
            return await book(*arguments, **settings)
        finally:
            took_s.append(time.monotonic() - began)

    async with working(mesh, "holds", concurrency=queues) as holder:
        await eventually(lambda: len(holder.running) == queues, 60)
        monkeypatch.setattr(store_limits, "book", slow)
        async with working(mesh, "waits", concurrency=queues):
            learned = 5 * queues  # how long asking takes, and that all of them are full
            await eventually(lambda: len(took_s) > learned, 60)
            began, asked = time.monotonic(), len(took_s)
            await eventually(lambda: len(took_s) > asked + 3 * queues, 60)
            share = sum(took_s[asked:]) / (time.monotonic() - began)
    assert share < 1, share


async def test_scans_for_tasks_for_room_are_apart(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many queues are limited, some queue has room all the time."""
    ordered: list[float] = []
    scan = Limits._scan

    def noted(limits: Limits) -> None:
        ordered.append(time.monotonic())
        scan(limits)

    monkeypatch.setattr(Limits, "_scan", noted)
    async with working(mesh) as consumer:
        for _ in range(50):
            parts_of(consumer).limits._order_scan()
        assert len(ordered) == 1
        await eventually(lambda: len(ordered) == 2, what="the others have one together")
        assert ordered[1] - ordered[0] > 0.2


async def test_a_scan_that_brought_little_is_not_repeated_at_once_for_want_of_candidates(mesh: TaskMesh) -> None:
    """Most of what it passed over has no room: the next would see the same."""
    async with working(mesh, concurrency=10) as consumer:
        candidates = parts_of(consumer).candidates
        candidates.unread = True
        wanted = []
        for brought in (4, 5):
            candidates.scan_wanted.clear()
            candidates.scanned(brought, took_s=60.0)
            candidates.want_more()
            wanted.append(candidates.scan_wanted.is_set())
        candidates.scanned(0, took_s=60.0)
        candidates.scan_wanted.clear()
        candidates.order_scan()
        wanted.append(candidates.scan_wanted.is_set())
    assert wanted == [False, True, True]


async def test_a_rate_holds_in_every_window_and_is_used_up(mesh: TaskMesh) -> None:
    @mesh.task(queue="slow")
    async def work() -> None:
        return None

    await mesh.set_limit("slow", rate=10, per_ms=500)
    await work.publish_many({f"k{n}": {} for n in range(50)})
    async with all_working(mesh, ["w1", "w2", "w3"], concurrency=20):
        await all_finished(mesh, "work", 50)
    starts = sorted(start for start, _ in await starts_of(mesh, "work"))
    assert most_starts_within(starts, 500) == 10
    assert (starts[-1] - starts[0]).total_seconds() < 10, "2 s if all is well; 14 s if bookings had to run out"


@pytest.mark.parametrize(
    "limits", [{"rate": 2, "per_ms": 50}, {"group_rate": 2, "group_per_ms": 50}], ids=["rate", "group_rate"]
)
async def test_a_rate_is_asked_for_again_when_it_has_room_and_until_then_nothing_is_scanned(
    mesh: TaskMesh, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taskmesh.consumer.candidates.limits, "_ASK_AGAIN_S", 60.0)

    @mesh.task(queue="slow")
    async def work() -> None:
        return None

    await mesh.set_limit("slow", **limits)
    await work.configure(group="g").publish_many({f"k{n}": {} for n in range(100)})
    async with working(mesh, "w", concurrency=10) as consumer:
        await all_finished(mesh, "work", 100)
        assert parts_of(consumer).scanner.scans < 25, "fewer than one for two windows"


async def test_all_that_a_window_has_room_for_starts_though_few_are_tried_first(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taskmesh.consumer.candidates.limits, "_TRIED_AT_ONCE", 1)

    @mesh.task(queue="slow")
    async def work() -> None:
        return None

    await mesh.set_limit("slow", rate=10, per_ms=300)
    await work.publish_many({f"k{n}": {} for n in range(40)})
    async with working(mesh, "w", concurrency=20) as consumer:
        await eventually(lambda: consumer.finished, what="the first have started, so that the others are known")
        parts_of(consumer).scanner.open = False
        await all_finished(mesh, "work", 40)


async def test_workers_that_had_no_share_of_a_rate_leave_it_to_the_one_that_had(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taskmesh.consumer.candidates.limits, "_OTHERS_APART_S", 2.0)

    @mesh.task(queue="slow")
    async def work() -> None:
        return None

    await mesh.set_limit("slow", rate=1, per_ms=50)
    async with all_working(mesh, ["w1", "w2", "w3"]) as consumers:
        parts = [parts_of(consumer) for consumer in consumers]
        await eventually(lambda: all(each.partitions.others_cnt == 2 for each in parts), what="all know each other")
        await work.publish_many({f"k{n}": {} for n in range(30)})
        await all_finished(mesh, "work", 30)
    entries = [task.task_state.worker_states[0] async for task in mesh.find("work")]
    workers = [entry.worker_id for entry in sorted(entries, key=lambda entry: str(entry.start_time))]
    assert sum(worker != later for worker, later in pairwise(workers)) < 8, (
        f"if anybody may be next, about 20: {workers}"
    )


@pytest.mark.parametrize("limits", [{"rate": 1_000}, {"group_rate": 1_000}], ids=["rate", "group_rate"])
@pytest.mark.parametrize("most", ["running", "group_running"])
async def test_room_is_used_at_once_where_starts_are_counted_too(
    mesh: TaskMesh, most: str, limits: dict[str, Any]
) -> None:
    @mesh.task(queue="narrow")
    async def work() -> None:
        return None

    await mesh.set_limit("narrow", **limits | {most: 2})
    await work.configure(group="g").publish_many({f"k{n}": {} for n in range(40)})
    before = time.monotonic()
    await mesh.consumer(concurrency=10).run(until_idle=True)
    assert await mesh.listing.count("status:SUCCESS") == 40
    assert time.monotonic() - before < 30, (
        "well below a second if all is well; 100 s if each pair waits for a second look"
    )


@pytest.mark.parametrize("limits", [{}, {"rate": 1_000}], ids=["running", "running and rate"])
async def test_who_waits_for_room_is_not_held_up_by_those_before_it_that_nobody_claims(
    mesh: TaskMesh, limits: dict[str, Any]
) -> None:
    gate = anyio.Event()

    @mesh.task(queue="narrow")
    async def work() -> None:
        await gate.wait()

    await mesh.set_limit("narrow", running=1, **limits)
    await work.configure(priority=9).publish("first")
    await work.configure(priority=2).publish_many({f"gone-{n}": {} for n in range(20)})
    await work.configure(priority=1, group="paused").publish_many({f"paused-{n}": {} for n in range(20)})
    await work.publish_many({f"k{n}": {} for n in range(10)})
    async with working(mesh, "w1", concurrency=10) as consumer:
        await eventually(lambda: consumer.running == ["first"])
        await mesh.pause("narrow", group="paused")
        for n in range(20):
            await mesh.cancel("work", f"gone-{n}")
        gate.set()
        before = time.monotonic()
        await all_finished(mesh, "work", 1 + 20 + 10)
    assert time.monotonic() - before < 30, (
        "well below a second if all is well; seconds for each that is not claimed if not"
    )


async def test_workers_that_take_turns_with_the_slots_of_groups_leave_none_behind(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that is free is asked for as soon as it is, and not when a worker looks once more though it has all the room."""
    monkeypatch.setattr(taskmesh.consumer.candidates.limits, "_WHILE_ALL_OURS_S", 3_600.0)

    @mesh.task(queue="narrow")
    async def work() -> None:
        await anyio.sleep(0.01)

    await mesh.set_limit("narrow", group_running=1)
    async with all_working(mesh, ["w1", "w2", "w3", "w4"], concurrency=8):
        for group in range(15):
            await work.configure(group=f"g{group}").publish_many({f"{group}-{n}": {} for n in range(10)})
        await all_finished(mesh, "work", 150)


async def test_who_waits_for_an_execution_to_end_is_not_put_off_until_a_rate_has_room_again(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a claim that the server gives up has booked counts as started: on a busy machine too, none is given up here.
    monkeypatch.setattr("taskmesh.consumer.claimer._LEAST_DEADLINE_MS", 30_000)
    gate, begun = anyio.Event(), 0

    @mesh.task(queue="narrow")
    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun == 8:
            await gate.wait()

    await mesh.set_limit("narrow", running=1, rate=10, per_ms=600_000)
    await work.publish_many({f"k{n}": {} for n in range(30)})
    async with working(mesh, "w1", concurrency=10) as first:
        await eventually(lambda: begun == 8)
        async with working(mesh, "w2", concurrency=10) as second:
            room = parts_of(second).limits
            await eventually(lambda: room.is_full("narrow", None), what="there are fewer starts left than it asks for")
            gate.set()
            await first.stop()
            await eventually(lambda: begun == 10)


@pytest.mark.parametrize("most", [{"running": 1}, {"group_running": 1}], ids=["running", "group_running"])
async def test_room_is_free_at_once_where_a_task_was_ended_by_somebody_else_just_before_its_handler_returned(
    mesh: TaskMesh, most: dict[str, Any]
) -> None:
    """Its outcome does not count any more; that its place is free, nobody has to find out by the end of its slot."""

    @mesh.task(queue="narrow")
    async def work(n: int) -> None:
        if n % 3 == 0:
            await mesh.cancel("work", f"k{n}")
        elif n % 3 == 1:
            await mesh.delete("work", f"k{n}")
        else:
            await mesh.store.driver.collection(mesh.store.tasks).delete_one({"_id": f"work:k{n}"})

    await mesh.set_limit("narrow", **most)
    await work.configure(group="a").publish_many({f"k{n}": {"n": n} for n in range(18)})
    began = time.monotonic()
    async with all_working(mesh, ["w1", "w2"], concurrency=10):
        await all_over(mesh)
    assert time.monotonic() - began < 12, "2 s if all is well; 22 s if each slot has to run out"


async def test_a_queue_at_its_limit_holds_up_no_other_queue(mesh: TaskMesh) -> None:
    gate = anyio.Event()

    @mesh.task(queue="full")
    async def stuck() -> None:
        await gate.wait()

    @mesh.task(queue="free")
    async def quick() -> str:
        return "done"

    await mesh.set_limit("full", running=1)
    await stuck.configure(priority=5).publish_many({f"k{n}": {} for n in range(200)})
    async with working(mesh, "w1", concurrency=5) as consumer:
        await eventually(lambda: len(consumer.running) == 1)
        assert await (await quick.publish("q")).result(timeout=60) == "done"
        await eventually(lambda: len(consumer.running) == 1)
        gate.set()


async def test_tasks_of_a_full_group_do_not_block_other_groups(mesh: TaskMesh) -> None:
    gate = anyio.Event()

    @mesh.task(queue="shared")
    async def work(customer: int) -> int:
        if customer == 1:
            await gate.wait()
        return customer

    await mesh.set_limit("shared", group_running=2)
    # More than a scan reads at a time, and before everybody else.
    many = {f"big-{n:05}": {"customer": 1} for n in range(3_000)}
    await work.configure(group="customer-1", priority=9).publish_many(many)
    small = await work.configure(group="customer-2").publish("small", customer=2)
    async with working(mesh, "w1", concurrency=20) as consumer:
        assert await small.result(timeout=60) == 2
        await eventually(lambda: len(consumer.running) == 2)
        assert all(key.startswith("big") for key in consumer.running)
        await mesh.queues.set_group_limit("shared", "customer-1", 5)
        await eventually(lambda: len(consumer.running) == 5, what="the group may run five now")
        gate.set()
        await eventually(lambda: consumer.finished > 200)
    assert most_running(await starts_of(mesh, "work", status=Status.SUCCESS)) <= 7


async def test_what_runs_already_is_counted_when_a_limit_is_set(mesh: TaskMesh) -> None:
    gate = anyio.Event()

    @mesh.task(queue="late")
    async def work() -> None:
        await gate.wait()

    await work.publish_many({f"k{n}": {} for n in range(20)})
    async with working(mesh, "w1", concurrency=4) as consumer, working(mesh, "w2", concurrency=4) as other:
        await eventually(lambda: len(consumer.running) + len(other.running) == 8)
        await mesh.set_limit("late", running=9)
        consumer.concurrency = 20
        await eventually(lambda: len(consumer.running) + len(other.running) == 9)
        for _ in range(30):
            assert len(consumer.running) + len(other.running) == 9
            await anyio.sleep(0.01)
        await mesh.set_limit("late", running=None)
        await eventually(lambda: len(consumer.running) + len(other.running) == 20, what="without a limit all run")
        gate.set()


@pytest.mark.parametrize("limit", ["running", "group_running"])
async def test_a_limit_that_is_lowered_holds_though_more_waits_than_ends(mesh: TaskMesh, limit: str) -> None:
    """Who ends a task has the slot for the next one in hand, and would use it again and again, asking nobody."""
    gates = {f"k{n}": anyio.Event() for n in range(10)}

    @mesh.task(queue="lowered")
    async def work() -> None:
        await gates[current_task().key].wait()

    await mesh.set_limit("lowered", **{limit: 3})  # type: ignore[arg-type]  # no `by` is among them
    await work.configure(group="g").publish_many({key: {} for key in gates})
    async with working(mesh, concurrency=10) as consumer:
        await eventually(lambda: len(consumer.running) == 3)
        await mesh.set_limit("lowered", **{limit: 1})  # type: ignore[arg-type]
        ran = sorted(consumer.running)

        def ended(key: str) -> Callable[[], bool]:
            gates[key].set()
            return lambda: key not in consumer.running

        for left, key in [(2, ran[0]), (1, ran[1])]:
            await eventually(ended(key))
            for _ in range(30):
                assert len(consumer.running) == left
                await anyio.sleep(0.01)
        gates[ran[2]].set()
        await eventually(lambda: consumer.finished == 3 and len(consumer.running) == 1, what="the next one starts")
        for gate in gates.values():
            gate.set()
        await all_finished(mesh, "work", 10)
    assert most_running(sorted(await starts_of(mesh, "work"))[3:]) == 1


@pytest.mark.parametrize("listen", [True, False])
@pytest.mark.parametrize("to", [{"queue": "full"}, {"group": "full"}, {"queue": "others"}], ids=str)
async def test_what_is_moved_when_a_worker_has_found_it_obeys_the_limits_of_where_it_stands(
    mesh: TaskMesh, to: dict[str, Any], listen: bool
) -> None:
    gate, ran = anyio.Event(), list[str]()

    @mesh.task
    async def block() -> None:
        await gate.wait()

    @mesh.task
    async def work() -> None:
        ran.append(current_task().key)

    await mesh.set_limit("full", running=0)
    await mesh.queues.set_group_limit("default", "full", 0)
    async with working(mesh, concurrency=1, listen=listen, queues=["default", "full"]) as consumer:
        await block.publish("b")
        await eventually(lambda: consumer.running == ["b"])
        await work.publish_many({"moves": {}, "stays": {}})
        candidates = parts_of(consumer).candidates
        await eventually(lambda: "work:moves" in candidates and "work:stays" in candidates)
        await work.configure(update_existing_params=True, **to).publish("moves")
        gate.set()
        await finished(mesh, "work", "stays")
        await (await work.publish("later")).result(timeout=60)
        assert ran == ["stays", "later"]
        await mesh.set_limit("full", running=None)
        await mesh.queues.set_group_limit("default", "full", None)
        if to != {"queue": "others"}:
            await finished(mesh, "work", "moves")


async def test_explain_and_the_queue_say_how_much_of_a_limit_is_used(mesh: TaskMesh) -> None:
    gate = anyio.Event()

    @mesh.task(queue="told")
    async def work() -> None:
        await gate.wait()

    await mesh.set_limit("told", running=1, rate=100, per_ms=60_000)
    await work.publish_many({"a": {}, "b": {}})
    async with working(mesh, "w1") as consumer:
        await eventually(lambda: len(consumer.running) == 1)
        waiting = "b" if consumer.running == ["a"] else "a"
        (queue,) = [info for info in await mesh.queues.all() if info.queue == "told"]
        assert (queue.running, queue.limits.running, queue.waiting) == (1, 1, 1)
        await eventually(lambda: _started_is(mesh, 1), what="the booking of the other task is given back")
        (explanation,) = await mesh.explain("work", waiting)
        (gate_of_queue,) = [g for g in explanation.gates if g.name == "queue"]
        assert not gate_of_queue.open
        assert not explanation.claimable
        assert "1 of at most 1" in gate_of_queue.reason
        gate.set()
        await finished(mesh, "work", waiting)


async def _started_is(mesh: TaskMesh, count: int) -> bool:
    return [queue.started for queue in await mesh.queues.all() if queue.queue == "told"] == [count]


@pytest.mark.parametrize(
    "limit", [{"running": -1}, {"rate": -1, "per_ms": 5}, {"per_ms": 5}, {"rate": 1.5, "per_ms": 5}, {"running": True}]
)
async def test_a_limit_that_makes_no_sense_is_refused(mesh: TaskMesh, limit: dict[str, object]) -> None:
    with pytest.raises(InvalidOption):
        await mesh.set_limit("q", **limit)  # type: ignore[arg-type]  # that is the test


async def test_the_slot_of_a_task_that_ran_for_long_goes_back_and_is_not_left_for_others_to_write_off(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_off: list[int] = []

    async def check(store: Store, queue: str) -> int:
        written_off.append(await store_check(store, queue))
        return written_off[-1]

    store_check = store_limits.check
    monkeypatch.setattr(store_limits, "check", check)
    monkeypatch.setattr(store_limits, "BOOKED_MS", 400)

    @mesh.task(queue="long")
    async def work() -> None:
        await anyio.sleep(0.6)  # longer than a booking is good for

    await mesh.set_limit("long", group_running=1)
    for group in ("a", "b", "c"):
        await work.configure(group=group).publish_many({f"{group}{n}": {} for n in range(4)})
    async with working(mesh, "w1", concurrency=10):
        await all_finished(mesh, "work", 12)
    assert sum(written_off) == 0, "each would have kept its group shut for two seconds"
