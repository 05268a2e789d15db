"""Leaving `async with mesh` while a consumer runs: it is stopped first, so that nothing is left running without a database."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskmesh import Status, TaskMesh
from tests.waiting import eventually


class Left:
    """What a test leaves: a mesh with one consumer, which runs one task."""

    def __init__(self, uri: str, database: str) -> None:
        self.mesh = TaskMesh(uri, database=database)
        self.started, self.go_on = asyncio.Event(), asyncio.Event()

        @self.mesh.task
        async def work() -> str:
            self.started.set()
            await self.go_on.wait()
            return "done"

        self.work = work
        self.consumer = self.mesh.consumer(worker_id="left")
        self.running: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        self.running = asyncio.create_task(self.consumer.run())
        await self.work.publish("k")
        await self.started.wait()

    async def nothing_is_left(self, seen_by: TaskMesh) -> Any:
        """Check that the consumer has ended as it should, and return its task."""
        assert self.running is not None
        assert self.consumer.state == "stopped"
        await asyncio.wait_for(self.running, 10)
        await eventually(lambda: _gone(seen_by), what="its registration is taken back")
        return await seen_by.get("work", "k")


async def _gone(mesh: TaskMesh) -> bool:
    return all(worker.state == "stopped" for worker in await mesh.workers() if worker.worker_id == "left")


async def test_what_runs_may_end_before_the_mesh_is_closed(mesh: TaskMesh, mongo_uri: str, database: str) -> None:
    left = Left(mongo_uri, database)
    async with left.mesh:
        await left.begin()
        asyncio.get_running_loop().call_later(0.2, left.go_on.set)
    task = await left.nothing_is_left(mesh)
    assert (task.status, task.successes[0].returns) == (Status.SUCCESS, "done")


async def test_an_error_in_the_block_stops_the_consumer_at_once_and_gives_its_task_back(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    left = Left(mongo_uri, database)

    async def fail() -> None:
        async with left.mesh:
            await left.begin()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await fail()
    task = await left.nothing_is_left(mesh)
    assert (task.status, task.task_state.worker_states, task.task_state.lost_cnt) == (Status.INIT, [], 0)


async def test_close_stops_it_too_and_a_consumer_that_never_ran_is_left_alone(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    left = Left(mongo_uri, database)
    await left.mesh.connect()
    never_ran = left.mesh.consumer(worker_id="never ran")
    await left.begin()
    left.go_on.set()
    await left.mesh.close()
    assert never_ran.state == "ready"
    assert (await left.nothing_is_left(mesh)).status is Status.SUCCESS
