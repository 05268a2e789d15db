"""Conflicts inside `transaction()`: MongoDB undoes one of two who write the same document, and taskmesh charges nobody."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import PyMongoError

from taskmesh import (
    Snooze,
    Status,
    TaskError,
    TaskMesh,
    TaskOption,
    TransactionConflict,
    current_blocking_task,
    current_task,
)
from tests.consumer import process_handlers as handlers
from tests.waiting import eventually
from tests.working import finished, working

ONCE = TaskOption(max_unexpected_retries=0)


@pytest.fixture
async def client(mongo_uri: str) -> AsyncIterator[AsyncMongoClient[dict[str, Any]]]:
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        yield client


@asynccontextmanager
async def locked(client: Any, database: str) -> AsyncIterator[None]:
    """Let the account `a` stand in somebody's open transaction, so that whoever writes it meets a conflict."""
    accounts = client[database]["accounts"]
    await accounts.insert_many([{"_id": "a", "cents": 0}, {"_id": "b", "cents": 0}])
    async with client.start_session() as session:
        await session.start_transaction()
        await accounts.update_one({"_id": "a"}, {"$inc": {"others": 1}}, session=session)
        yield
        await session.commit_transaction()


async def cents_in(client: Any, database: str) -> dict[Any, int]:
    return {account["_id"]: account["cents"] async for account in client[database]["accounts"].find().sort("_id")}


async def move(session: Any, database: str) -> None:
    accounts = session.client[database]["accounts"]
    await accounts.update_one({"_id": "a"}, {"$inc": {"cents": -1}}, session=session)
    await accounts.update_one({"_id": "b"}, {"$inc": {"cents": 1}}, session=session)


@pytest.mark.parametrize("in_place", [False, True], ids=["block", "in_transaction"])
async def test_transfers_between_few_accounts_all_succeed_once_and_none_is_charged(
    mesh: TaskMesh, client: Any, database: str, in_place: bool
) -> None:
    accounts, transfers = 4, 30

    @mesh.task(option=ONCE)
    async def transfer(n: int, giver: int, taker: int) -> Any:
        async def moving(session: Any) -> str:
            shop = session.client[database]
            await shop["accounts"].update_one({"_id": giver}, {"$inc": {"cents": -1}}, session=session)
            await shop["moves"].insert_one({"_id": n}, session=session)
            await shop["accounts"].update_one({"_id": taker}, {"$inc": {"cents": 1}}, session=session)
            return "moved"

        task = current_task()
        if in_place:
            await task.in_transaction(moving)
        else:
            async with task.transaction() as session:
                task.set_result(await moving(session))

    await client[database]["accounts"].insert_many([{"_id": n, "cents": 0} for n in range(accounts)])
    chance = random.Random(6)
    expected = dict.fromkeys(range(accounts), 0)
    async with working(mesh, "w1", concurrency=16), working(mesh, "w2", concurrency=16):
        handles = []
        for n in range(transfers):
            giver, taker = chance.sample(range(accounts), 2)
            expected[giver] -= 1
            expected[taker] += 1
            handles.append(await transfer.publish(str(n), n=n, giver=giver, taker=taker))
        assert [await handle.result(120) for handle in handles] == ["moved"] * transfers
    assert await cents_in(client, database) == expected
    assert await client[database]["moves"].count_documents({}) == transfers
    states = [(await handle.task()).task_state for handle in handles]
    assert {len(state.worker_states) for state in states} == {1}
    assert {(state.lost_cnt, state.conflict_cnt) for state in states} == {(0, 0)}


@pytest.mark.parametrize("kind", ["in_loop", "wrapped", "in_thread", "in_process"])
async def test_a_conflict_of_the_handler_s_own_statement_ends_the_execution_uncharged(
    mesh: TaskMesh, client: Any, database: str, tmp_path: Path, kind: str
) -> None:
    attempts, tries = tmp_path / "attempts", list[str]()
    attempts.touch()
    mesh.task(run="process", option=ONCE, name="in_process")(handlers.move_in_block)
    mesh.task(run="thread", option=ONCE, name="in_thread")(handlers.move_in_block)

    @mesh.task(option=ONCE)
    async def in_loop(database: str, attempts: str, wrapped: bool = False) -> None:
        tries.append(attempts)
        async with current_task().transaction() as session:
            await current_task().publish("add", "receipt", a=1)
            try:
                await move(session, database)
            except PyMongoError as error:
                if wrapped:
                    raise RuntimeError("as libraries do") from error
                raise
            current_task().set_result("moved")

    params: dict[str, Any] = {"database": database, "attempts": str(attempts)}
    name = "in_loop" if kind == "wrapped" else kind
    async with working(mesh, names=[name]):
        async with locked(client, database):
            handle = await mesh.publish(name, "k", params | ({"wrapped": True} if kind == "wrapped" else {}))

            async def is_counted() -> bool:
                return (await handle.task()).task_state.conflict_cnt >= 2

            await eventually(is_counted, what="it has met two conflicts")
            assert (await handle.task()).status in (Status.INIT, Status.RUNNING)
        assert await handle.result(60) == "moved"
    task = await handle.task()
    assert [entry.state for entry in task.task_state.worker_states] == ["SUCCESS"]
    assert (task.task_state.conflict_cnt, task.task_state.lost_cnt) == (0, 0)
    assert len(attempts.read_text()) + len(tries) >= 3
    assert await cents_in(client, database) == {"a": -1, "b": 1}
    assert [task.key async for task in mesh.find("add")] == ["receipt"]


@pytest.mark.parametrize("kind", ["in_loop", "in_thread", "in_process"])
async def test_in_transaction_runs_again_in_place(
    mesh: TaskMesh, client: Any, database: str, tmp_path: Path, kind: str
) -> None:
    attempts, tries = tmp_path / "attempts", list[str]()
    attempts.touch()
    mesh.task(run="process", option=ONCE, name="in_process")(handlers.move_in_place)
    mesh.task(run="thread", option=ONCE, name="in_thread")(handlers.move_in_place)

    @mesh.task(option=ONCE)
    async def in_loop(database: str, attempts: str) -> str:
        async def moving(session: Any) -> str:
            tries.append(attempts)
            await current_task().publish("add", "receipt", a=1)
            await move(session, database)
            return "moved"

        moved: str = await current_task().in_transaction(moving)
        return f"{moved}, and this comes too late"

    events: list[str] = []
    async with working(mesh, names=[kind]), mesh.events(kind) as stream:
        async with locked(client, database):
            handle = await mesh.publish(kind, "k", {"database": database, "attempts": str(attempts)})
            await eventually(lambda: len(attempts.read_text()) + len(tries) >= 3, what="it has tried three times")
        assert await handle.result(60) == "moved"
        async for event in stream:
            events.append(event.kind)
            if event.kind == "finished":
                break
    assert events == ["published", "claimed", "succeeded", "finished"]
    assert await cents_in(client, database) == {"a": -1, "b": 1}
    assert [task.key async for task in mesh.find("add")] == ["receipt"]


async def test_in_transaction_takes_a_function_and_keeps_what_set_result_said(mesh: TaskMesh) -> None:
    @mesh.task(option=ONCE)
    async def said(how: str) -> Any:
        async def fn(_: Any) -> str | None:
            if how == "inside":
                current_task().set_result("inside")
            return "returned" if how != "nothing" else None

        await current_task().in_transaction(fn)

    @mesh.task(option=ONCE)
    async def no_function() -> None:
        await current_task().in_transaction("transfer")  # type: ignore[arg-type]  # that is the point

    @mesh.task(option=ONCE)
    def not_plain() -> None:
        async def fn(_: Any) -> None: ...

        current_blocking_task().in_transaction(fn)  # type: ignore[unused-coroutine]  # that is the point

    async with working(mesh):
        handles = [await said.publish(how, how=how) for how in ("inside", "returns", "nothing")]
        assert [await handle.result(60) for handle in handles] == ["inside", "returned", None]
        for definition, text in ((no_function, "got str"), (not_plain, "got an async function")):
            with pytest.raises(TaskError, match=text):
                await (await definition.publish("k")).result(60)


async def test_a_handler_that_catches_the_conflict_may_say_itself_how_it_ends(
    mesh: TaskMesh, client: Any, database: str
) -> None:
    caught: list[BaseException] = []

    @mesh.task(option=ONCE)
    async def order() -> str:
        try:
            async with current_task().transaction() as session:
                await move(session, database)
        except Snooze as error:
            caught.append(error)
        return "the other way"

    async with working(mesh), locked(client, database):
        assert await (await order.publish("k")).result(60) == "the other way"
    assert [type(error) for error in caught] == [TransactionConflict]


@pytest.mark.parametrize("before", [98, 98.0], ids=["int", "from_a_shell"])
async def test_the_hundredth_conflict_in_a_row_is_a_failure_whichever_worker_meets_it(
    mesh: TaskMesh, client: Any, database: str, before: float
) -> None:
    attempts: list[str] = []

    @mesh.task(option=TaskOption(max_unexpected_retries=1, unexpected_retry_delay_ms=0))
    async def order() -> Any:
        attempts.append(current_task().worker_id)
        async with current_task().transaction() as session:
            await move(session, database)

    handle = await order.publish("k")
    await client[database]["tasks"].update_one({"_id": "order:k"}, {"$set": {"task_state.conflict_cnt": before}})

    async def has_failed() -> bool:
        return any(entry.state == "FAIL" for entry in (await handle.task()).task_state.worker_states)

    async with AsyncExitStack() as workers:
        async with locked(client, database):  # before any worker: whoever comes second has the conflict
            await workers.enter_async_context(working(mesh, "w1"))
            await workers.enter_async_context(working(mesh, "w2"))
            await eventually(has_failed)
        task = await finished(mesh, "order", "k")
    assert task.status is Status.SUCCESS
    [failed] = [entry for entry in task.task_state.worker_states if entry.state == "FAIL"]
    assert (failed.fail_reason or "").startswith("TransactionConflict: 100 executions in a row")
    assert len(attempts) >= 3
    assert task.task_state.conflict_cnt == 0


async def test_inside_the_block_the_lease_is_the_server_s_limit_and_outside_the_task_s_own(
    mesh: TaskMesh, client: Any, database: str
) -> None:
    steps = {name: asyncio.Event() for name in ("outside", "inside", "after")}
    go_on = {name: asyncio.Event() for name in steps}

    async def stand(name: str) -> None:
        steps[name].set()
        await go_on[name].wait()

    @mesh.task(option=TaskOption(worker_timeout_ms=4_000, ping_interval_ms=200, max_unexpected_retries=0))
    async def order() -> str:
        await stand("outside")
        with suppress(ValueError):
            async with current_task().transaction():
                await stand("inside")
                raise ValueError
        await stand("after")
        return "done"

    async def lease_s() -> float:
        """How long the lease lasts by the server's clock, as it stands."""
        left = {"$subtract": [{"$first": "$task_state.worker_states.ping_expire_time"}, "$$NOW"]}
        found = await (await client[database]["tasks"].aggregate([{"$project": {"left": left}}])).to_list()
        return float(found[0]["left"]) / 1000

    async def is_short_again() -> bool:
        return await lease_s() <= 4

    async with working(mesh):
        handle = await order.publish("k")
        await steps["outside"].wait()
        assert await lease_s() <= 4
        go_on["outside"].set()
        await steps["inside"].wait()
        assert await lease_s() > 60
        go_on["inside"].set()
        await steps["after"].wait()
        await eventually(is_short_again)
        go_on["after"].set()
        assert await handle.result(60) == "done"
