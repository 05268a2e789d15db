"""Connecting in the middle of an election."""

from __future__ import annotations

from typing import Any

import pytest

from taskmesh import TaskMesh
from tests.faults import failing_commands


@pytest.mark.parametrize("fault", [{"errorCode": 10107}, {"closeConnection": True}], ids=["NotWritablePrimary", "cut"])
async def test_a_mesh_connects_though_the_primary_changes_meanwhile(
    mongo_uri: str, database: str, fault: dict[str, Any]
) -> None:
    async with (
        failing_commands(mongo_uri, ["create", "createIndexes"], times=2, **fault),
        TaskMesh(mongo_uri, database=database) as mesh,
    ):
        assert await mesh.workers() == []
