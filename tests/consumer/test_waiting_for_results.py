"""Waiting for results: woken by the process's one stream, however many wait; a vanished task raises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from pymongo import MongoClient

import taskmesh.client.results
from taskmesh import TaskMesh, TaskNotFound, TaskOption, current_task
from taskmesh.client.handle import TaskHandle
from tests.mongod import Mongod
from tests.waiting import eventually
from tests.working import finished, working

DEADLINE_S = 60.0


@pytest.fixture
def never_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the stream wakes who waits."""
    monkeypatch.setattr(taskmesh.client.results, "_LOOK_EVERY_S", 3_600.0)


@pytest.mark.usefixtures("never_looks_by_itself")
async def test_ten_thousand_wait_at_once_and_all_are_woken(mesh: TaskMesh) -> None:
    count, tasks = 10_000, 200

    @mesh.task
    async def job(n: int) -> int:
        return n

    handles = await job.publish_many({f"k{n}": {"n": n} for n in range(tasks)})
    waiting = [asyncio.ensure_future(handles[n % tasks].result(DEADLINE_S)) for n in range(count)]
    await eventually(lambda: sum(map(len, mesh.connection.results._waiters.values())) == count, what="all wait")
    async with working(mesh, concurrency=50):
        assert await asyncio.gather(*waiting) == [n % tasks for n in range(count)]
    assert mesh.connection.results._waiters == {}, "nothing is kept of who waited"


@pytest.mark.usefixtures("never_looks_by_itself")
async def test_who_waits_is_woken_by_the_stream_each_time(mesh: TaskMesh) -> None:
    go_on: dict[str, asyncio.Event] = {f"k{n}": asyncio.Event() for n in range(5)}

    @mesh.task
    async def job(key: str) -> str:
        await go_on[key].wait()
        return key

    async with working(mesh):
        for key, event in go_on.items():
            result = asyncio.ensure_future((await job.publish(key, key=key)).result(DEADLINE_S))
            await eventually(lambda: mesh.connection.results._waiters, what="it waits")
            event.set()
            assert await result == key


@pytest.mark.usefixtures("never_looks_by_itself")
async def test_a_task_finished_long_ago_answers_at_once_also_in_another_process_s_mesh(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    @mesh.task
    async def job() -> str:
        return "long ago"

    handle = await job.publish("k")
    await mesh.consumer().run(until_idle=True)
    assert await handle.result(DEADLINE_S) == "long ago"
    async with TaskMesh(mongo_uri, database=database) as other:
        again = await other.publish("job", "k")
        assert (again.created, await again.result(DEADLINE_S)) == (False, "long ago")


@pytest.mark.usefixtures("never_looks_by_itself")
async def test_a_task_that_vanishes_raises(mesh: TaskMesh) -> None:
    handle = await mesh.publish("job", "k")
    waiting = asyncio.ensure_future(handle.result(DEADLINE_S))
    await eventually(lambda: "job:k" in mesh.connection.results._waiters)
    await mesh.delete("job", "k")
    with pytest.raises(TaskNotFound, match="it was deleted, or is past its retention"):
        await waiting
    with pytest.raises(TaskNotFound):
        await handle.result(DEADLINE_S)


async def test_a_task_that_a_stranger_removes_raises_too(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word in the document no event tells of it: the slow look finds out."""
    monkeypatch.setattr(taskmesh.client.results, "_LOOK_EVERY_S", 0.2)
    handle = await mesh.publish("job", "k")
    waiting = asyncio.ensure_future(handle.result(DEADLINE_S))
    await eventually(lambda: "job:k" in mesh.connection.results._waiters)
    await mesh.store.driver.collection(mesh.store.tasks).delete_one({"_id": "job:k"})
    with pytest.raises(TaskNotFound):
        await waiting


async def test_who_gives_up_or_is_cancelled_leaves_nothing_behind(mesh: TaskMesh) -> None:
    handle: TaskHandle[object] = await mesh.publish("job", "k")
    with pytest.raises(TimeoutError, match=r"task 'job' 'k' has not finished within 0\.05 s"):
        await handle.result(0.05)
    waiting = asyncio.ensure_future(handle.result())
    await eventually(lambda: "job:k" in mesh.connection.results._waiters)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert mesh.connection.results._waiters == {}


async def test_a_result_past_its_retention_is_gone(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(retain_success_ms=2_000))  # the TTL monitor comes each second
    async def job() -> int:
        return 1

    handle = await job.publish("k")
    async with working(mesh):
        assert await handle.result(DEADLINE_S) == 1
        await finished_and_gone(mesh)
    with pytest.raises(TaskNotFound):
        await handle.result(DEADLINE_S)
    assert (await job.publish("k")).created, "the key is free again"


async def finished_and_gone(mesh: TaskMesh) -> None:
    async def is_gone() -> bool:
        return [task async for task in mesh.find("job")] == []

    await eventually(is_gone, what="it is past its retention")


async def test_an_exhausted_task_goes_after_its_retention_and_one_with_retries_left_stays(mesh: TaskMesh) -> None:
    """What node-daemons confused (NEEDS 3c): exhausted tasks stayed for ever."""
    kept_briefly = TaskOption(retain_failed_ms=200, unexpected_retry_delay_ms=60_000)

    @mesh.task(option=kept_briefly)
    async def job() -> None:
        raise ValueError("always")

    await job.publish("waits for its retry")
    await job.configure(max_unexpected_retries=0).publish("exhausted")
    tasks = mesh.store.driver.collection(mesh.store.tasks)
    async with working(mesh):

        async def only_one_is_left() -> bool:
            return [task["key"] for task in await tasks.find({}).to_list(None)] == ["waits for its retry"]

        await eventually(only_one_is_left, what="the TTL monitor has removed the exhausted one")
    task = await mesh.get("job", "waits for its retry")
    assert [entry.state for entry in task.task_state.worker_states] == ["FAIL"]
    assert task.delete_time is None


async def test_of_two_that_finish_at_once_the_task_that_both_publish_exists_once(mesh: TaskMesh) -> None:
    """The flow queue's double move (NEEDS 3c)."""
    together = asyncio.Barrier(2)

    @mesh.task(option=TaskOption(concurrent_worker_cnt=2))
    async def first() -> None:

        await current_task().publish(then, "next")
        await together.wait()

    @mesh.task
    async def then() -> str:
        return "once"

    handle = await first.publish("k")
    async with working(mesh, "w1"), working(mesh, "w2"):
        await handle.result(DEADLINE_S)
        task = await finished(mesh, "then", "next")
    assert len(task.successes) == 1
    assert len([task async for task in mesh.find("then")]) == 1


@pytest.fixture
async def unswept(own_mongod: Mongod) -> AsyncIterator[TaskMesh]:
    """A mesh whose server removes nothing by itself; the tests' other servers come round every second, not every minute."""
    with MongoClient[dict[str, object]](own_mongod.uri) as client:
        client.admin.command("setParameter", 1, ttlMonitorEnabled=False)
    async with TaskMesh(own_mongod.uri, database="unswept") as mesh:
        yield mesh


@pytest.mark.usefixtures("never_looks_by_itself")
async def test_who_waits_gets_the_value_of_a_task_that_is_not_retained_at_all(unswept: TaskMesh) -> None:
    go_on = asyncio.Event()

    @unswept.task(option=TaskOption(retain_success_ms=0))
    async def job(n: int) -> int:
        await go_on.wait()
        return n

    handles = await job.publish_many({f"k{n}": {"n": n} for n in range(50)})
    waiting = [asyncio.ensure_future(handle.result(DEADLINE_S)) for handle in handles]
    await eventually(lambda: len(unswept.connection.results._waiters) == 50, what="all wait")
    async with working(unswept):
        go_on.set()
        assert await asyncio.gather(*waiting) == list(range(50))
    with pytest.raises(TaskNotFound):
        await unswept.get("job", "k0")
    with pytest.raises(TaskNotFound):
        await handles[0].result(DEADLINE_S)


@pytest.mark.usefixtures("never_looks_by_itself")
async def test_who_publishes_and_waits_at_once_gets_the_value_though_it_is_not_retained(unswept: TaskMesh) -> None:
    """The task may be done before its publisher has come to wait."""

    @unswept.task(option=TaskOption(retain_success_ms=0))
    async def job(n: int) -> int:
        return n

    async def published(n: int) -> int:
        return await (await job.publish(f"k{n}", n=n)).result(DEADLINE_S)

    async with working(unswept):
        assert await asyncio.gather(*(published(n) for n in range(200))) == list(range(200))
