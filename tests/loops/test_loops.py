"""Loops run again and again without being published: when, where, whatever their rounds do, and beside all other work."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from taskmesh import (
    InvalidOption,
    Snooze,
    Status,
    TaskFailed,
    TaskMesh,
    TaskOption,
    current_blocking_task,
    current_task,
)
from taskmesh.consumer.candidates.partitions import LAST_PLACE_TO_WAIT
from taskmesh.consumer.loops import Loops
from taskmesh.consumer.subprocess import processes  # noqa: F401 — imported here, so that no event loop has to read files
from taskmesh.model.task import Rounds
from tests.loops import handlers
from tests.waiting import eventually
from tests.working import all_working, finished, lanes_of, parts_of, seen_by_others, status_is, working

QUICK = TaskOption(unexpected_retry_delay_ms=20)


async def test_a_loop_runs_again_after_each_end_however_that_came(
    mesh: TaskMesh, caplog: pytest.LogCaptureFixture
) -> None:
    starts: list[float] = []

    @mesh.loop(interval_ms=100, option=QUICK.changed(max_unexpected_retries=0, max_timeouts=0))
    async def sweep() -> object:
        starts.append(time.monotonic())
        if len(starts) == 2:
            raise ValueError("the second")
        if len(starts) == 3:
            raise TaskFailed("the third")
        return object()  # which nobody could store

    @mesh.loop(interval_ms=3_600_000, option=QUICK)
    def hourly() -> None:
        if current_blocking_task().attempt < 3:
            raise ValueError("not yet")

    async with working(mesh, "w1"):
        await eventually(lambda: len(starts) >= 6)
        task = await mesh.get("sweep", "fleet")
        assert not task.status.finished
        assert task.loop is not None
        assert task.loop.sentence == "again 100 ms after its last end, once in the fleet"
        fails = [entry for entry in task.task_state.worker_states if entry.state == "FAIL"]
        assert [(entry.fail_reason or "").partition("\n")[0] for entry in fails] == [
            "ValueError: the second",
            "the third",
        ]
        assert task.task_state.rounds is not None
        assert task.task_state.rounds.cnt >= 3

        async def rests() -> bool:
            task = await mesh.get("hourly", "fleet")
            return task.task_state.rounds is not None and task.standing == "scheduled"

        # A failure is tried again after its retry delay, sooner than the interval.
        await eventually(rests)
        assert caplog.text.count("failed and will run again") == 4

        async def both_reported() -> bool:
            return {"sweep", "hourly"} == {group.name for group in (await mesh.inspect.errors()).groups}

        # The report reads one status after another, and `sweep` has another one every 100 ms.
        await eventually(both_reported)
        assert (await mesh.stats()).oldest_claimable_ms is None
        # Who wants it now can have it.
        before = (await mesh.get("hourly", "fleet")).task_state.rounds
        await mesh.retry("hourly", "fleet")
        await eventually(lambda: _has_other_rounds(mesh, before))
    gaps = [after - before for before, after in pairwise(starts)]
    assert all(gap >= 0.095 for gap in (gaps[0], *gaps[3:])), "after what ended well"


async def _has_other_rounds(mesh: TaskMesh, before: Rounds | None) -> bool:
    return (await mesh.get("hourly", "fleet")).task_state.rounds != before


async def test_a_singleton_is_started_again_after_it_returns_or_raises(mesh: TaskMesh) -> None:
    starts: list[str] = []

    @mesh.singleton(option=QUICK)
    async def leader() -> None:
        starts.append(current_task().worker_id)
        if len(starts) == 2:
            raise RuntimeError("down")
        if len(starts) >= 4:
            await asyncio.sleep(3_600)

    async with all_working(mesh, ["w1", "w2"]):
        await eventually(lambda: len(starts) == 4)
        task = await status_is(mesh, "leader", "fleet", Status.RUNNING)
        assert [entry.state for entry in task.task_state.worker_states] == ["FAIL", "RUNNING"]
        # Told to stop for good, it stays so, until somebody wants it again.
        await mesh.cancel("leader", "fleet")
        await status_is(mesh, "leader", "fleet", Status.CANCELLED)
        assert (await mesh.get("leader", "fleet")).delete_time is None
        await mesh.retry("leader", "fleet")
        await eventually(lambda: len(starts) == 5)
        # Deleted, it is there again: its code declares it.
        await mesh.delete("leader", "fleet")
        await eventually(lambda: len(starts) == 6)


async def test_a_loop_runs_in_each_worker_or_on_each_host(mesh: TaskMesh) -> None:
    ran: Counter[tuple[str, str]] = Counter()

    @mesh.loop(interval_ms=50, per="worker")
    async def in_each() -> None:
        ran["worker", current_task().worker_id] += 1

    @mesh.loop(interval_ms=50, per="host")
    async def on_each() -> None:
        ran["host", current_task().key] += 1

    @mesh.loop(interval_ms=50, needs={"gpu": True})
    async def on_a_gpu() -> None:
        ran["gpu", current_task().worker_id] += 1

    async with (
        working(mesh, "w1", labels={"host": "h1"}),
        working(mesh, "w2", labels={"host": "h2"}),
        working(mesh, "w3", labels={"host": "h2", "gpu": True}) as third,
    ):
        wanted = {("worker", "w1"), ("worker", "w2"), ("worker", "w3"), ("host", "h1"), ("host", "h2"), ("gpu", "w3")}
        await eventually(lambda: ran.keys() == wanted and min(ran.values()) >= 3)
        assert {(task.name, task.key) async for task in mesh.find()} == {
            *(("in_each", key) for key in ("w1", "w2", "w3")),
            *(("on_each", key) for key in ("h1", "h2")),
            ("on_a_gpu", "fleet"),
        }
        # As of a worker and a host that went without a word, of which the registry knows nothing any more.
        tasks = mesh.store.driver.collection(mesh.store.tasks)
        for name, old, gone in (("in_each", "w1", "w0"), ("on_each", "h1", "h0")):
            document = await tasks.find_one({"_id": f"{name}:{old}"})
            own: dict[str, Any] = {"_id": f"{name}:{gone}", "key": gone, "status": "INIT", "needs": ['host="h0"']}
            own["task_state"] = {**document["task_state"], "worker_states": []}
            await tasks.insert_one({**document, **own})
        await parts_of(third).loops._forget_those_of_others_gone()
        left = {task.key async for task in mesh.find(limit=0)}
        assert not {"w0", "h0"} & left
        assert {"w1", "h1"} <= left
    # Who stops takes what is its own with it; what is of the host stays.
    assert {task.key async for task in mesh.find()} == {"h1", "h2", "fleet"}


async def test_in_a_large_fleet_the_first_workers_for_a_loop_look_after_it(mesh: TaskMesh) -> None:
    @mesh.loop(interval_ms=60_000)
    async def rounds() -> None:
        """Do nothing."""

    ids = [f"w{n}" for n in range(20)]
    async with working(mesh, "w") as consumer:
        worker, settings = parts_of(consumer), consumer._settings
        await eventually(
            lambda: worker.executions.started >= 1 and not worker.executions, what="the next round is waited for"
        )
        for each in ids:
            lanes = lanes_of(each, [seen_by_others(other, ["rounds"]) for other in ids], ["rounds"])
            looks = Loops(
                mesh.store, settings, mesh.clock, mesh.definitions, worker.candidates, worker.executions, lanes
            )
            seldom = lanes.place("rounds:fleet", "default") > LAST_PLACE_TO_WAIT
            assert await looks.run_once() == pytest.approx(5.0 if seldom else 1.0, rel=0.11)


async def test_loops_run_beside_a_full_worker_and_hold_no_slot(mesh: TaskMesh) -> None:
    rounds: list[int] = []
    let_go = asyncio.Event()

    @mesh.task
    async def busy() -> None:
        await let_go.wait()

    @mesh.singleton
    async def leader() -> None:
        rounds.append(0)
        await asyncio.sleep(3_600)

    @mesh.loop(interval_ms=20)
    async def sweep() -> None:
        rounds.append(1)

    await busy.publish_many({f"k{number}": {} for number in range(3)})
    async with working(mesh, "w1", concurrency=1) as consumer:
        await eventually(lambda: "k" in "".join(consumer.running) and 0 in rounds and rounds.count(1) > 3)
        [running] = [task async for task in mesh.find("busy", status="RUNNING")]
        let_go.set()
        for number in range(3):
            await finished(mesh, "busy", f"k{number}")
        assert running.status is Status.RUNNING


async def test_until_idle_leaves_loops_to_others(mesh: TaskMesh) -> None:
    ran: list[str] = []

    @mesh.singleton
    def leader() -> None:
        ran.append("leader")
        while not current_blocking_task().cancelled:
            time.sleep(0.01)

    @mesh.loop(interval_ms=1)
    async def sweep() -> None:
        ran.append("sweep")

    @mesh.task
    async def work() -> None:
        ran.append("work")

    async with working(mesh, "w1", names=["leader", "sweep"]):
        await eventually(lambda: {"leader", "sweep"} <= set(ran))
        await work.publish("k")
        await asyncio.wait_for(mesh.consumer(worker_id="w2").run(until_idle=True), 30)
        assert "work" in ran
        assert (await mesh.get("leader", "fleet")).status is Status.RUNNING


async def test_what_a_round_records_and_publishes_is_its_own(mesh: TaskMesh) -> None:
    seen: list[tuple[int, Any]] = []

    @mesh.task
    async def note(n: int) -> int:
        return n

    @mesh.loop(interval_ms=20, option=QUICK)
    async def sweep() -> None:
        task = current_task()
        number = await task.step("number", lambda: len(seen))
        seen.append((len(seen), number))
        await task.publish(note, f"n{number}", n=number)
        if len(seen) % 3 == 2:
            raise ValueError("so this round goes on where it was")

    @mesh.loop(interval_ms=20)
    async def together() -> None:
        async with current_task().transaction() as session:
            await mesh.store.driver.collection("kept").insert_one({"at": time.monotonic()}, session=session)

    async with working(mesh, "w1"):
        # The next round has begun, so what the sixth published is there.
        await eventually(lambda: len(seen) >= 7)
        for number in (0, 1, 3, 4):
            assert (await finished(mesh, "note", f"n{number}")).successes[0].returns == number
        kept = mesh.store.driver.collection("kept")

        async def kept_some() -> bool:
            return bool(await kept.count_documents({}) >= 2)

        await eventually(kept_some)
    # The second round fails, and is resumed by the third execution: what it had recorded is there.
    assert [number for _, number in seen[:5]] == [0, 1, 1, 3, 4]
    assert await mesh.listing.count("name:note key:n2") == 0


async def test_a_loop_follows_what_its_code_declares_now(mesh: TaskMesh, mongo_uri: str, database: str) -> None:
    ran: list[str] = []

    def declare(mesh: TaskMesh, **settings: Any) -> None:
        async def sweep() -> None:
            ran.append(current_task().worker_id)

        mesh.loop(sweep, interval_ms=20, **settings)

    declare(mesh)
    async with working(mesh, "old"):
        await eventually(lambda: "old" in ran)
    async with TaskMesh(mongo_uri, database=database) as newer:
        declare(newer, queue="slow", option=TaskOption(priority=5), needs={"disk": "large"})
        async with working(newer, "new", labels={"disk": "large"}):
            await eventually(lambda: "new" in ran)
            task = await newer.get("sweep", "fleet")
            assert (task.queue, task.task_option.priority, task.needs) == ("slow", 5, {"disk": "large"})
    # One that no code declares any more waits, and doctor tells how to be rid of it.
    async with TaskMesh(mongo_uri, database=database) as without:

        @without.task
        async def other() -> None: ...

        async with working(without, "w3"):
            assert (await without.get("sweep", "fleet")).status is Status.INIT
            assert (await without.stats()).oldest_claimable_ms is None
            [found] = [each for each in await without.inspect.doctor() if each.subject == "loops"]
            assert "'sweep' is a loop or a singleton that no live worker declares" in found.found
            assert found.remedy is not None
            assert "taskmesh delete" in found.remedy
            with pytest.raises(InvalidOption, match="is a loop or a singleton"):
                await without.publish("sweep", "x")


async def test_an_interval_that_is_declared_anew_counts_from_the_last_end(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    ran: list[str] = []

    def declare(mesh: TaskMesh, interval_ms: int) -> None:
        async def sweep() -> None:
            ran.append(current_task().worker_id)

        async def asks() -> None:
            raise Snooze(delay_ms=7_200_000)

        mesh.loop(sweep, interval_ms=interval_ms)
        mesh.loop(asks, interval_ms=interval_ms)

    async def state(name: str) -> tuple[timedelta | None, datetime | None]:
        """How long after its last end it runs again, and when."""
        told = (await mesh.get(name, "fleet")).task_state
        until = told.resume_time
        return (None if told.rounds is None or until is None else until - told.rounds.end_time), until

    async def rests(hours: int) -> bool:
        return (await state("sweep"))[0] == timedelta(hours=hours)

    async def asked() -> datetime | None:
        return (await state("asks"))[1]

    declare(mesh, 3_600_000)
    async with working(mesh, "old"):
        await eventually(lambda: ran)
        await eventually(lambda: rests(1))
        until = await eventually(asked)
    async with TaskMesh(mongo_uri, database=database) as newer:
        declare(newer, 7_200_000)
        async with working(newer, "later"):
            await eventually(lambda: rests(2))
            assert ran == ["old"]
    async with TaskMesh(mongo_uri, database=database) as newest:
        declare(newest, 20)
        async with working(newest, "sooner"):
            await eventually(lambda: "sooner" in ran)
            assert await asked() == until, "what it asked for itself stays"


@pytest.mark.lasting
async def test_a_singleton_in_a_child_process_ends_with_its_worker(mesh: TaskMesh) -> None:
    mesh.singleton(handlers.in_a_child, run="process", option=handlers.LONG_LEASE)
    async with all_working(mesh, ["w1", "w2"]) as consumers:
        task = await status_is(mesh, "in_a_child", "fleet", Status.RUNNING)
        first = task.task_state.worker_states[0].worker_id
        await next(consumer for consumer in consumers if consumer.worker_id == first).stop()

        async def moved() -> bool:
            task = await mesh.get("in_a_child", "fleet")
            return [entry.worker_id for entry in task.task_state.worker_states] == [{"w1": "w2", "w2": "w1"}[first]]

        await eventually(moved)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"interval_ms": 0}, "interval_ms must be a whole number from 1"),
        ({"interval_ms": True}, "got True"),
        ({"interval_ms": 1.5}, "got 1.5"),
        ({"interval_ms": 100, "per": "planet"}, "per must be 'fleet', 'worker' or 'host', got 'planet'"),
        ({"interval_ms": 100, "cron": "* * * * *"}, "mesh.loop got cron='\\* \\* \\* \\* \\*'; it takes: name"),
        ({"interval_ms": 100, "option": TaskOption(concurrent_worker_cnt=2)}, "concurrent_worker_cnt must be 1"),
        ({"interval_ms": 100, "name": "taken"}, "a task 'taken' is defined already: give one of them another name"),
    ],
    ids=str,
)
def test_what_a_loop_cannot_be_is_refused(settings: Any, problem: str) -> None:
    mesh = TaskMesh()
    mesh.singleton(lambda: None, name="taken")
    with pytest.raises(InvalidOption, match=problem):
        mesh.loop(lambda: None, **{"name": "sweep", **settings})
    assert list(mesh.definitions) == ["taken"]


async def test_a_second_task_of_a_loop_is_refused_by_whoever_claims_it(mesh: TaskMesh) -> None:
    """As of a publisher that does not know what the name is."""
    ran: list[str] = []

    @mesh.singleton
    async def leader() -> None:
        ran.append(current_task().key)
        await asyncio.sleep(3_600)

    async with TaskMesh(mesh.connection.client, database=mesh.connection.database) as ignorant:
        await ignorant.publish("leader", "second")
    async with working(mesh, "w1"):
        task = await finished(mesh, "leader", "second")
        assert task.status is Status.FAIL
        assert "is a loop or a singleton" in task.fail_reasons[0]
        await eventually(lambda: ran == ["fleet"])


async def test_a_loop_is_never_published_and_takes_no_params(mesh: TaskMesh) -> None:
    with pytest.raises(InvalidOption, match="is run without params"):

        @mesh.loop(interval_ms=100)
        async def needy(n: int) -> None: ...

    @mesh.singleton(name="leader")
    async def elected(n: int = 1) -> None: ...

    for publishing in (
        lambda: elected.publish("k"),
        lambda: elected.publish_many({"k": {}}),
        lambda: mesh.publish("leader", "k"),
        lambda: _declared(mesh),
        lambda: _in_a_flow(mesh, elected),
    ):
        with pytest.raises(InvalidOption, match="'leader' is a loop or a singleton"):
            await publishing()
    assert [task async for task in mesh.find()] == []


async def _declared(mesh: TaskMesh) -> None:
    await mesh.every("leader", interval_ms=1_000)


async def _in_a_flow(mesh: TaskMesh, definition: Any) -> None:
    async with mesh.flow("f") as flow:
        flow.add(definition, "k")
