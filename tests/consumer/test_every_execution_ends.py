"""Every execution has an outcome, whatever a handler or a hook raises, and on whatever way it arrives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskmesh import Ending, Status, Task, TaskMesh, TaskOption
from tests.waiting import eventually
from tests.working import finished, working

ONCE = TaskOption(max_unexpected_retries=0)
KINDS = [GeneratorExit, SystemExit, KeyboardInterrupt]


def raise_it(kind: type[BaseException]) -> None:
    raise kind("as asked")


async def through_a_future(kind: type[BaseException]) -> None:
    loop = asyncio.get_running_loop()
    failed = loop.create_future()
    loop.call_soon(failed.set_exception, kind("as asked"))  # later: what is there already is raised on the spot
    await failed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["at once", "through a future", "to_thread", "thread"])
async def test_a_base_exception_of_a_handler_is_its_failure(
    mesh: TaskMesh, kind: type[BaseException], way: str
) -> None:
    @mesh.task(option=ONCE, name="job")
    async def in_loop() -> None:
        if way == "at once":
            raise_it(kind)
        elif way == "to_thread":
            await asyncio.to_thread(raise_it, kind)
        else:
            await through_a_future(kind)

    def in_thread() -> None:
        raise_it(kind)

    job: Any = in_loop if way != "thread" else mesh.task(in_thread, option=ONCE, name="in_thread")
    await job.publish("k")
    async with working(mesh) as consumer:
        task = await finished(mesh, job.name, "k")
        await eventually(lambda: not consumer.running, 10.0, what="its slot is free")
    [entry] = task.task_state.worker_states
    assert (task.status, entry.state) == (Status.FAIL, "FAIL")
    assert (entry.fail_reason or "").startswith(f"{kind.__name__}: as asked")


@pytest.mark.parametrize("kind", KINDS)
async def test_what_arrives_while_a_handler_cleans_up_is_its_failure(mesh: TaskMesh, kind: type[BaseException]) -> None:
    """A coroutine that is closed may not wait any more: Python raises `RuntimeError` where it does."""

    @mesh.task(option=ONCE)
    async def job() -> None:
        try:
            await through_a_future(kind)
        finally:
            await asyncio.sleep(0)

    await job.publish("k")
    async with working(mesh) as consumer:
        task = await finished(mesh, "job", "k")
        await eventually(lambda: not consumer.running, 10.0, what="its slot is free")
    assert [entry.state for entry in task.task_state.worker_states] == ["FAIL"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["plain", "async", "through a future"])
async def test_a_base_exception_of_the_hook_before_is_the_execution_s_failure(
    mesh: TaskMesh, kind: type[BaseException], way: str
) -> None:
    def plain(_: Task) -> None:
        raise_it(kind)

    async def in_loop(_: Task) -> None:
        await (through_a_future(kind) if way == "through a future" else asyncio.sleep(0))
        raise_it(kind)

    @mesh.task(option=ONCE)
    async def job() -> None: ...

    await job.publish("k")
    async with working(mesh, before=plain if way == "plain" else in_loop) as consumer:
        assert (await finished(mesh, "job", "k")).status is Status.FAIL
        await eventually(lambda: not consumer.running, 10.0, what="its slot is free")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["plain", "async", "through a future"])
async def test_a_base_exception_of_the_hook_after_is_logged_and_changes_nothing(
    mesh: TaskMesh, caplog: pytest.LogCaptureFixture, kind: type[BaseException], way: str
) -> None:
    def plain(_: Task, __: Ending) -> None:
        raise_it(kind)

    async def in_loop(_: Task, __: Ending) -> None:
        await (through_a_future(kind) if way == "through a future" else asyncio.sleep(0))
        raise_it(kind)

    @mesh.task
    async def job() -> int:
        return 7

    handle = await job.publish("k")
    async with working(mesh, after=plain if way == "plain" else in_loop) as consumer:
        assert await handle.result(10) == 7
        await eventually(lambda: not consumer.running, 10.0, what="its slot is free")
        assert consumer.state == "running"
    assert "the hook 'after' failed for task job:k" in caplog.text
