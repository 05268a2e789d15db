"""T9: somebody's open transaction holds one document of a set. The others do not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession

from taskmesh import Status, TaskDefinition, TaskMesh, TaskOption, current_task
from tests.waiting import eventually, slowness_of_the_machine
from tests.working import finished, working

TASKS = 60


@asynccontextmanager
async def locked(uri: str, database: str, id_: str) -> AsyncIterator[AsyncClientSession]:
    """A transaction that has changed a document, and stays open until the block ends (then it is undone)."""
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(uri)
    async with client, client.start_session() as session, await session.start_transaction():
        await client[database]["tasks"].update_one({"_id": id_}, {"$set": {"touched": True}}, session=session)
        yield session
        await session.abort_transaction()


async def test_t9_a_claim_does_not_wait_for_a_document_in_an_open_transaction(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    started: list[str] = []

    @mesh.task
    async def job(n: int) -> int:
        started.append(str(n))
        return n

    await job.publish_many({str(n): {"n": n} for n in range(TASKS)})
    async with working(mesh, "w", concurrency=100):
        async with locked(mongo_uri, database, "job:7"):
            others = [str(n) for n in range(TASKS) if n != 7]
            for key in others:
                assert (await finished(mesh, "job", key)).status is Status.SUCCESS
            assert "7" not in started
        assert (await finished(mesh, "job", "7")).status is Status.SUCCESS
    assert sorted(started, key=int) == [str(n) for n in range(TASKS)], "each was started once"


def part_and_whole(mesh: TaskMesh) -> tuple[TaskDefinition[[], None], TaskDefinition[[], None]]:
    """Something to wait for, and something that waits."""

    @mesh.task
    async def part() -> None: ...

    @mesh.task
    async def whole() -> None: ...

    return part, whole


async def test_t9_tasks_that_wait_for_others_do_not_wait_for_a_dependency_in_an_open_transaction(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    part, whole = part_and_whole(mesh)
    keys = [str(n) for n in range(20)]
    await part.publish_many({key: {} for key in keys})
    async with working(mesh, "w"):
        for key in keys:
            await finished(mesh, "part", key)
        async with locked(mongo_uri, database, "part:7"):
            await asyncio.gather(*(whole.configure(after=[("part", key)]).publish(key) for key in keys))
            for key in keys:
                if key != "7":
                    assert (await finished(mesh, "whole", key)).status is Status.SUCCESS
            assert (await mesh.get("whole", "7")).status is Status.INIT
        assert (await finished(mesh, "whole", "7")).status is Status.SUCCESS


async def test_t9_a_publication_that_meets_a_dependency_in_an_open_transaction_holds_up_no_later_one(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    part, whole = part_and_whole(mesh)
    done: list[str] = []

    async def publish(key: str) -> None:
        await whole.configure(after=[("part", key)]).publish(key)
        done.append(key)

    await part.publish_many({"locked": {}, "free": {}})
    async with locked(mongo_uri, database, "part:locked"):
        first = asyncio.create_task(publish("locked"))
        await eventually(lambda: mesh.listing.count("name:whole"))  # from now on it is linked, which takes long
        await publish("free")
        await first
    assert done == ["free", "locked"]


async def test_t9_outcomes_do_not_wait_for_a_document_in_an_open_transaction(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    release = asyncio.Event()

    @mesh.task
    async def job(n: int) -> int:
        await release.wait()
        return n

    await job.publish_many({str(n): {"n": n} for n in range(TASKS)})
    async with working(mesh, "w", concurrency=100) as consumer:
        await eventually(lambda: len(consumer.running) == TASKS)
        async with locked(mongo_uri, database, "job:7"):
            release.set()
            for n in range(TASKS):
                if n != 7:
                    assert (await finished(mesh, "job", str(n))).status is Status.SUCCESS
            # What the database shows, the worker hears a moment later.
            await eventually(lambda: consumer.running == ["7"], what="its outcome is kept, and no other")
        task = await finished(mesh, "job", "7")
        assert task.status is Status.SUCCESS
        assert task.successes[0].returns == 7


@pytest.mark.timed
async def test_t9_no_claim_is_begun_that_has_little_of_its_lease_left(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    left: list[float] = []

    @mesh.task
    async def job(n: int) -> None:
        task = await mesh.get("job", str(n))
        entry = task.task_state.worker_states[-1]
        assert entry.ping_expire_time is not None
        left.append((entry.ping_expire_time - mesh.clock.now()).total_seconds())

    short = job.configure(worker_timeout_ms=2_000, ping_interval_ms=400)
    await short.publish_many({str(n): {"n": n} for n in range(TASKS)})
    async with working(mesh, "w", concurrency=100), slowness_of_the_machine(mesh) as slowness:
        async with locked(mongo_uri, database, "job:7"):
            for n in range(TASKS):
                if n != 7:
                    await finished(mesh, "job", str(n))
        await finished(mesh, "job", "7")
    assert len(left) >= TASKS
    assert min(left) > 1.0 - slowness.allows.total_seconds(), "more than half of the lease of two seconds"


async def test_t9_renewals_do_not_wait_for_a_document_in_an_open_transaction(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    release = asyncio.Event()
    begun: set[str] = set()

    @mesh.task(option=TaskOption(worker_timeout_ms=60_000, ping_interval_ms=300))
    async def job() -> None:
        begun.add(current_task().key)
        await release.wait()

    async def lease_ends() -> dict[str, datetime]:
        ends = {task.key: task.task_state.worker_states[0].ping_expire_time async for task in mesh.find("job", limit=0)}
        return {key: end for key, end in ends.items() if end is not None}

    async def renewed(before: dict[str, datetime]) -> set[str]:
        return {key for key, end in (await lease_ends()).items() if end > before[key]}

    async def all_but_one_are_renewed(before: dict[str, datetime]) -> bool:
        return await renewed(before) == before.keys() - {"7"}

    await job.publish_many({str(n): {} for n in range(TASKS)})
    async with working(mesh, "w", concurrency=TASKS):
        await eventually(lambda: len(begun) == TASKS)
        async with locked(mongo_uri, database, "job:7"):
            for _ in range(3):
                before = await lease_ends()
                await eventually(lambda before=before: all_but_one_are_renewed(before))  # type: ignore[misc]  # a default

        async def the_other_too() -> bool:
            return "7" in await renewed(before)

        await eventually(the_other_too, what="it is renewed as soon as it is free")
        release.set()
        for n in range(TASKS):
            task = await finished(mesh, "job", str(n))
            assert (task.status, task.task_state.lost_cnt) == (Status.SUCCESS, 0)


async def test_t9_neither_scans_nor_what_time_settles_wait_for_a_document_in_an_open_transaction(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    @mesh.task
    async def job() -> None: ...

    waiting = job.configure(delay_ms=3_600_000, expire_time=mesh.clock.now() + timedelta(milliseconds=500))
    await waiting.publish_many({str(n): {} for n in range(TASKS)})

    async def settled() -> bool:
        stored = mesh.store.driver.collection("tasks").find({"status": "EXPIRED"}, {"key": 1})
        return len(await stored.to_list(None)) == TASKS - 1

    async with locked(mongo_uri, database, "job:7"), working(mesh, "w", listen=False):
        await eventually(settled, what="all but the locked one are settled in the database")
        for n in range(3):  # while it is still locked, and found by scans alone
            await (await job.publish(f"due {n}")).result(timeout=60)
