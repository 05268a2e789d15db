"""The same promises in child processes, and for steps whose writes commit with their record."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from taskmesh import TaskError, TaskFailed, TaskMesh, TaskOption, current_blocking_task, current_task
from tests.durable import handlers
from tests.durable.test_suspension import suspended
from tests.working import working

AGAIN = TaskOption(unexpected_retry_delay_ms=0)


async def test_a_handler_in_a_child_process_takes_steps_and_waits(mesh: TaskMesh, tmp_path: Path) -> None:
    work = mesh.task(handlers.in_a_process, name="work", run="process", option=AGAIN)
    handle = await work.publish("1", directory=str(tmp_path))
    async with working(mesh, "w1"):
        await suspended(mesh, "work", "1")
        await handle.signal("word", "and")
        assert await handle.result(60) == "first and second"
    assert [step.name for step in (await handle.task()).steps] == ["first", "moment", "word", "second"]


async def test_a_transactional_step_of_a_child_process_is_done_exactly_once(mesh: TaskMesh) -> None:
    database = mesh.store.driver.database
    await database["accounts"].insert_many([{"_id": "ada", "cents": 100}, {"_id": "bob", "cents": 100}])
    await database["moves"].insert_one({"key": "none"})
    work = mesh.task(handlers.in_a_process_with_a_transaction, name="work", run="process", option=AGAIN)
    handle = await work.publish("1", database=database.name)
    async with working(mesh, "w1"):
        assert await handle.result(60) == 2
    assert await database["moves"].count_documents({"key": "1"}) == 2
    assert (await database["accounts"].find_one({"_id": "ada"}))["cents"] == 98
    await database.drop_collection("moves")
    await database.drop_collection("accounts")


@pytest.mark.parametrize("blocking", [False, True])
async def test_transfers_inside_steps_happen_exactly_once_though_they_conflict(mesh: TaskMesh, blocking: bool) -> None:
    """Few accounts and many transfers: MongoDB undoes most of the transactions the first time."""
    database = mesh.store.driver.database
    await database["accounts"].insert_many([{"_id": n, "cents": 100} for n in range(3)])
    await database["transfers"].insert_one({"_id": "first"})

    async def transfer(source: int, to: int, number: str, *, session: Any) -> int:
        accounts = database["accounts"]
        await accounts.update_one({"_id": source}, {"$inc": {"cents": -1}}, session=session)
        await accounts.update_one({"_id": to}, {"$inc": {"cents": 1}}, session=session)
        await database["transfers"].insert_one({"_id": number}, session=session)
        return source

    def blocking_transfer(source: int, to: int, number: str, *, session: Any) -> int:
        own = session.client[database.name]
        own["accounts"].update_one({"_id": source}, {"$inc": {"cents": -1}}, session=session)
        own["accounts"].update_one({"_id": to}, {"$inc": {"cents": 1}}, session=session)
        own["transfers"].insert_one({"_id": number}, session=session)
        return source

    if blocking:

        @mesh.task(name="work", option=AGAIN)
        def in_a_thread(n: int) -> None:
            task = current_blocking_task()
            for leg in range(2):
                task.step(
                    f"leg-{leg}", blocking_transfer, (n + leg) % 3, (n + leg + 1) % 3, f"{n}-{leg}", transactional=True
                )
                if task.attempt == 1:
                    raise ValueError("after a transfer")

    else:

        @mesh.task(name="work", option=AGAIN)
        async def in_the_loop(n: int) -> None:
            task = current_task()
            for leg in range(2):
                await task.step(
                    f"leg-{leg}", transfer, (n + leg) % 3, (n + leg + 1) % 3, f"{n}-{leg}", transactional=True
                )
                if task.attempt == 1:
                    raise ValueError("after a transfer")

    handles = [await mesh.publish("work", str(n), {"n": n}) for n in range(8)]
    async with working(mesh, "w1"):
        await asyncio.gather(*(handle.result(90) for handle in handles))
    assert await database["transfers"].count_documents({}) == 17
    assert sum([account["cents"] async for account in database["accounts"].find()]) == 300
    await database.drop_collection("transfers")
    await database.drop_collection("accounts")


async def test_a_transactional_step_that_fails_leaves_nothing_but_what_is_final(mesh: TaskMesh) -> None:
    database = mesh.store.driver.database
    await database["orders"].insert_one({"_id": "first"})

    async def refuse(session: Any) -> None:
        await database["orders"].insert_one({"_id": "half"}, session=session)
        raise TaskFailed("no stock")

    @mesh.task(option=AGAIN)
    async def work() -> None:
        await current_task().step("order", refuse, transactional=True)

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        with pytest.raises(TaskError, match="no stock"):
            await handle.result(60)
    assert await database["orders"].count_documents({}) == 1
    assert [step.error for step in (await handle.task()).steps] == ["no stock"]
    await database.drop_collection("orders")
