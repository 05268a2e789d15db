"""A queue of which too much fails pauses by itself, and a canary that SUCCEEDs opens it."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskmesh import Consumer, InvalidOption, TaskHandle, TaskMesh, TaskMeshError, TaskOption
from taskmesh.model.queue import FailurePause, QueueInfo
from tests.waiting import eventually
from tests.working import all_working, working

CANARY_MS = 1_500
AGAIN = TaskOption(max_unexpected_retries=1_000_000, unexpected_retry_delay_ms=0)


async def info(mesh: TaskMesh, queue: str) -> QueueInfo:
    """Return what is known of a queue."""
    return next((each for each in await mesh.queues.all() if each.queue == queue), QueueInfo(queue=queue))


async def is_failing(mesh: TaskMesh, queue: str) -> bool:
    """Whether it is paused for its failures."""
    return (await info(mesh, queue)).failing


def knows(consumer: Consumer, queue: str) -> bool:
    """Whether this worker has heard of it, and runs nothing that began before."""
    assert consumer._worker is not None
    idle = consumer._worker.claimer.idle and not consumer.running
    return consumer._worker.failures._failing.get(queue) is True and idle


async def test_a_queue_pauses_when_too_much_fails_and_opens_when_a_canary_succeeds(mesh: TaskMesh) -> None:
    broken, starts = True, list[float]()

    @mesh.task(queue="mail", option=AGAIN)
    async def send() -> str:
        starts.append(time.monotonic())
        if broken:
            raise ConnectionError("the provider is down")
        return "sent"

    @mesh.task(queue="other")
    async def other() -> str:
        return "done"

    await mesh.queues.pause_on_failures("mail", 0.5, of_last=10, canary_ms=CANARY_MS)
    assert (await info(mesh, "mail")).failure_pause == FailurePause(share=0.5, of_last=10, canary_ms=CANARY_MS)
    handles = await send.publish_many({f"k{n}": {} for n in range(30)})
    async with all_working(mesh, ["w1", "w2"]) as consumers:
        await eventually(lambda: is_failing(mesh, "mail"))
        paused = await info(mesh, "mail")
        assert (paused.paused, paused.paused_by) == (True, "taskmesh")
        assert "of the last 10 executions failed" in (paused.paused_reason or "")
        assert paused.limits.rate is None, "it has no limit of its own"
        await eventually(lambda: all(knows(consumer, "mail") for consumer in consumers))
        before = len(starts)
        await eventually(lambda: len(starts) >= before + 4)
        # A start may come some time after its booking, on a busy machine; the one after the next is apart all the same.
        canaries = starts[before : before + 4]
        assert all(later - earlier >= CANARY_MS / 1000 for earlier, later in zip(canaries, canaries[2:], strict=False))
        assert await (await other.publish("o")).result(60) == "done"
        warned = [each for each in await mesh.inspect.doctor() if each.subject == "queues" and "failed" in each.found]
        assert [each.remedy for each in warned] == ["taskmesh resume mail"]
        broken = False
        for handle in handles:
            await handle.result(60)
        assert not (await info(mesh, "mail")).paused


async def test_a_limit_of_its_own_holds_beside_it_and_comes_back(mesh: TaskMesh) -> None:
    broken, at_once, most = True, 0, 0

    @mesh.task(queue="mail", option=AGAIN)
    async def send() -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            if broken:
                raise ConnectionError("down")
        finally:
            at_once -= 1

    await mesh.set_limit("mail", running=2, rate=1_000, per_ms=1_000)
    await mesh.queues.pause_on_failures("mail", 1, of_last=5, canary_ms=200)
    handles = await send.publish_many({f"k{n}": {} for n in range(20)})
    async with working(mesh):
        await eventually(lambda: is_failing(mesh, "mail"))
        limits = (await info(mesh, "mail")).limits
        assert (limits.running, limits.rate, limits.per_ms) == (2, 1_000, 1_000)
        broken = False
        for handle in handles:
            await handle.result(60)
    assert most <= 2


async def test_people_open_it_at_once_and_end_it(mesh: TaskMesh) -> None:
    @mesh.task(queue="mail", option=AGAIN)
    async def send() -> None:
        raise ConnectionError("down")

    await mesh.queues.pause_on_failures("mail", 0.1, of_last=3, canary_ms=86_400_000)
    await send.publish("k")
    async with working(mesh) as consumer:
        await eventually(lambda: is_failing(mesh, "mail"))
        await eventually(lambda: knows(consumer, "mail"))
        finished = consumer.finished
        consumer.pause()  # else it may be paused again by the time that it is looked at
        await mesh.resume("mail")
        assert not await is_failing(mesh, "mail")
        consumer.resume()
        await eventually(lambda: consumer.finished >= finished + 3)
        await eventually(lambda: is_failing(mesh, "mail"), what="it counts anew")
        await mesh.queues.pause_on_failures("mail", None)
        finished = consumer.finished
        await eventually(lambda: consumer.finished >= finished + 20)
        assert (await info(mesh, "mail")).failure_pause is None
        assert not await is_failing(mesh, "mail")


async def _paused_for_good(mesh: TaskMesh) -> TaskHandle[None]:
    """Let the queue pause for its failures, with a task in it that no canary ever tries."""

    @mesh.task(queue="mail", option=AGAIN)
    async def send() -> None:
        raise ConnectionError("down")

    await mesh.queues.pause_on_failures("mail", 0.1, of_last=3, canary_ms=86_400_000)
    handle = await send.publish("k")
    async with working(mesh):
        await eventually(lambda: is_failing(mesh, "mail"))
    return handle


async def test_a_rate_of_0_is_one_of_0_while_it_is_paused_too(mesh: TaskMesh) -> None:
    await _paused_for_good(mesh)
    await mesh.set_limit("mail", rate=0)
    async with asyncio.timeout(60):
        await mesh.consumer().run(until_idle=True)
    another = await mesh.publish("send", "another")
    assert any("'mail' is limited to 0" in warning for warning in another.warnings)


async def test_a_pause_by_hand_hides_not_that_it_is_paused_for_its_failures(mesh: TaskMesh) -> None:
    handle = await _paused_for_good(mesh)
    await mesh.pause("mail", reason="maintenance", by="ann", until=datetime.now(UTC) + timedelta(hours=1))
    (explained,) = await mesh.explain(handle.name, handle.key)
    assert explained.next_claim_time is None, "nothing starts when the one is over"
    (why,) = [gate.reason for gate in explained.gates if gate.name == "queue"]
    told = await info(mesh, "mail")
    assert (told.paused_by, told.paused_reason, told.failing) == ("ann", "maintenance", True)
    for text in (why, told.shut_because or ""):
        assert "paused by ann" in text
        assert "and paused by taskmesh: 3 of the last 3 executions failed" in text


async def test_what_is_declared_is_stored_when_the_mesh_connects(mongo_uri: str, database: str) -> None:
    mesh = TaskMesh(mongo_uri, database=database)
    mesh.queue("mail", pause_on_failures=0.5, of_last=20)
    mesh.queue("never", pause_on_failures=None)
    async with mesh:
        assert (await info(mesh, "mail")).failure_pause == FailurePause(share=0.5, of_last=20, canary_ms=30_000)
        with pytest.raises(TaskMeshError, match="connected already"):
            mesh.queue("late", pause_on_failures=0.5)
        assert [each.queue for each in await mesh.queues.all()] == ["mail"]
    again = TaskMesh(mongo_uri, database=database)
    again.queue("mail", pause_on_failures=None)
    async with again:
        assert (await info(again, "mail")).failure_pause is None


@pytest.mark.parametrize(
    ("share", "settings", "told"),
    [
        (0, {}, "share"),
        (1.1, {}, "share"),
        (True, {}, "share"),
        ("half", {}, "share"),
        (0.5, {"of_last": 0}, "of_last"),
        (0.5, {"of_last": 1_001}, "of_last"),
        (0.5, {"canary_ms": 99}, "canary_ms"),
        (0.5, {"canary_ms": None}, "canary_ms"),
    ],
)
def test_what_makes_no_sense_is_refused(share: Any, settings: Any, told: str) -> None:
    with pytest.raises(InvalidOption, match=told):
        TaskMesh("mongodb://127.0.0.1:1/").queue("mail", pause_on_failures=share, **settings)
