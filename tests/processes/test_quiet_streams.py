"""T24: however many workers listen, a renewed lease and reported progress are delivered to none of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from pymongo import AsyncMongoClient

from taskmesh import TaskMesh, TaskOption, current_task
from taskmesh.consumer.candidates.listening import A_FEW
from tests.waiting import eventually
from tests.working import working

IDLE = A_FEW - 1
"""With the busy one, as many workers as all listen. Of more, some close their streams after a while."""
RUNNING = 60
RENEWED_OFTEN = TaskOption(ping_interval_ms=200, worker_timeout_ms=20_000)


async def _streams(client: AsyncMongoClient[dict[str, object]], database: str) -> int:
    """How many change streams on the database the server has open."""
    every: list[dict[str, object]] = [
        {"$currentOp": {"idleCursors": True, "allUsers": True}},
        {"$match": {"cursor.originatingCommand.pipeline.0.$changeStream": {"$exists": True}}},
    ]
    cursor = await client.admin.aggregate(every)
    return sum(str(operation.get("ns", "")).startswith(f"{database}.") for operation in await cursor.to_list())


async def _has_streams(client: AsyncMongoClient[dict[str, object]], database: str, count: int) -> bool:
    """Whether there are so many. A stream between two reads is not always told: ask again."""
    return await _streams(client, database) == count


@pytest.mark.lasting
async def test_t24_idle_workers_hear_nothing_of_renewals_and_progress(mongo_uri: str, database: str) -> None:
    release = asyncio.Event()
    renewals: dict[str, int] = {}

    def define(mesh: TaskMesh, *, runs: bool) -> None:
        @mesh.task(option=RENEWED_OFTEN)
        async def job() -> None:
            assert runs, "the idle ones are paused"
            task = current_task()
            while not release.is_set():
                renewals[task.key] = renewals.get(task.key, 0) + 1
                await task.progress(0.5, f"round {renewals[task.key]}")
                await asyncio.sleep(0.5)

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncMongoClient[dict[str, object]](mongo_uri))
        meshes = [await stack.enter_async_context(TaskMesh(mongo_uri, database=database)) for _ in range(IDLE + 1)]
        busy, *idle = meshes
        for mesh in meshes:
            define(mesh, runs=mesh is busy)
        consumer = await stack.enter_async_context(working(busy, "busy", concurrency=RUNNING))
        await busy.definitions["job"].publish_many({f"k{n}": {} for n in range(RUNNING)})
        await eventually(lambda: len(consumer.running) == RUNNING)
        for n, mesh in enumerate(idle):
            await stack.enter_async_context(working(mesh, f"idle{n}", names=["job"]))

        heard = [mesh.feed.delivered for mesh in idle]
        rounds = sum(renewals.values())
        await eventually(lambda: sum(renewals.values()) > rounds + 3 * RUNNING, 60, what="three rounds of progress")

        assert [mesh.feed.delivered for mesh in idle] == heard
        await eventually(lambda: _has_streams(client, database, len(meshes)), what="one stream for each process")
        release.set()
        await eventually(lambda: not consumer.running)


async def test_t24_all_readers_of_a_process_share_one_stream(mongo_uri: str, database: str) -> None:
    release = asyncio.Event()
    async with (
        AsyncMongoClient[dict[str, object]](mongo_uri) as client,
        TaskMesh(mongo_uri, database=database) as mesh,
    ):

        @mesh.task
        async def job(n: int) -> int:
            await release.wait()
            return n

        async with working(mesh, "a"), working(mesh, "b"):
            events = mesh.events("job")
            first = asyncio.ensure_future(anext(events))
            handles = await job.publish_many({f"k{n}": {"n": n} for n in range(20)})
            results = [asyncio.ensure_future(handle.result(60)) for handle in handles]
            await first

            await eventually(lambda: _has_streams(client, database, 1), what="one stream serves them all")
            release.set()
            assert await asyncio.gather(*results) == list(range(20))
            await events.aclose()


async def test_t24_a_worker_that_only_scans_opens_no_stream(mongo_uri: str, database: str) -> None:
    async with (
        AsyncMongoClient[dict[str, object]](mongo_uri) as client,
        TaskMesh(mongo_uri, database=database) as mesh,
    ):

        @mesh.task
        async def job() -> None:
            """Do nothing."""

        async with working(mesh, "w", listen=False) as consumer:
            await job.publish("k")
            await eventually(lambda: consumer.finished == 1)
            assert await _streams(client, database) == 0
