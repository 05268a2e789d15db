"""What passes costs no lease: whatever fails for a moment, nothing is forgotten until somebody misses it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pymongo.errors import PyMongoError

from taskmesh import Status, TaskMesh, TaskOption, current_task
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import all_working

SEED = 20261128
SOON_S = 45.0
"""Less than a transaction may stay open at the server, if nobody aborts it."""
LEASE_MS = 600_000
"""Much longer than that: what is left to its lease is missed."""
REFUSALS = [8, 24, 50, 112]
"""Codes by which the driver does not take the server for gone: unknown, a lock, a deadline, a conflict."""
COMMANDS = [
    ["update"],
    ["findAndModify"],
    ["find"],
    ["aggregate"],
    ["getMore"],
    ["commitTransaction"],
    ["update", "findAndModify", "insert"],
    ["update", "findAndModify", "insert", "find", "aggregate", "commitTransaction"],
]


def _define(mesh: TaskMesh) -> dict[str, Callable[[int], Awaitable[Any]]]:
    """Define the tasks. Return what publishes one of each kind."""
    option = TaskOption(
        worker_timeout_ms=LEASE_MS, ping_interval_ms=60_000, max_unexpected_retries=1_000, unexpected_retry_delay_ms=20
    )

    @mesh.task(option=option)
    async def plain(n: int) -> int:
        return n

    @mesh.task(option=option)
    async def fails_first(n: int) -> int:
        if current_task().attempt == 1:
            raise ValueError(n)
        return n

    @mesh.task(option=option)
    async def in_steps(n: int) -> int:
        return sum([await current_task().step(f"step {i}", _same, n) for i in range(3)])

    @mesh.task(option=option)
    async def with_children(n: int) -> int:
        children = [await current_task().start(plain, f"child {n}-{i}", n=i) for i in range(2)]
        return sum(await current_task().results(children))

    @mesh.task(option=option)
    async def publishes(n: int) -> None:
        await current_task().publish(plain, f"published {n}", n=n)

    @mesh.task(option=option)
    async def writes(n: int) -> None:
        async with current_task().transaction() as session:
            await mesh.store.driver.database["written"].insert_one({"n": n}, session=session)

    return {
        "plain": lambda n: plain.publish(f"{n}", n=n),
        "fails first": lambda n: fails_first.publish(f"{n}", n=n),
        "in steps": lambda n: in_steps.publish(f"{n}", n=n),
        "with children": lambda n: with_children.publish(f"{n}", n=n),
        "publishes": lambda n: publishes.publish(f"{n}", n=n),
        "writes": lambda n: writes.publish(f"{n}", n=n),
        "in line": lambda n: plain.configure(sequence_key="line").publish(f"in line {n}", n=n),
        "one at a time": lambda n: plain.configure(queue="running").publish(f"one at a time {n}", n=n),
        "in groups": lambda n: plain.configure(queue="groups", group=f"{n % 3}").publish(f"in groups {n}", n=n),
        "at a rate": lambda n: plain.configure(queue="rate").publish(f"at a rate {n}", n=n),
    }


async def _same(n: int) -> int:
    return n


async def _insist(publish: Callable[[int], Awaitable[Any]], n: int) -> None:
    """Publish, and again if that is refused: a publisher's own affair."""
    while True:
        try:
            await publish(n)
        except PyMongoError:
            await asyncio.sleep(0.01)
        else:
            return


def _faults() -> list[dict[str, Any]]:
    """Return all faults, in some order."""
    ways: list[dict[str, Any]] = [{"errorCode": code} for code in REFUSALS] + [{"closeConnection": True}]
    late = {"writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}}
    faults = [{"commands": commands, **way} for commands in COMMANDS for way in ways]
    faults += [{"commands": [command], **late} for command in ("update", "findAndModify", "insert")]
    return random.Random(SEED).sample(faults, len(faults))


@pytest.mark.lasting
async def test_all_that_waits_or_runs_while_something_fails_is_finished_long_before_a_lease_ends(
    mesh: TaskMesh, mongo_uri: str
) -> None:
    publish = _define(mesh)
    await mesh.set_limit("running", running=1)
    await mesh.set_limit("groups", group_running=1)
    await mesh.set_limit("rate", rate=5, per_ms=100)
    over = asyncio.Event()

    async def publish_all() -> None:
        n = 0
        while not over.is_set():
            for call in publish.values():
                await _insist(call, n)
            n += 1
            await asyncio.sleep(0.05)

    async with all_working(mesh, ["a", "b"], concurrency=20):
        publishing = asyncio.create_task(publish_all())
        for fault in _faults():
            async with failing_commands(mongo_uri, times=1, **fault) as have_failed:
                await have_failed()
        over.set()
        await publishing

        async def all_finished() -> bool:
            return not [task async for task in mesh.find(status=["INIT", "RUNNING"], limit=1)]

        await eventually(all_finished, SOON_S)
    tasks = [task async for task in mesh.find(limit=0)]
    assert {task.status for task in tasks} == {Status.SUCCESS}
    assert sum(task.task_state.lost_cnt for task in tasks) == 0
