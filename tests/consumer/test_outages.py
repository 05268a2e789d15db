"""The server goes away in the middle of work and comes back: nothing is lost, and work goes on by itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

import pytest

from taskmesh import Status, TaskMesh, TaskOption, current_task
from tests.mongod import Mongod
from tests.waiting import eventually
from tests.working import finished, working

LONG_LEASE = TaskOption(worker_timeout_ms=120_000, ping_interval_ms=1_000)


@pytest.mark.parametrize("away_s", [2.0, pytest.param(20.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_server_that_goes_and_comes_back_costs_nothing(
    own_mongod: Mongod, caplog: pytest.LogCaptureFixture, how: str, away_s: float
) -> None:
    caplog.set_level(logging.WARNING, "taskmesh")
    ran: Counter[str] = Counter()
    release = asyncio.Event()
    mesh = TaskMesh(own_mongod.uri, database="app")

    @mesh.task(option=LONG_LEASE)
    async def job() -> str:
        key = str(current_task().key)
        ran[key] += 1
        if key.startswith("during"):
            await release.wait()
        return key

    async with mesh, working(mesh, "w", concurrency=20) as consumer:
        await job.publish_many({f"during {i}": {} for i in range(10)})
        await eventually(lambda: len(consumer.running) == 10)
        waiting = [await job.configure(delay_ms=1_000).publish(f"delayed {i}") for i in range(10)]

        gone = time.monotonic()
        if how == "killed":
            await asyncio.to_thread(own_mongod.kill)
        else:
            own_mongod.suspend()
        release.set()  # the handlers return while nothing can be recorded
        publishing = asyncio.create_task(job.publish("published while it was away"))
        await eventually(lambda: time.monotonic() - gone > away_s, away_s + 5)
        assert {f"during {i}" for i in range(10)} <= set(consumer.running), "no outcome is taken for recorded"
        if how == "killed":
            await asyncio.to_thread(own_mongod.start)
            await asyncio.to_thread(own_mongod.wait_for_primary)
        else:
            own_mongod.resume()

        assert (await publishing).created
        keys = [f"during {i}" for i in range(10)] + [handle.key for handle in waiting]
        for key in [*keys, "published while it was away"]:
            task = await finished(mesh, "job", key)
            assert task.status is Status.SUCCESS
            assert (task.task_state.lost_cnt, len(task.task_state.worker_states)) == (0, 1)
        assert await (await job.publish("afterwards")).result(timeout=60) == "afterwards"

    assert set(ran.values()) == {1}
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) < 15 + 10 * away_s, "an outage is told, and not again and again by every part"
    assert not [record for record in lines if record.levelno >= logging.ERROR]
