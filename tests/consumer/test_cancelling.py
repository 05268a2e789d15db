"""T35: a cancel is never lost and never hits the wrong run, at whatever point of a task's life it comes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from taskmesh import Ending, Status, Task, TaskCancelled, TaskMesh, TaskNotFound, TaskOption, current_task
from tests.faults import another_mesh, failing_commands
from tests.waiting import eventually
from tests.working import finished, parts_of, status_is, working

PINGS_LATE = TaskOption(ping_interval_ms=30_000, worker_timeout_ms=60_000)
"""Whatever happens within seconds did not wait for a ping."""
HEARD_WITHIN_S = 20.0


async def is_cancelled_for_good(mesh: TaskMesh, name: str, key: str) -> None:
    task = await mesh.get(name, key)
    assert task.status is Status.CANCELLED
    assert task.successes == [], "CANCELLED, and no result beside it"
    assert task.next_claim_time is None


async def test_t35_before_the_claim_it_never_starts(mesh: TaskMesh) -> None:
    ran: list[str] = []

    @mesh.task
    async def job() -> None:
        ran.append(current_task().key)

    handles = [await job.publish("due"), await job.configure(delay_ms=200).publish("delayed")]
    for handle in handles:
        assert (await handle.cancel()).status is Status.CANCELLED
    await job.publish("other")
    async with working(mesh):
        await finished(mesh, "job", "other")
        await job.configure(delay_ms=500).publish("later than the delayed one")
        await finished(mesh, "job", "later than the delayed one")
    assert ran == ["other", "later than the delayed one"]
    for handle in handles:
        with pytest.raises(TaskCancelled):
            await handle.result(timeout=60)


async def excluded(mesh: TaskMesh) -> None:
    await mesh.set_option("job", "k1", specific_worker_ids=("somebody else",))


@pytest.mark.parametrize(
    "change",
    [lambda mesh: mesh.cancel("job", "k1"), lambda mesh: mesh.delete("job", "k1"), excluded],
    ids=["cancel", "delete", "set_option"],
)
async def test_t35_between_the_claim_and_the_handler_s_start_it_is_heard_at_once(
    mesh: TaskMesh, mongo_uri: str, database: str, change: Callable[[TaskMesh], Awaitable[Any]]
) -> None:
    """The claim has come to pass, and the worker, which waits for what it won, hears of the change before."""
    ran: list[str] = []
    cut_short: list[str] = []

    async with another_mesh(mongo_uri, database, "the slow worker") as slow:

        @slow.task(option=PINGS_LATE)
        async def job() -> None:
            key = current_task().key
            try:
                await asyncio.sleep(0.5)
            except asyncio.CancelledError:
                cut_short.append(key)
                raise
            ran.append(key)

        async with working(slow, "slow", concurrency=6) as consumer:
            consumer.pause()
            await mesh.publisher.publish_many("job", {f"k{n}": {} for n in range(3)}, **dict(PINGS_LATE))
            await eventually(lambda: len(parts_of(consumer).candidates) == 3, what="it knows of all three, a set")
            # What a set has won is read by a find.
            async with failing_commands(
                mongo_uri, ["find"], appname="the slow worker", blockConnection=True, blockTimeMS=1_500
            ):
                consumer.resume()
                await status_is(mesh, "job", "k1", Status.RUNNING)
                assert consumer.running == [], "the handlers have not started"
                await change(mesh)
            for key in ("k0", "k2"):
                await finished(mesh, "job", key)
            await eventually(lambda: not consumer.running, HEARD_WITHIN_S)
    assert sorted(ran) == ["k0", "k2"]
    assert cut_short in (["k1"], [])


async def test_t35_while_the_hook_before_is_at_work_it_is_cut_short_and_the_handler_never_starts(
    mesh: TaskMesh,
) -> None:
    ran: list[str] = []
    at_work = asyncio.Event()

    async def before(_: Task) -> None:
        at_work.set()
        try:
            await asyncio.sleep(60)
        finally:
            ran.append("before was cut short")

    async def after(_: Task, ending: Ending) -> None:
        ran.append(f"after: {ending.kind}")

    @mesh.task(option=PINGS_LATE)
    async def job() -> None:
        ran.append("the handler")

    await job.publish("k")
    async with working(mesh, before=before, after=after) as consumer:
        await at_work.wait()
        await mesh.cancel("job", "k")
        await eventually(lambda: not consumer.running, HEARD_WITHIN_S)
    assert ran == ["before was cut short", "after: cancelled"]
    await is_cancelled_for_good(mesh, "job", "k")


async def in_progress(_: TaskMesh) -> None:
    while True:
        await current_task().progress(random.random())
        await asyncio.sleep(0)


async def in_a_driver_call(mesh: TaskMesh) -> None:
    while True:
        await mesh.get("job", "k")


async def in_a_publish(mesh: TaskMesh) -> None:
    for number in range(1_000_000):
        await mesh.publish("other", f"k{number % 3}")


async def in_a_transaction(_: TaskMesh) -> None:
    async with current_task().transaction() as session:
        while True:
            await session.client.get_database("test").command("ping")


@pytest.mark.parametrize("busy", [in_progress, in_a_driver_call, in_a_publish, in_a_transaction])
async def test_t35_in_the_run_it_is_heard_at_once_whatever_the_handler_is_doing(
    mesh: TaskMesh, busy: Callable[[TaskMesh], Awaitable[None]]
) -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    @mesh.task(option=PINGS_LATE)
    async def job() -> None:
        started.set()
        try:
            await busy(mesh)
        finally:
            stopped.set()

    await job.publish("k")
    async with working(mesh) as consumer:
        await started.wait()
        await eventually(lambda: consumer.running == ["k"])
        assert (await mesh.cancel("job", "k")).status is Status.CANCELLED
        await asyncio.wait_for(stopped.wait(), HEARD_WITHIN_S)
        await eventually(lambda: not consumer.running)
        await is_cancelled_for_good(mesh, "job", "k")

        async def noted() -> bool:
            [entry] = (await mesh.get("job", "k")).task_state.worker_states
            return (entry.state, entry.fail_reason) == ("FAIL", "the task was cancelled")

        if busy is not in_a_transaction:  # undone, with all that it wrote
            await eventually(noted, what="the entry shows that the handler has ended")


async def test_t35_at_the_moment_of_the_success_there_is_one_final_state(mesh: TaskMesh) -> None:
    """Cancels that race the outcome: whoever comes first wins, and nobody changes it after."""
    released: dict[str, asyncio.Event] = {}

    @mesh.task(option=PINGS_LATE)
    async def job() -> str:
        key = current_task().key
        await released.setdefault(key, asyncio.Event()).wait()
        return f"result of {key}"

    keys = [f"k{number}" for number in range(60)]
    handles = await job.publish_many({key: {} for key in keys})
    chance = random.Random(35)
    async with working(mesh) as consumer:
        await eventually(lambda: len(consumer.running) == len(keys) == len(released))

        async def race(key: str) -> None:
            cancel = asyncio.create_task(mesh.cancel("job", key))
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            released[key].set()
            await cancel

        await asyncio.gather(*(race(key) for key in keys))
        await eventually(lambda: not consumer.running)
        results = await asyncio.gather(*(handle.result(60) for handle in handles), return_exceptions=True)
        for key, result in zip(keys, results, strict=True):
            task = await mesh.get("job", key)
            if task.status is Status.SUCCESS:
                assert result == f"result of {key}"
            else:
                assert isinstance(result, TaskCancelled)
                await is_cancelled_for_good(mesh, "job", key)


async def test_t35_after_the_handler_and_before_the_record_the_result_is_dropped_and_the_entry_has_ended(
    mesh: TaskMesh,
) -> None:
    async def after(_: Task, ending: Ending) -> None:
        assert ending.kind == "succeeded"
        await mesh.cancel("job", "k")

    @mesh.task(option=PINGS_LATE)
    async def job() -> str:
        return "a result that nobody waits for"

    await job.publish("k")
    async with working(mesh, after=after) as consumer:
        await eventually(lambda: consumer.finished == 1)

        async def noted() -> bool:
            [entry] = (await mesh.get("job", "k")).task_state.worker_states
            return (entry.state, entry.fail_reason, entry.returns) == ("FAIL", "the task was cancelled", None)

        await eventually(noted)
    await is_cancelled_for_good(mesh, "job", "k")


async def test_t35_after_the_end_it_changes_nothing_and_hits_no_later_run(mesh: TaskMesh) -> None:
    runs: list[str] = []

    @mesh.task
    async def job() -> int:
        runs.append(current_task().running_id)
        await asyncio.sleep(0.2 if len(runs) > 1 else 0)
        return len(runs)

    handle = await job.publish("k")
    async with working(mesh):
        assert await handle.result(60) == 1
        before = await handle.task()
        assert await handle.cancel() == before
        await mesh.retry("job", "k")
        assert await handle.result(60) == 2, "the second run has nothing to do with a cancel before it"
    assert len(runs) == 2


async def test_t35_an_unknown_key_is_an_error_and_nothing_is_left_behind(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> int:
        return 1

    with pytest.raises(TaskNotFound, match="there is no task 'job' 'k'"):
        await mesh.cancel("job", "k")
    assert [task async for task in mesh.find()] == []
    handle = await job.publish("k")
    await mesh.consumer().run(until_idle=True)
    assert await handle.result(60) == 1


async def test_t35_while_the_stream_is_down_it_takes_effect_by_the_next_ping(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    started, stopped = asyncio.Event(), asyncio.Event()
    async with another_mesh(mongo_uri, database, "the deaf worker") as deaf:

        @deaf.task(option=TaskOption(ping_interval_ms=500, worker_timeout_ms=20_000))
        async def job() -> None:
            started.set()
            try:
                await asyncio.sleep(60)
            finally:
                stopped.set()

        await job.publish("k")
        async with working(deaf, "deaf") as consumer:
            await started.wait()
            # Neither the stream nor the scan gets through (HostUnreachable); what is written does.
            async with failing_commands(mongo_uri, ["aggregate", "getMore"], appname="the deaf worker", errorCode=6):
                await mesh.cancel("job", "k")
                await asyncio.wait_for(stopped.wait(), HEARD_WITHIN_S)
            await eventually(lambda: not consumer.running)
    await is_cancelled_for_good(mesh, "job", "k")


async def test_a_change_that_is_heard_while_the_database_falters_is_looked_at_again(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    started, stopped = asyncio.Event(), asyncio.Event()
    async with another_mesh(mongo_uri, database, "the unlucky worker") as unlucky:

        @unlucky.task(option=PINGS_LATE)
        async def job() -> None:
            started.set()
            try:
                await asyncio.sleep(60)
            finally:
                stopped.set()

        await job.publish("k1")
        async with working(unlucky, "unlucky"):
            await started.wait()
            heard = unlucky.feed.delivered
            # What the worker would ask after it has heard of the change fails (HostUnreachable).
            async with failing_commands(mongo_uri, ["aggregate"], appname="the unlucky worker", errorCode=6) as asked:
                await excluded(mesh)
                await eventually(lambda: unlucky.feed.delivered > heard, what="it hears of the change")
                await asked()  # in vain
                assert not stopped.is_set()
            await asyncio.wait_for(stopped.wait(), HEARD_WITHIN_S)
    task = await mesh.get("job", "k1")
    assert (task.status, task.task_state.worker_states) == (Status.INIT, [])
