"""Ten thousand children, or parts of a flow, and one that comes after all of them, while workers are killed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from taskmesh import TaskMesh
from tests.durable.handlers import Handlers, define
from tests.processes.fleet import Fleet, Worker
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
_SIZE = 10_000
_SETTING: dict[str, Any] = {"handlers": "tests.durable.handlers", "concurrency": 200}


async def _kill_now_and_then(fleet: Fleet, living: list[Worker], times: int) -> None:
    """Kill one of two workers at a random moment, again and again, and start another in its place."""
    chance = random.Random(3)
    for _ in range(times):
        await asyncio.to_thread(
            wait_until, lambda: all("ready" in worker.told for worker in living), what="both are at work"
        )
        await asyncio.sleep(3 * chance.random())  # the moment of a kill is what the test is about
        victim = living.pop(0)
        victim.kill()
        living.append(fleet.start(victim.worker_id, **_SETTING))


async def test_a_parent_of_ten_thousand_children_joins_them_once_whoever_is_killed(
    mesh: TaskMesh, fleet: Fleet
) -> None:
    handlers: Handlers = define(mesh)
    handle = await handlers.crowd.publish("c", size=_SIZE)
    living = [fleet.start(**_SETTING) for _ in range(2)]
    await _kill_now_and_then(fleet, living, 5)
    assert await handle.result(200) == sum(range(_SIZE))
    assert await mesh.listing.count("name:child status:SUCCESS") == _SIZE
    task = await handle.task()
    assert [step.kind for step in task.steps] == ["start"] * _SIZE + ["join"]
    joined = [mark for mark in fleet.history if mark.what == "joined"]
    assert len(joined) <= 1 + task.task_state.lost_cnt, "it is joined once, and again only if its worker was killed"


async def test_what_comes_after_ten_thousand_parts_of_a_flow_runs_once_after_all_of_them(
    mesh: TaskMesh, fleet: Fleet
) -> None:
    handlers: Handlers = define(mesh)
    living = [fleet.start(**_SETTING) for _ in range(2)]
    killing = asyncio.create_task(_kill_now_and_then(fleet, living, 4))
    async with mesh.flow("crowd") as flow:
        parts = [flow.add(handlers.child, f"p{n}", n=n) for n in range(_SIZE)]
        merge = flow.add(handlers.merge, "m", after=parts)
    await killing
    assert await merge.result(200) == sum(range(_SIZE))
    task = await merge.task()
    merged = [mark for mark in fleet.history if mark.what == "merged"]
    assert len(merged) <= 1 + task.task_state.lost_cnt
    [entry] = task.task_state.worker_states
    tasks = mesh.store.driver.collection(mesh.store.tasks)
    last = await tasks.find({"name": "child"}, {"finish_time": 1}).sort([("finish_time", -1)]).limit(1).to_list(1)
    assert entry.start_time is not None
    assert last[0]["finish_time"] <= entry.start_time
