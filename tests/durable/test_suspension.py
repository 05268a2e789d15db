"""A task that waits is put aside: no slot, no lease, nothing counted; and what it waits for always wakes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from taskmesh import (
    InvalidName,
    InvalidOption,
    Status,
    Task,
    TaskError,
    TaskFailed,
    TaskFinished,
    TaskMesh,
    TaskNotFound,
    TaskOption,
    TaskSuspended,
    TooManySignals,
    UnstorableValue,
    current_blocking_task,
    current_task,
)
from taskmesh.consumer import unserved
from taskmesh.consumer.worker import Consumer
from tests.waiting import eventually
from tests.working import parts_of, working

AGAIN = TaskOption(unexpected_retry_delay_ms=0)


async def suspended(mesh: TaskMesh, name: str, key: str) -> Task:
    """Wait until a task is put aside."""

    async def is_suspended() -> Task | None:
        task = await mesh.get(name, key)
        return task if task.task_state.suspended_for is not None else None

    return await eventually(is_suspended, what=f"{name} {key} is suspended")


async def at_rest(consumer: Consumer) -> None:
    await eventually(lambda: not consumer.running, what="no slot is taken")


async def due_now(mesh: TaskMesh, key: str) -> None:
    """Let the time come at which a sleep or a wait is over."""
    now = mesh.clock.now() - timedelta(seconds=1)
    tasks = mesh.store.driver.collection(mesh.store.tasks)
    await tasks.update_one(
        {"key": key, "task_state.suspended_until": {"$ne": None}},
        [
            {
                "$set": {
                    "task_state.suspended_until": now,
                    "next_claim_time": now,
                    "task_state.steps": {
                        "$map": {
                            "input": "$task_state.steps",
                            "in": {
                                "$mergeObjects": [
                                    "$$this",
                                    {"$cond": [{"$gt": ["$$this.until", None]}, {"until": now}, {}]},
                                ]
                            },
                        }
                    },
                }
            }
        ],
    )


async def test_a_sleeping_task_holds_nothing_and_goes_on_when_it_is_due(mesh: TaskMesh) -> None:
    runs: list[int] = []
    unwound: list[str] = []

    @mesh.task(option=TaskOption(max_unexpected_retries=0, max_timeouts=0))
    async def work() -> str:
        task = current_task()
        runs.append(task.attempt)
        try:
            await task.sleep("cooling off", hours=24)
        except Exception:  # noqa: BLE001 — a suspension is none
            unwound.append("Exception")
        finally:
            unwound.append("finally")
        return "rested"

    handle = await work.publish("1")
    async with working(mesh, "w1") as consumer:
        task = await suspended(mesh, "work", "1")
        await at_rest(consumer)
        assert (task.status, task.task_state.worker_states, task.steps) == (Status.INIT, [], [])
        waits_for = task.task_state.suspended_for
        assert waits_for is not None
        assert waits_for.until is not None
        assert (waits_for.kind, waits_for.name) == ("sleep", "cooling off")
        in_a_day = mesh.clock.now() + timedelta(hours=24)
        assert abs(waits_for.until - in_a_day) < timedelta(minutes=2)
        assert task.next_claim_time == waits_for.until
        (explained,) = await mesh.explain("work", "1", "w1")
        gate = next(gate for gate in explained.gates if gate.name == "suspended")
        assert not gate.open
        assert "sleeps 'cooling off'" in gate.reason
        await mesh.retry("work", "1")
        assert (await handle.task()).next_claim_time == waits_for.until, "a retry cuts no sleep short"
        await due_now(mesh, "1")
        assert await handle.result(60) == "rested"
    assert runs == [1, 1]
    assert unwound == ["finally", "finally"]
    task = await handle.task()
    assert [(step.kind, step.name) for step in task.steps] == [("sleep", "cooling off")]
    assert task.task_state.suspended_for is None


async def test_up_to_a_second_is_waited_for_in_place_and_once(mesh: TaskMesh) -> None:
    attempts: list[int] = []

    @mesh.task(option=AGAIN)
    async def work() -> None:
        task = current_task()
        attempts.append(task.attempt)
        await task.sleep("a moment", milliseconds=50)
        await task.sleep_until("the past", mesh.clock.now() - timedelta(days=1))
        if task.attempt == 1:
            raise ValueError("again")

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        await handle.result(60)
    assert attempts == [1, 2]
    assert [step.kind for step in (await handle.task()).steps] == ["sleep", "sleep"]


async def test_a_signal_wakes_whoever_waits_and_one_sent_before_is_there(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> list[Any]:
        task = current_task()
        return [await task.wait_for("early"), await task.wait_for("late"), await task.wait_for("late")]

    handle = await work.publish("1")
    await handle.signal("early", {"by": "ann"})
    async with working(mesh, "w1") as consumer:
        await suspended(mesh, "work", "1")
        await at_rest(consumer)
        await handle.signal("other")
        await handle.signal("late")
        await handle.signal("late", 2)
        assert await handle.result(60) == [{"by": "ann"}, {}, 2]
    task = await handle.task()
    assert [(step.kind, step.name, step.value) for step in task.steps] == [
        ("wait", "early", {"by": "ann"}),
        ("wait", "late", {}),
        ("wait", "late#2", 2),
    ]
    assert [signal.event for signal in task.task_state.signals] == ["other"]


async def test_d6_a_timeout_is_recorded_like_a_value(mesh: TaskMesh) -> None:
    """absurd#96: who did not record it waited anew."""
    seen: list[list[Any]] = []

    @mesh.task(option=AGAIN)
    async def work() -> list[Any]:
        task = current_task()
        seen.append([await task.wait_for("tick", timeout_ms=1_000) for _ in range(2)])
        if task.attempt == 1:
            raise ValueError("after both")
        return seen[-1]

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        await suspended(mesh, "work", "1")
        assert await handle.result(60) == [None, None]
        with pytest.raises(TaskFinished, match="SUCCESS"):
            await handle.signal("tick")
    assert seen == [[None, None], [None, None]]
    assert [step.value for step in (await handle.task()).steps] == [None, None]


async def test_d7_the_deadline_is_fixed_at_the_first_call(mesh: TaskMesh) -> None:
    """absurd#43: after a wake that meant something else the wait began anew."""

    @mesh.task(option=AGAIN)
    async def work() -> Any:
        return await current_task().wait_for("approved", timeout_ms=600_000)

    handle = await work.publish("1")
    async with working(mesh, "w1") as consumer:
        before = (await suspended(mesh, "work", "1")).task_state.suspended_for
        assert before is not None
        for _ in range(2):
            await at_rest(consumer)
            await mesh.cancel("work", "1")
            await mesh.retry("work", "1")
            after = (await suspended(mesh, "work", "1")).task_state.suspended_for
            assert after == before
        await at_rest(consumer)
        await due_now(mesh, "1")
        assert await handle.result(60) is None


async def _bare(task: Any) -> None:
    with suppress(BaseException):
        await task.sleep("a", hours=1)


async def _gathered(task: Any) -> None:
    await asyncio.gather(task.sleep("a", hours=1), return_exceptions=True)


async def _in_a_group(task: Any) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(task.sleep("a", hours=1))


async def _waited_for(task: Any) -> None:
    await asyncio.wait([asyncio.ensure_future(task.sleep("a", hours=1))])


async def _wrapped(task: Any) -> None:
    try:
        await task.sleep("a", hours=1)
    except BaseException as error:
        raise TaskFailed("a library wraps it") from error


@pytest.mark.parametrize("swallow", [_bare, _gathered, _in_a_group, _waited_for, _wrapped])
async def test_d3_who_swallows_a_suspension_is_put_aside_all_the_same(
    mesh: TaskMesh, swallow: Callable[[Any], Awaitable[None]]
) -> None:
    """Restate, aws-durable-execution-sdk-java#369: bare except, gather, TaskGroup, wait."""
    after: list[str] = []

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def work() -> str:
        task = current_task()
        await swallow(task)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: task.step("b", after.append, "step"),
            lambda: task.progress(0.5),
        ]
        for call in calls:
            try:
                await call()
            except TaskSuspended:
                after.append("met again")
        return "success"

    await work.publish("1")
    async with working(mesh, "w1") as consumer:
        task = await suspended(mesh, "work", "1")
        await at_rest(consumer)
    assert (task.status, task.task_state.worker_states) == (Status.INIT, [])
    assert after in ([], ["met again", "met again"])


async def test_d3_a_plain_handler_that_swallows_it_is_put_aside_all_the_same(mesh: TaskMesh) -> None:
    after: list[str] = []

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    def work() -> str:
        task = current_blocking_task()
        with suppress(BaseException):
            task.sleep("a", hours=1)
        after.append(f"cancelled {task.cancelled}")
        with suppress(TaskSuspended):
            task.step("b", after.append, "step")
        return "success"

    await work.publish("1")
    async with working(mesh, "w1") as consumer:
        task = await suspended(mesh, "work", "1")
        await at_rest(consumer)
    assert (task.status, task.task_state.worker_states) == (Status.INIT, [])
    assert after == ["cancelled True"]


async def test_d4_steps_under_way_are_recorded_before_the_task_is_put_aside(mesh: TaskMesh) -> None:
    """Measured: a sibling was cut off in the middle."""
    calls: list[str] = []
    go_on = asyncio.Event()

    async def slow() -> str:
        calls.append("slow")
        await go_on.wait()
        return "done"

    @mesh.task
    async def work() -> list[Any]:
        task = current_task()
        return list(await asyncio.gather(task.step("slow", slow), task.wait_for("x")))

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        await eventually(lambda: calls)
        assert (await handle.task()).task_state.suspended_for is None
        go_on.set()
        task = await suspended(mesh, "work", "1")
        assert [step.value for step in task.steps] == ["done"]
        await handle.signal("x", 1)
        assert await handle.result(60) == ["done", 1]
    assert calls == ["slow"]


async def test_d5_a_signal_at_any_moment_of_a_wait_is_consumed(mesh: TaskMesh) -> None:
    """Absurd 0.0.7, DBOS#76: one that came between the look and the going to sleep was lost."""
    count = 60
    reached: dict[str, asyncio.Event] = {str(n): asyncio.Event() for n in range(count)}

    @mesh.task
    async def work() -> Any:
        task = current_task()
        reached[task.key].set()
        return await task.wait_for("go")

    handles = await work.publish_many({key: {} for key in reached})

    async def send(n: int) -> None:
        await reached[str(n)].wait()
        for _ in range(n):  # a little later each: before the look, between the writes, after both
            await asyncio.sleep(0)
        await handles[n].signal("go", n)

    async with working(mesh, "w1", concurrency=20):
        await asyncio.gather(*(send(n) for n in range(count)))
        assert await asyncio.gather(*(handle.result(60) for handle in handles)) == list(range(count))


async def test_d17_neither_time_limit_binds_a_task_that_is_put_aside(mesh: TaskMesh) -> None:
    """Hatchet#4128: a parked task ran into its time limit and was started twice."""
    runs: list[str] = []

    @mesh.task(option=TaskOption(run_timeout_ms=60_000, max_unexpected_retries=0))
    async def work() -> str:
        runs.append("run")
        await current_task().sleep("long", seconds=2)
        return "done"

    handle = await work.configure(expire_time=mesh.clock.now() + timedelta(seconds=30)).publish("1")
    async with working(mesh, "w1") as consumer:
        await suspended(mesh, "work", "1")
        await at_rest(consumer)
        tasks = mesh.store.driver.collection(mesh.store.tasks)
        past = mesh.clock.now() - timedelta(days=1)
        await tasks.update_one({"key": "1"}, {"$set": {"task_state.expire_time": past}})
        assert (await handle.task()).status is Status.INIT
        assert await handle.result(60) == "done"
    assert runs == ["run", "run"]


async def test_d18_a_full_mailbox_is_the_sender_s_error_and_not_the_task_s_end(mesh: TaskMesh) -> None:
    """Temporal#4137: too many signals made the history impossible to close."""

    @mesh.task
    async def work() -> int:
        task = current_task()
        await task.step("large", lambda: "x" * 500_000)
        await task.wait_for("start")
        return len([await task.wait_for("part") for _ in range(9)])

    handle = await work.publish("1")
    for _ in range(9):
        await handle.signal("part", "x" * 100_000)
    with pytest.raises(TooManySignals, match="1,000,000 bytes"):
        await handle.signal("part", "x" * 100_000)
    with pytest.raises(TooManySignals, match="has 1000124 bytes"):
        await handle.signal("part", "x" * 1_000_001)
    async with working(mesh, "w1"):
        await suspended(mesh, "work", "1")
        await handle.signal("start")
        assert await handle.result(60) == 9


async def test_d19_a_signal_is_known_by_its_id_wherever_it_is(mesh: TaskMesh) -> None:
    """Temporal#1558 #4028: a repeated one was refused, or counted twice."""

    @mesh.task
    async def work() -> list[Any]:
        task = current_task()
        return [await task.wait_for("go"), await task.wait_for("end")]

    handle = await work.publish("1")
    for _ in range(2):
        await handle.signal("go", 1, signal_id="a")
    async with working(mesh, "w1"):
        await suspended(mesh, "work", "1")
        await handle.signal("go", 1, signal_id="a")
        await handle.signal("end", 2, signal_id="b")
        assert await handle.result(60) == [1, 2]
        await handle.signal("go", 1, signal_id="a")
        with pytest.raises(TaskFinished):
            await handle.signal("go", 1, signal_id="c")
        await mesh.retry("work", "1")
        await handle.signal("go", 1, signal_id="a")
        assert await handle.result(60) == [1, 2]
    assert (await handle.task()).task_state.signals == []


async def test_d24_what_is_waited_for_is_only_ever_the_present_wait(mesh: TaskMesh) -> None:
    """trigger.dev#1930: leftover information of the last wait blocked the next one."""

    @mesh.task
    async def work() -> str:
        task = current_task()
        await task.wait_for("first")
        await task.sleep("second", hours=1)
        await task.wait_for("third")
        return "done"

    handle = await work.publish("1")
    async with working(mesh, "w1") as consumer:

        async def waits_for(kind: str, name: str) -> None:
            async def so() -> bool:
                found = (await handle.task()).task_state.suspended_for
                return found is not None and (found.kind, found.name) == (kind, name)

            await eventually(so, what=f"it waits for {kind} {name}")
            await at_rest(consumer)

        await waits_for("wait", "first")
        await handle.signal("first")
        await waits_for("sleep", "second")
        await handle.signal("third")
        assert (await handle.task()).task_state.suspended_for is not None, "a signal ends no sleep"
        await due_now(mesh, "1")
        assert await handle.result(60) == "done"


async def test_signals_that_reach_nobody_are_refused_with_the_reason(mesh: TaskMesh) -> None:
    with pytest.raises(TaskNotFound):
        await mesh.signal("work", "nobody", "x")

    @mesh.task
    async def work() -> None: ...

    handle = await work.publish("1")
    with pytest.raises(UnstorableValue, match="payload=None"):
        await handle.signal("x", None)
    with pytest.raises(UnstorableValue, match="payload of signal 'x'"):
        await handle.signal("x", object())
    with pytest.raises(InvalidName):
        await handle.signal("")
    with pytest.raises(InvalidOption):
        await handle.signal("x", signal_id="")
    await handle.cancel()
    with pytest.raises(TaskFinished, match="CANCELLED"):
        await handle.signal("x")


async def test_bad_times_are_refused_by_value(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def work() -> list[str]:
        task = current_task()
        found = []
        tries: list[Callable[[], Awaitable[Any]]] = [
            lambda: task.sleep("a"),
            lambda: task.sleep("a", hours=-1),
            lambda: task.sleep("a", fortnights=1),
            lambda: task.sleep_until("a", "tomorrow"),  # type: ignore[arg-type]  # that is what is tried
            lambda: task.wait_for("a", timeout_ms=-1),
            lambda: task.wait_for("a", timeout_ms=1.5),  # type: ignore[arg-type]  # that is what is tried
        ]
        for attempt in tries:
            try:
                await attempt()
            except InvalidOption as error:
                found.append(str(error))
        return found

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        found = await handle.result(60)
    assert len(found) == 6
    assert "hours=24" in found[0]


async def test_a_cancelled_task_that_was_put_aside_is_not_run_again(mesh: TaskMesh) -> None:
    runs: list[str] = []

    @mesh.task
    async def work() -> None:
        runs.append("run")
        try:
            await current_task().wait_for("never")
        finally:
            runs.append("finally")

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        await suspended(mesh, "work", "1")
        assert (await handle.cancel()).status is Status.CANCELLED
    assert runs == ["run", "finally"]


async def test_plain_handlers_wait_with_the_same_names(mesh: TaskMesh) -> None:
    @mesh.task(option=AGAIN)
    def work() -> Any:
        task = current_blocking_task()
        task.sleep("a moment", milliseconds=10)
        task.step("a", lambda: 1)
        return task.wait_for("go")

    handle = await work.publish("1")
    async with working(mesh, "w1") as consumer:
        await suspended(mesh, "work", "1")
        await at_rest(consumer)
        await handle.signal("go", "now")
        assert await handle.result(60) == "now"
    assert [step.kind for step in (await handle.task()).steps] == ["sleep", "step", "wait"]


async def test_the_events_tell_of_records_suspensions_and_signals(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> None:
        task = current_task()
        await task.step("a", lambda: 1)
        await task.wait_for("go")

    async with mesh.events("work") as events, working(mesh, "w1"):
        handle = await work.publish("1")
        kinds = []
        async for event in events:
            kinds.append(event.kind)
            if event.kind == "suspended":
                await handle.signal("go")
            if event.kind == "finished":
                break
    assert kinds == [
        *("published", "claimed", "step_recorded", "suspended"),
        *("signalled", "step_recorded", "claimed", "succeeded", "finished"),
    ]


async def test_a_task_that_failed_says_why_though_it_had_waited(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> None:
        raise TaskFailed(await current_task().wait_for("reason"))

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        await suspended(mesh, "work", "1")
        await handle.signal("reason", "no stock")
        with pytest.raises(TaskError, match="no stock"):
            await handle.result(60)


async def test_nothing_that_a_worker_does_looks_at_tasks_that_are_put_aside(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that they cost the others nothing, however many they are."""
    monkeypatch.setattr(
        unserved, "_FIRST_LOOK_S", 600.0
    )  # who warns of names that nobody runs looks at all, once a minute

    @mesh.task
    async def sleeper() -> None:
        await current_task().sleep("night", hours=8)

    @mesh.task
    async def waiter() -> None:
        await current_task().wait_for("go")

    @mesh.task
    async def job() -> None: ...

    database, tasks = mesh.store.driver.database, mesh.store.driver.collection(mesh.store.tasks)
    many = 500
    async with working(mesh, "w1") as consumer:
        for definition in (sleeper, waiter):
            await definition.publish("first")
            await suspended(mesh, definition.name, "first")
            first = f"{definition.name}:first"
            stored = await tasks.find_one({"_id": first})
            await tasks.insert_many([stored | {"_id": f"{first}-{n}", "key": f"first-{n}"} for n in range(many)])
        await at_rest(consumer)
        scanner = parts_of(consumer).scanner
        await database.command({"profile": 2})
        try:
            before = scanner.scans
            for n in range(5):
                await (await job.publish(str(n))).result(60)
            await eventually(lambda: scanner.scans > before + 2, what="it has looked for work")
        finally:
            await database.command({"profile": 0})
        of_tasks = {"ns": f"{database.name}.{mesh.store.tasks}"}
        done = await database["system.profile"].find(of_tasks).to_list(None)
    looked_at = [(each.get("keysExamined", 0) + each.get("docsExamined", 0), each["command"]) for each in done]
    assert len(looked_at) > 10
    assert [command for count, command in looked_at if count > many / 10] == []


@pytest.mark.parametrize("what", ["sleep", "wait", "join"])
async def test_d25_a_suspension_that_comes_too_late_changes_nothing(mesh: TaskMesh, what: str) -> None:
    """Hatchet#4969, burr#786: the update that should put a task aside matched nothing, and was taken for done."""
    tasks = mesh.store.driver.collection(mesh.store.tasks)
    runs: list[int] = []

    @mesh.task
    async def child() -> None: ...

    async def taken_over() -> None:
        """The lease is over, and somebody has given the task back: the execution does not know of it yet."""
        given_back = {"task_state.worker_states": [], "status": "INIT", "next_claim_time": mesh.clock.now()}
        await tasks.update_one({"_id": "work:1"}, {"$set": given_back})

    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=0))
    async def work() -> str:
        task = current_task()
        runs.append(task.attempt)
        if len(runs) == 2:
            return "by another"
        try:
            if what == "join":
                await task.results([await task.start(child, "c")])
            elif what == "sleep":
                await task.sleep("night", hours=8)
            else:
                await task.wait_for("go")
        finally:
            await taken_over()  # between its being told to unwind, and the update that puts it aside
        return "never"

    handle = await work.publish("1")
    async with working(mesh, "w1", names=["work"]):
        assert await handle.result(60) == "by another"
    state = (await handle.task()).task_state
    assert (len(runs), state.suspended_for, state.waits_for, state.lost_cnt) == (2, None, None, 0)
    stored = await tasks.find_one({"_id": "work:1"})
    assert stored["task_state"].get("suspended_until") is None, "who had lost it put it aside"
