"""Handlers that publish, many at once: their SUCCESSes and publications go together, and what is refused is parted."""

from __future__ import annotations

import asyncio
from typing import Any

from pymongo import AsyncMongoClient

from taskmesh import Next, Status, TaskMesh, TaskOption, current_task
from tests.waiting import eventually
from tests.working import finished, working

ONCE = TaskOption(max_unexpected_retries=0)
COUNT = 300


async def test_many_handlers_publish_one_key_and_each_counts_once(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    ran: list[int] = []

    @mesh.task
    async def refresh(n: int) -> None:
        ran.append(n)

    @mesh.task(option=ONCE)
    async def change(n: int) -> None:
        await current_task().publish(refresh.configure(run_again=True), "all", n=n)

    await change.publish_many({str(n): {"n": n} for n in range(COUNT)})
    async with working(mesh, "w1", concurrency=100), working(mesh, "w2", concurrency=100):
        for n in range(COUNT):
            await finished(mesh, "change", str(n), 45)
        target = await finished(mesh, "refresh", "all")
    tasks = [task async for task in mesh.find("change")]
    assert {task.status for task in tasks} == {Status.SUCCESS}
    assert {len(task.task_state.worker_states) for task in tasks} == {1}
    assert target.status is Status.SUCCESS
    assert ran
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        stored = await client[database]["tasks"].find_one({"_id": "refresh:all"})
    assert stored is not None
    assert stored["task_state"]["wanted"] == COUNT - 1, "the first created it, each other asked for one more run"


async def test_what_cannot_be_published_fails_its_own_handlers_alone(mesh: TaskMesh) -> None:
    running, go_on = asyncio.Event(), asyncio.Event()

    @mesh.task
    async def busy() -> None:
        running.set()
        await go_on.wait()

    @mesh.task(option=ONCE)
    async def parent(n: int) -> None:
        await go_together.wait()
        if n % 5 == 0:
            await current_task().publish(busy.configure(not_update_running=True, run_again=True), "k")
        await current_task().publish("child", str(n), n=n)

    go_together = asyncio.Event()
    await busy.publish("k")
    await parent.publish_many({str(n): {"n": n} for n in range(20)})
    async with working(mesh, names=["busy", "parent"], concurrency=30) as consumer:
        await running.wait()
        await eventually(lambda: len(consumer.running) == 21)
        go_together.set()
        ends = {n: await finished(mesh, "parent", str(n)) for n in range(20)}
        go_on.set()
    assert {n for n, task in ends.items() if task.status is Status.FAIL} == {0, 5, 10, 15}
    assert {n for n, task in ends.items() if task.status is Status.SUCCESS} == {n for n in range(20) if n % 5}
    assert "is running" in (ends[0].task_state.worker_states[0].fail_reason or "")
    assert {task.key async for task in mesh.find("child")} == {str(n) for n in range(20) if n % 5}


async def test_tasks_stages_and_loops_that_end_at_once_each_end_as_what_they_are(mesh: TaskMesh) -> None:
    go_together = asyncio.Event()
    rounds: list[str] = []

    async def follow() -> None:
        task = current_task()
        await go_together.wait()
        await task.publish("followed", f"{task.name}-{task.key}")

    @mesh.task(option=ONCE)
    async def plain() -> str:
        await follow()
        return "done"

    @mesh.loop(interval_ms=3_600_000, option=ONCE)
    async def sweep() -> None:
        rounds.append("begun")
        await follow()

    @mesh.task(option=ONCE)
    async def video() -> Any:
        await follow()
        raise Next(queue="encode")

    @video.on_queue("encode")
    async def encode() -> str:
        return "encoded"

    await plain.publish_many({str(n): {} for n in range(5)})
    await video.publish_many({str(n): {} for n in range(5)})
    async with working(mesh, names=["plain", "video", "sweep"], concurrency=30) as consumer:
        await eventually(lambda: len(consumer.running) == 11)
        go_together.set()
        for n in range(5):
            assert (await finished(mesh, "plain", str(n))).successes[0].returns == "done"
            film = await finished(mesh, "video", str(n))
            assert (film.successes[0].returns, [stage.queue for stage in film.stages]) == ("encoded", ["default"])
        await eventually(lambda: not consumer.running)
    loop = await mesh.get("sweep", "fleet")
    assert (loop.status, rounds) == (Status.INIT, ["begun"])
    keys = {task.key async for task in mesh.find("followed")}
    assert keys == {"sweep-fleet"} | {f"{name}-{n}" for name in ("plain", "video") for n in range(5)}


async def test_a_key_that_is_locked_holds_up_no_other_publications(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    @mesh.task(option=ONCE)
    async def parent(target: str) -> None:
        await current_task().publish(mesh.definitions["child"].configure(run_again=True), target, n=1)

    @mesh.task
    async def child(n: int) -> None: ...

    await child.publish_many({"locked": {"n": 0}, "free": {"n": 0}})
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client, client.start_session() as session:
        await session.start_transaction()
        await client[database]["tasks"].update_one({"_id": "child:locked"}, {"$set": {"x": 1}}, session=session)
        async with working(mesh, names=["parent"], concurrency=20):
            await parent.publish_many({f"l{n}": {"target": "locked"} for n in range(5)})
            await parent.publish_many({f"f{n}": {"target": "free"} for n in range(5)})
            for n in range(5):
                assert (await finished(mesh, "parent", f"f{n}", 20)).status is Status.SUCCESS
            await session.commit_transaction()
            for n in range(5):
                assert (await finished(mesh, "parent", f"l{n}", 20)).status is Status.SUCCESS


async def test_a_handler_may_publish_a_new_key_twice(mesh: TaskMesh) -> None:
    @mesh.task
    async def child(n: int) -> None: ...

    @mesh.task(option=ONCE)
    async def parent() -> Any:
        for n in (1, 2):
            await current_task().publish(child.configure(update_existing_params=True), "new", n=n)

    async with working(mesh, names=["parent"]):
        await (await parent.publish("k")).result(60)
    assert (await mesh.get("child", "new")).params == {"n": 2}
