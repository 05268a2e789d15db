"""Killed at any moment: what was recorded is never done again, and nothing that was waited for is lost."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from taskmesh import TaskMesh, current_task
from tests.durable.handlers import STEPS, define
from tests.durable.test_suspension import suspended
from tests.faults import failing_commands
from tests.processes.fleet import Fleet
from tests.processes.history import read_history
from tests.waiting import eventually, wait_until
from tests.working import working


@pytest.mark.slow
async def test_recorded_steps_never_run_again_whoever_is_killed(mesh: TaskMesh, fleet: Fleet) -> None:
    """Kill -9 at random moments: between a step's function and its record it may run again, after that never."""
    handlers = define(mesh)
    keys = [f"k{n}" for n in range(40)]
    handles = await handlers.journey.publish_many({key: {} for key in keys})
    chance = random.Random(14)
    living = [fleet.start(handlers="tests.durable.handlers", concurrency=10) for _ in range(2)]
    for n in range(12):
        wait_until(lambda: all("ready" in worker.told for worker in living), what="both are at work")
        await asyncio.sleep(0.3 * chance.random())  # the moment of a kill is what the test is about
        victim = living.pop(0)
        victim.kill()
        living.append(fleet.start(victim.worker_id, handlers="tests.durable.handlers", concurrency=10))
        for handle in handles[4 * n : 4 * n + 4]:
            await handle.signal("go on", n, signal_id=handle.key)
    for handle in handles:
        await handle.signal("go on", -1, signal_id=handle.key)  # known by its id: nothing comes twice
        found = await handle.result(90)
        assert [value for place, value in enumerate(found) if place != 2] == list(range(STEPS))
    got: dict[tuple[str, Any], float] = {}
    marks = sorted(read_history(fleet.history_directory), key=lambda mark: mark.mono)
    for mark in marks:
        if mark.what == "got":
            got.setdefault((mark.key, mark.more["step"]), mark.mono)
    again = [mark for mark in marks if mark.what == "did" and mark.mono > got.get((mark.key, mark.more["step"]), 1e18)]
    assert not again
    assert len(got) == len(keys) * STEPS
    for handle in handles:
        names = [step.name for step in (await handle.task()).steps]
        assert sorted(names) == sorted(["nap", "go on", *(f"leg-{n}" for n in range(STEPS))])


async def test_d8_a_zombie_records_nothing(mesh: TaskMesh, fleet: Fleet) -> None:
    """tensorzero/durable#68, dbos-transact-ts#1206: a worker suspended in a step, while another took the task over."""
    handlers = define(mesh)
    handle = await handlers.journey.publish("1", slow_on="zombie")
    zombie = fleet.start("zombie", handlers="tests.durable.handlers").wait_ready()
    await eventually(lambda: [m for m in read_history(fleet.history_directory) if m.what == "did"])
    zombie.suspend()
    fleet.start(handlers="tests.durable.handlers").wait_ready()
    await handle.signal("go on", 5)
    value = await handle.result(60)
    before = await mesh.store.driver.collection("tasks").find_one({"_id": "journey:1"})
    zombie.resume()
    await eventually(lambda: "lease" in zombie.log, what="the zombie has noticed")
    assert value == [0, 1, 5, 2, 3]
    assert await mesh.store.driver.collection("tasks").find_one({"_id": "journey:1"}) == before


@pytest.mark.slow
async def test_d20_families_are_complete_whoever_is_killed(mesh: TaskMesh, fleet: Fleet) -> None:
    """Kill -9 around `start` and `results`: no child is missing, none is there twice, and every parent gets its values."""
    handlers = define(mesh)
    handles = await handlers.family.publish_many({f"f{n}": {} for n in range(20)})
    chance = random.Random(20)
    living = [fleet.start(handlers="tests.durable.handlers", concurrency=10) for _ in range(2)]
    for _ in range(8):
        wait_until(lambda: all("ready" in worker.told for worker in living), what="both are at work")
        await asyncio.sleep(0.4 * chance.random())  # the moment of a kill is what the test is about
        victim = living.pop(0)
        victim.kill()
        living.append(fleet.start(victim.worker_id, handlers="tests.durable.handlers", concurrency=10))
    for handle in handles:
        assert await handle.result(90) == 6
        kinds = [step.kind for step in (await handle.task()).steps]
        assert (kinds.count("start"), kinds.count("join")) == (6, 2)
    assert await mesh.listing.count("name:child") == 120


GHOST: dict[str, Any] = {"writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}}
CUT_OFF: dict[str, Any] = {"closeConnection": True}


@pytest.mark.parametrize("fault", [GHOST, CUT_OFF], ids=["writeConcernError", "closeConnection"])
async def test_d9_a_record_whose_answer_was_lost_is_written_once_and_its_step_runs_once(
    mesh: TaskMesh, mongo_uri: str, fault: dict[str, Any]
) -> None:
    """DBOS#740: a retry of the database took two numbers."""
    ran: list[str] = []
    release = asyncio.Event()

    def note(what: str) -> str:
        ran.append(what)
        return what

    @mesh.task
    async def work() -> list[Any]:
        task = current_task()
        ran.append("handler")
        await release.wait()
        first = await task.step("a", note, "a")
        await task.step("a", note, "a#2")
        return [first, await task.wait_for("go")]

    handle = await work.publish("1")
    async with working(mesh, "w1"):
        await eventually(lambda: ran)
        async with failing_commands(mongo_uri, ["update", "findAndModify"], times=4, **fault) as have_failed:
            release.set()
            await have_failed(4)
        await suspended(mesh, "work", "1")
        async with failing_commands(mongo_uri, ["update", "findAndModify"], times=2, **fault):
            await handle.signal("go", 7)
        assert await handle.result(60) == ["a", 7]
    assert ran == ["handler", "a", "a#2", "handler"]
    task = await handle.task()
    assert [step.name for step in task.steps] == ["a", "a#2", "go"]
    assert task.task_state.signals == []
    assert (task.task_state.lost_cnt, task.task_state.timeout_cnt) == (0, 0)
