"""Handlers that are cancelled inside driver calls leave nothing behind (trap T41)."""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
from typing import Any

import pytest

from taskmesh import Status, TaskMesh, TaskOption, current_task
from tests.waiting import eventually
from tests.working import working

# The option that this test is about; the rest is long, so that nothing but the cancellation ends an execution.
ENDLESS = TaskOption(max_unexpected_retries=0, worker_timeout_ms=60_000, ping_interval_ms=10_000)


@pytest.mark.lasting
@pytest.mark.parametrize("count", [50, pytest.param(2_000, marks=pytest.mark.slow)])
async def test_t41_cancellations_at_random_awaits_leave_no_connection_cursor_or_session(  # noqa: C901 — one story, told in one go
    mesh: TaskMesh, database: str, count: int
) -> None:
    chance = random.Random(41)
    client = mesh.store.driver.client
    notes = client[database]["notes"]
    await notes.insert_one({"made": "before any transaction"})
    kinds = ("progress", "publish", "transaction", "events", "find")

    @mesh.task(option=ENDLESS)
    async def job(kind: str) -> None:
        task = current_task()
        while True:
            await asyncio.sleep(0)
            match kind:
                case "progress":
                    await task.progress(0.5)
                case "publish":
                    await mesh.publish("nobody-runs-this", task.key, {}, update_existing_params=True)
                case "transaction":
                    async with task.transaction() as session:
                        await notes.insert_one({"key": task.key}, session=session)
                        await asyncio.sleep(60)
                case "events":
                    async for _ in mesh.events("job", task.key):
                        pass
                case "find":
                    async for _ in mesh.find("nobody-runs-this", limit=0):
                        pass

    @mesh.task
    async def afterwards() -> str:
        return "alive"

    async def open_on_the_server() -> tuple[int, int]:
        status = await client.admin.command("serverStatus")
        return int(status["metrics"]["cursor"]["open"]["total"]), int(status["transactions"]["currentOpen"])

    async def cancel(key: str) -> None:
        await asyncio.sleep(chance.random() * 0.04)  # so that it hits at any await
        await mesh.cancel("job", key)

    async with working(mesh, "w", concurrency=10) as consumer:
        assert await (await afterwards.publish("before")).result(timeout=60) == "alive"
        await eventually(lambda: not consumer.running)
        before = await open_on_the_server()
        await job.publish_many({f"k{n}": {"kind": kinds[n % len(kinds)]} for n in range(count)})
        while await _left(mesh):
            # Side by side: each handler loops as fast as it can until its turn comes.
            await asyncio.gather(*map(cancel, consumer.running))
        await eventually(lambda: not consumer.running)

        async def is_as_before() -> bool:
            cursors, transactions = await open_on_the_server()
            return cursors <= before[0] and transactions <= before[1]

        await eventually(is_as_before, what="cursors and transactions are as before")
        pools = [server.pool for server in client._topology._servers.values()]
        # The change stream holds one.
        await eventually(lambda: sum(pool.active_sockets for pool in pools) <= 2, what="connections are given back")
        assert await (await afterwards.publish("after")).result(timeout=60) == "alive", "the stream is alive"

    found = [task.status async for task in mesh.find("job", limit=0)]
    assert found == [Status.CANCELLED] * count
    written = notes.count_documents({"key": {"$exists": True}})
    assert (await written if inspect.isawaitable(written) else written) == 0, "every transaction was undone"
    gc.collect()  # "Task was destroyed but it is pending" would be raised here


async def _left(mesh: TaskMesh) -> Any:
    return await mesh.store.driver.collection("tasks").count_documents({"name": "job", "status": {"$ne": "CANCELLED"}})
