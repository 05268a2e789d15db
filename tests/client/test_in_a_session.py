"""Publishing inside somebody's transaction: as quick as outside."""

from __future__ import annotations

from typing import Any

from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandListener, CommandStartedEvent

from taskmesh import TaskMesh


class _Counted(CommandListener):
    """How many commands that are about tasks a client sends."""

    def __init__(self) -> None:
        self.count = 0

    def started(self, event: CommandStartedEvent) -> None:
        self.count += event.command_name in ("insert", "find", "update", "getMore")

    def succeeded(self, event: Any) -> None:
        """Not of interest."""

    def failed(self, event: Any) -> None:
        """Not of interest."""


async def test_many_tasks_need_two_round_trips_a_thousand(mongo_uri: str, database: str) -> None:
    counted = _Counted()
    async with AsyncMongoClient[dict[str, Any]](mongo_uri, event_listeners=[counted]) as client:
        mesh = TaskMesh(client, database=database)

        @mesh.task
        async def job(n: int) -> None: ...

        async with mesh:
            await job.publish("k7", n=0)
            counted.count = 0
            async with client.start_session() as session, await session.start_transaction():
                handles = await job.configure(session=session).publish_many({f"k{n}": {"n": n} for n in range(2_500)})
            assert counted.count <= 3 * 2 + 2
            assert [handle.key for handle in handles] == [f"k{n}" for n in range(2_500)]
            assert [handle.key for handle in handles if not handle.created] == ["k7"]
            assert [task.key async for task in mesh.find("job", limit=0)] == sorted(f"k{n}" for n in range(2_500))
            assert (await mesh.get("job", "k7")).params == {"n": 0}
            assert (await mesh.get("job", "k8")).params == {"n": 8}
