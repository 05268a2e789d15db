"""What it means when the server gave up at our deadline."""

from __future__ import annotations

from typing import Any

import pytest
from pymongo.errors import OperationFailure

from taskmesh import TaskMesh
from taskmesh.store.faults import is_over_deadline, is_passing
from taskmesh.store.lease import ping
from tests.faults import failing_commands

_NO_MAJORITY: dict[str, Any] = {"writeConcernError": {"code": 50, "errmsg": "operation exceeded time limit"}}
_LOCKED: dict[str, Any] = {"errorCode": 50}


@pytest.mark.blocks_the_loop  # pings are sent from a thread of their own, as a rule
@pytest.mark.parametrize(("fault", "locked"), [(_NO_MAJORITY, False), (_LOCKED, True)], ids=["no majority", "locked"])
async def test_a_set_is_split_for_a_locked_document_and_not_for_a_majority_that_is_slow(
    mesh: TaskMesh, mongo_uri: str, fault: dict[str, Any], locked: bool
) -> None:
    database, ours = mesh.store.driver.sync_database()
    try:
        async with failing_commands(mongo_uri, ["update"], times=1, **fault):
            with pytest.raises(OperationFailure) as raised:
                ping(mesh.store, database, [("job:k", "r1")], 1_000)
    finally:
        if ours:
            database.client.close()
    assert is_over_deadline(raised.value) is locked
    assert is_passing(raised.value) is not locked
