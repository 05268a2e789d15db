"""Lanes divide a backlog among workers, and nobody's death or business makes a task wait for the end of it."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest
from pymongo import MongoClient

from taskmesh import Status, Task, TaskMesh, TaskOption, current_task
from taskmesh.consumer import scanner
from taskmesh.store import registry
from taskmesh.store.claim import claim
from tests.waiting import eventually
from tests.working import all_working, lanes_of, parts_of, seen_by_others, working

SHORT_LEASE = TaskOption(worker_timeout_ms=1_500, ping_interval_ms=500)
BACKLOG = 3_000


async def a_worker_that_does_nothing(mesh: TaskMesh, worker_id: str) -> None:
    """Register a worker that looks alive for some seconds, and claims nothing more."""
    description = {"state": "running", "names": ["step"], "queues": None, "host": "elsewhere", "pid": 1, "version": "0"}
    await registry.register(mesh.store, worker_id, "instance", {**description, "concurrency": 1, "running": 1})


def keys_in_lanes_of(worker_id: str, other: str) -> list[str]:
    lanes = lanes_of(worker_id, [seen_by_others(other, ["step"])], ["step"])
    return [key for key in map(str, range(BACKLOG)) if lanes.place(f"step:{key}", "default") == 0]


async def test_a_lost_task_is_taken_over_in_time_though_a_backlog_waits(mesh: TaskMesh) -> None:
    @mesh.task(option=SHORT_LEASE)
    async def step() -> None:
        await asyncio.sleep(0.02)

    await a_worker_that_does_nothing(mesh, "dead")
    lost = keys_in_lanes_of("dead", "alive")[0]
    await step.publish(lost)
    assert await claim(mesh.store, [f"step:{lost}"], "dead", "a-lost-execution") == 1
    lease_end = (await mesh.get("step", lost)).task_state.worker_states[0].ping_expire_time
    await step.publish_many({str(i): {} for i in range(BACKLOG) if str(i) != lost})
    async with working(mesh, "alive", concurrency=4):
        task = await eventually(lambda: successful(mesh, lost), what="the lost task has its SUCCESS")
        waiting = [task async for task in mesh.find(status="INIT", limit=1)]
    assert waiting, "the backlog was worked off before: the test proves nothing"
    start_time = task.task_state.worker_states[0].start_time
    assert lease_end is not None
    assert start_time is not None
    assert lease_end <= start_time
    meanwhile = {"task_state.worker_states.start_time": {"$gt": lease_end, "$lt": start_time}}
    # Counted in others that went before: 200 of them begin in a second at most, and fewer on a busy machine.
    assert await mesh.store.driver.collection("tasks").count_documents(meanwhile) < 500


async def test_a_task_in_the_lane_of_a_busy_worker_does_not_wait_for_the_end_of_the_backlog(mesh: TaskMesh) -> None:
    @mesh.task(option=SHORT_LEASE)
    async def step() -> None:
        await asyncio.sleep(0.02)

    await a_worker_that_does_nothing(mesh, "busy")
    urgent = keys_in_lanes_of("busy", "alive")[0]
    await step.configure(priority=9).publish(urgent)
    await step.publish_many({str(i): {} for i in range(BACKLOG) if str(i) != urgent})
    async with working(mesh, "alive", concurrency=2):
        await eventually(lambda: successful(mesh, urgent), what="the urgent task has its SUCCESS")
        waiting = [task async for task in mesh.find(status="INIT", limit=1)]
    assert waiting, "the backlog was worked off before: the test proves nothing"


async def test_a_task_in_the_lane_of_full_workers_is_soon_taken_by_one_that_is_not(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first two workers in a lane try what they hear of."""
    go_on = asyncio.Event()

    @mesh.task
    async def step(holds: bool = False) -> str:
        if holds:
            await go_on.wait()
        return current_task().worker_id

    async with all_working(mesh, ["full1", "full2", "free"], concurrency=1) as consumers:
        for worker_id in ("full1", "full2"):
            await step.configure(specific_worker_ids=[worker_id]).publish(worker_id, holds=True)
        free = parts_of(consumers[2])
        await eventually(lambda: len(free.partitions._full) == 2, what="it knows that both are full")
        monkeypatch.setattr(scanner, "SCAN_EVERY_S", 3_600.0)
        scans = free.scanner.scans
        await eventually(lambda: free.scanner.scans >= scans + 3, what="it looks more often than others do")
        keys = (str(n) for n in range(1_000))
        third = next(key for key in keys if free.partitions.place_to_hear(f"step:{key}", "default") == 2)
        assert await (await step.publish(third)).result(60) == "free"
        go_on.set()


async def test_who_is_second_in_a_lane_looks_seldom_while_nobody_is_neglected(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    go_on = asyncio.Event()

    @mesh.task
    async def step(holds: bool = False) -> str:
        if holds:
            await go_on.wait()
        return current_task().worker_id

    async with all_working(mesh, ["w1", "w2"], concurrency=1) as consumers:
        first, second = map(parts_of, consumers)
        await eventually(
            lambda: first.partitions.others_cnt == second.partitions.others_cnt == 1, what="they know each other"
        )
        with MongoClient[dict[str, Any]](mongo_uri) as client:
            documents = client[database]
            documents.create_collection("system.profile", capped=True, size=64_000_000)
            documents.command("profile", 2)
            began = time.monotonic()
            for n in range(150):
                await (await step.publish(f"{n}")).result(60)
            took_s = time.monotonic() - began
            documents.command("profile", 0)
            filters = [each["command"].get("filter", {}) for each in documents["system.profile"].find({"op": "query"})]
        looks = len([each for each in filters if each.keys() == {"_id", "next_claim_time"}])
        assert looks <= 2 * took_s / 0.12 + 10, f"{looks} in {took_s:.1f} s"

        # On a busy machine a task may be neglected for a moment, too; so one by one, until none has been for a while.
        more = itertools.count(150)

        async def both_look_seldom() -> bool:
            await (await step.publish(f"{next(more)}")).result(60)
            return first.backup_claims._together_s == second.backup_claims._together_s == 0.2

        await eventually(both_look_seldom)
        await step.configure(specific_worker_ids=["w1"]).publish("w1", holds=True)
        await eventually(lambda: not first.executions.free_slots, what="w1 is full")
        keys = (f"neglected{n}" for n in itertools.count())
        of_first = (key for key in keys if first.partitions.place_to_hear(f"step:{key}", "default") == 0)

        async def second_looks_soon() -> bool:
            """A scan may have taken it before the look."""
            assert await (await step.publish(next(of_first))).result(60) == "w2"
            return second.backup_claims._together_s < 0.2

        await eventually(second_looks_soon)
        go_on.set()


async def successful(mesh: TaskMesh, key: str) -> Task | None:
    task = await mesh.get("step", key)
    return task if task.status is Status.SUCCESS else None
