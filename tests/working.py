"""Consumers at work in the background of a test, and what tests ask the database about them."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import Any

from taskmesh import Consumer, Status, Task, TaskMesh, WorkerInfo
from taskmesh.consumer.candidates.partitions import Partitions
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.worker import Worker
from tests.waiting import eventually, wait_until

STOP_DEADLINE_S = 60.0


@asynccontextmanager
async def working(mesh: TaskMesh, worker_id: str | None = None, **settings: Any) -> AsyncIterator[Consumer]:
    """Run a consumer while the block lasts; at its end stop it at once. What `run()` raises ends the block."""
    consumer = mesh.consumer(worker_id=worker_id, **settings)
    running = asyncio.get_running_loop().create_task(consumer.run())
    test = asyncio.current_task()
    assert test is not None

    def end_the_block(_: asyncio.Task[None]) -> None:
        if not running.cancelled() and running.exception() is not None:
            test.cancel()

    running.add_done_callback(end_the_block)
    try:
        await eventually(lambda: consumer.state == "running" or running.done(), what="the consumer runs")
        yield consumer
    finally:
        running.remove_done_callback(end_the_block)
        consumer.begin_stop(grace_ms=0)
        await asyncio.wait([running], timeout=STOP_DEADLINE_S)
        assert running.done(), f"the consumer did not stop within {STOP_DEADLINE_S} s"
        if not running.cancelled():
            running.result()


@asynccontextmanager
async def all_working(mesh: TaskMesh, worker_ids: Iterable[str], **settings: Any) -> AsyncIterator[list[Consumer]]:
    """Run one consumer for each id while the block lasts."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(working(mesh, worker_id, **settings)) for worker_id in worker_ids]


@contextmanager
def working_in_a_thread(
    uri: str, database: str, define: Callable[[TaskMesh], None], worker_id: str, **settings: Any
) -> Iterator[Consumer]:
    """Run a consumer in a thread with an event loop of its own, which goes on while the test's loop is blocked.

    `define` gives its mesh the same tasks.
    """
    started: queue.SimpleQueue[tuple[Consumer, asyncio.AbstractEventLoop] | BaseException] = queue.SimpleQueue()

    async def work() -> None:
        mesh = TaskMesh(uri, database=database)
        define(mesh)
        async with mesh:
            consumer = mesh.consumer(worker_id=worker_id, **settings)
            started.put((consumer, asyncio.get_running_loop()))
            await consumer.run()

    def run() -> None:
        try:
            asyncio.run(work())
        except BaseException as error:
            started.put(error)
            raise

    thread = threading.Thread(target=run, name=worker_id)
    thread.start()
    try:
        first = started.get(timeout=STOP_DEADLINE_S)
        if isinstance(first, BaseException):
            raise first
        consumer, loop = first
        wait_until(lambda: consumer.state == "running")
        yield consumer
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(consumer.begin_stop, 0)
        thread.join(STOP_DEADLINE_S)
        assert not thread.is_alive(), f"the consumer did not stop within {STOP_DEADLINE_S} s"


def lanes_of(
    worker_id: str, others: Iterable[WorkerInfo], names: Iterable[str] = ("job",), queues: list[str] | None = None
) -> Partitions:
    """Return what a worker of these names and queues makes of others."""
    settings = Settings(
        worker_id=worker_id,
        labels={},
        names=list(names),
        queues=queues,
        concurrency=1,
        listen=True,
        before=None,
        after=None,
        stall_limit_ms=1_000,
    )
    partitions = Partitions(settings)
    partitions.set_workers(others)
    return partitions


def seen_by_others(
    worker_id: str,
    names: Iterable[str] = ("job",),
    queues: list[str] | None = None,
    *,
    listens: bool = True,
    labels: dict[str, Any] | None = None,
    running: int = 0,
) -> WorkerInfo:
    """Return a live worker with one slot as the registry has it."""
    return WorkerInfo(
        worker_id=worker_id,
        host="elsewhere",
        pid=1,
        version="0",
        state="running",
        names=list(names),
        queues=queues,
        concurrency=1,
        running=running,
        last_seen=datetime.now(UTC),
        listens=listens,
        labels=labels or {},
    )


def parts_of(consumer: Consumer) -> Worker:
    """Return what a consumer that runs, or has run, is made of."""
    assert consumer._worker is not None
    return consumer._worker


async def finished(mesh: TaskMesh, name: str, key: str, deadline_s: float = 60.0) -> Task:
    """Wait until a task is finished, by polling alone, and return it."""

    async def task_if_finished() -> Task | None:
        task = await mesh.get(name, key)
        return task if task.status.finished else None

    return await eventually(task_if_finished, deadline_s, what=f"task {name}:{key} is finished")


async def status_is(mesh: TaskMesh, name: str, key: str, status: Status, deadline_s: float = 60.0) -> Task:
    """Wait until a task has this status, and return it."""

    async def task_if_so() -> Task | None:
        task = await mesh.get(name, key)
        return task if task.status is status else None

    return await eventually(task_if_so, deadline_s, what=f"task {name}:{key} is {status}")
