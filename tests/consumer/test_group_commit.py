"""The group commit: outcomes go together, no kind waits for another, and none is lost for an error that is not its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from taskmesh import TaskError, TaskMesh, TaskOption, current_task
from taskmesh.consumer.run.finisher import Finisher
from taskmesh.consumer.write_times import WriteTimes
from taskmesh.store.finish import Outcome
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import working

ONCE = TaskOption(max_unexpected_retries=0)


async def test_a_failure_does_not_wait_until_there_are_no_more_successes(mesh: TaskMesh) -> None:
    finisher = Finisher(mesh.store, "w", WriteTimes())
    told: list[str] = []

    def add(kind: str, n: int) -> None:
        finisher.add(Outcome(f"job:{n}", "x", kind), lambda _: told.append(kind))  # type: ignore[arg-type]

    for n in range(6_000):
        add("succeeded", n)
    add("failed", 6_000)
    await finisher.drain()
    assert len(told) == 6_001
    assert told.index("failed") < 4_000


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("code", [2, 13, 391, 8000, 11601])
async def test_a_success_outlives_what_the_server_refuses_for_a_while(
    mesh: TaskMesh, mongo_uri: str, database: str, code: int, count: int
) -> None:
    release = asyncio.Event()

    @mesh.task(option=ONCE)
    async def job(n: int) -> dict[str, int]:
        await release.wait()
        return {"n": n}

    handles = await job.publish_many({f"k{n}": {"n": n} for n in range(count)})
    async with working(mesh) as consumer:
        await eventually(lambda: len(consumer.running) == count)
        tasks = f"{database}.tasks"
        async with failing_commands(mongo_uri, ["update"], times=4, errorCode=code, namespace=tasks) as have_failed:
            release.set()
            await have_failed(4)
            assert [await handle.result(60) for handle in handles] == [{"n": n} for n in range(count)]


async def test_locked_tasks_hold_up_no_others_however_many_they_are(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    release = {f"k{n}": asyncio.Event() for n in range(4)}
    ended: list[str] = []

    @mesh.task(option=ONCE)
    async def job() -> str:
        key = str(current_task().key)
        if key in release:
            await release[key].wait()
        ended.append(key)
        return key

    locked = await job.publish_many({key: {} for key in release})
    async with (
        working(mesh) as consumer,
        AsyncMongoClient[dict[str, Any]](mongo_uri) as client,
        client.start_session() as session,
    ):
        await eventually(lambda: len(consumer.running) == len(release))
        async with await session.start_transaction():
            await client[database]["tasks"].update_many({}, {"$set": {"mark": 1}}, session=session)
            for n, event in enumerate(release.values()):  # one after the other, so that each is on its way alone
                event.set()
                await eventually(lambda n=n: len(ended) > n)  # type: ignore[misc]
            for handle in await job.publish_many({f"free {n}": {} for n in range(5)}):
                assert await handle.result(20) == handle.key
        assert [await handle.result(60) for handle in locked] == list(release)


async def test_a_result_is_what_it_was_when_it_was_returned(mesh: TaskMesh) -> None:
    """Handlers that share a dict put into it what cannot be stored, before the first result is on its way."""
    shared: dict[str, Any] = {}
    release = asyncio.Event()

    @mesh.task(option=ONCE)
    async def job(n: int) -> dict[str, Any]:
        await release.wait()
        shared["n"] = n if n < 5 else object()
        return shared

    handles = await job.publish_many({f"k{n}": {"n": n} for n in range(6)})
    async with working(mesh) as consumer:
        await eventually(lambda: len(consumer.running) == 6)
        release.set()  # all end in the same turn of the loop
        assert [await handle.result(60) for handle in handles[:5]] == [{"n": n} for n in range(5)]
        with pytest.raises(TaskError, match=r"result.*n.*cannot.*object"):
            await handles[5].result(60)
        await eventually(lambda: not consumer.running)
