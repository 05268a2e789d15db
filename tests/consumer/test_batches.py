"""`@mesh.task(batch=…)`: one call of the handler gets the items of many tasks, and each has its own outcome."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from taskmesh import (
    InvalidOption,
    InvalidParams,
    Retry,
    Snooze,
    Status,
    Task,
    TaskFailed,
    TaskMesh,
    TaskMeshError,
    TaskOption,
    current_batch,
    current_blocking_batch,
    current_task,
)
from tests.waiting import eventually
from tests.working import finished, parts_of, status_is, working

AT_ONCE = TaskOption(unexpected_retry_delay_ms=0)
ONCE = TaskOption(max_unexpected_retries=0)


@dataclass
class Item:
    n: int
    text: str = ""


def numbers(count: int) -> dict[str, dict[str, Item]]:
    return {f"k{n}": {"item": Item(n)} for n in range(count)}


async def ends(mesh: TaskMesh, name: str, keys: Any) -> dict[str, Task]:
    return {key: await finished(mesh, name, key) for key in keys}


async def test_one_call_gets_up_to_so_many_items_and_each_task_has_its_own_value_or_error(mesh: TaskMesh) -> None:
    calls: list[list[int]] = []

    @mesh.task(batch=10, batch_wait_ms=1_000, option=AT_ONCE)  # a claim may come in parts, on a busy machine
    async def index(items: list[Item]) -> list[str | Exception]:
        assert all(type(item) is Item for item in items)
        first = {context.key for context in current_batch() if context.attempt == 1}
        calls.append([item.n for item in items])
        errors: dict[int, Exception] = {
            3: TaskFailed("no use"),
            4: ValueError("once"),
            5: Retry("again", delay_ms=0),
            6: Snooze(delay_ms=100),
        }
        return [
            errors[item.n]
            if item.n in errors and f"k{item.n}" in first and (item.n != 6 or len(calls) < 3)
            else f"v{item.n}"
            for item in items
        ]

    handles = await index.publish_many(numbers(25))
    async with working(mesh, concurrency=100):
        tasks = await ends(mesh, "index", numbers(25))
    assert max(map(len, calls)) == 10
    assert len(calls) < 10
    assert tasks["k3"].status is Status.FAIL
    assert tasks["k3"].fail_reasons[0].endswith("no use")
    assert {key for key, task in tasks.items() if task.status is not Status.SUCCESS} == {"k3"}
    fails = {
        key: [e.fail_reason for e in task.task_state.worker_states if e.state == "FAIL"] for key, task in tasks.items()
    }
    assert {key: reasons for key, reasons in fails.items() if reasons} == {
        "k3": ["no use"],
        "k4": ["ValueError: once"],
        "k5": ["again"],
    }
    assert await handles[7].result(10) == "v7"


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_none_means_that_all_are_done_and_what_the_call_raises_is_everybody_s_failure(
    mesh: TaskMesh, kind: str
) -> None:
    def judge(items: list[Item]) -> Any:
        if any(item.text == "raise" for item in items):
            raise ValueError("all of them")
        return {"short": [1], "text": "ab"}.get(items[0].text)

    async def judge_in_the_loop(items: list[Item]) -> Any:
        return judge(items)

    fn: Any = judge if kind == "thread" else judge_in_the_loop
    for name in ("done", "raise", "short", "text"):
        job: Any = mesh.task(batch=2, batch_wait_ms=30_000, name=name, option=ONCE)(fn)
        await job.publish_many({key: {"item": {"n": 1, "text": name}} for key in ("a", "b")})
    async with working(mesh):
        done = await ends(mesh, "done", "ab")
        assert [task.status for task in done.values()] == [Status.SUCCESS] * 2
        for name, told in (
            ("raise", "ValueError: all of them"),
            ("short", "returned 1 for a batch of 2 tasks: return a list with one value"),
            ("text", "returned str for a batch of 2 tasks"),
        ):
            for task in (await ends(mesh, name, "ab")).values():
                assert task.status is Status.FAIL
                assert told in task.fail_reasons[0]


async def test_a_batch_that_is_not_full_begins_when_its_first_task_has_waited(mesh: TaskMesh) -> None:
    """And where fewer tasks have room than it could hold, when all of these are there."""
    sizes: list[int] = []

    @mesh.task(batch=100, batch_wait_ms=30_000)
    async def index(items: list[int]) -> None:
        sizes.append(len(items))

    @mesh.task(batch=100, batch_wait_ms=50)
    async def soon(items: list[int]) -> None:
        sizes.append(len(items))

    await index.publish_many({f"k{n}": {"item": n} for n in range(6)})
    async with working(mesh, concurrency=3):
        await ends(mesh, "index", [f"k{n}" for n in range(6)])
        assert sizes == [3, 3]
        await soon.publish("k", 1)
        await finished(mesh, "soon", "k")
    assert sizes == [3, 3, 1]


async def test_who_is_cancelled_keeps_his_place_till_the_call_is_over_and_the_others_go_on(mesh: TaskMesh) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()
    seen: list[list[tuple[str, bool]]] = []

    @mesh.task(batch=3, batch_wait_ms=5_000)
    async def index(items: list[Item]) -> list[int | Exception]:
        contexts = current_batch()
        began.set()
        await go_on.wait()
        seen.append([(context.key, context.cancelled) for context in contexts])
        return [item.n for item in items]

    handles = await index.publish_many(numbers(3))
    async with working(mesh) as consumer:
        worker = parts_of(consumer)
        await asyncio.wait_for(began.wait(), 60)
        execution = worker.executions["index:k1"]
        await mesh.cancel("index", "k1")
        await eventually(lambda: execution.judged, what="the worker has heard")
        cancelled = await mesh.get("index", "k1")
        assert [entry.state for entry in cancelled.task_state.worker_states] == ["RUNNING"], "its place is kept"
        go_on.set()
        assert await handles[0].result(60) == 0
        assert await handles[2].result(60) == 2
        ended = await eventually(lambda: entry_ended(mesh), what="its place is free")
    assert seen == [[("k0", False), ("k1", True), ("k2", False)]]
    assert ended.status is Status.CANCELLED


async def entry_ended(mesh: TaskMesh) -> Task | None:
    task = await mesh.get("index", "k1")
    return task if task.task_state.worker_states[0].state == "FAIL" else None


async def test_a_call_whose_tasks_are_all_told_to_stop_is_cancelled_and_its_end_is_waited_for(mesh: TaskMesh) -> None:
    began, cleaned_up = asyncio.Event(), asyncio.Event()

    @mesh.task(batch=2, batch_wait_ms=5_000)
    async def index(items: list[Item]) -> None:
        assert len(items) == 2
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            cleaned_up.set()

    @mesh.task(batch=2, batch_wait_ms=0, option=TaskOption(run_timeout_ms=100, max_unexpected_retries=0))
    async def slow(items: list[Item]) -> None:
        await asyncio.sleep(60 * len(items))

    await index.publish_many(numbers(2))
    async with working(mesh) as consumer:
        await asyncio.wait_for(began.wait(), 60)
        await slow.publish_many(numbers(2))
        for task in (await ends(mesh, "slow", ["k0", "k1"])).values():
            assert "run_timeout_ms" in task.fail_reasons[0]
        await consumer.stop(grace_ms=0)
        assert cleaned_up.is_set()
    for key in ("k0", "k1"):
        released = await mesh.get("index", key)
        assert (released.status, released.task_state.worker_states, released.task_state.lost_cnt) == (
            Status.INIT,
            [],
            0,
        )


async def test_a_graceful_stop_waits_for_a_batch_and_until_idle_empties_a_queue(mesh: TaskMesh) -> None:
    sizes: list[int] = []
    began, go_on = threading.Event(), threading.Event()

    @mesh.task(batch=4, batch_wait_ms=1_000)  # a claim may come in parts, on a busy machine
    def index(items: list[int]) -> None:
        began.set()
        go_on.wait(60)
        sizes.append(len(items))

    await index.publish_many({f"k{n}": {"item": n} for n in range(4)})
    async with working(mesh) as consumer:
        await asyncio.to_thread(began.wait, 60)
        stopping = asyncio.create_task(consumer.stop(grace_ms=60_000))
        await eventually(lambda: consumer.state == "stopping")
        go_on.set()
        await stopping
    assert sizes == [4]
    await index.publish_many({f"more{n}": {"item": n} for n in range(10)})
    await mesh.consumer().run(until_idle=True)
    assert sum(sizes) == 14
    assert [task async for task in mesh.find(status=["INIT", "RUNNING", "FAIL"])] == []


async def test_hooks_and_what_a_handler_publishes_are_each_task_s_own(mesh: TaskMesh) -> None:
    hooked: list[str] = []

    def before(task: Task) -> None:
        hooked.append(f"before {task.key}")
        if task.key == "k1":
            raise ValueError("not this one")

    @mesh.task
    async def follow(n: int) -> None: ...

    @mesh.task(batch=3, batch_wait_ms=50, option=ONCE)
    async def index(items: list[Item]) -> list[Exception | None]:
        with pytest.raises(RuntimeError, match="current_batch"):
            current_task()
        with pytest.raises(RuntimeError, match="async handler"):
            current_blocking_batch()
        found: list[Exception | None] = []
        for context, item in zip(current_batch(), items, strict=True):
            await context.publish(follow, context.key, n=item.n)
            await context.progress(0.5)
            context.log(f"line of {context.key}")
            with pytest.raises(TaskMeshError, match="are not for the handler of a batch"):
                await context.step("s", len, "abc")
            with pytest.raises(TaskMeshError, match="transactions are not for"):
                context.transaction()
            found.append(ValueError("bad") if item.n == 2 else None)
        return found

    await index.publish_many(numbers(4))
    async with working(mesh, before=before, after=lambda task, ending: hooked.append(f"{ending.kind} {task.key}")):
        tasks = await ends(mesh, "index", numbers(4))
        await status_is(mesh, "follow", "k3", Status.SUCCESS)
    assert [task.status for task in tasks.values()] == [Status.SUCCESS, Status.FAIL, Status.FAIL, Status.SUCCESS]
    assert {"before k0", "failed k1", "failed k2", "succeeded k3"} <= set(hooked)
    assert {task.key async for task in mesh.find("follow")} == {"k0", "k3"}, "what failed publishes nothing"
    [entry] = tasks["k3"].task_state.worker_states
    assert [line.message for line in entry.logs] == ["line of k3"]


async def test_an_item_is_checked_when_it_is_published_and_when_it_is_run(mesh: TaskMesh) -> None:
    @mesh.task(batch=5, batch_wait_ms=50, option=ONCE)
    async def index(items: list[Item]) -> list[int]:
        return [item.n for item in items]

    wrong: Any = "seven"
    with pytest.raises(InvalidParams, match="item"):
        await index.publish("k", wrong)
    with pytest.raises(InvalidParams, match="item"):
        await mesh.publish("index", "k", {"n": 1})
    good = await index.publish("good", Item(1))
    by_name = await mesh.publish("index", "by name", {"item": {"n": 2}})
    spoilt = await index.publish("spoilt", Item(3))
    await mesh.store.driver.collection("tasks").update_one({"_id": "index:spoilt"}, {"$set": {"params.item.n": "x"}})
    async with working(mesh):
        assert (await good.result(60), await by_name.result(60)) == (1, 2)
        failed = await finished(mesh, "index", spoilt.key)
    assert "InvalidParams" in failed.fail_reasons[0], "it hurts no other of its batch"
    assert await index([Item(5)]) == [5], "calling the definition calls the function"


def test_what_no_batch_can_be_is_refused() -> None:
    mesh: Any = TaskMesh()

    async def good(items: list[int]) -> None: ...
    async def none() -> None: ...
    async def two(items: list[int], more: int) -> None: ...
    async def number(items: int) -> None: ...
    def plain(items: list[int]) -> None: ...

    for settings, fn, told in (
        ({"batch": 0}, good, "batch must be a whole number from 1 to 1000, got 0"),
        ({"batch": True}, good, "batch must be"),
        ({"batch": "10"}, good, "batch must be"),
        ({"batch": 10, "batch_wait_ms": -1}, good, "batch_wait_ms must be a whole number from 0 to 60000, got -1"),
        ({"batch": 10, "run": "process"}, plain, "batch cannot be combined with run='process'"),
        ({"batch": 10}, none, "takes one parameter, a list"),
        ({"batch": 10}, two, "takes one parameter, a list"),
        ({"batch": 10}, number, "takes a list, like items"),
        ({"batch_wait_ms": 10}, good, "batch_wait_ms was set without batch"),
        ({"batch": 10, "projection": ["item"]}, good, "batch and projection were both set"),
    ):
        with pytest.raises(InvalidOption, match=told):
            mesh.task(**settings)(fn)
    assert not mesh.definitions
