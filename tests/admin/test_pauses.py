"""Pauses: of a queue, who, why and until when; of one worker alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest

from taskmesh import QueueNotEmpty, TaskMesh, TaskNotFound, TaskOption
from taskmesh.store import Store
from taskmesh.store.queues import limits
from tests.waiting import eventually
from tests.working import parts_of, working


@pytest.mark.parametrize("listen", [True, False])
async def test_a_pause_until_a_time_ends_by_itself(mesh: TaskMesh, listen: bool) -> None:
    @mesh.task(queue="tired")
    async def work() -> str:
        return "awake"

    async with working(mesh, listen=listen) as consumer:
        await mesh.pause("tired", reason="deploy", by="ann", until=mesh.clock.now() + timedelta(hours=1))
        await eventually(lambda: parts_of(consumer).queues.paused == {"tired"})
        handle = await work.publish("k")
        assert any("paused" in warning for warning in handle.warnings)
        (queue,) = await mesh.queues.all()
        assert (queue.paused, queue.paused_by, queue.paused_reason) == (True, "ann", "deploy")
        (explanation,) = await mesh.explain("work", "k")
        (gate,) = [gate for gate in explanation.gates if gate.name == "queue"]
        assert not gate.open
        assert "by ann" in gate.reason
        assert "deploy" in gate.reason
        assert gate.opens_at == queue.paused_until == explanation.next_claim_time
        assert consumer.finished == 0
        await mesh.pause("tired", until=mesh.clock.now() + timedelta(seconds=1))
        assert await handle.result(timeout=60) == "awake"


async def test_a_pause_ends_by_itself_however_much_the_stream_tells(mesh: TaskMesh) -> None:
    """No event announces its end, so a worker that always has an event to follow up has to look by time, too."""

    @mesh.task(option=TaskOption(max_unexpected_retries=1_000, unexpected_retry_delay_ms=200))
    async def restless() -> None:
        raise ValueError("again")

    @mesh.task(queue="tired")
    async def work() -> str:
        return "awake"

    await restless.publish_many({str(n): {} for n in range(5)})
    async with working(mesh) as consumer:
        await mesh.pause("tired", until=mesh.clock.now() + timedelta(seconds=1))
        await eventually(lambda: parts_of(consumer).queues.paused == {"tired"})
        handle = await work.publish("k")
        assert await handle.result(timeout=20) == "awake"


async def test_what_runs_runs_on_while_its_queue_is_paused_and_nothing_new_starts(mesh: TaskMesh) -> None:
    gate = anyio.Event()

    @mesh.task
    async def work() -> None:
        await gate.wait()

    first = await work.publish("first")
    async with working(mesh) as consumer:
        await eventually(lambda: consumer.running == ["first"])
        await mesh.pause("default")
        await eventually(lambda: parts_of(consumer).queues.paused == {"default"})
        second = await work.publish("second")
        gate.set()
        await first.result(timeout=60)
        assert await second.status() == "INIT"
        await mesh.resume("default")
        await second.result(timeout=60)


async def test_a_consumer_that_is_paused_before_it_runs_claims_nothing_until_it_is_resumed(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> str:
        return "awake"

    handle = await work.publish("k")
    consumer = mesh.consumer()
    consumer.pause()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.run)
        await eventually(lambda: consumer.state == "running" and parts_of(consumer).scanner.scans >= 2)
        assert (await handle.task()).task_state.worker_states == []
        consumer.resume()
        assert await handle.result(timeout=60) == "awake"
        await consumer.stop()


async def test_a_worker_that_runs_until_idle_does_not_wait_for_a_paused_queue(mesh: TaskMesh) -> None:
    @mesh.task(queue="closed")
    async def work() -> None:
        return None

    await mesh.pause("closed")
    await work.publish("k")
    with anyio.fail_after(15):
        await mesh.consumer().run(until_idle=True)
    assert (await mesh.get("work", "k")).status == "INIT"


async def test_one_worker_paused_alone_leaves_the_work_to_the_others(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> None:
        return None

    async with working(mesh, "w1") as tired, working(mesh, "w2") as awake:
        await mesh.pause_worker("w1")
        await eventually(lambda: tired.paused)
        await work.publish_many({f"k{n}": {} for n in range(50)})
        await eventually(lambda: awake.finished == 50)
        assert tired.finished == 0
        handle = await work.publish("one more")
        explained = {e.worker_id: e for e in await mesh.explain("work", "one more")}
        assert not explained["w1"].claimable
        await handle.result(timeout=60)
        await mesh.resume_worker("w1")
        await eventually(lambda: not tired.paused)
        await awake.stop(0)
        await (await work.publish("the last")).result(timeout=60)


async def test_a_queue_limited_to_nothing_says_so_at_publish(mesh: TaskMesh) -> None:
    await mesh.set_limit("shut", running=0)
    handle = await mesh.publish("work", "k", queue="shut")
    assert any("limited to 0" in warning for warning in handle.warnings)


async def test_a_queue_that_was_a_slip_is_forgotten(mesh: TaskMesh) -> None:
    @mesh.task(queue="mial")
    async def work() -> str:
        return "done"

    await mesh.pause("mial", reason="a slip")
    await mesh.pause("mial", group="g")
    await mesh.set_limit("mial", running=1, group_rate=2)
    await mesh.queues.pause_on_failures("mial", 0.5)
    async with working(mesh) as consumer:
        await eventually(lambda: parts_of(consumer).queues.paused == {"mial"})
        await mesh.queues.forget("mial", by="ann")
        assert await mesh.queues.all() == []
        for name in ("queues", "limits"):
            assert await mesh.store.driver.collection(name).count_documents({}) == 0, name
        assert await (await work.publish("k")).result(timeout=60) == "done", "the worker has heard that it is open"
    [noted] = [each for each in await mesh.audit.actions() if each.action == "queue.forget"]
    assert (noted.by, noted.about) == ("ann", "queue 'mial'")
    with pytest.raises(TaskNotFound, match="nothing is set for a queue 'mial'"):
        await mesh.queues.forget("mial")


async def test_a_queue_with_tasks_in_it_is_not_forgotten(mesh: TaskMesh) -> None:
    await mesh.publish("work", "k", queue="mail")
    await mesh.pause("mail", reason="deploy")
    with pytest.raises(QueueNotEmpty, match="queue 'mail' has unfinished tasks"):
        await mesh.queues.forget("mail")
    (queue,) = await mesh.queues.all()
    assert (queue.paused, queue.paused_reason) == (True, "deploy")


async def test_what_somebody_sets_while_a_queue_is_forgotten_stays(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.set_limit("mail", running=1)
    change = limits.change

    async def interrupted(store: Store, queue: str, stages: Sequence[dict[str, Any]]) -> None:
        monkeypatch.setattr(limits, "change", change)
        await change(store, queue, stages)
        await mesh.set_limit("mail", running=7)

    monkeypatch.setattr(limits, "change", interrupted)
    await mesh.queues.forget("mail")
    (queue,) = await mesh.queues.all()
    assert queue.limits.running == 7


@pytest.mark.parametrize(
    "besides", ["a pause of its group", "a limit of the queue", "a limit of the group", "a longer pause of its group"]
)
async def test_when_a_pause_ends_is_not_when_a_task_starts_that_something_else_holds_back_too(
    mesh: TaskMesh, besides: str
) -> None:
    ends = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    later = ends + timedelta(hours=1)
    await mesh.publish("work", "k", group="g")
    await mesh.pause("default", until=ends)
    (explained,) = await mesh.explain("work", "k")
    assert explained.next_claim_time == ends
    if besides == "a pause of its group":
        await mesh.pause("default", group="g")
    elif besides == "a limit of the queue":
        await mesh.set_limit("default", running=0)
    elif besides == "a limit of the group":
        await mesh.set_limit("default", group_rate=0)
    else:
        await mesh.pause("default", group="g", until=later)
    (explained,) = await mesh.explain("work", "k")
    assert explained.next_claim_time == (later if "longer" in besides else None)
    (shut,) = [gate for gate in explained.gates if not gate.open]
    assert "queue 'default' is shut: paused" in shut.reason
    assert len(shut.reason.split("; ")) == 2, "it says both"
