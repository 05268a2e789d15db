"""Connecting, and starting a worker, while the database falters."""

from __future__ import annotations

from typing import Any

import pytest

from taskmesh import TaskMesh
from tests.faults import failing_commands
from tests.working import working


@pytest.mark.parametrize("fault", [{"errorCode": 10107}, {"closeConnection": True}], ids=["NotWritablePrimary", "cut"])
async def test_a_mesh_connects_though_the_primary_changes_meanwhile(
    mongo_uri: str, database: str, fault: dict[str, Any]
) -> None:
    async with (
        failing_commands(mongo_uri, ["create", "createIndexes"], times=2, **fault),
        TaskMesh(mongo_uri, database=database) as mesh,
    ):
        assert await mesh.workers() == []


@pytest.mark.parametrize(
    "fault",
    [{"errorCode": 10107}, {"errorCode": 50}, {"closeConnection": True}],
    ids=["NotWritablePrimary", "MaxTimeMSExpired", "cut"],
)
async def test_so_does_a_worker_start(mesh: TaskMesh, mongo_uri: str, fault: dict[str, Any]) -> None:
    @mesh.task
    async def job() -> str:
        return "done"

    handle = await job.publish("k")
    async with failing_commands(mongo_uri, ["aggregate", "findAndModify"], times=3, **fault), working(mesh):
        assert await handle.result(timeout=60) == "done"
