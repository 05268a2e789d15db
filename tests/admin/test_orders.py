"""Orders to workers elsewhere: each is obeyed once, and one that makes no sense is refused where it is given."""

from __future__ import annotations

from typing import Any

import pytest

from taskmesh import InvalidOption, TaskMesh
from tests.waiting import eventually
from tests.working import finished, working


async def test_an_order_is_not_obeyed_again_with_the_next_one(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    async with working(mesh, "w") as consumer:
        await mesh.pause_worker("w")
        await eventually(lambda: consumer.paused)
        consumer.resume()
        await mesh.fleet.set_concurrency("w", 7)
        await eventually(lambda: consumer.concurrency == 7)
        assert not consumer.paused
        consumer.concurrency = 9
        await mesh.pause_worker("w")
        await eventually(lambda: consumer.paused, what="the same order once more is a new order")
        assert consumer.concurrency == 9


@pytest.mark.parametrize("concurrency", [0, -1, 2_000_000, 1.5, True, "7", None])
async def test_a_concurrency_that_makes_no_sense_is_refused(mesh: TaskMesh, concurrency: Any) -> None:
    @mesh.task
    async def job() -> None: ...

    async with working(mesh, "w"):
        with pytest.raises(InvalidOption, match="concurrency must be a whole number from 1"):
            await mesh.fleet.set_concurrency("w", concurrency)


async def test_a_worker_outlives_an_order_that_it_cannot_obey(mesh: TaskMesh) -> None:
    """As another release may give one, or somebody by hand."""

    @mesh.task
    async def job() -> None: ...

    async with working(mesh, "w") as consumer:
        workers = mesh.store.driver.collection("workers")
        order = {"order": {"concurrency": 0, "paused": True}, "order_time": mesh.clock.now()}
        await workers.update_one({"_id": "w"}, {"$set": order})
        await eventually(lambda: consumer.paused, what="the rest is obeyed")
        consumer.resume()
        await job.publish("k")
        await finished(mesh, "job", "k")


@pytest.mark.parametrize("grace_ms", [-1, 0.5, "1", None])
async def test_a_grace_that_makes_no_sense_is_refused(mesh: TaskMesh, grace_ms: Any) -> None:
    with pytest.raises(InvalidOption, match="grace_ms must be a whole number of milliseconds"):
        await mesh.stop_worker("w", grace_ms=grace_ms)
