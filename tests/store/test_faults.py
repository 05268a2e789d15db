"""Which errors pass by themselves: what is safe to repeat is repeated, and nobody is told of them."""

from __future__ import annotations

import pytest

from taskmesh import TaskMesh
from tests.faults import failing_commands


@pytest.mark.parametrize("code", [365, 91, 11602, 112])
async def test_a_publish_outlives_an_error_that_passes(
    mesh: TaskMesh, mongo_uri: str, database: str, code: int
) -> None:
    async with failing_commands(mongo_uri, ["insert"], times=1, errorCode=code, namespace=f"{database}.tasks"):
        assert (await mesh.publish("job", "k")).created
