"""What users write, and what every type checker must accept under its strictest rules. It is checked, and never run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any, assert_type

from taskmesh import (
    BlockingTaskContext,
    Consumer,
    Ending,
    FlowStatus,
    FromDependency,
    Lifespan,
    Next,
    Task,
    TaskContext,
    TaskError,
    TaskEvent,
    TaskHandle,
    TaskMesh,
    TaskOption,
    WorkerInfo,
    current_batch,
    current_blocking_batch,
    current_blocking_task,
    current_task,
)

mesh = TaskMesh("mongodb://127.0.0.1:27017/?replicaSet=rs0", database="app")


@mesh.lifespan
async def pools() -> AsyncIterator[dict[str, int]]:
    yield {"size": 10}


@asynccontextmanager
async def models() -> AsyncGenerator[bytes, None]:
    yield b"weights"


assert_type(pools, Lifespan[dict[str, int]])
assert_type(pools.state["size"], int)
assert_type(TaskMesh().lifespan(models).state, bytes)


@mesh.task(option=TaskOption(worker_timeout_ms=90_000, specific_worker_ids=["a", "b"]), queue="images")
async def resize(path: str, width: int = 200) -> dict[str, int]:
    task = current_task()
    assert_type(task, TaskContext)
    await task.progress(0.5, "half way")
    await task.publish(shrink, "child", path=path)
    await task.publish("by.name", "child", anything=1)
    async with task.transaction() as session:
        task.set_result(session)
    return {path: width}


@mesh.task(run="thread")
def shrink(path: str) -> int:
    task = current_blocking_task()
    assert_type(task, BlockingTaskContext)
    task.progress(0.5)
    task.publish(resize, "again", path=path, width=2)
    return len(path)


async def charge(order: str, *, cents: int) -> bytes:
    return order.encode() * cents


def weigh(order: str) -> float:
    return float(order)


async def move(order: str, session: object) -> int:
    return int(order) if session else 0


@mesh.task
async def order(key: str) -> None:
    task = current_task()
    assert_type(await task.step("charge", charge, key, cents=5), bytes)
    assert_type(await task.step("weigh", weigh, key), float)
    assert_type(await task.step("move", move, key, transactional=True), int)
    await task.sleep("cooling off", hours=24, minutes=5)
    approval = await task.wait_for("approved", timeout_ms=1_000)
    parts = [await task.start(shrink, f"{key}-{n}", path="a") for n in range(3)]
    assert_type(parts, list[TaskHandle[int]])
    assert_type(await task.results(parts), list[int])
    assert_type(await task.results(parts, return_errors=True), list[int | TaskError])
    assert_type(await task.start(shrink, "alone", path="a", detached=True), TaskHandle[int])
    assert_type(await task.start(shrink, "other", params={"path": "a"}), TaskHandle[int])
    await asyncio.gather(*(asyncio.create_task(task.step(f"w-{n}", weigh, key)) for n in range(2)))
    assert approval


@mesh.task
def plain_order(key: str) -> None:
    task = current_blocking_task()
    assert_type(task.step("weigh", weigh, key), float)
    task.sleep("cooling off", hours=24)
    task.wait_for("approved")
    assert_type(task.results([task.start(shrink, "a", path="a")]), list[int])


@shrink.on_queue("small")
def shrink_more(path: str, rows: Annotated[int, FromDependency] = 0) -> int:
    assert_type(current_blocking_task().dependencies(), dict[tuple[str, str], Any])
    raise Next(queue="smaller", params={"path": path, "rows": rows})


@mesh.task(batch=100, batch_wait_ms=20, retry_on=(TimeoutError,), fail_on=ValueError)
async def index(items: list[float]) -> list[str | Exception]:
    return [
        ValueError("negative") if item < 0 else context.key
        for item, context in zip(items, current_batch(), strict=True)
    ]


@mesh.task(batch=10, run="thread")
def index_plainly(items: list[bytes]) -> None:
    assert items
    assert_type(current_blocking_batch()[0], BlockingTaskContext)


def on_claim(consumer: Consumer) -> Mapping[str, Any] | None:
    return {} if consumer.concurrency > 1 else None


async def before(task: Task) -> None:
    assert task.key


def after(task: Task, outcome: Ending) -> None:
    assert task.key in outcome.kind


async def main() -> None:
    async with mesh:
        handle = await resize.publish("img-42", path="a.png", width=300)
        assert_type(handle, TaskHandle[dict[str, int]])
        assert_type(await handle.result(timeout=30), dict[str, int])
        number = shrink.configure(priority=3, delay_ms=500, group="g", update_existing_params=True).publish_sync(
            "k", path="a"
        )
        assert_type(number, TaskHandle[int])
        assert_type(resize.handle("img-42"), TaskHandle[dict[str, int]])
        assert_type(await resize.handle("img-42").result(), dict[str, int])
        assert_type(mesh.handle("resize", "img-42"), TaskHandle[Any])
        await resize.publish_many({"a": {"path": "a"}})
        assert_type(await (await index.publish("k", 1.5)).result(), str)
        assert_type(await (await index_plainly.configure(priority=1).publish("k", b"")).result(), None)
        await shrink.configure(after=[handle, ("resize", "b")], on_dependency_failure="run").publish("k", path="a")
        await shrink.configure(sequence_key="s", on_sequence_failure="block").publish("k", path="a")
        await shrink.configure(after={"path": number}).publish("k", path="a")
        async with mesh.flow("f") as flow:
            part = flow.add(resize, "a", path="a")
            assert_type(part, TaskHandle[dict[str, int]])
            flow.add("shrink", "b", path="a", after=[part])
        assert_type(await mesh.flow_status("f"), FlowStatus)
        assert_type((await (await part.flow()).retry()).progress, float)
        await mesh.publish("resize", "k", {"path": "a"}, run_again=True, retain_failed_ms=None)
        assert_type(
            await mesh.set_option("resize", "k", run_timeout_ms=None, unexpected_retry_delay_scope="worker"), Task
        )
        await mesh.set_limit("images", rate=10, per_ms=1_000, group_running=None)
        await mesh.every(resize, cron="0 3 * * *", params={"path": "a"}, queue="night", max_timeouts=1)
        assert_type([task async for task in mesh.find("resize", status="FAIL")], list[Task])
        assert_type(await mesh.workers(), list[WorkerInfo])
        assert_type(await mesh.listing.count("status:FAIL"), int)
        await mesh.bulk.retry("status:FAIL", by="ada")
        await mesh.schedules.pause("resize", reason="too much")
        async with mesh.events("resize") as events:
            async for event in events:
                assert_type(event, TaskEvent)
        consumer = mesh.consumer(worker_id="w1", concurrency=10, on_claim=on_claim, before=before, after=after)
        await consumer.run(until_idle=True)
