"""M33: with a slow network between worker and database, claims in sets keep it busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from taskmesh import TaskMesh
from tests.mongod import Mongod
from tests.waiting import eventually
from tests.working import working

ONE_WAY_S = 0.01
"""So a round trip takes 20 ms."""
TASKS = 1_000


@asynccontextmanager
async def slow_road(port: int) -> AsyncIterator[int]:
    """A loopback port that leads to another one, and delays what passes in either direction."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                moment, chunk = await due.get()
                await asyncio.sleep(max(0.0, moment - time.monotonic()))
                writer.write(chunk)
                await writer.drain()
                if not chunk:
                    return

        delivering = asyncio.create_task(deliver())
        try:
            while chunk := await reader.read(65_536):
                due.put_nowait((time.monotonic() + ONE_WAY_S, chunk))
        except ConnectionError:
            pass
        finally:
            delivering.cancel()
            writer.close()

    carrying: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        for there, back in ((reader, behind_writer), (behind_reader, writer)):
            task = asyncio.create_task(carry(there, back))
            carrying.add(task)
            task.add_done_callback(carrying.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tuple(carrying):
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)


@pytest.mark.slow
async def test_m33_sets_make_up_for_a_slow_network(mongod: Mongod, database: str) -> None:
    async with (
        slow_road(mongod.port) as port,
        TaskMesh(mongod.uri, database=database) as publisher,
        TaskMesh(f"mongodb://127.0.0.1:{port}/?directConnection=true", database=database) as mesh,
    ):

        @mesh.task
        async def job() -> None:
            """Do nothing."""

        async def rate(worker_id: str, concurrency: int, count: int) -> float:
            await publisher.publisher.publish_many("job", {f"{worker_id}-{n}": {} for n in range(count)})
            async with working(mesh, worker_id, concurrency=concurrency) as consumer:
                await eventually(lambda: consumer.finished > 0)
                begun, first = time.monotonic(), consumer.finished
                await eventually(lambda: consumer.finished >= count, 120)
                return (consumer.finished - first) / (time.monotonic() - begun)

        one_by_one = await rate("single", 1, 40)
        together = await rate("sets", 100, TASKS)

    assert one_by_one < 1 / (2 * ONE_WAY_S), "the road is as slow as it is meant to be"
    assert together > 10 * one_by_one
