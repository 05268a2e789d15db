"""The server goes away and does not come back: whoever wants to end, ends."""

from __future__ import annotations

import asyncio
import time

import pytest

from taskmesh import TaskMesh, TaskOption, current_task
from tests.mongod import Mongod
from tests.waiting import eventually

pytestmark = pytest.mark.slow  # waits for deadlines to run out

_PATIENCE_S = 45.0


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_mesh_closes_though_its_server_is_gone_for_good(own_mongod: Mongod, how: str) -> None:
    mesh = TaskMesh(own_mongod.uri, database="app")

    @mesh.task
    async def job() -> None: ...

    await mesh.connect()
    handle = await job.publish("1")
    waiting = asyncio.create_task(handle.result())
    reading = asyncio.create_task(anext(aiter(mesh.events())))
    await eventually(lambda: mesh.feed.position, what="the stream is read")
    await _gone(own_mongod, how)

    began = time.monotonic()
    await asyncio.wait_for(mesh.close(), _PATIENCE_S)

    assert time.monotonic() - began < _PATIENCE_S
    await asyncio.wait([waiting, reading], timeout=5.0)
    assert waiting.done()
    assert reading.done()
    for task in (waiting, reading):
        if not task.cancelled():
            task.exception()


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_worker_that_is_cancelled_ends_though_its_server_is_gone_for_good(own_mongod: Mongod, how: str) -> None:
    mesh = TaskMesh(own_mongod.uri, database="app")
    cancelled: list[str] = []

    @mesh.task
    async def job() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.append(current_task().key)

    await mesh.connect()
    consumer = mesh.consumer(worker_id="w")
    running = asyncio.create_task(consumer.run())
    await job.publish("1")
    await eventually(lambda: consumer.running)
    await _gone(own_mongod, how)

    running.cancel()
    await asyncio.wait([running], timeout=_PATIENCE_S)
    assert running.done(), "the consumer does not end"
    assert cancelled == ["1"]
    await asyncio.wait_for(mesh.close(), _PATIENCE_S)


async def _gone(mongod: Mongod, how: str) -> None:
    if how == "killed":
        await asyncio.to_thread(mongod.kill)
    else:
        mongod.suspend()


async def test_a_worker_that_is_told_to_stop_ends_though_its_server_is_gone_for_good(own_mongod: Mongod) -> None:
    mesh = TaskMesh(own_mongod.uri, database="app")
    goes_on = asyncio.Event()

    @mesh.task(option=TaskOption(ping_interval_ms=1_000, worker_timeout_ms=5_000))
    async def job() -> None:
        await goes_on.wait()

    await mesh.connect()
    consumer = mesh.consumer(worker_id="w")
    running = asyncio.create_task(consumer.run())
    await job.publish("1")
    await eventually(lambda: consumer.running)
    await _gone(own_mongod, "killed")
    goes_on.set()  # its outcome cannot be recorded, now or later

    consumer.begin_stop(grace_ms=1_000)
    await asyncio.wait([running], timeout=_PATIENCE_S)
    assert running.done(), "the consumer does not end"
    running.result()
    await asyncio.wait_for(mesh.close(), _PATIENCE_S)
