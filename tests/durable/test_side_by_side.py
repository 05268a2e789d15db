"""Steps, waits and children side by side: what one branch does or raises takes nothing from another."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from taskmesh import (
    Status,
    TaskError,
    TaskFailed,
    TaskMesh,
    TaskOption,
    current_blocking_task,
    current_task,
)
from tests.durable.test_suspension import suspended
from tests.waiting import eventually
from tests.working import finished, working

AGAIN = TaskOption(unexpected_retry_delay_ms=0)
NOT_AGAIN = TaskOption(max_unexpected_retries=0)


async def test_branches_each_start_a_child_and_wait_for_it(mesh: TaskMesh) -> None:
    @mesh.task
    async def pack(n: int) -> int:
        return 10 * n

    async def branch(n: int) -> int:
        task = current_task()
        child = await task.start(pack, f"{task.key}-{n}", n=n)
        [value] = await task.results([child])
        return value + 1

    @mesh.task
    async def order() -> list[int]:
        return list(await asyncio.gather(*map(branch, range(4))))

    handle = await order.publish("1")
    async with working(mesh):
        assert await handle.result(60) == [1, 11, 21, 31]
    joins = [step.name for step in (await handle.task()).steps if step.kind == "join"]
    assert sorted(joins) == [f"results of pack:1-{n}" for n in range(4)]


async def test_results_that_new_code_asks_for_first_are_not_those_that_old_code_has_recorded(mesh: TaskMesh) -> None:
    new_code = asyncio.Event()

    @mesh.task
    async def pack(n: int) -> int:
        return 10 * n

    @mesh.task
    async def order() -> list[int]:
        task = current_task()
        before = await task.results([await task.start(pack, "new", n=7)]) if new_code.is_set() else []
        values = await task.results([await task.start(pack, f"old-{n}", n=n) for n in range(2)])
        await task.wait_for("go on")
        return before + values

    handle = await order.publish("1")
    async with working(mesh):
        await eventually(lambda: _waits_for(mesh, "wait"))
        new_code.set()
        await mesh.signal("order", "1", "go on")
        assert await handle.result(60) == [70, 0, 10]


async def _waits_for(mesh: TaskMesh, kind: str) -> bool:
    waits_for = (await mesh.get("order", "1")).task_state.suspended_for
    return waits_for is not None and waits_for.kind == kind


async def test_a_child_that_somebody_has_retried_is_waited_for_once_more(mesh: TaskMesh) -> None:
    runs: list[int] = []

    @mesh.task
    async def pack() -> int:
        runs.append(1)
        return len(runs)

    @mesh.task
    async def order() -> list[int]:
        task = current_task()
        values = await task.results([await task.start(pack, "box")])
        await task.wait_for("go on")
        return values

    handle = await order.publish("1")
    async with working(mesh, "w1", names=["order"]):
        async with working(mesh, "w2", names=["pack"]):
            await eventually(lambda: _waits_for(mesh, "wait"))
        await mesh.retry("pack", "box")
        await mesh.signal("order", "1", "go on")
        await eventually(lambda: _waits_for(mesh, "join"), what="its value is gone, so it is waited for")
        async with working(mesh, "w2", names=["pack"]):
            assert await handle.result(60) == [2]


@pytest.mark.parametrize("plain", [False, True], ids=["async", "in a thread"])
async def test_a_step_beside_one_that_fails_is_recorded_before_the_task_is_tried_again(
    mesh: TaskMesh, plain: bool
) -> None:
    calls: list[str] = []
    reserved = threading.Event()

    async def charge() -> str:
        calls.append("begins")
        await eventually(reserved.is_set)
        await asyncio.sleep(0.5)
        calls.append("ends")
        return "receipt"

    def charge_in_thread() -> str:
        return asyncio.run(charge())

    async def reserve() -> str:
        if not reserved.is_set():
            await eventually(lambda: calls)
            reserved.set()
            raise ValueError("no room")
        return "reserved"

    @mesh.task(option=AGAIN)
    async def order() -> list[str]:
        task = current_task()
        charging = task.step("charge", charge_in_thread) if plain else task.step("charge", charge)
        return list(await asyncio.gather(charging, task.step("reserve", reserve)))

    handle = await order.publish("1")
    async with working(mesh):
        assert await handle.result(60) == ["receipt", "reserved"]
    assert calls == ["begins", "ends"]


async def test_a_step_that_never_ends_beside_one_that_fails_is_cancelled(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("taskmesh.consumer.durable.journal._ENDS_WITHIN_S", 0.3)
    cancelled: list[str] = []

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append("yes")

    async def fail() -> None:
        raise ValueError("no room")

    @mesh.task(option=NOT_AGAIN)
    async def order() -> None:
        task = current_task()
        await asyncio.gather(task.step("ever", wait_for_ever), task.step("fail", fail))

    await order.publish("1")
    async with working(mesh):
        task = await finished(mesh, "order", "1")
    assert "no room" in task.fail_reasons[0]
    assert cancelled == ["yes"]
    assert "its step 'ever' goes on for more than" in caplog.text


async def test_what_a_thread_has_done_all_the_same_is_recorded_though_its_worker_stops(mesh: TaskMesh) -> None:
    calls: list[str] = []
    go_on = threading.Event()

    def charge() -> str:
        calls.append(current_task().worker_id)
        assert go_on.wait(60)
        return "receipt"

    @mesh.task
    async def order() -> str:
        return await current_task().step("charge", charge)

    handle = await order.publish("1")
    async with working(mesh, "w1") as first:
        await eventually(lambda: calls == ["w1"])
        stopping = asyncio.create_task(first.stop(grace_ms=0))
        await eventually(lambda: first.state == "stopping")
        go_on.set()
        await stopping
    async with working(mesh, "w2"):
        assert await handle.result(60) == "receipt"
    assert calls == ["w1"]


async def test_a_step_with_a_large_number_of_a_record_is_known_again(mesh: TaskMesh) -> None:
    ids: list[Any] = []

    async def new_id() -> Any:
        return 5_000_000_000

    async def charge(id_: Any, *, parts: Any) -> str:
        ids.append((id_, parts))
        return f"charged {id_}"

    @mesh.task(option=AGAIN)
    async def order() -> str:
        task = current_task()
        id_ = await task.step("id", new_id)
        charged = await task.step("charge", charge, id_, parts={"id": [id_]})
        if task.attempt == 1:
            raise ValueError("after both")
        return charged

    handle = await order.publish("1")
    async with working(mesh):
        assert await handle.result(60) == "charged 5000000000"
    assert len(ids) == 1


@pytest.mark.parametrize("what", ["publish", "transaction", "in_transaction"])
@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_what_belongs_to_the_success_is_refused_inside_a_step(mesh: TaskMesh, what: str, plain: bool) -> None:
    @mesh.task
    async def mail() -> None: ...

    def call(task: Any) -> Any:
        match what:
            case "publish":
                return task.publish(mail, "m")
            case "transaction":
                return task.transaction()
            case _:
                return task.in_transaction(lambda _: None)

    async def notify() -> None:
        called = call(current_task())
        if asyncio.iscoroutine(called):
            await called

    async def order() -> None:
        await current_task().step("notify", notify)

    def plain_order() -> None:
        task = current_blocking_task()
        task.step("notify", call, task)

    mesh.task(plain_order if plain else order, name="order", option=NOT_AGAIN)
    await mesh.publish("order", "1")
    async with working(mesh):
        task = await finished(mesh, "order", "1")
    assert task.status is Status.FAIL
    assert f"{what}() was called inside the step 'notify'" in task.fail_reasons[0]
    assert "call it from the handler, after the step" in task.fail_reasons[0]
    assert not [each async for each in mesh.find("mail")]


async def test_in_a_plain_handler_a_transactional_step_is_over_before_a_sleep(mesh: TaskMesh) -> None:
    calls: list[str] = []

    def charge(session: Any) -> str:  # noqa: ARG001 — that it is given one is enough
        calls.append("charge")
        return "receipt"

    @mesh.task
    def order() -> str:
        task = current_blocking_task()
        receipt: str = task.step("charge", charge, transactional=True)
        task.sleep("a while", seconds=1.2)
        return receipt

    handle = await order.publish("1")
    async with working(mesh):
        assert await handle.result(60) == "receipt"
    assert calls == ["charge"]


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_a_value_that_is_too_large_says_so_and_is_not_made_again(mesh: TaskMesh, plain: bool) -> None:
    calls: list[str] = []

    def draw() -> str:
        calls.append("draw")
        return "x" * 1_100_000

    async def order() -> None:
        await current_task().step("draw", draw)

    def plain_order() -> None:
        current_blocking_task().step("draw", draw)

    mesh.task(plain_order if plain else order, name="order", option=AGAIN)
    await mesh.publish("order", "1")
    async with working(mesh):
        task = await finished(mesh, "order", "1")
    assert "the value of the step 'draw' has 1100" in task.fail_reasons[0]
    assert calls == ["draw"]


# --- errors in groups ---


async def _in_a_group(*steps: Any) -> None:
    async with asyncio.TaskGroup() as group:
        for step in steps:
            group.create_task(step)


async def test_what_is_final_is_final_in_a_group_too(mesh: TaskMesh) -> None:
    calls: list[str] = []

    async def draw() -> str:
        calls.append("draw")
        return "x" * 1_100_000

    async def decline() -> None:
        calls.append("decline")
        raise TaskFailed("the card was declined")

    @mesh.task(option=AGAIN)
    async def too_large() -> None:
        await _in_a_group(current_task().step("draw", draw))

    @mesh.task(option=AGAIN)
    async def declined() -> None:
        await _in_a_group(current_task().step("decline", decline))

    handles = [await too_large.publish("1"), await declined.publish("1")]
    async with working(mesh):
        with pytest.raises(TaskError, match=r"TaskTooLarge: .*the value of the step 'draw'"):
            await handles[0].result(60)
        with pytest.raises(TaskError, match="the card was declined"):
            await handles[1].result(60)
    assert sorted(calls) == ["decline", "draw"]


async def test_a_mismatch_in_a_group_is_not_charged(mesh: TaskMesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "taskmesh.executor")
    prices = [1]

    async def charge(price: int) -> int:
        return price

    @mesh.task(option=NOT_AGAIN)
    async def order() -> None:
        task = current_task()
        await _in_a_group(task.step("charge", charge, prices[-1]))
        await task.wait_for("go on")

    await order.publish("order")
    async with working(mesh):
        await suspended(mesh, "order", "order")
        prices.append(2)
        await mesh.signal("order", "order", "go on")
        await eventually(lambda: "is put off for" in caplog.text)

        async def is_said() -> bool:
            [explained] = await mesh.explain("order", "order")
            return any("code or keys do not fit" in gate.reason for gate in explained.gates)

        await eventually(is_said)
        task = await mesh.get("order", "order")
    assert (task.status, task.fail_reasons) == (Status.INIT, [])


async def test_the_reason_of_a_group_names_what_is_in_it_and_where_it_was_raised(mesh: TaskMesh) -> None:
    async def raise_one() -> None:
        raise ValueError("no luck")

    async def raise_another() -> None:
        raise KeyError("nothing there")

    @mesh.task(option=NOT_AGAIN)
    async def job() -> None:
        await _in_a_group(raise_one(), raise_another())

    await job.publish("1")
    async with working(mesh):
        task = await finished(mesh, "job", "1")
    [reason] = task.fail_reasons
    assert "(2 sub-exceptions): ValueError: no luck; KeyError: 'nothing there'" in reason
    assert "in raise_one" in reason
    [entry] = task.task_state.worker_states
    assert (entry.fail_type, (entry.fail_frame or "").endswith("in raise_one")) == ("ExceptionGroup", True)
