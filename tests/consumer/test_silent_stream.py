"""T26: a stream that is open and delivers nothing costs a delay and no task, and it can be seen that it is silent."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from taskmesh import TaskMesh
from taskmesh.integrations.metrics import WorkerMetrics
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import finished, working


def silence_in(text: bytes) -> float:
    """What the worker's metrics tell of it."""
    [line] = re.findall(rb"^taskmesh_stream_silent_seconds (\S+)$", text, re.MULTILINE)
    return float(line)


@pytest.mark.slow
@pytest.mark.blocks_the_loop  # the metrics are made here
async def test_t26_while_the_stream_is_open_and_silent_tasks_start_by_the_scan_and_the_silence_shows(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    async with (
        AsyncMongoClient[dict[str, Any]](mongo_uri, appname="the deaf", tz_aware=True) as client,
        TaskMesh(client, database=database) as deaf,
    ):

        @deaf.task
        async def job() -> str:
            return "done"

        metrics = WorkerMetrics()
        async with working(deaf, "deaf", observer=metrics) as consumer:
            await mesh.publish("job", "heard")
            await finished(mesh, "job", "heard")
            heard = deaf.feed.delivered
            silence = failing_commands(
                mongo_uri, ["getMore"], appname="the deaf", blockConnection=True, blockTimeMS=120_000
            )
            await silence.__aenter__()
            try:
                await eventually(lambda: consumer.stream_silent_ms > 3_000, what="the silence shows")
                for number in range(5):
                    await mesh.publish("job", f"unheard {number}")
                    await finished(mesh, "job", f"unheard {number}")
                assert consumer.stream_silent_ms > 3_000
                assert silence_in(await metrics.text(consumer)) > 3
                assert deaf.feed.delivered <= heard + 1, "what was on its way when the stream fell silent"
            finally:
                ending = asyncio.ensure_future(silence.__aexit__(None, None, None))
                await eventually(lambda: _woken(mongo_uri, ending), 60, what="the server answers again")
            await eventually(lambda: consumer.stream_silent_ms < 3_000)


async def _woken(mongo_uri: str, ending: asyncio.Future[Any]) -> bool:
    """The server ends a fault only when nobody is held up by it any more: interrupt those."""
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        held_up: list[dict[str, Any]] = [
            {"$currentOp": {"allUsers": True}},
            {"$match": {"appName": "the deaf", "command.getMore": {"$exists": True}}},
        ]
        for operation in await (await client.admin.aggregate(held_up)).to_list():
            await client.admin.command({"killOp": 1, "op": operation["opid"]})
    return ending.done()


async def test_a_stream_that_moves_on_is_not_silent_though_nothing_concerns_it(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    assert mesh.feed.silent_ms == 0
    async with working(mesh) as consumer:
        await eventually(lambda: consumer.stream_silent_ms > 500, what="a while without any write")
        await mesh.store.driver.database["something else"].insert_one({})
        await eventually(lambda: consumer.stream_silent_ms < 500, what="any write to the server moves it on")
    assert consumer.stream_silent_ms == 0
