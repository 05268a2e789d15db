"""A handler's first step comes at once, with all that it may count on: a task, a name, a context, time-outs and a lease."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

from taskmesh import Status, TaskMesh, TaskOption, current_task
from tests.waiting import eventually
from tests.working import finished, working

COUNT = 40
where: ContextVar[str] = ContextVar("where", default="outside")


async def test_a_handler_is_one_asyncio_task_in_a_context_of_its_own_whether_it_waits_or_not(mesh: TaskMesh) -> None:
    found: dict[str, list[Any]] = {}

    async def note(key: str) -> None:
        found.setdefault(key, []).append((asyncio.current_task(), where.get(), current_task().key))

    @mesh.task
    async def job(turns: int) -> None:
        key = current_task().key
        assert where.get() == "outside", "another handler's context"
        where.set(key)
        await note(key)
        for _ in range(turns):
            await asyncio.sleep(0)
            await note(key)
        asyncio.get_running_loop().call_soon(lambda: found[key].append((None, where.get(), key)))

    await job.publish_many({f"k{n}": {"turns": n % 3} for n in range(COUNT)})
    async with working(mesh, concurrency=COUNT):
        for n in range(COUNT):
            assert (await finished(mesh, "job", f"k{n}")).status is Status.SUCCESS
    tasks = set()
    for n in range(COUNT):
        (task,) = {task for task, _, _ in found[f"k{n}"] if task is not None}
        assert task.get_name() == f"task job:k{n}"
        assert [(key, inside) for _, inside, key in found[f"k{n}"]] == [(f"k{n}", f"k{n}")] * (n % 3 + 2)
        tasks.add(task)
    assert len(tasks) == COUNT


async def test_time_outs_groups_and_cancellations_that_begin_in_the_first_step_hold(mesh: TaskMesh) -> None:
    cancelled: list[str] = []
    once = TaskOption(max_unexpected_retries=0)

    @mesh.task(option=once)
    async def patient() -> str:
        try:
            async with asyncio.timeout(0.05):
                await asyncio.Event().wait()
        except TimeoutError:
            return "timed out"
        return "never"

    @mesh.task(option=once)
    async def grouped() -> int:
        async with asyncio.TaskGroup() as group:
            parts = [group.create_task(asyncio.sleep(0, n)) for n in range(3)]
        return sum(part.result() for part in parts)

    @mesh.task(option=once)
    async def cancels_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    @mesh.task(option=TaskOption(run_timeout_ms=50, max_unexpected_retries=0))
    async def too_long() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("too_long")
            raise

    @mesh.task(option=once)
    async def leaves(how: str) -> None:
        raise {"exit": SystemExit, "interrupt": KeyboardInterrupt, "cancelled": asyncio.CancelledError}[how]

    for definition in (patient, grouped, cancels_itself, too_long):
        await definition.publish("k")
    for how in ("exit", "interrupt", "cancelled"):
        await leaves.publish(how, how=how)
    async with working(mesh, concurrency=20):
        tasks = {name: await finished(mesh, name, "k") for name in ("patient", "grouped", "cancels_itself", "too_long")}
        left = [await finished(mesh, "leaves", how) for how in ("exit", "interrupt", "cancelled")]
    assert tasks["patient"].successes[0].returns == "timed out"
    assert tasks["grouped"].successes[0].returns == 3
    assert tasks["cancels_itself"].status is Status.FAIL
    assert tasks["too_long"].status is Status.FAIL
    assert cancelled == ["too_long"]
    assert [task.status for task in left] == [Status.FAIL] * 3


async def test_all_that_one_claim_won_runs_before_the_first_handler_begins(mesh: TaskMesh) -> None:
    """So their leases are renewed, by a thread, though the first handler should hold the loop for long."""
    saw: dict[str, set[str]] = {}
    claim_of: dict[str, str] = {}

    @mesh.task
    async def job() -> None:
        task = current_task()
        saw[task.key] = set(consumer.running)
        claim_of[task.key] = task.running_id

    await job.publish_many({f"k{n}": {} for n in range(COUNT)})
    async with working(mesh, concurrency=COUNT) as consumer:
        await eventually(lambda: consumer.finished == COUNT)
    claims = {running_id: {key for key in saw if claim_of[key] == running_id} for running_id in claim_of.values()}
    assert len(claims) < COUNT
    for key, running_id in claim_of.items():
        first = next(other for other in saw if claim_of[other] == running_id)
        assert saw[first] >= claims[running_id], f"{key} was not there yet"


async def test_whoever_makes_all_tasks_of_the_loop_makes_those_of_handlers_too(mesh: TaskMesh) -> None:
    made: list[asyncio.Task[Any]] = []

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        made.append(asyncio.Task(coroutine, loop=loop, **options))
        return made[-1]

    @mesh.task
    async def job() -> None: ...

    await job.publish_many({f"k{n}": {} for n in range(5)})
    loop = asyncio.get_running_loop()
    loop.set_task_factory(factory)
    try:
        async with working(mesh) as consumer:
            await eventually(lambda: consumer.finished == 5)
    finally:
        loop.set_task_factory(None)
    assert {task.get_name() for task in made if task.get_name().startswith("task job")} == {
        f"task job:k{n}" for n in range(5)
    }
