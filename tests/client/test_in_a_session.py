"""Publishing inside somebody's transaction: as quick as outside."""

from __future__ import annotations

from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandListener, CommandStartedEvent

from taskmesh import InvalidOption, TaskMesh, TaskNotFound
from taskmesh.store.blocking import check_same_servers
from taskmesh.store.mongodb.driver import maybe


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


async def test_the_session_may_be_of_another_client_of_the_same_servers(
    mesh: TaskMesh, mongo_uri: str, subtests: pytest.Subtests
) -> None:
    @mesh.task
    async def job(n: int) -> None: ...

    for kind, client in (
        ("PyMongo", AsyncMongoClient[dict[str, Any]](mongo_uri)),
        ("Motor", AsyncIOMotorClient(mongo_uri)),
    ):
        with subtests.test(kind=kind):
            async with await maybe(client.start_session()) as session:
                for n, commits in enumerate((True, False)):
                    await maybe(session.start_transaction())
                    assert (await job.configure(session=session).publish(kind, n=n)).created is commits
                    if not commits:
                        assert (await job.configure(session=session).publish(f"{kind} undone", n=n)).created
                        await session.abort_transaction()
                        continue
                    with pytest.raises(TaskNotFound):
                        await mesh.get("job", kind)
                    await session.commit_transaction()
                assert (await mesh.get("job", kind)).params == {"n": 0}
                with pytest.raises(TaskNotFound):
                    await mesh.get("job", f"{kind} undone")
            await maybe(client.close())


def test_a_session_of_other_servers_is_refused(subtests: pytest.Subtests) -> None:
    ours = {"setName": "rs0", "hosts": ["a:1", "b:1"]}
    for theirs, same in (
        (ours, True),
        ({"setName": "rs0", "hosts": ["b:1", "c:1"]}, True),
        ({"msg": "isdbgrid"}, True),
        ({"setName": "rs1", "hosts": ["a:1", "b:1"]}, False),
        ({"setName": "rs0", "hosts": ["c:1"]}, False),
    ):
        with subtests.test(theirs=theirs):
            if same:
                check_same_servers(ours, theirs)
            else:
                with pytest.raises(InvalidOption, match="session is one of another replica set"):
                    check_same_servers(ours, theirs)


async def test_what_is_no_session_is_refused_before_anything_is_published(mesh: TaskMesh) -> None:
    with pytest.raises(InvalidOption, match=r"session must be what client\.start_session\(\) gives, got 3"):
        await mesh.publish("job", "k", session=3)
