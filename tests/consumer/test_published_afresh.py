"""A key that is past its retention is free again, though the server has not removed its task yet: all hear of the new one."""

from __future__ import annotations

import asyncio

from pymongo import MongoClient

from taskmesh import TaskMesh, TaskNotFound, TaskOption
from tests.mongod import Mongod
from tests.waiting import eventually
from tests.working import working


async def test_readers_of_events_hear_of_it(own_mongod: Mongod) -> None:
    with MongoClient[dict[str, object]](own_mongod.uri) as client:
        client.admin.command("setParameter", 1, ttlMonitorEnabled=False)
    async with TaskMesh(own_mongod.uri, database="afresh") as mesh:

        @mesh.task(option=TaskOption(retain_success_ms=500))
        async def job(n: int) -> None: ...

        async def is_forgotten() -> bool:
            try:
                await mesh.get("job", "k")
            except TaskNotFound:
                return True
            return False

        async with working(mesh):
            await job.publish("k", n=1)
            await eventually(is_forgotten)
        async with mesh.events("job") as events:
            assert (await job.publish("k", n=2)).created
            event = await asyncio.wait_for(anext(aiter(events)), 60)
        assert (event.kind, event.key) == ("published", "k")
