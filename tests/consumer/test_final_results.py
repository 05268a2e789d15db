"""A result that somebody was told is final: no failover takes it back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from taskmesh import Status, TaskMesh
from taskmesh.embedded import replica
from tests.mongod import Mongod
from tests.mongods import ThreeNodes
from tests.waiting import eventually
from tests.working import working

pytestmark = [pytest.mark.failover, pytest.mark.blocks_the_loop]


@contextmanager
def _not_replicating(members: list[Mongod]) -> Iterator[None]:
    """Let these members fetch nothing, so that no majority has what is written meanwhile."""
    for mode in ("alwaysOn", "off"):
        for member in members:
            with replica.direct_client(member.address) as client:
                client.admin.command("configureFailPoint", "stopReplProducer", mode=mode)
        if mode == "alwaysOn":
            yield


async def test_a_success_that_only_the_primary_has_is_no_result_yet(replica_set: ThreeNodes, database: str) -> None:
    mesh = TaskMesh(replica_set.uri, database=database)
    may_end = asyncio.Event()

    @mesh.task
    async def job() -> str:
        await may_end.wait()
        return "done"

    async with mesh, working(mesh):
        handle = await job.publish("k")
        await eventually(lambda: _is(mesh, Status.RUNNING))
        with _not_replicating(replica_set.secondaries()):
            may_end.set()
            await eventually(lambda: _is(mesh, Status.SUCCESS), what="the primary shows it")
            with pytest.raises(TimeoutError):
                await handle.result(timeout=7)  # who waits looks again every five seconds
        assert await handle.result(timeout=60) == "done"


async def _is(mesh: TaskMesh, status: Status) -> bool:
    return (await mesh.get("job", "k")).status is status
