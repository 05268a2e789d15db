"""What `mesh.lifespan` opens is there before the first claim and until the last handler has ended, once in a process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from taskmesh import (
    InvalidOption,
    Lifespan,
    Status,
    Task,
    TaskError,
    TaskMesh,
    TaskMeshError,
    TaskOption,
    current_batch,
    current_blocking_task,
    current_task,
)
from tests.consumer import process_handlers
from tests.waiting import eventually
from tests.working import all_working, finished, working

LIFESPAN_LOGGER = "taskmesh.consumer"


@dataclass
class Pool:
    """What the tests open."""

    number: int
    is_open: bool = True


@dataclass
class Opened:
    """All that was opened so far, and what a test makes go wrong."""

    pools: list[Pool] = field(default_factory=list)
    refuses: Exception | None = None

    @asynccontextmanager
    async def pool(self) -> AsyncIterator[Pool]:
        if self.refuses is not None:
            raise self.refuses
        pool = Pool(len(self.pools) + 1)
        self.pools.append(pool)
        try:
            yield pool
        finally:
            pool.is_open = False


@pytest.fixture
def opened() -> Opened:
    return Opened()


@pytest.fixture
def pools(mesh: TaskMesh, opened: Opened) -> Lifespan[Pool]:
    return mesh.lifespan(opened.pool)


async def test_every_kind_of_handler_and_the_hooks_see_the_same_state(
    mesh: TaskMesh, opened: Opened, pools: Lifespan[Pool]
) -> None:
    seen: list[object] = []

    @mesh.task
    async def in_loop() -> int:
        mine: object = current_task().state
        assert mine is pools.state
        return pools.state.number

    @mesh.task
    def in_thread() -> int:
        mine: object = current_blocking_task().state
        assert mine is pools.state
        return pools.state.number

    @mesh.task(batch=10)
    async def in_batch(items: list[int]) -> list[int]:
        return [item + context.state.number for item, context in zip(items, current_batch(), strict=True)]

    async def before(_: Task) -> None:
        seen.append(pools.state)

    handles: list[Any] = [await in_loop.publish("1"), await in_thread.publish("1"), await in_batch.publish("1", 41)]
    await mesh.consumer(before=before).run(until_idle=True)
    assert [await handle.result(10) for handle in handles] == [1, 1, 42]
    assert seen == opened.pools * 3
    with pytest.raises(TaskMeshError, match="the lifespan 'pool' is not open"):
        _ = pools.state


async def test_a_child_process_is_told_that_there_is_none(mesh: TaskMesh, pools: Lifespan[Pool]) -> None:
    del pools
    once = TaskOption(max_unexpected_retries=0)
    handle = await mesh.task(process_handlers.state, run="process", option=once).publish("1")
    await mesh.consumer().run(until_idle=True)
    with pytest.raises(TaskError, match=r"there is no state in a child process: .* at the top of its module"):
        await handle.result(10)


async def test_without_a_lifespan_there_is_no_state(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def look() -> object:
        return current_task().state

    handle = await look.publish("1")
    await mesh.consumer().run(until_idle=True)
    with pytest.raises(TaskError, match=r"this mesh has no @mesh\.lifespan"):
        await handle.result(10)


async def test_consumers_of_one_process_share_one_opening(
    mesh: TaskMesh, opened: Opened, pools: Lifespan[Pool]
) -> None:
    async with working(mesh, "w1"):
        async with all_working(mesh, ["w2", "w3"]):
            assert pools.state.number == 1
        assert pools.state.is_open, "one of three still runs"
    assert opened.pools == [Pool(1, is_open=False)]
    async with working(mesh, "w4"):
        assert pools.state.number == 2


async def test_called_it_opens_for_the_caller_alone(mesh: TaskMesh, opened: Opened, pools: Lifespan[Pool]) -> None:
    async with working(mesh), pools() as mine:
        assert (mine.number, pools.state.number) == (2, 1)
    assert opened.pools == [Pool(1, is_open=False), Pool(2, is_open=False)]


async def test_who_comes_while_it_is_closed_waits_and_opens_it_anew(mesh: TaskMesh) -> None:
    open_ones: list[int] = []
    closing, go_on = asyncio.Event(), asyncio.Event()

    @mesh.lifespan
    async def slow() -> AsyncIterator[None]:
        assert not open_ones, "never two at once"
        open_ones.append(1)
        yield
        closing.set()
        await go_on.wait()
        open_ones.pop()

    first = mesh.consumer()
    running = asyncio.create_task(first.run())
    await eventually(lambda: first.state == "running")
    first.begin_stop(0)
    await closing.wait()
    second = mesh.consumer()
    also = asyncio.create_task(second.run())
    go_on.set()
    await eventually(lambda: second.state == "running")
    await second.stop(0)
    await asyncio.gather(running, also)
    assert slow.name == "slow"


@pytest.mark.parametrize("how", ["graceful stop", "forced stop", "cancellation", "end of the mesh"])
async def test_it_is_closed_after_the_handlers_have_ended(
    mongo_uri: str, database: str, opened: Opened, how: str
) -> None:
    mesh = TaskMesh(mongo_uri, database=database)
    pools = mesh.lifespan(opened.pool)
    at_the_end: list[bool] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    @mesh.task
    async def work() -> None:
        begun.set()
        try:
            await go_on.wait()
        finally:
            await asyncio.sleep(0)
            at_the_end.append(pools.state.is_open)

    async with mesh:
        await work.publish("1")
        consumer = mesh.consumer()
        running = asyncio.create_task(consumer.run())
        await asyncio.wait_for(begun.wait(), 60)
        if how == "cancellation":
            running.cancel()
        elif how == "end of the mesh":
            go_on.set()
        else:
            consumer.begin_stop(30_000 if how == "graceful stop" else 0)
        if how == "graceful stop":
            await eventually(lambda: consumer.state == "stopping")
            assert opened.pools[0].is_open
            go_on.set()
        if how != "end of the mesh":
            await asyncio.wait([running])
            assert not opened.pools[0].is_open
    await asyncio.wait([running])
    assert at_the_end == [True]
    assert opened.pools == [Pool(1, is_open=False)]


async def test_what_cannot_be_opened_keeps_the_worker_from_starting(
    mesh: TaskMesh, opened: Opened, pools: Lifespan[Pool], caplog: pytest.LogCaptureFixture
) -> None:
    @mesh.task
    async def work() -> int:
        return pools.state.number

    await work.publish("1")
    opened.refuses = ConnectionRefusedError("nobody listens at port 1")
    consumer = mesh.consumer(worker_id="w1")
    with pytest.raises(TaskMeshError, match=r"'pool' could not be opened.* ConnectionRefusedError: nobody listens"):
        await consumer.run(until_idle=True)
    task = await mesh.get("work", "1")
    assert (task.status, task.task_state.worker_states, await mesh.workers()) == (Status.INIT, [], [])
    assert any(record.exc_info for record in caplog.records), "the log has the traceback"

    opened.refuses = None
    await consumer.run(until_idle=True)
    assert (await finished(mesh, "work", "1")).task_state.worker_states[0].returns == 1


async def test_a_stop_cuts_the_opening_off_and_what_was_open_is_closed(mesh: TaskMesh) -> None:
    said: list[str] = []

    @mesh.lifespan
    async def endless() -> AsyncIterator[None]:
        said.append("begins")
        try:
            await asyncio.Event().wait()
            yield
        finally:
            said.append("ends")

    consumer = mesh.consumer()
    running = asyncio.create_task(consumer.run())
    await eventually(lambda: said)
    await consumer.stop(30_000)
    await running
    assert said == ["begins", "ends"]


async def test_a_task_group_of_the_lifespan_that_fails_stops_the_worker(mesh: TaskMesh) -> None:
    fails = asyncio.Event()

    @mesh.lifespan
    async def with_a_loop_of_its_own() -> AsyncIterator[None]:
        async def refresh() -> None:
            await fails.wait()
            raise ValueError("the token has expired")

        async with anyio.create_task_group() as group:
            group.start_soon(refresh)
            yield
            group.cancel_scope.cancel()

    async with working(mesh):
        pass
    consumer = mesh.consumer()
    running = asyncio.create_task(consumer.run())
    await eventually(lambda: consumer.state == "running")
    fails.set()
    with pytest.raises(TaskMeshError, match="'with_a_loop_of_its_own' has ended while the worker ran"):
        await running
    assert consumer.state == "stopped"


async def test_what_cannot_be_closed_is_logged_and_the_worker_ends_all_the_same(
    mesh: TaskMesh, caplog: pytest.LogCaptureFixture
) -> None:
    @mesh.lifespan
    async def broken() -> AsyncIterator[None]:
        yield
        raise OSError("the disk is full")

    with caplog.at_level(logging.ERROR, LIFESPAN_LOGGER):
        async with working(mesh):
            pass
    assert "the lifespan 'broken' could not be closed: OSError: the disk is full" in caplog.text


async def _coroutine() -> None: ...


def _generator() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (None, "lifespan must be given an async generator function"),
        (_coroutine, "'_coroutine' is neither: write `async def _coroutine"),
        (_generator, "'_generator' is neither"),
        (lambda app: app, "is called without arguments: missing a required argument: 'app'"),
    ],
)
def test_what_cannot_be_a_lifespan_is_refused(fn: Any, told: str) -> None:
    with pytest.raises(InvalidOption, match=told):
        TaskMesh().lifespan(fn)


def test_a_mesh_has_one(opened: Opened) -> None:
    mesh = TaskMesh()
    mesh.lifespan(opened.pool)
    with pytest.raises(InvalidOption, match="this mesh has a lifespan already, 'pool': open 'another' inside it"):

        @mesh.lifespan
        async def another() -> AsyncIterator[None]:
            yield


async def test_a_function_that_returns_something_else_is_told_when_it_is_called(mesh: TaskMesh) -> None:
    wrong: Any = dict
    mesh.lifespan(wrong)
    with pytest.raises(TaskMeshError, match="it must return an async context manager, got dict"):
        await mesh.consumer().run()
