"""What a program's own client prefers is its own matter: taskmesh reads from the primary and writes to a majority."""

from __future__ import annotations

from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandListener, CommandStartedEvent

from taskmesh import TaskMesh, current_task
from taskmesh.store.mongodb.driver import maybe
from tests.working import working

_LAX = {"readPreference": "secondaryPreferred", "w": 1, "readConcernLevel": "available"}
_OF_THE_SESSION = ("endSessions", "abortTransaction")


class _Seen(CommandListener):
    """All commands that a client sends."""

    def __init__(self) -> None:
        self.commands: list[dict[str, Any]] = []

    def started(self, event: CommandStartedEvent) -> None:
        self.commands.append(dict(event.command))

    def succeeded(self, event: Any) -> None:
        """Not of interest."""

    def failed(self, event: Any) -> None:
        """Not of interest."""


@pytest.mark.parametrize("client_class", [AsyncMongoClient, AsyncIOMotorClient])
async def test_a_client_that_reads_from_secondaries_and_waits_for_no_majority_changes_nothing(
    mongo_uri: str, database: str, client_class: Any
) -> None:
    seen = _Seen()
    client = client_class(mongo_uri, event_listeners=[seen], **_LAX)
    mesh = TaskMesh(client, database=database)

    @mesh.task
    async def job() -> str:
        async with current_task().transaction() as session:
            await session.client[database]["mine"].insert_one({}, session=session)
            current_task().set_result("done")
        return "done"

    @mesh.task
    async def first() -> None:
        await current_task().publish(job, "chained")

    @mesh.task(run="thread")
    def plain() -> str:
        return "done"

    async with mesh:
        await first.publish("k")
        await plain.publish("k")
        async with working(mesh):
            for name, key in (("first", "k"), ("plain", "k"), ("job", "chained")):
                await mesh.tasks.finished(name, key, 60)
        assert [task.status.value async for task in mesh.find("job")] == ["SUCCESS"]
    asked = [c for c in seen.commands if not {"hello", *_OF_THE_SESSION} & c.keys()]
    assert {c.get("$readPreference", {}).get("mode", "primary") for c in asked} <= {"primary", "primaryPreferred"}, (
        "primaryPreferred is what the driver says to a single server"
    )
    writes = [c for c in asked if {"update", "insert", "findAndModify", "commitTransaction"} & c.keys()]
    lax = [c for c in writes if "txnNumber" not in c or "commitTransaction" in c]
    assert len(lax) > 5
    assert [c for c in lax if c.get("writeConcern", {}).get("w") != "majority"] == []
    await maybe(client.close())
