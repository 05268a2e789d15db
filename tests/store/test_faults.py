"""Which errors pass by themselves: what is safe to repeat is repeated, and nobody is told of them."""

from __future__ import annotations

import pytest

from taskmesh import TaskMesh
from tests.faults import failing_commands


@pytest.mark.parametrize("code", [365, 91, 11602, 112])
async def test_a_publish_outlives_an_error_that_passes(mongo_uri: str, database: str, code: int) -> None:
    # After some of them the driver asks the server how it is, which by default has ten seconds to answer.
    async with (
        TaskMesh(f"{mongo_uri}&heartbeatFrequencyMS=500", database=database) as mesh,
        failing_commands(mongo_uri, ["insert"], times=1, errorCode=code, namespace=f"{database}.tasks"),
    ):
        assert (await mesh.publish("job", "k")).created
