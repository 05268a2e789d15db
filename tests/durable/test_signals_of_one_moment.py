"""What is signalled at one moment in one process goes together, and means to each caller what it would mean alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from benchmarks.commands import Commands
from taskmesh import TaskFinished, TaskMesh, TaskNotFound, TooManySignals, current_task
from taskmesh.store.signals import MAX_BYTES
from tests.consumer.test_lost_answers import CUT_OFF, GHOST, GHOST_OF_AN_ELECTION, UNCONFIRMED
from tests.durable.test_suspension import suspended
from tests.faults import failing_commands
from tests.working import working

COUNT = 120


async def test_many_signals_are_a_few_commands_and_each_handler_gets_its_own(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    @mesh.task
    async def waits() -> Any:
        return await current_task().wait_for("go")

    @mesh.task
    async def later() -> Any:
        return [await current_task().wait_for("go"), await current_task().wait_for("go")]

    keys = [f"k{n}" for n in range(COUNT)]
    early = await later.publish_many({key: {} for key in keys})
    handles = await waits.publish_many({key: {} for key in keys})
    commands = Commands()
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(mongo_uri, event_listeners=[commands], tz_aware=True)
    async with client, TaskMesh(client, database=database) as sender, working(mesh, names=["waits"]):
        for key in keys:
            await suspended(mesh, "waits", key)
        await asyncio.gather(
            *(sender.signal("waits", key, "go", {"$n": n}) for n, key in enumerate(keys)),
            *(sender.signal("later", key, "go", [m, n]) for n, key in enumerate(keys) for m in range(2)),
        )
        # One by one it would be 600; on a machine that is slow enough, one set or another passes its deadline.
        assert commands.by_name["update"] < 2 * COUNT
        assert await asyncio.gather(*(handle.result(30) for handle in handles)) == [{"$n": n} for n in range(COUNT)]
    async with working(mesh, names=["later"]):
        for n, both in enumerate(await asyncio.gather(*(handle.result(30) for handle in early))):
            assert sorted(both) == [[0, n], [1, n]]


async def test_what_becomes_of_one_signal_concerns_its_sender_alone(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    handles = await job.publish_many({f"k{n}": {} for n in range(COUNT)})
    await job.configure(delay_ms=3_600_000).publish("full")
    await mesh.signal("job", "full", "go", "x" * (MAX_BYTES - 1_000))
    await (await job.publish("over")).cancel()
    await handles[3].signal("go", "first", signal_id="known")
    tasks = mesh.store.driver.collection(mesh.store.tasks)
    damaged = await tasks.find_one({"key": "k5"})
    assert damaged is not None
    await tasks.update_one({"key": "k5"}, {"$set": {"task_state.signals": 5}})

    answers = await asyncio.gather(
        *(handle.signal("go", n) for n, handle in enumerate(handles) if n != 3),
        handles[3].signal("go", "second", signal_id="known"),
        mesh.signal("job", "full", "go", "x" * 2_000),
        mesh.signal("job", "over", "go"),
        mesh.signal("job", "nobody", "go"),
        return_exceptions=True,
    )
    errors = [type(answer) for answer in answers if answer is not None]
    assert errors[1:] == [TooManySignals, TaskFinished, TaskNotFound]
    assert answers.index(next(filter(None, answers))) == 4, "the sender of another's signal was told of damage"
    await tasks.replace_one({"key": "k5"}, damaged)
    stored = await mesh.store.find({"key": {"$regex": "^k"}}, {"key": 1, "task_state.signals": 1})
    found = {task["key"]: task["task_state"].get("signals", []) for task in stored}
    payloads = {key: [signal["payload"] for signal in signals] for key, signals in found.items()}
    assert payloads == {f"k{n}": [n] for n in range(COUNT)} | {"k3": ["first"], "k5": []}


async def test_a_locked_task_holds_up_none_of_the_others(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    handles = await job.publish_many({f"k{n}": {} for n in range(COUNT)})
    async with mesh.store.driver.session() as session:
        await session.start_transaction()
        await job.configure(session=session, run_again=True, delay_ms=3_600_000).publish("k0")
        waiting = asyncio.create_task(handles[0].signal("go"))
        await asyncio.gather(*(handle.signal("go") for handle in handles[1:]))
        assert not waiting.done()
        await session.commit_transaction()
    await waiting
    stored = await mesh.store.find({}, {"task_state.signals": 1})
    assert [len(task["task_state"]["signals"]) for task in stored] == [1] * COUNT


@pytest.mark.parametrize(
    "fault",
    [GHOST, GHOST_OF_AN_ELECTION, UNCONFIRMED, CUT_OFF],
    ids=["writeConcernError", "election", "unconfirmed", "closeConnection"],
)
async def test_t13_signals_are_consumed_once_though_the_answer_was_lost(
    mesh: TaskMesh, mongo_uri: str, fault: dict[str, Any]
) -> None:
    @mesh.task
    async def job() -> list[Any]:
        return [await current_task().wait_for("go"), await current_task().wait_for("go", timeout_ms=1)]

    handles = await job.publish_many({f"k{n}": {} for n in range(COUNT)})
    async with working(mesh):
        for n in range(0, COUNT, 2):
            await suspended(mesh, "job", f"k{n}")
        async with failing_commands(mongo_uri, ["update"], times=3, **fault):
            await asyncio.gather(*(handle.signal("go", n) for n, handle in enumerate(handles)))
        assert await asyncio.gather(*(handle.result(30) for handle in handles)) == [[n, None] for n in range(COUNT)]
