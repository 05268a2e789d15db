"""A step runs once: its record is what every later execution of the task gets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

from taskmesh import (
    InvalidName,
    Status,
    StepMismatch,
    TaskError,
    TaskFailed,
    TaskMesh,
    TaskMeshError,
    TaskOption,
    TaskTooLarge,
    UnstorableValue,
    current_blocking_task,
    current_task,
)
from tests.waiting import eventually
from tests.working import finished, working

AGAIN = TaskOption(unexpected_retry_delay_ms=0, max_unexpected_retries=3)


async def test_a_recorded_step_is_not_run_again_and_comes_back_as_it_was(mesh: TaskMesh) -> None:
    calls: list[str] = []

    async def charge(order_id: str, *, cents: int) -> str:
        calls.append(f"{order_id} {cents}")
        return f"receipt {order_id}"

    @mesh.task(option=AGAIN)
    async def order(order_id: str) -> str:
        task = current_task()
        receipt = await task.step("charge", charge, order_id, cents=500)
        if task.attempt == 1:
            raise ValueError("after the step")
        return receipt

    handle = await order.publish("1", order_id="a")
    async with working(mesh, "w1"):
        assert await handle.result(60) == "receipt a"
    assert calls == ["a 500"]
    (step,) = (await handle.task()).steps
    assert (step.kind, step.name, step.value, step.worker_id, step.attempt) == ("step", "charge", "receipt a", "w1", 1)
    assert isinstance(step.time, datetime)


@dataclass
class Parcel:
    weight: Decimal
    sent: date


async def test_d23_values_come_back_in_the_same_types_on_the_first_run_and_on_a_resumed_one(mesh: TaskMesh) -> None:
    """Rails#58045: a date came back as a string."""
    seen: list[list[Any]] = []

    def a_date() -> date:
        return date(2026, 11, 22)

    def a_decimal() -> Decimal:
        return Decimal("1.50")

    async def a_model() -> Parcel:
        return Parcel(Decimal("2.5"), date(2026, 1, 2))

    def a_tuple() -> tuple[int, str]:
        return 1, "x"

    def some_bytes() -> bytes:
        return b"\0\1"

    def a_moment():  # type: ignore[no-untyped-def]  # nothing is annotated: the stored form, the first time too
        return (datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC),)

    def a_large_number() -> int:
        return 2**60

    functions = (a_date, a_decimal, a_model, a_tuple, some_bytes, a_moment, a_large_number)

    @mesh.task(option=AGAIN)
    async def work() -> None:
        task = current_task()
        seen.append([await task.step(fn.__name__, fn) for fn in functions])
        if task.attempt == 1:
            raise ValueError("once more")

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        await handle.result(60)
    assert seen[0] == seen[1]
    assert seen[0] == [
        date(2026, 11, 22),
        Decimal("1.50"),
        Parcel(Decimal("2.5"), date(2026, 1, 2)),
        (1, "x"),
        b"\0\1",
        [datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)],
        2**60,
    ]
    first, second = ([type(value) for value in run] for run in seen)
    assert first == second


async def test_d1_steps_of_one_name_side_by_side_are_an_error_and_never_exchange_values(mesh: TaskMesh) -> None:
    """vercel/workflow#4090, DBOS#688: they swapped their results, silently."""
    done: list[int] = []

    async def double(n: int) -> int:
        await asyncio.sleep(0.001 * (n % 7))
        done.append(n)
        return 2 * n

    @mesh.task(option=AGAIN)
    async def work(named: bool) -> list[int]:
        task = current_task()
        steps = [task.step(f"f-{n}" if named else "f", double, n) for n in range(20)]
        try:
            values = await asyncio.gather(*steps)
        except StepMismatch as error:
            raise TaskFailed(str(error)) from None
        if task.attempt == 1:
            raise ValueError("half-way")
        return values

    async with working(mesh, "w1"):
        with pytest.raises(TaskError, match=r"two of its steps named 'f' are under way at once") as failed:
            await (await work.publish("one name", named=False)).result(60)
        assert "double" in str(failed.value)
        done.clear()
        assert await (await work.publish("names", named=True)).result(60) == [2 * n for n in range(20)]
    assert sorted(done) == list(range(20))


async def test_d2_a_shifted_counter_is_a_mismatch_and_nothing_is_charged(mesh: TaskMesh) -> None:
    """Rails#55174: new code with another step of the same name before the old one."""
    charged, mismatches = list[str](), list[str]()
    new_code = False

    def charge(what: str) -> str:
        charged.append(what)
        return what

    @mesh.task(option=AGAIN.changed(max_unexpected_retries=1, unexpected_retry_delay_ms=600_000))
    async def order() -> str:
        task = current_task()
        try:
            if new_code:
                await task.step("charge", charge, "shipping")
            paid = await task.step("charge", charge, "goods")
        except StepMismatch as error:
            mismatches.append(str(error))
            raise
        if len(mismatches) == 0:
            raise ValueError("deploy")
        return paid

    async def put_off() -> bool:
        task = await handle.task()
        return task.status is Status.INIT and task.task_state.resume_time is not None

    handle = await order.publish("1")
    async with working(mesh, "w1") as consumer:
        await _failed(mesh, "order", 1)
        new_code = True
        for times in (1, 2, 3):  # more often than it may fail
            await mesh.retry("order", "1")
            await eventually(lambda times=times: len(mismatches) == times)  # type: ignore[misc]  # bound now
            await eventually(put_off)
        assert all(said.count("charge(") == 2 for said in mismatches), "it names both"
        fails = [entry for entry in (await handle.task()).task_state.worker_states if entry.state == "FAIL"]
        assert ["deploy" in (entry.fail_reason or "") for entry in fails] == [True]
        assert charged == ["goods"]
        new_code = False
        await mesh.retry("order", "1")
        assert await handle.result(60) == "goods"
        assert consumer.state == "running"
    assert charged == ["goods"]


async def _failed(mesh: TaskMesh, name: str, times: int) -> Any:
    async def so_often() -> Any:
        task = await mesh.get(name, "1")
        fails = [entry for entry in task.task_state.worker_states if entry.state == "FAIL"]
        return task if len(fails) >= times else None

    return await eventually(so_often)


async def test_the_second_step_of_a_name_has_a_number_that_no_literal_meets(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> list[int]:
        task = current_task()
        values = [await task.step("x", abs, n) for n in range(3)]
        return [*values, await task.step("x#2", lambda: 9)]

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        assert await handle.result(60) == [0, 1, 2, 9]
    assert [step.name for step in (await handle.task()).steps] == ["x", "x#2", "x#3", "x#2"]


async def test_an_exception_records_nothing_and_a_final_one_is_recorded(mesh: TaskMesh) -> None:
    calls: list[str] = []

    def flaky() -> str:
        calls.append("flaky")
        if len(calls) == 1:
            raise ValueError("no")
        return "yes"

    def refuse() -> None:
        calls.append("refuse")
        raise TaskFailed("card stolen")

    @mesh.task(option=AGAIN)
    async def order() -> str:
        task = current_task()
        await task.step("flaky", flaky)
        try:
            await task.step("refuse", refuse)
        except TaskFailed as error:
            if task.attempt == 2:
                raise ValueError("again") from None
            return str(error)
        return "not reached"

    handle = await order.publish("1")
    async with working(mesh, "w1"):
        assert await handle.result(60) == "card stolen"
    assert calls == ["flaky", "flaky", "refuse"]
    assert [(step.name, step.error) for step in (await handle.task()).steps] == [
        ("flaky", None),
        ("refuse", "card stolen"),
    ]


async def test_bad_input_is_refused_by_name_and_value(mesh: TaskMesh) -> None:
    found: dict[str, BaseException] = {}

    async def nested() -> None:
        await current_task().step("inner", lambda: 1)

    async def coroutine() -> int:
        return 1

    @mesh.task
    async def work() -> None:
        task = current_task()
        unawaited = coroutine()
        tries: dict[str, Any] = {
            "empty": lambda: task.step("", lambda: 1),
            "nul": lambda: task.step("a\0b", lambda: 1),
            "called": lambda: task.step("called", unawaited),  # type: ignore[call-overload]  # that is what is tried
            "nested": lambda: task.step("outer", nested),
            "unstorable": lambda: task.step("unstorable", object),
            "large": lambda: task.step("large", lambda: "x" * 1_000_001),
        }
        for name, attempt in tries.items():
            try:
                await attempt()
            except Exception as error:  # noqa: BLE001 — which one is what the test asks
                found[name] = error
        unawaited.close()

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        await handle.result(60)
    assert {name: type(error) for name, error in found.items()} == {
        "empty": InvalidName,
        "nul": InvalidName,
        "called": TypeError,
        "nested": TaskMeshError,
        "unstorable": UnstorableValue,
        "large": TaskTooLarge,
    }
    assert "'large'" in str(found["large"])
    assert "'outer'" in str(found["nested"])
    assert (await handle.task()).steps == []


async def test_several_workers_for_a_task_exclude_steps(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(concurrent_worker_cnt=2, max_unexpected_retries=0))
    async def work() -> None:
        await current_task().step("a", lambda: 1)

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        with pytest.raises(TaskError, match="concurrent_worker_cnt=1, and it is 2"):
            await handle.result(60)


async def test_d22_too_many_bytes_of_records_fail_once_and_for_good(mesh: TaskMesh) -> None:
    """elsa-core#3849: error → resume → error for ever."""
    runs: list[int] = []

    @mesh.task(option=AGAIN)
    async def work() -> None:
        task = current_task()
        runs.append(task.attempt)
        for n in range(12):
            await task.step(f"s{n}", lambda: "x" * 900_000)

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        with pytest.raises(TaskError, match="more than the 8000000 that fit together"):
            await handle.result(60)
    assert runs == [1]
    task = await handle.task()
    assert [step.name for step in task.steps] == [f"s{n}" for n in range(8)]
    assert [found.steps async for found in mesh.find("work")] == [[]]


async def test_d22_a_value_too_large_to_be_recorded_fails_once_and_for_good(mesh: TaskMesh) -> None:
    """The step would be done again in vain."""
    calls: list[int] = []

    def large() -> str:
        calls.append(1)
        return "x" * 1_000_001

    @mesh.task(option=AGAIN)
    async def work() -> None:
        await current_task().step("large", large)

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        with pytest.raises(TaskError, match="the step 'large' has 1000"):
            await handle.result(60)
    assert calls == [1]


async def test_records_of_many_bytes_are_loaded_when_they_are_asked_for(mesh: TaskMesh) -> None:
    calls: list[int] = []

    def large(n: int) -> str:
        calls.append(n)
        return "x" * 100_000

    @mesh.task(option=AGAIN)
    async def work() -> int:
        task = current_task()
        sizes = [len(await task.step(f"s{n}", large, n)) for n in range(4)]
        if task.attempt == 1:
            raise ValueError("again")
        return sum(sizes)

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        assert await handle.result(60) == 400_000
    assert calls == [0, 1, 2, 3]


async def test_a_recorded_step_renews_the_lease_and_counts_as_progress(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(max_timeouts=0))
    async def work() -> None:
        await current_task().step("a", lambda: 1)

    handle = await work.publish("1")
    await mesh.store.driver.collection("tasks").update_one({"_id": "work:1"}, {"$set": {"task_state.timeout_cnt": 0}})
    async with working(mesh, "w1"):
        await handle.result(60)
    assert (await handle.task()).task_state.timeout_cnt == 0


async def test_after_mesh_retry_values_stay_errors_go_and_fresh_starts_over(mesh: TaskMesh) -> None:
    calls: list[str] = []
    refused = True

    def take(name: str) -> str:
        calls.append(name)
        if name == "pay" and refused:
            raise TaskFailed("no money")
        return name

    @mesh.task
    async def order() -> list[str]:
        task = current_task()
        return [await task.step("pack", take, "pack"), await task.step("pay", take, "pay")]

    handle = await order.publish("1")
    async with working(mesh, "w1"):
        assert (await finished(mesh, "order", "1")).status is Status.FAIL
        refused = False
        await mesh.retry("order", "1")
        assert await handle.result(60) == ["pack", "pay"]
        assert calls == ["pack", "pay", "pay"]
        await mesh.retry("order", "1")
        assert await handle.result(60) == ["pack", "pay"]
        assert calls == ["pack", "pay", "pay"]
        await mesh.retry("order", "1", fresh=True)
        assert (await finished(mesh, "order", "1")).status is Status.SUCCESS
        assert calls == ["pack", "pay", "pay", "pack", "pay"]
        await order.configure(run_again=True).publish("1")
        assert (await finished(mesh, "order", "1")).status is Status.SUCCESS
        assert calls[5:] == ["pack", "pay"]


async def test_plain_handlers_in_threads_have_the_same_steps(mesh: TaskMesh) -> None:
    calls: list[int] = []

    def charge(n: int) -> Decimal:
        calls.append(n)
        return Decimal(n)

    async def charge_by_http(n: int) -> Decimal:
        await asyncio.sleep(0)
        assert current_blocking_task().key == "1"
        return charge(n)

    @mesh.task(option=AGAIN)
    def work() -> Decimal:
        task = current_blocking_task()
        value: Decimal = task.step("charge", charge, 7)
        by_http: Decimal = task.step("by http", charge_by_http, 8)
        assert (type(value), by_http) == (Decimal, Decimal(8))
        if task.attempt == 1:
            raise ValueError("again")
        with pytest.raises(TypeError):
            task.step("called", 7)  # type: ignore[call-overload]  # that is what is tried
        return value

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        assert await handle.result(60) == Decimal(7)
    assert calls == [7, 8]
