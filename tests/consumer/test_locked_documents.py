"""T9: somebody's open transaction holds one document of a set. The others do not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession

from taskmesh import Status, TaskMesh
from tests.waiting import eventually
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
            assert consumer.running == ["7"], "its outcome is kept, and no other"
        task = await finished(mesh, "job", "7")
        assert task.status is Status.SUCCESS
        assert task.successes[0].returns == 7


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
    async with working(mesh, "w", concurrency=100):
        async with locked(mongo_uri, database, "job:7"):
            for n in range(TASKS):
                if n != 7:
                    await finished(mesh, "job", str(n))
        await finished(mesh, "job", "7")
    assert len(left) >= TASKS
    assert min(left) > 1.0, "more than half of the lease of two seconds"


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
