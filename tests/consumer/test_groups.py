"""Groups of a queue: each is paused by itself, and has a rate of its own."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

import anyio
import pytest

from taskmesh import InvalidOption, Status, TaskMesh
from tests.consumer.sampling import most_starts_within
from tests.waiting import eventually
from tests.working import all_working, finished, working


async def test_nothing_of_a_paused_group_is_claimed_and_the_others_go_on(mesh: TaskMesh) -> None:
    @mesh.task(queue="shared")
    async def work(tenant: str) -> str:
        return tenant

    await mesh.pause("shared", group="late", reason="unpaid", by="ann")
    # More than a scan reads at a time, and before everybody else.
    many = {f"late-{n:05}": {"tenant": "late"} for n in range(3_000)}
    (first, *_) = await work.configure(group="late", priority=9).publish_many(many)
    assert "group 'late' of queue 'shared' is paused" in first.warnings
    other = await work.configure(group="good").publish("other", tenant="good")
    assert not any("paused" in warning for warning in other.warnings)
    async with all_working(mesh, ["w1", "w2"], concurrency=20) as consumers:
        assert await other.result(timeout=60) == "good"
        assert await (await work.publish("of none", tenant="none")).result(timeout=60) == "none"
        # Results are read as soon as a majority has them: perhaps before the worker hears that they were recorded.
        await eventually(lambda: sum(consumer.finished for consumer in consumers) >= 2)
        assert sum(consumer.finished for consumer in consumers) == 2
        explained = await mesh.explain("work", "late-00000")
        for explanation in explained:
            (gate,) = [gate for gate in explanation.gates if gate.name == "queue"]
            assert not gate.open
            assert gate.reason == "group 'late' is paused by ann: unpaid"
            assert not explanation.claimable
        await mesh.resume("shared", group="late")
        await finished(mesh, "work", "late-00000")
    (queue,) = [queue for queue in await mesh.queues.all() if queue.queue == "shared"]
    assert queue.paused_groups == {}


async def test_what_a_worker_has_found_before_is_not_claimed_after_the_pause(mesh: TaskMesh) -> None:
    gate = anyio.Event()

    @mesh.task(queue="shared")
    async def work() -> None:
        await gate.wait()

    await work.configure(group="late").publish_many({f"k{n}": {} for n in range(20)})
    async with working(mesh, "w1", concurrency=2) as consumer:
        await eventually(lambda: len(consumer.running) == 2)
        await mesh.pause("shared", group="late")
        gate.set()
        await eventually(lambda: not consumer.running, what="what runs, runs on")
        await (await work.configure(group="good").publish("other")).result(timeout=60)
        await eventually(lambda: consumer.finished >= 3)
        assert consumer.finished == 3


async def test_a_pause_of_a_group_ends_by_itself_and_is_not_waited_for(mesh: TaskMesh) -> None:
    @mesh.task(queue="shared")
    async def work() -> None: ...

    await mesh.pause("shared", group="late")
    handle = await work.configure(group="late").publish("k")
    with anyio.fail_after(60):
        await mesh.consumer().run(until_idle=True)
    assert await handle.status() is Status.INIT
    (explanation,) = await mesh.explain("work", "k", worker_id="w")
    assert explanation.next_claim_time is None
    (waiting,) = [queue.waiting for queue in await mesh.queues.all()]
    assert waiting == 1
    until = mesh.clock.now()
    await mesh.pause("shared", group="late", until=until)
    with anyio.fail_after(60):
        await mesh.consumer().run(until_idle=True)
    assert await handle.status() is Status.SUCCESS


async def test_each_group_has_its_rate_in_every_window_and_uses_it_up(mesh: TaskMesh) -> None:
    @mesh.task(queue="mail")
    async def send() -> None: ...

    await mesh.set_limit("mail", group_rate=5, group_per_ms=400)
    groups = ["a", "b", "c"]
    for group in groups:
        await send.configure(group=group).publish_many({f"{group}{n}": {} for n in range(20)})
    await send.publish_many({f"none{n}": {} for n in range(20)})
    async with all_working(mesh, ["w1", "w2", "w3"], concurrency=10) as consumers:
        await eventually(lambda: sum(consumer.finished for consumer in consumers) == 80)
    starts: dict[str | None, list[datetime]] = {}
    async for task in mesh.find("send", limit=0):
        (entry,) = task.task_state.worker_states
        assert entry.start_time is not None
        starts.setdefault(task.group, []).append(entry.start_time)
    for group in groups:
        # How many of the five fall into one short window, a busy machine decides: see the next test.
        assert most_starts_within(sorted(starts[group]), 400) <= 5
        spent = max(starts[group]) - min(starts[group])
        assert spent.total_seconds() < 8, "1.2 s if all is well; 14 s if bookings had to run out"


async def test_each_group_starts_exactly_as_many_in_a_window_as_its_rate_allows(mesh: TaskMesh) -> None:
    @mesh.task(queue="mail")
    async def send() -> None: ...

    await mesh.set_limit("mail", group_rate=5, group_per_ms=3_600_000)
    groups = ["a", "b", "c"]
    for group in groups:
        await send.configure(group=group).publish_many({f"{group}{n}": {} for n in range(20)})
    async with all_working(mesh, ["w1", "w2", "w3"], concurrency=10) as consumers:
        await eventually(lambda: sum(consumer.finished for consumer in consumers) >= 15)
        # What comes without a group, behind all of them, is started: by then each worker has tried what waits in the groups.
        await send.publish_many({f"none{n}": {} for n in range(20)})
        await eventually(lambda: sum(consumer.finished for consumer in consumers) >= 35)
    started = Counter([task.group async for task in mesh.find("send", status=Status.SUCCESS, limit=0)])
    assert started == {"a": 5, "b": 5, "c": 5, None: 20}


async def test_a_used_up_rate_of_a_group_is_told(mesh: TaskMesh) -> None:
    @mesh.task(queue="mail")
    async def send() -> None: ...

    await mesh.set_limit("mail", group_rate=1, group_per_ms=600_000)
    await send.configure(group="a").publish_many({"k1": {}, "k2": {}})
    other = await send.configure(group="b").publish("k3")
    async with working(mesh, "w1") as consumer:
        await eventually(lambda: consumer.finished == 2)
        await other.result(timeout=60)
        left = "k1" if (await mesh.get("send", "k1")).status is Status.INIT else "k2"
        (explanation,) = await mesh.explain("send", left)
        (gate,) = [gate for gate in explanation.gates if gate.name == "queue"]
        assert gate.reason == "1 of at most 1 starts in 600000 ms of group 'a' are used up"
        assert gate.opens_at is not None
        assert explanation.next_claim_time == gate.opens_at


async def test_a_limit_that_is_not_given_stays_as_it_is(mesh: TaskMesh) -> None:
    async def limits() -> dict[str, object]:
        (queue,) = await mesh.queues.all()
        return queue.limits.model_dump(exclude_none=True, exclude={"groups"})

    await mesh.set_limit("q", running=3, rate=5, per_ms=2_000)
    await mesh.set_limit("q", rate=7)
    assert await limits() == {"running": 3, "rate": 7, "per_ms": 2_000}
    await mesh.set_limit("q", per_ms=50, group_rate=2)
    assert await limits() == {"running": 3, "rate": 7, "per_ms": 50, "group_rate": 2, "group_per_ms": 1_000}
    await mesh.set_limit("q", rate=None)
    assert await limits() == {"running": 3, "group_rate": 2, "group_per_ms": 1_000}
    await mesh.set_limit("q")
    with pytest.raises(InvalidOption, match="group_per_ms=5 has no meaning without group_rate"):
        await mesh.set_limit("q", group_rate=None, group_per_ms=5)
    with pytest.raises(InvalidOption, match="per_ms=5 has no meaning without rate"):
        await mesh.set_limit("q", per_ms=5)
    await mesh.set_limit("q", running=None, group_rate=None)
    assert await limits() == {}
