"""What deadlines mean: the server's, when it gave up at ours, and our own for a server that says nothing."""

from __future__ import annotations

from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient
from pymongo.errors import NetworkTimeout, OperationFailure

from taskmesh import TaskMesh
from taskmesh.store.mongodb.driver import Driver
from taskmesh.store.mongodb.server_errors import is_over_deadline, is_passing
from taskmesh.store.renew import ping
from tests.faults import failing_commands

_NO_MAJORITY: dict[str, Any] = {"writeConcernError": {"code": 50, "errmsg": "operation exceeded time limit"}}
_LOCKED: dict[str, Any] = {"errorCode": 50}


@pytest.mark.blocks_the_loop  # pings are sent from a thread of their own, as a rule
@pytest.mark.parametrize(("fault", "locked"), [(_NO_MAJORITY, False), (_LOCKED, True)], ids=["no majority", "locked"])
async def test_a_set_is_split_for_a_locked_document_and_not_for_a_majority_that_is_slow(
    mesh: TaskMesh, mongo_uri: str, fault: dict[str, Any], locked: bool
) -> None:
    database = mesh.store.driver.sync_database()
    try:
        async with failing_commands(mongo_uri, ["update"], times=1, **fault):
            with pytest.raises(OperationFailure) as raised:
                ping(mesh.store, database, [("job:k", "r1")], 1_000)
    finally:
        database.client.close()
    assert is_over_deadline(raised.value) is locked
    assert is_passing(raised.value) is not locked


@pytest.mark.blocks_the_loop  # it is for threads
@pytest.mark.parametrize("kind", [AsyncMongoClient, AsyncIOMotorClient])
async def test_a_server_that_is_silent_holds_up_pings_for_no_longer_than_they_allow(
    mongo_uri: str, database: str, kind: Any
) -> None:
    client = kind(mongo_uri, appname="of its user")
    pings = Driver(client, database).sync_database(socket_timeout_ms=1_000)
    try:
        how: dict[str, Any] = {"blockConnection": True, "blockTimeMS": 3_000}
        async with failing_commands(mongo_uri, ["count"], times=1, appname="of its user", **how):
            with pytest.raises(NetworkTimeout):
                pings.command("count", "tasks")
        assert pings.command("count", "tasks")["ok"] == 1
    finally:
        pings.client.close()
        await Driver(client, database).close()
