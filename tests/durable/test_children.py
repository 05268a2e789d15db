"""Children: started once, kept until their parent is finished, and waited for without a slot."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from taskmesh import (
    InvalidKey,
    InvalidOption,
    Status,
    TaskError,
    TaskFailed,
    TaskMesh,
    TaskNotFound,
    TaskOption,
    current_task,
)
from taskmesh.consumer.run.dependents import Dependents
from tests.durable import handlers
from tests.durable.test_suspension import at_rest, suspended
from tests.working import finished, status_is, working

AGAIN = TaskOption(unexpected_retry_delay_ms=0)


async def test_a_handler_starts_children_once_and_gets_their_values_in_order(mesh: TaskMesh) -> None:
    created: list[list[bool]] = []

    @mesh.task
    async def pack(n: int) -> timedelta:
        return timedelta(seconds=n)

    @mesh.task(option=AGAIN)
    async def order() -> list[float]:
        task = current_task()
        parts = [await task.start(pack, f"{task.key}-{n}", n=n) for n in range(3)]
        created.append([part.created for part in parts])
        boxes = await task.results(parts)
        if task.attempt == 1:
            raise ValueError("after the results")
        return [box.total_seconds() for box in boxes]

    handle = await order.publish("1")
    async with working(mesh, "w1", names=["order"]) as consumer:
        task = await suspended(mesh, "order", "1")
        await at_rest(consumer)
        waits_for = task.task_state.suspended_for
        assert waits_for is not None
        assert (waits_for.kind, waits_for.name) == ("join", "3 tasks")
        assert task.status is Status.INIT
        [explained] = await mesh.explain("order", "1", worker_id="w1")
        [gate] = [gate for gate in explained.gates if gate.name == "suspended"]
        assert gate.reason == (
            "waits for 3 unfinished: 'pack' '1-0' (INIT), 'pack' '1-1' (INIT), 'pack' '1-2' (INIT), which it has started"
        )
        async with working(mesh, "w2", names=["pack"]):
            assert await handle.result(60) == [0.0, 1.0, 2.0]
    assert created[0] == [True, True, True]
    assert not any(any(each) for each in created[1:])
    assert [step.kind for step in (await handle.task()).steps] == ["start", "start", "start", "join"]


async def test_children_that_are_started_together_are_few_writes_and_one_record_and_a_stranger_stops_no_other(
    mesh: TaskMesh,
) -> None:
    refused: list[str] = []
    tasks = mesh.store.driver.collection(mesh.store.tasks)

    @mesh.task
    async def pack(n: int) -> int:
        return n

    @mesh.task(option=AGAIN)
    async def order() -> int:
        task = current_task()
        parts = await task.start_many(pack, {f"a{n}": {"n": n} for n in range(30)})
        started = [task.start(pack, f"b{n}", n=n) for n in range(30)]
        found = await asyncio.gather(*started, task.start(pack, "stranger", n=7), return_exceptions=True)
        *more, error = found
        refused.append(str(error))
        parts += [part for part in more if not isinstance(part, BaseException)]
        same = await asyncio.gather(*(task.start(pack, "c", n=5) for _ in range(3)))
        parts += same[:1]
        if task.attempt == 1:
            raise ValueError("again")
        assert not any(part.created for part in parts)
        return sum(await task.results(parts))

    await pack.publish("stranger", n=7)
    handle = await order.publish("1")
    async with working(mesh, "w1"):
        assert await handle.result(60) == 2 * sum(range(30)) + 5
    assert len(refused) >= 2
    assert all("'stranger' is there already" in each for each in refused)
    shown = (await handle.task()).steps
    names = [f"pack:{letter}{n}" for letter in "ab" for n in range(30)]
    assert [step.name for step in shown if step.kind == "start"] == [*names, "pack:c"]
    stored = await tasks.find_one({"_id": "order:1"})
    assert [step["kind"] for step in stored["task_state"]["steps"]] == ["start", "join"]
    assert await mesh.listing.count("name:pack") == 62


async def test_d13_no_children_are_done_at_once(mesh: TaskMesh) -> None:
    """sidekiq#5903: an empty batch was never called back."""

    @mesh.task
    async def work() -> list[Any]:
        return await current_task().results([])

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        assert await handle.result(60) == []


async def test_d26_waiting_parents_block_nobody_three_deep_with_one_slot(mesh: TaskMesh) -> None:
    """absurd: a parent that waited in its children's own queue held the only slot."""

    @mesh.task
    async def tree(depth: int) -> int:
        task = current_task()
        if depth == 0:
            return 1
        parts = [await task.start("tree", f"{task.key}.{n}", depth=depth - 1) for n in range(3)]
        return sum(await task.results(parts))

    handle = await tree.publish("t", depth=3)
    async with working(mesh, "w1", concurrency=1):
        assert await handle.result(90) == 27


async def test_a_child_that_fails_raises_the_same_error_after_a_retry(mesh: TaskMesh) -> None:
    errors: list[str] = []

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def pack(n: int) -> int:
        if n == 1:
            raise ValueError("torn")
        return n

    @mesh.task(option=AGAIN)
    async def order() -> list[Any]:
        task = current_task()
        parts = [await task.start(pack, f"p{n}", n=n) for n in range(3)]
        try:
            await task.results(parts)
        except TaskError as error:
            errors.append(str(error))
        if task.attempt == 1:
            raise ValueError("again")
        found = await task.results(parts, return_errors=True)
        return [str(value) if isinstance(value, TaskError) else value for value in found]

    handle = await order.publish("1")
    async with working(mesh, "w1"):
        first, second, third = await handle.result(60)
    assert (first, third) == (0, 2)
    assert "torn" in second
    assert len(set(errors)) == 1
    assert len(errors) >= 2


async def test_d20_children_are_cancelled_with_their_parent_but_for_detached_ones_and_strangers(mesh: TaskMesh) -> None:
    """Temporal#2829 #2390: orphans ran on, or an unrelated task was hit."""
    refused: list[str] = []

    @mesh.task
    async def pack() -> None: ...

    @mesh.task
    async def order() -> None:
        task = current_task()
        own = await task.start(pack, "own")
        await task.start(pack, "alone", detached=True)
        try:
            await task.start(pack, "stranger")
        except InvalidKey as error:
            refused.append(str(error))
        await task.results([own])

    await pack.publish("stranger")
    handle = await order.publish("1")
    async with working(mesh, "w1", names=["order"]):
        await suspended(mesh, "order", "1")
        await handle.cancel()
        await status_is(mesh, "pack", "own", Status.CANCELLED)
        assert (await mesh.get("pack", "alone")).status is Status.INIT
        assert (await mesh.get("pack", "stranger")).status is Status.INIT
    assert len(refused) == 1
    assert "'stranger' is there already" in refused[0]


async def test_children_of_a_parent_that_fails_are_cancelled(mesh: TaskMesh) -> None:
    @mesh.task
    async def pack() -> None: ...

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def order() -> None:
        await current_task().start(pack, "own")
        raise ValueError("no")

    await order.publish("1")
    async with working(mesh, "w1", names=["order"]):
        assert (await finished(mesh, "order", "1")).status is Status.FAIL
        await status_is(mesh, "pack", "own", Status.CANCELLED)


async def test_children_start_over_with_their_parent_whatever_has_become_of_them(mesh: TaskMesh) -> None:
    stuck = True

    @mesh.task
    async def child(n: int) -> int:
        if stuck:
            await current_task().sleep("long", hours=1)
        return n

    @mesh.task
    async def parent(n: int) -> list[int]:
        task = current_task()
        return await task.results([await task.start(child, "c", n=n)])

    handle = await parent.publish("p", n=1)
    async with working(mesh, "w1"):
        await suspended(mesh, "parent", "p")
        await suspended(mesh, "child", "c")
        await handle.cancel()
        await finished(mesh, "child", "c")
        stuck = False
        await mesh.retry("parent", "p", fresh=True)  # the child is CANCELLED
        assert await handle.result(30) == [1]
        await parent.configure(run_again=True).publish("p", n=2)  # it is SUCCESS
        assert await handle.result(30) == [2]


async def test_children_that_were_cancelled_with_their_parent_go_on_with_it_and_others_stay_cancelled(
    mesh: TaskMesh,
) -> None:
    done: list[str] = []

    async def pick(key: str) -> str:
        done.append(key)
        return key

    @mesh.task
    async def pack() -> str:
        task = current_task()
        picked = await task.step("pick", pick, task.key)
        return picked + str(await task.wait_for("go"))

    @mesh.task
    async def order() -> list[str]:
        task = current_task()
        found = await task.results([await task.start(pack, key) for key in ("a", "b", "c")], return_errors=True)
        return [str(each) for each in found]

    handle = await order.publish("1")
    async with working(mesh, "w1"):
        await suspended(mesh, "order", "1")
        for key in ("a", "b", "c"):
            await suspended(mesh, "pack", key)
        await mesh.cancel("pack", "b")
        await mesh.signal("pack", "c", "go", "!")
        await status_is(mesh, "pack", "c", Status.SUCCESS)
        await handle.cancel()
        await status_is(mesh, "pack", "a", Status.CANCELLED)
        await mesh.retry("order", "1")
        await suspended(mesh, "pack", "a")
        await mesh.signal("pack", "a", "go", "!")
        assert await handle.result(60) == ["a!", "the child 'pack' 'b' ended as CANCELLED", "c!"]
    assert sorted(done) == ["a", "b", "c"], "a recorded step ran again"


async def test_a_parent_that_failed_by_one_child_goes_on_with_all_when_both_are_retried(mesh: TaskMesh) -> None:
    broken = True

    @mesh.task
    async def pack(n: int) -> int:
        if n and broken:
            raise TaskFailed("no box")
        return n

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def order() -> list[int]:
        task = current_task()
        late = await task.start(pack.configure(delay_ms=3_600_000), "late", n=0)
        return await task.results([await task.start(pack, "bad", n=1)]) + await task.results([late])

    handle = await order.publish("1")
    async with working(mesh, "w1"):
        assert (await finished(mesh, "order", "1")).status is Status.FAIL
        await status_is(mesh, "pack", "late", Status.CANCELLED)
        broken = False
        await mesh.retry("pack", "bad")
        await mesh.retry("order", "1")
        assert await handle.result(60) == [1, 0]


async def test_only_the_children_that_are_awaited_are_waited_for(mesh: TaskMesh) -> None:
    @mesh.task
    async def pack(n: int) -> int:
        return n if n == 0 else int(await current_task().wait_for("go"))

    @mesh.task
    async def order() -> list[int]:
        task = current_task()
        quick, slow = [await task.start(pack, f"p{n}", n=n) for n in range(2)]
        first = await task.results([quick])
        await mesh.signal("pack", "p1", "go", 7, signal_id="once")
        return first + await task.results([slow])

    handle = await order.publish("1")
    async with working(mesh, "w1"):
        assert await handle.result(60) == [0, 7]


async def test_children_are_kept_until_their_parent_is_finished(mesh: TaskMesh) -> None:
    """BullMQ#1778 #1099: a result was gone because retention had removed the child."""

    @mesh.task(option=TaskOption(retain_success_ms=0))
    async def pack() -> str:
        return "packed"

    @mesh.task
    async def order() -> list[str]:
        task = current_task()
        part = await task.start(pack, "p")
        await task.wait_for("go")
        return await task.results([part])

    handle = await order.publish("1")
    async with working(mesh, "w1"):
        await suspended(mesh, "order", "1")
        await status_is(mesh, "pack", "p", Status.SUCCESS)
        await handle.signal("go")
        assert await handle.result(60) == ["packed"]


async def test_what_was_not_started_here_is_not_waited_for(mesh: TaskMesh) -> None:
    @mesh.task
    async def other() -> None: ...

    stranger = await other.publish("1")

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def work() -> None:
        nonsense: Any
        for nonsense in (stranger, [7], "1", None):
            with pytest.raises(TypeError, match="takes a list of what start"):
                await current_task().results(nonsense)
        await current_task().results([stranger])

    handle = await work.publish("1")
    async with working(mesh, "w1", names=["work"]):
        with pytest.raises(TaskError, match="was not started by this task"):
            await handle.result(60)


async def test_a_child_that_would_wait_for_its_parent_is_refused(mesh: TaskMesh) -> None:
    @mesh.task
    async def part() -> None: ...

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def work() -> str:
        task = current_task()
        try:
            child = await task.start(part.configure(after=[("work", task.key)]), "p")
        except InvalidOption as error:
            return str(error)
        await task.results([child])
        return "both have ended"

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        told = await handle.result(30)
    assert "task 'part' 'p' cannot wait for 'work' '1', which starts it" in told
    with pytest.raises(TaskNotFound):
        await mesh.get("part", "p")


async def test_children_that_would_wait_for_each_other_are_refused_though_they_are_started_at_the_same_moment(
    mesh: TaskMesh,
) -> None:
    @mesh.task
    async def part() -> None: ...

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def work() -> list[str]:
        task = current_task()
        a = task.start(part.configure(after=[("part", "b")]), "a")
        b = task.start(part.configure(after=[("part", "a")]), "b")
        started = await asyncio.gather(a, b, return_exceptions=True)
        if not any(isinstance(each, BaseException) for each in started):
            await task.results(started)  # type: ignore[arg-type]  # none is an exception
        return [str(each) for each in started]

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        told = await handle.result(30)
    assert "there is no task 'part' 'b'" in told[0]
    assert "there is no task 'part' 'a'" in told[1]


async def test_one_that_cannot_be_started_stops_none_that_is_started_at_the_same_moment(mesh: TaskMesh) -> None:
    @mesh.task
    async def part() -> int:
        return 1

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def work() -> list[Any]:
        task = current_task()
        waiting = part.configure(after=[("part", "nobody")])
        starts = (task.start(part, "a"), task.start(waiting, "b"), task.start(part, "c"))
        a, b, c = await asyncio.gather(*starts, return_exceptions=True)
        assert not isinstance(a, BaseException), a
        assert not isinstance(c, BaseException), c
        return [*await task.results([a, c]), type(b).__name__, "'part' 'nobody'" in str(b)]

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        assert await handle.result(30) == [1, 1, "TaskNotFound", True]


async def test_d21_the_parent_stays_small_whatever_its_children_return(mesh: TaskMesh) -> None:
    runs: list[int] = []

    @mesh.task
    async def pack(n: int) -> str:
        return f"{n:05}" * 1_000

    @mesh.task(option=AGAIN)
    async def order() -> int:
        task = current_task()
        runs.append(task.attempt)
        parts = [await task.start(pack, f"p{n}", n=n) for n in range(60)]
        values = await task.results(parts)
        if task.attempt < 3:
            raise ValueError("again")
        return sum(map(len, values))

    handle = await order.publish("1")
    async with working(mesh, "w1"):
        assert await handle.result(90) == 300_000
    assert max(runs) == 3
    tasks = mesh.store.driver.collection(mesh.store.tasks)
    cursor = tasks.find({"_id": "order:1"}, {"size": {"$bsonSize": "$$ROOT"}})
    assert (await cursor.to_list(1))[0]["size"] < 30_000


async def test_a_wake_that_nobody_told_is_found_again(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """trigger.dev#1171: the child finished, whoever should have told its parent died, and the parent waited for ever."""
    monkeypatch.setattr(Dependents, "finished", lambda *_: None)

    @mesh.task
    async def pack() -> int:
        return 1

    @mesh.task
    async def order() -> list[int]:
        task = current_task()
        return await task.results([await task.start(pack, "p")])

    handle = await order.publish("1")
    async with working(mesh, "w1"):
        assert await handle.result(60) == [1]


@pytest.mark.parametrize("where", ["thread", "process"])
async def test_plain_handlers_start_children_with_the_same_names(mesh: TaskMesh, where: Any) -> None:
    work = mesh.task(handlers.with_children, name="work", run=where, option=AGAIN)
    mesh.task(handlers.leaf, name="leaf")
    handle = await work.publish("1")
    async with working(mesh, "w1"):
        assert await handle.result(60) == ["leaf 0", "leaf 1"]
