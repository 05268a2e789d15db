"""Documents and code do not always change together; and what fits alone may not fit together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskmesh import TaskError, TaskMesh, TaskOption, current_task
from tests.waiting import eventually
from tests.working import finished, parts_of, working

ONCE = TaskOption(max_unexpected_retries=0)


@pytest.mark.parametrize(
    ("stored", "complaint"),
    [
        ({}, "'path' is missing"),
        ({"path": "a.png", "width": "wide"}, "'width'='wide' does not fit"),
        ({"path": "a.png", "height": 3}, "there is no parameter 'height'"),
        (["a.png"], "the stored params must be a document"),
    ],
    ids=["missing", "wrong type", "unknown", "no document"],
)
async def test_params_that_do_not_fit_at_execution_fail_the_execution_with_that_reason(
    mesh: TaskMesh, stored: Any, complaint: str
) -> None:
    ran: list[str] = []

    @mesh.task(option=ONCE)
    async def resize(path: str, width: int = 200) -> None:
        ran.append(f"{path} {width}")

    await resize.publish("old", path="a.png")
    await resize.publish("good", path="b.png")
    tasks = mesh.store.driver.collection("tasks")
    await tasks.update_one({"_id": "resize:old"}, {"$set": {"params": stored}})
    async with working(mesh):
        # Read as it is stored: what has no document for its params is no task that `mesh.get` would return.
        old = await eventually(lambda: tasks.find_one({"_id": "resize:old", "status": "FAIL"}))
        await finished(mesh, "resize", "good")
    assert complaint in old["task_state"]["worker_states"][0]["fail_reason"]
    assert ran == ["b.png 200"]


async def test_a_result_that_fits_alone_but_not_beside_its_params_fails_its_own_execution(mesh: TaskMesh) -> None:
    """Each is under the limit for one value, and the document would be over MongoDB's 16 MB."""
    ran: list[str] = []

    @mesh.task(option=TaskOption(max_unexpected_retries=0, worker_timeout_ms=60_000, ping_interval_ms=10_000))
    async def job(blob: bytes) -> bytes:
        ran.append(current_task().key)
        return blob

    large = await job.publish("large", blob=bytes(9_000_000))
    small = await job.publish("small", blob=b"1")
    async with working(mesh) as consumer:
        assert await small.result(timeout=60) == b"1"
        with pytest.raises(TaskError, match="result"):
            await large.result(timeout=60)
        await eventually(lambda: not consumer.running)
    assert sorted(ran) == ["large", "small"]


async def test_m22_a_handler_that_returns_at_once_leaves_no_slot_taken(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    async with working(mesh, concurrency=3) as consumer:
        handles = await job.publish_many({f"k{n}": {} for n in range(100)})  # far more than slots
        for handle in handles:
            await handle.result(timeout=60)
        await eventually(lambda: not consumer.running)
        assert parts_of(consumer).claimer.reserved == 0


async def test_m39_a_reader_of_events_that_never_reads_slows_nobody_and_loses_only_its_own(mesh: TaskMesh) -> None:
    count = 100  # three events each: far more than the reader's buffer

    @mesh.task
    async def job() -> None: ...

    kinds: list[str] = []
    read_on = asyncio.Event()

    async def read_one_and_then_nothing() -> None:
        async for event in mesh.events(buffer=10):
            kinds.append(event.kind)
            await read_on.wait()
            if event.kind == "missed":
                return

    async with working(mesh, concurrency=50) as consumer:
        reading = asyncio.create_task(read_one_and_then_nothing())
        await eventually(lambda: any(s.interest.events and s.ready.is_set() for s in mesh.feed._subscriptions))
        before = mesh.feed.delivered
        handles = await job.publish_many({f"k{n}": {} for n in range(count)})
        for handle in handles:
            await handle.result(timeout=60)
        await eventually(lambda: not consumer.running)
        await eventually(lambda: mesh.feed.delivered >= before + 3 * count, what="all is told")
        assert len(kinds) == 1, "the reader stands still"
        read_on.set()
        async with asyncio.timeout(60):
            await reading
    assert kinds[-1] == "missed", "it is told"
    assert len(kinds) <= 12
