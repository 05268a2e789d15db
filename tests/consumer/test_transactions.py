"""What a handler writes in `transaction()`, what it publishes, and its SUCCESS are there together or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

from taskmesh import (
    LeaseLost,
    Status,
    TaskError,
    TaskHandle,
    TaskMesh,
    TaskMeshError,
    TaskOption,
    current_blocking_task,
    current_task,
)
from taskmesh.store.renew import end_lease
from tests.consumer import process_handlers as handlers
from tests.faults import failing_commands, server_parameter
from tests.waiting import eventually, slowness_of_the_machine
from tests.working import finished, working

ONCE = TaskOption(max_unexpected_retries=0)
SHORT = TaskOption(worker_timeout_ms=1_000, ping_interval_ms=200, max_unexpected_retries=0)


@pytest.fixture
async def client(mongo_uri: str) -> AsyncIterator[AsyncMongoClient[dict[str, Any]]]:
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        yield client


async def orders_in(client: Any, database: str) -> list[Any]:
    return [order["n"] async for order in client[database]["orders"].find().sort("n")]


@pytest.fixture(params=["pymongo", "motor"])
async def mesh_of_client(
    request: pytest.FixtureRequest, mongo_uri: str, database: str, client: Any
) -> AsyncIterator[TaskMesh]:
    """A mesh that was made with the caller's own client: its handlers write with that."""
    own = client if request.param == "pymongo" else AsyncIOMotorClient(mongo_uri)
    async with TaskMesh(own, database=database) as mesh:
        yield mesh
    if own is not client:
        own.close()


async def test_the_writes_the_result_and_what_was_published_come_together(
    mesh_of_client: TaskMesh, client: Any, database: str
) -> None:
    mesh = mesh_of_client

    @mesh.task
    async def after_order(n: int) -> None: ...

    @mesh.task
    async def order(n: int) -> str:
        task = current_task()
        async with task.transaction() as session:
            await session.client[database]["orders"].insert_one({"n": n}, session=session)
            await task.publish(after_order, "next", n=n)
            task.set_result("ordered")
            assert await orders_in(client, database) == []
        assert await orders_in(client, database) == [n]
        assert (await mesh.get("order", task.key)).status is Status.SUCCESS
        return "not this"

    endings: list[Any] = []
    async with working(mesh, names=["order"], after=lambda _, ending: endings.append(ending)):
        assert await (await order.publish("k", n=1)).result(60) == "ordered"
        assert [task.key async for task in mesh.find("after_order")] == ["next"]
        await eventually(lambda: endings, what="the handler has gone on to its end")
    assert [(ending.kind, ending.value) for ending in endings] == [("succeeded", "ordered")]


async def test_an_exception_in_the_block_undoes_it(mesh: TaskMesh, client: Any, database: str) -> None:
    @mesh.task(option=ONCE)
    async def order() -> None:
        async with current_task().transaction() as session:
            await session.client[database]["orders"].insert_one({"n": 1}, session=session)
            raise ValueError("changed my mind")

    async with working(mesh):
        handle = await order.publish("k")
        with pytest.raises(TaskError, match="changed my mind"):
            await handle.result(60)
    assert await orders_in(client, database) == []


async def test_a_handler_may_go_on_after_a_block_that_failed(mesh: TaskMesh, client: Any, database: str) -> None:
    @mesh.task(option=SHORT)
    async def order() -> str:
        try:
            async with current_task().transaction() as session:
                await session.client[database]["orders"].insert_one({"n": 1}, session=session)
                raise ValueError  # noqa: TRY301 — it has to be raised in the block
        except ValueError:
            await asyncio.sleep(1.5)  # longer than the lease: it is renewed again
            return "the other way"

    async with working(mesh):
        handle = await order.publish("k")
        assert await handle.result(60) == "the other way"
    assert await orders_in(client, database) == []
    assert len((await handle.task()).task_state.worker_states) == 1


async def test_what_is_raised_after_the_block_changes_nothing(mesh: TaskMesh) -> None:
    @mesh.task
    async def order() -> None:
        async with current_task().transaction():
            current_task().set_result("done")
        raise ValueError("too late")

    async with working(mesh):
        handle: TaskHandle[Any] = await order.publish("k")
        assert await handle.result(60) == "done"
    assert (await handle.task()).status is Status.SUCCESS


@pytest.mark.lasting
async def test_t10_a_long_transaction_keeps_its_lease_and_those_of_others(
    mesh: TaskMesh, client: Any, database: str
) -> None:
    option = TaskOption(worker_timeout_ms=3_000, ping_interval_ms=300, max_unexpected_retries=0)

    @mesh.task(option=option)
    async def order() -> None:
        async with current_task().transaction() as session:
            await session.client[database]["orders"].insert_one({"n": 1}, session=session)
            await current_task().progress(0.5)
            current_task().log("in the middle")
            await asyncio.sleep(7)
            current_task().set_result("kept")

    @mesh.task(option=option)
    async def wait() -> str:
        await asyncio.sleep(7)
        return "kept"

    async with working(mesh, "a"), working(mesh, "b"):
        handles: list[TaskHandle[Any]] = [await order.publish("k"), *[await wait.publish(str(i)) for i in range(10)]]
        assert [await handle.result(60) for handle in handles] == ["kept"] * 11
    for handle in handles:
        task = await handle.task()
        assert (len(task.task_state.worker_states), task.task_state.lost_cnt) == (1, 0)
    task = await handles[0].task()
    assert [line.message for line in task.task_state.worker_states[0].logs] == ["in the middle"]
    assert task.task_state.progress is not None
    assert await orders_in(client, database) == [1]


async def test_t10_a_transaction_that_outlives_the_server_s_limit_says_so(
    mongo_uri: str, client: Any, database: str
) -> None:
    async with (
        server_parameter(mongo_uri, "transactionLifetimeLimitSeconds", 1),
        TaskMesh(client, database=database) as mesh,
    ):

        @mesh.task(option=SHORT)
        async def order() -> None:
            async with current_task().transaction() as session:
                await client[database]["orders"].insert_one({"n": 1}, session=session)
                await asyncio.sleep(4)

        async with working(mesh):
            handle = await order.publish("k")
            with pytest.raises(TaskError, match="transactionLifetimeLimitSeconds=1"):
                await handle.result(60)
        assert await orders_in(client, database) == []


async def test_t10_a_commit_after_the_lease_was_lost_leaves_nothing(mesh: TaskMesh, client: Any, database: str) -> None:
    inside, at_the_end = asyncio.Event(), asyncio.Event()
    errors: list[Exception] = []

    @mesh.task(option=ONCE)
    async def order() -> None:
        try:
            async with current_task().transaction() as session:
                await session.client[database]["orders"].insert_one({"n": 1}, session=session)
                inside.set()
                await at_the_end.wait()
        except Exception as error:
            errors.append(error)
            raise

    async with working(mesh):
        await order.publish("k")
        await eventually(inside.is_set)
        # As if another worker had preempted it: its entry is no longer there.
        await client[database]["tasks"].update_one({"_id": "order:k"}, {"$set": {"task_state.worker_states": []}})
        at_the_end.set()
        await eventually(lambda: errors)
    assert await orders_in(client, database) == []
    assert isinstance(errors[0], (LeaseLost, TaskMeshError)) or "undone" in str(errors[0])


@pytest.mark.timed
async def test_a_cancel_during_the_block_undoes_it(mesh: TaskMesh, client: Any, database: str) -> None:
    inside = asyncio.Event()

    @mesh.task
    async def order() -> None:
        async with current_task().transaction() as session:
            await session.client[database]["orders"].insert_one({"n": 1}, session=session)
            inside.set()
            await asyncio.sleep(30)

    async with working(mesh) as consumer:
        handle = await order.publish("k")
        await inside.wait()
        async with slowness_of_the_machine(mesh) as slowness:
            cancelled_at = time.monotonic()
            assert (await handle.cancel()).status is Status.CANCELLED
            took_s = time.monotonic() - cancelled_at
        assert took_s < 1 + slowness.allows.total_seconds(), "a cancel does not wait for the transaction"
        await eventually(lambda: not consumer.running, 20)
    assert await orders_in(client, database) == []


async def test_a_change_of_the_task_during_the_block_undoes_it_and_runs_it_again_uncounted(
    mesh: TaskMesh, client: Any, database: str
) -> None:
    changed = asyncio.Event()
    inside = asyncio.Event()
    attempts: list[int] = []

    @mesh.task(option=ONCE)
    async def order() -> None:
        attempts.append(current_task().attempt)
        async with current_task().transaction() as session:
            await session.client[database]["orders"].insert_one({"n": len(attempts)}, session=session)
            inside.set()
            await changed.wait()

    async with working(mesh):
        handle = await order.publish("k")
        await inside.wait()
        await mesh.set_option("order", "k", priority=5)
        changed.set()
        await handle.result(60)
    assert attempts == [1, 1]
    assert await orders_in(client, database) == [2]


async def test_a_result_that_cannot_be_stored_undoes_the_block(mesh: TaskMesh, client: Any, database: str) -> None:
    @mesh.task
    async def order() -> None:
        async with current_task().transaction() as session:
            await session.client[database]["orders"].insert_one({"n": 1}, session=session)
            current_task().set_result({"deep": object()})

    async with working(mesh):
        handle = await order.publish("k")
        with pytest.raises(TaskError, match="cannot be stored"):
            await handle.result(60)
    assert await orders_in(client, database) == []


async def test_it_works_in_a_thread(mesh_of_client: TaskMesh, client: Any, database: str) -> None:
    mesh = mesh_of_client

    @mesh.task
    async def after_order(n: int) -> None: ...

    @mesh.task(option=SHORT)
    def order(n: int, fail: bool = False) -> str:
        with current_blocking_task().transaction() as session:
            session.client[database]["orders"].insert_one({"n": n}, session=session)
            current_blocking_task().publish(after_order, f"after {n}", n=n)
            if fail:
                raise ValueError("changed my mind")
            time.sleep(1.2)
            current_blocking_task().set_result(f"ordered {n}")
        return "not this"

    async with working(mesh, names=["order"]):
        assert await (await order.publish("good", n=1)).result(60) == "ordered 1"
        handle = await order.publish("bad", n=2, fail=True)
        with pytest.raises(TaskError, match="changed my mind"):
            await handle.result(60)
    assert await orders_in(client, database) == [1]
    assert [task.key async for task in mesh.find("after_order")] == ["after 1"]


@pytest.mark.parametrize("run", ["async", "thread", "process"])
async def test_a_result_said_outside_of_the_block_is_refused(mesh: TaskMesh, run: Any, tmp_path: Path) -> None:
    told = tmp_path / "why"

    async def result_outside(where: str, path: str) -> str:  # noqa: ARG001 — as the others take it
        task = current_task()
        if where == "before":
            task.set_result("lost")
        async with task.transaction():
            task.set_result("inside")
        try:
            task.set_result("late")
        except TaskMeshError as error:
            await anyio.Path(told).write_text(str(error))
        return "not this"

    mesh.task(result_outside if run == "async" else handlers.result_outside, name="order", run=run, option=ONCE)
    async with working(mesh):
        after = await mesh.publish("order", "after", {"where": "after", "path": str(told)})
        assert await after.result(60) == "inside"
        assert "outside of transaction()" in await eventually(lambda: told.read_text() if told.exists() else None)
        before = await mesh.publish("order", "before", {"where": "before", "path": str(told)})
        with pytest.raises(TaskError, match=r"set_result\(\) was called outside of transaction\(\)"):
            await before.result(60)


async def test_a_block_that_came_to_nothing_leaves_no_result_to_the_next(mesh: TaskMesh) -> None:
    @mesh.task(option=ONCE)
    async def order() -> str | None:
        task = current_task()
        with contextlib.suppress(ValueError):
            async with task.transaction():
                task.set_result("undone")
                raise ValueError("changed my mind")
        async with task.transaction():
            return "not this"

    async with working(mesh):
        assert await (await order.publish("k")).result(60) is None


async def test_it_works_in_a_process(mesh: TaskMesh, client: Any, database: str) -> None:
    mesh.task(run="process", name="add")(handlers.add)
    order = mesh.task(run="process", option=SHORT)(handlers.order_in_transaction)
    async with working(mesh, names=["order_in_transaction"]):
        handle = await order.publish("good", database=database, n=1)
        assert await handle.result(60) == "ordered 1"
        assert len((await handle.task()).task_state.worker_states) == 1
        for kind, reason in (("raise", "changed my mind"), ("die", "SIGKILL"), ("set", "does not fit")):
            handle = await order.publish(kind, database=database, n=2, ending=kind)
            with pytest.raises(TaskError, match=reason):
                await handle.result(60)
    assert await orders_in(client, database) == [1]
    assert [task.key async for task in mesh.find("add")] == ["after 1"]


async def test_success_and_publications_are_one_and_are_refused_together(mesh: TaskMesh) -> None:
    @mesh.task
    async def child(n: int) -> None: ...

    @mesh.task(option=ONCE)
    async def parent(good: bool) -> None:
        await current_task().publish(child, "a", n=1)
        await current_task().publish("unknown.here", "b", anything=[1])
        await current_task().publish(child.configure(priority=7, delay_ms=60_000), "c", n=2)
        if not good:
            await current_task().publish(child, "d", n="no number")  # type: ignore[call-overload]  # that is the point

    async with working(mesh, names=["parent"]):
        await (await parent.publish("good", good=True)).result(60)
        published = {task.key: task async for task in mesh.find()}
        assert set(published) == {"good", "a", "b", "c"}
        assert published["c"].task_option.priority == 7
        await parent.publish("bad", good=False)
        failed = await finished(mesh, "parent", "bad")
    assert "no number" in (failed.task_state.worker_states[0].fail_reason or "")
    assert len([task async for task in mesh.find()]) == 5


async def test_a_publication_of_an_existing_key_leaves_that_task_alone(mesh: TaskMesh) -> None:
    @mesh.task
    async def child(n: int) -> None: ...

    @mesh.task
    async def parent() -> None:
        await current_task().publish(child, "a", n=2)

    await child.publish("a", n=1)
    async with working(mesh, names=["parent"]):
        await (await parent.publish("k")).result(60)
    assert (await mesh.get("child", "a")).params == {"n": 1}


@pytest.mark.parametrize("kind", ["in_loop", "in_thread", "in_process"])
async def test_a_publication_after_the_block_is_refused_and_not_lost_in_silence(
    mesh: TaskMesh, tmp_path: Path, kind: str
) -> None:
    refused: list[str] = []
    reason_in = tmp_path / "reason"
    mesh.task(run="process", name="add")(handlers.add)
    mesh.task(run="process", name="in_process")(handlers.publish_after_the_block)

    @mesh.task
    async def in_loop() -> None:
        async with current_task().transaction():
            await current_task().publish("add", "inside", a=1)
        try:
            await current_task().publish("add", "after", a=1)
        except LeaseLost as error:
            refused.append(str(error))

    @mesh.task
    def in_thread() -> None:
        with current_blocking_task().transaction():
            current_blocking_task().publish("add", "inside", a=1)
        try:
            current_blocking_task().publish("add", "after", a=1)
        except LeaseLost as error:
            refused.append(str(error))

    async with working(mesh, names=[kind]):
        params = {"path": str(reason_in)} if kind == "in_process" else {}
        await (await mesh.publish(kind, "k", params)).result(60)
        await eventually(
            lambda: refused or (reason_in.exists() and reason_in.read_text()),
            what="the handler goes on after its block",
        )
    assert [task.key async for task in mesh.find("add")] == ["inside"]
    [reason] = refused or [reason_in.read_text()]
    assert "before the end of its transaction()" in reason


async def test_a_publication_after_a_block_that_failed_goes_with_the_success(mesh: TaskMesh) -> None:
    @mesh.task
    async def order() -> None:
        with contextlib.suppress(ValueError):
            async with current_task().transaction():
                raise ValueError
        await current_task().publish("another", "after", n=1)

    async with working(mesh, names=["order"]):
        await (await order.publish("k")).result(60)
    assert [task.key async for task in mesh.find("another")] == ["after"]


async def test_what_a_handler_leaves_behind_publishes_nothing_after_its_end(mesh: TaskMesh) -> None:
    over = asyncio.Event()
    left_behind: list[asyncio.Task[None]] = []

    @mesh.task
    async def order() -> None:
        task = current_task()

        async def publish_late() -> None:
            await over.wait()
            await task.publish("another", "late", n=1)

        left_behind.append(asyncio.create_task(publish_late()))

    async with working(mesh, names=["order"]):
        await (await order.publish("k")).result(60)
        over.set()
        with pytest.raises(LeaseLost, match="has ended"):
            await left_behind[0]
    assert [task async for task in mesh.find("another")] == []


async def test_a_block_that_a_cancel_scope_cuts_short_is_undone_at_once(
    mesh: TaskMesh, client: Any, database: str
) -> None:
    cut, go_on = asyncio.Event(), asyncio.Event()

    @mesh.task
    async def order() -> str:
        with anyio.move_on_after(0.3):
            async with current_task().transaction() as session:
                await session.client[database]["orders"].insert_one({"_id": 1, "n": 1}, session=session)
                await anyio.sleep_forever()
        await current_task().progress(0.5, "the other way")
        cut.set()
        await go_on.wait()
        return "the other way"

    async def progress_is_stored() -> bool:
        return (await mesh.get("order", "k")).task_state.progress is not None

    async with working(mesh):
        handle = await order.publish("k")
        await cut.wait()
        async with asyncio.timeout(10):  # nothing is locked
            await client[database]["orders"].insert_one({"_id": 1, "n": 2})
        await eventually(progress_is_stored, what="its writes are not held back any more")
        go_on.set()
        assert await handle.result(60) == "the other way"
    assert await orders_in(client, database) == [2]


@pytest.mark.slow
async def test_a_block_that_is_cut_short_as_it_begins_leaves_the_lease_as_it_was(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    begin = asyncio.Event()
    attempts: list[int] = []

    @mesh.task(option=TaskOption(worker_timeout_ms=4_000, ping_interval_ms=500, max_unexpected_retries=0))
    async def order() -> str:
        attempts.append(current_task().attempt)
        await begin.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3), current_task().transaction():
                attempts.append(0)  # never: the pinger is in the middle of a round
        await asyncio.sleep(6)  # longer than the lease
        return "the other way"

    async with working(mesh):
        handle = await order.publish("k")
        await eventually(lambda: attempts)
        slow: dict[str, Any] = {"blockConnection": True, "blockTimeMS": 1_500, "namespace": f"{database}.tasks"}
        async with failing_commands(mongo_uri, ["update"], times=1, **slow) as have_failed:
            await have_failed()  # a ping is on its way
            begin.set()
            assert await handle.result(60) == "the other way"
    assert attempts == [1]


@pytest.mark.parametrize(
    "fault",
    [{"errorCode": 189}, {"writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}}],
    ids=["election", "writeConcernError"],
)
async def test_a_passing_fault_at_the_record_of_a_block_undoes_it_and_counts_as_no_failure(
    mesh: TaskMesh, mongo_uri: str, database: str, client: Any, fault: dict[str, Any]
) -> None:
    runs: list[int] = []
    faults = contextlib.AsyncExitStack()

    @mesh.task(option=ONCE)
    async def order(n: int) -> None:
        runs.append(current_task().failures)
        async with faults, current_task().transaction() as session:
            await mesh.store.driver.database["orders"].insert_one({"n": n}, session=session)
            if len(runs) == 1:
                await faults.enter_async_context(failing_commands(mongo_uri, ["update"], times=1, **fault))

    async with working(mesh):
        await (await order.publish("k", n=1)).result(60)
    assert runs == [0, 0]
    assert await orders_in(client, database) == [1]
    task = await mesh.get("order", "k")
    assert task.status is Status.SUCCESS


async def test_a_connection_that_is_cut_before_the_first_block_begins_costs_nothing(
    mesh: TaskMesh, mongo_uri: str
) -> None:
    runs: list[int] = []

    @mesh.task(option=ONCE)
    async def order() -> None:
        runs.append(current_task().attempt)
        cut_off = failing_commands(mongo_uri, ["getParameter"], times=1, closeConnection=True)
        async with cut_off as have_failed, current_task().transaction():
            await have_failed()

    async with working(mesh):
        await (await order.publish("k")).result(60)
    assert runs == [1]


@pytest.mark.parametrize("kind", ["published", "child"])
async def test_what_a_refused_commit_was_to_record_is_recorded_by_the_next(
    mesh: TaskMesh, mongo_uri: str, kind: str
) -> None:
    """The driver takes it for ended. At the server it is open until its time is over, and locks the task for a minute."""
    runs: list[str] = []

    @mesh.task(option=ONCE)
    async def order() -> None:
        runs.append(current_task().key)
        if kind == "published":
            await current_task().publish(after_order, "k")
        else:
            await current_task().start(after_order, "k")

    @mesh.task
    async def after_order() -> None: ...

    async with working(mesh), failing_commands(mongo_uri, ["commitTransaction"], times=1, errorCode=8) as have_failed:
        handle = await order.publish("k")
        await have_failed()
        await handle.result(30)
        await after_order.handle("k").result(30)
    assert runs == ["k"]


@pytest.mark.parametrize("kind", ["in_loop", "in_thread"])
async def test_a_handler_whose_commit_is_refused_fails_and_runs_again_at_once(
    mesh: TaskMesh, mongo_uri: str, database: str, kind: str
) -> None:
    runs: list[int] = []

    async def in_loop() -> None:
        runs.append(current_task().failures)
        async with current_task().transaction() as session:
            await mesh.store.driver.database["orders"].insert_one({"n": 1}, session=session)

    def in_thread() -> None:
        runs.append(current_blocking_task().failures)
        with current_blocking_task().transaction() as session:
            session.client[database]["orders"].insert_one({"n": 1}, session=session)

    handler: Any = {"in_loop": in_loop, "in_thread": in_thread}[kind]
    order = mesh.task(option=TaskOption(max_unexpected_retries=1, unexpected_retry_delay_ms=0))(handler)
    async with working(mesh), failing_commands(mongo_uri, ["commitTransaction"], times=1, errorCode=8) as have_failed:
        handle = await order.publish("k")
        await have_failed()
        await handle.result(30)
    assert runs == [0, 1]


async def test_of_blocks_that_begin_at_one_moment_those_go_on_whose_lease_is_not_over(mesh: TaskMesh) -> None:
    begun, go_on = asyncio.Barrier(11), asyncio.Event()
    entered: list[int] = []
    lost: list[int] = []

    @mesh.task
    async def order(n: int) -> int:
        if not go_on.is_set():
            await begun.wait()
            await go_on.wait()
        try:
            async with current_task().transaction():
                entered.append(n)
                current_task().set_result(n)
        except LeaseLost:
            lost.append(n)
            raise
        return n

    handles = await order.publish_many({str(n): {"n": n} for n in range(10)})
    async with working(mesh):
        await begun.wait()
        over = await handles[3].task()
        await end_lease(mesh.store, "order:3", over.task_state.worker_states[0].running_id)
        go_on.set()
        assert await asyncio.gather(*(handle.result(60) for handle in handles)) == list(range(10))
    assert (lost, sorted(entered)) == ([3], list(range(10)))


async def test_t9_blocks_that_begin_at_one_moment_do_not_wait_for_a_task_in_an_open_transaction(mesh: TaskMesh) -> None:
    begun, go_on = asyncio.Barrier(11), asyncio.Event()

    @mesh.task
    async def order(n: int) -> int:
        await begun.wait()
        await go_on.wait()
        async with current_task().transaction():
            current_task().set_result(n)
        return n

    handles = await order.publish_many({str(n): {"n": n} for n in range(10)})
    async with working(mesh):
        await begun.wait()
        async with mesh.store.driver.session() as session:
            await session.start_transaction()
            tasks = mesh.store.driver.collection("tasks")
            await tasks.update_one({"_id": "order:3"}, {"$set": {"locked": True}}, session=session)
            go_on.set()
            others = handles[:3] + handles[4:]
            assert await asyncio.gather(*(handle.result(60) for handle in others)) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
            assert (await handles[3].task()).status is Status.RUNNING
            await session.commit_transaction()
        assert await handles[3].result(60) == 3
