"""The whole path of a task on each client that a mesh can be given: PyMongo's async one, and a Motor client."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

from taskmesh import (
    Status,
    TaskError,
    TaskFailed,
    TaskMesh,
    TaskNotFound,
    TaskOption,
    current_blocking_task,
    current_task,
)
from tests.waiting import eventually
from tests.working import finished, working

VALUE = {"decimal": Decimal("1.50"), "bytes": b"\0\1", "id": UUID(int=7), "deep": [{"$x.y": None}]}
AT_ONCE = TaskOption(unexpected_retry_delay_ms=0, unexpected_retry_jitter=0.0)


@pytest.fixture(params=[AsyncMongoClient, AsyncIOMotorClient])
async def mesh(request: pytest.FixtureRequest, mongo_uri: str, database: str) -> AsyncIterator[TaskMesh]:
    """A connected mesh, made of each. Nearly all other tests make theirs of a URI."""
    client: Any = request.param(mongo_uri)
    async with TaskMesh(client, database=database) as mesh:
        yield mesh
    assert (await client.admin.command("ping"))["ok"] == 1, "a client that was passed in is left open"
    closing = client.close()
    if inspect.isawaitable(closing):
        await closing


async def test_tasks_live_their_lives_on_every_driver(mesh: TaskMesh) -> None:
    @mesh.task(option=AT_ONCE)
    async def job(value: Any, fail_first: bool = False) -> Any:
        task = current_task()
        task.log("seen")
        await task.progress(0.5, "half")
        if fail_first and task.attempt == 1:
            raise ValueError("once")
        return value

    @mesh.task
    def plain(n: int) -> int:
        current_blocking_task().progress(1.0)
        return n + 1

    @mesh.task(option=AT_ONCE)
    async def broken() -> None:
        raise TaskFailed("for good")

    async with working(mesh, "w") as consumer:
        handle = await job.publish("k", VALUE)
        assert handle.created
        assert await handle.result(timeout=60) == VALUE
        assert not (await job.publish("k", 1)).created
        many = await job.publish_many({f"k{i}": {"value": i, "fail_first": i % 5 == 0} for i in range(50)})
        assert [await one.result(timeout=60) for one in many] == list(range(50))
        assert await (await plain.publish("k", 1)).result(timeout=60) == 2
        with pytest.raises(TaskError, match="for good"):
            await (await broken.publish("k")).result(timeout=60)
        task = await handle.task()
        assert task.task_state.progress is not None
        assert [line.message for line in task.task_state.worker_states[0].logs] == ["seen"]
        delayed = await job.configure(delay_ms=300).publish("delayed", 1)
        assert await delayed.result(timeout=60) == 1
        again = await job.configure(run_again=True).publish("k", 2)
        assert again.updated
        assert await again.result(timeout=60) == 2
        # The result is read as soon as a majority has it: perhaps before the worker hears that it was recorded.
        await eventually(lambda: not consumer.running)


async def test_tasks_can_be_found_changed_and_watched_on_every_driver(mesh: TaskMesh) -> None:
    release = asyncio.Event()

    @mesh.task
    async def job() -> str:
        await release.wait()
        return "done"

    kinds: list[str] = []

    async def watch() -> None:
        async for event in mesh.events("job", "k"):
            kinds.append(event.kind)
            if event.kind == "finished":
                return

    watching = asyncio.create_task(watch())
    await eventually(lambda: mesh.feed._subscriptions and mesh.feed._subscriptions[0].ready.is_set())
    await job.publish("k")
    await job.configure(delay_ms=60_000).publish("later")
    async with working(mesh, "w"):
        await eventually(lambda: "claimed" in kinds)
        assert (await mesh.set_option("job", "later", priority=5)).task_option.priority == 5
        assert (await mesh.cancel("job", "later")).status is Status.CANCELLED
        assert [t.key async for t in mesh.find("job", status=[Status.RUNNING, Status.CANCELLED])] == ["k", "later"]
        assert [t.key async for t in mesh.find(sort="newest", limit=1)] == ["later"]
        (explanation,) = await mesh.explain("job", "k", worker_id="w")
        assert not explanation.claimable
        assert [worker.worker_id for worker in await mesh.workers()] == ["w"]
        assert (await mesh.stats()).counts == {"job": {"RUNNING": 1, "CANCELLED": 1}}
        await mesh.delete("job", "later")
        with pytest.raises(TaskNotFound):
            await mesh.get("job", "later")
        await mesh.pause("default")
        await job.publish("held back")
        release.set()
        await finished(mesh, "job", "k")
        await mesh.resume("default")
        await finished(mesh, "job", "held back")
        async with asyncio.timeout(60):
            await watching
    assert kinds[0] == "published"
    assert kinds[-2:] == ["succeeded", "finished"]


async def test_transactions_work_on_every_driver(mesh: TaskMesh, database: str) -> None:
    driver = mesh.store.driver
    notes = driver.client[database]["notes"]

    @mesh.task
    async def leaf(n: int) -> int:
        return n

    @mesh.task(option=AT_ONCE)
    async def job() -> str:
        task = current_task()
        async with task.transaction() as session:
            await notes.insert_one({"attempt": task.attempt}, session=session)
            task.set_result("from inside")
            if task.attempt == 1:
                raise ValueError("undo it")
        return "ignored"

    @mesh.task
    async def chain() -> None:
        await current_task().publish(leaf, "chained", n=1)

    async with driver.session() as session:
        transaction = session.start_transaction()
        async with await transaction if inspect.isawaitable(transaction) else transaction:
            await leaf.configure(session=session).publish("in a transaction", n=2)
            with pytest.raises(TaskNotFound):
                await mesh.get("leaf", "in a transaction")

    handle = await job.publish("k")
    await chain.publish("k")
    await mesh.consumer().run(until_idle=True)
    assert await handle.result(timeout=60) == "from inside"
    assert [note["attempt"] for note in await notes.find({}).to_list(None)] == [2]
    assert (await mesh.get("leaf", "chained")).status is Status.SUCCESS
    assert (await mesh.get("leaf", "in a transaction")).status is Status.SUCCESS


async def test_leases_are_renewed_and_lost_on_every_driver(mesh: TaskMesh) -> None:
    ended: list[str] = []

    go_on = asyncio.Event()

    @mesh.task(option=TaskOption(worker_timeout_ms=20_000, ping_interval_ms=300))
    async def job() -> None:
        try:
            await (go_on.wait() if current_task().key == "long" else asyncio.sleep(60))
        finally:
            ended.append(current_task().key)

    async def is_renewed() -> bool:
        [entry] = (await mesh.get("job", "long")).task_state.worker_states
        assert entry.start_time is not None
        assert entry.ping_expire_time is not None
        return entry.ping_expire_time - entry.start_time > timedelta(seconds=20 + 1)

    await job.publish("long")
    await job.publish("taken away")
    async with working(mesh, "w") as consumer:
        await eventually(lambda: len(consumer.running) == 2)
        consumer.pause()
        tasks = mesh.store.driver.collection("tasks")
        long_ago = mesh.clock.now() - timedelta(hours=1)
        await tasks.update_one(
            {"_id": "job:taken away"}, {"$set": {"task_state.worker_states.0.ping_expire_time": long_ago}}
        )
        await eventually(lambda: ended == ["taken away"])
        await eventually(is_renewed, what="its lease lasts longer than the first one")
        go_on.set()
        task = await finished(mesh, "job", "long")
    assert task.status is Status.SUCCESS
    assert task.task_state.lost_cnt == 0
    assert (await mesh.get("job", "taken away")).status is Status.INIT
