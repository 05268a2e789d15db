"""Policies for a key that is published again and again: `debounce_ms`, `throttle_ms`, `replace_running`."""

from __future__ import annotations

import asyncio
import operator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from taskmesh import InvalidOption, Status, TaskMesh, current_task
from tests.waiting import eventually
from tests.working import finished, status_is, working

LATER = 600_000


async def test_each_publication_of_a_waiting_task_puts_it_off_and_the_newest_params_run_once(mesh: TaskMesh) -> None:
    ran: list[int] = []

    @mesh.task
    async def save(n: int) -> int:
        ran.append(n)
        return n

    late = save.configure(debounce_ms=LATER)
    first = await late.publish("k", n=1)
    before = await first.task()
    second = await late.publish("k", n=2)
    assert (first.created, second.created, second.updated) == (True, False, True)
    after = await second.task()
    assert after.params == {"n": 2}
    assert after.status is Status.INIT
    assert after.task_state.start_time is not None
    assert before.task_state.start_time is not None
    assert before.task_state.start_time < after.task_state.start_time, "from now on"
    third = await save.configure(debounce_ms=1, debounce_max_ms=1).publish("k", n=3)
    async with working(mesh):
        assert await third.result(60) == 3
        again = await save.configure(debounce_ms=1).publish("k", n=4)
        assert await again.result(60) == 4, "a finished one runs again"
    assert ran == [3, 4]


async def test_it_is_put_off_no_later_than_the_longest_wait_after_the_first(mesh: TaskMesh) -> None:
    settings: Any = {"debounce_ms": 400_000, "debounce_max_ms": LATER}
    for n in range(3):
        await mesh.publish("job", "k", {"n": n}, **settings)
    task = await mesh.get("job", "k")
    await mesh.store.driver.collection("tasks").update_one(
        {"_id": "job:k"},
        {"$set": {"task_state.debounced_since": task.task_state.create_time - timedelta(milliseconds=LATER - 1_000)}},
    )
    await mesh.publish("job", "k", {"n": 3}, **settings)
    put_off = await mesh.get("job", "k")
    assert put_off.task_state.start_time == task.task_state.create_time + timedelta(milliseconds=1_000)
    assert put_off.params == {"n": 3}


async def test_while_it_runs_it_is_put_off_for_the_run_after(mesh: TaskMesh) -> None:
    go_on = asyncio.Event()
    ran: list[int] = []

    @mesh.task
    async def save(n: int) -> int:
        ran.append(n)
        await go_on.wait()
        return n

    await save.configure(debounce_ms=1).publish("k", n=1)
    async with working(mesh):
        await eventually(lambda: ran == [1], what="the first run")
        await save.configure(debounce_ms=LATER).publish("k", n=2)
        await save.configure(debounce_ms=LATER).publish("k", n=3)
        assert ran == [1]
        go_on.set()
        waiting = await status_is(mesh, "save", "k", Status.INIT)
        assert waiting.next_claim_time is not None
        assert waiting.next_claim_time > mesh.clock.now() + timedelta(milliseconds=LATER / 2)
        await save.configure(debounce_ms=1).publish("k", n=4)
        await finished(mesh, "save", "k")
    assert ran == [1, 4], "one run for all that came meanwhile"


async def test_a_publication_that_comes_too_soon_does_nothing_and_says_so(mesh: TaskMesh) -> None:
    first = await mesh.publish("job", "k", {"n": 1}, throttle_ms=LATER)
    await mesh.cancel("job", "k")
    before = await mesh.get("job", "k")
    second = await mesh.publish("job", "k", {"n": 2}, throttle_ms=LATER)
    assert (first.created, second.created, second.updated) == (True, False, False)
    told = "task 'job' 'k' was published less than 600000 ms ago (throttle_ms), so this publication did nothing"
    assert told in second.warnings
    assert told not in first.warnings
    assert await mesh.get("job", "k") == before
    async with mesh.store.driver.session() as session, await session.start_transaction():
        inside = await mesh.publish("job", "k", {"n": 3}, throttle_ms=LATER, session=session)
    assert told in inside.warnings
    many = await mesh.publisher.publish_many("job", {"k": {"n": 4}, "other": {"n": 4}}, throttle_ms=LATER)
    assert [handle.created for handle in many] == [False, True]
    third = await mesh.publish("job", "k", {"n": 5}, throttle_ms=1)
    assert (third.updated, third.warnings == second.warnings) == (True, False)
    task = await mesh.get("job", "k")
    assert (task.status, task.params) == (Status.INIT, {"n": 5})


async def test_what_runs_is_stopped_and_its_successor_begins_when_its_handler_has_ended(mesh: TaskMesh) -> None:
    at_work: set[int] = set()
    most = 0
    cleaned_up: list[int] = []

    @mesh.task
    async def train(n: int) -> int:
        nonlocal most
        at_work.add(n)
        most = max(most, len(at_work))
        try:
            if n < 3:
                await asyncio.sleep(60)
            return n * current_task().attempt
        finally:
            if n < 3:
                await asyncio.sleep(0.05)
                cleaned_up.append(n)
            at_work.remove(n)

    newest = train.configure(replace_running=True)
    await newest.publish("k", n=1)
    async with working(mesh, "w1"), working(mesh, "w2"):
        for n in (1, 2):
            await eventually(partial(operator.eq, at_work, {n}), what=f"{n} is at work")
            handle = await newest.publish("k", n=n + 1)
            assert (handle.created, handle.updated) == (False, True)
        assert await handle.result(60) == 3
        task = await finished(mesh, "train", "k")
    assert (most, cleaned_up) == (1, [1, 2])
    assert [entry.state for entry in task.task_state.worker_states] == ["SUCCESS"]
    assert task.task_state.lost_cnt == 0
    await newest.publish("k", n=4)
    assert (await mesh.get("train", "k")).status is Status.INIT, "a finished one runs again"


def test_what_contradicts_itself_or_is_no_time_is_refused() -> None:
    @TaskMesh().task
    async def job() -> None: ...

    wrong: Any
    for wrong, told in (
        ({"debounce_ms": 0}, "debounce_ms must be a whole number from 1 to"),
        ({"throttle_ms": "1 s"}, "throttle_ms must be a whole number from 1 to .*, got '1 s'"),
        ({"debounce_ms": True}, "debounce_ms must be"),
        ({"replace_running": 1}, "replace_running must be True or False, got 1"),
        ({"debounce_max_ms": 5}, "must go with a debounce_ms that is not longer, got None"),
        ({"debounce_ms": 6, "debounce_max_ms": 5}, "must go with a debounce_ms that is not longer, got 6"),
        ({"debounce_ms": 5, "delay_ms": 5}, "debounce_ms and delay_ms were both set"),
        ({"debounce_ms": 5, "throttle_ms": 5}, "debounce_ms and throttle_ms were both set"),
        ({"replace_running": True, "not_update_running": True}, "not_update_running and replace_running were both set"),
        ({"throttle_ms": 5, "after": [("job", "k")]}, "after and throttle_ms were both set"),
    ):
        with pytest.raises(InvalidOption, match=told):
            job.configure(**wrong)
