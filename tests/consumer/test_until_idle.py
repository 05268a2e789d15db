"""`run(until_idle=True)` waits for what this worker may run, and for nothing else."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import MongoClient

from taskmesh import Status, TaskMesh, TaskOption, current_task
from taskmesh.store.find import unfinished_left
from tests.waiting import eventually
from tests.working import status_is, working

SOON_S = 30.0


async def _works_until_idle(mesh: TaskMesh, worker_id: str = "me") -> None:
    async with asyncio.timeout(SOON_S):
        await mesh.consumer(worker_id=worker_id).run(until_idle=True)


async def test_it_does_not_wait_for_what_runs_elsewhere_and_may_never_be_its_own(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None:
        if current_task().worker_id == "other":
            await asyncio.sleep(60)

    await job.configure(specific_worker_ids=["other"]).publish("for another")
    shared = await job.configure(concurrent_worker_cnt=2).publish("for two")
    async with working(mesh, "other") as other:
        await eventually(lambda: len(other.running) == 2)
        await _works_until_idle(mesh)
        assert [entry.worker_id for entry in (await shared.task()).successes] == ["me"]
        assert sorted(other.running) == ["for another", "for two"]


async def test_it_waits_for_what_runs_elsewhere_and_may_come_to_it(mesh: TaskMesh) -> None:
    began = asyncio.Event()

    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=0, unexpected_retry_jitter=0.0))
    async def job() -> None:
        if current_task().worker_id == "other":
            began.set()
            await asyncio.sleep(60)

    handle = await job.publish("k")
    async with working(mesh, "other") as other:
        await began.wait()
        waiting = asyncio.create_task(_works_until_idle(mesh))
        await eventually(lambda: len([w for w in mesh._consumers if w.state == "running"]) == 2)
        await other.stop(grace_ms=0)
        await waiting
    assert [entry.worker_id for entry in (await handle.task()).successes] == ["me"]


async def test_it_does_not_wait_for_a_queue_in_which_nothing_may_run(mesh: TaskMesh) -> None:
    @mesh.task(queue="shut")
    async def job() -> None: ...

    await mesh.set_limit("shut", running=0)
    handle = await job.publish("k")
    await _works_until_idle(mesh)
    assert await handle.status() is Status.INIT


async def test_asking_does_not_look_at_what_is_delayed(mesh: TaskMesh, mongo_uri: str, database: str) -> None:
    @mesh.task
    async def job() -> None: ...

    count = 2_000
    await job.configure(delay_ms=3_600_000).publish_many({f"k{n}": {} for n in range(count)})
    await job.configure(start_time=datetime.now(UTC) + timedelta(hours=2), specific_worker_ids=["me"]).publish("mine")

    def examined(profiles: Any) -> int:
        return sum(found.get("docsExamined", 0) for found in profiles.find({"ns": f"{database}.tasks"}))

    with MongoClient[dict[str, Any]](mongo_uri) as client:
        client[database].command("profile", 2)
        try:
            assert not await unfinished_left(mesh.store, "me", ["job"], None)
        finally:
            client[database].command("profile", 0)
        assert examined(client[database]["system.profile"]) < 20
    await job.publish("due")
    assert await unfinished_left(mesh.store, "me", ["job"], None)
    async with working(mesh, "me"):
        await status_is(mesh, "job", "due", Status.SUCCESS)
    assert not await unfinished_left(mesh.store, "me", ["job"], None)


@pytest.mark.parametrize("specific_worker_ids", [[], ["me"]])
async def test_it_sees_what_is_due_in_whatever_queue(mesh: TaskMesh, specific_worker_ids: list[str]) -> None:
    @mesh.task
    async def job() -> None: ...

    handle = await job.configure(queue="elsewhere", specific_worker_ids=specific_worker_ids).publish("k")
    assert await unfinished_left(mesh.store, "me", ["job"], None)
    assert not await unfinished_left(mesh.store, "me", ["job"], ["default"])
    await _works_until_idle(mesh)
    assert await handle.status() is Status.SUCCESS
