"""Limits while workers are killed and the primary changes: never more at once than they allow, and no count leaks."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from taskmesh import TaskMesh
from tests.mongods import ThreeNodes, quick_directory, three_nodes
from tests.processes.fleet import Fleet, Worker
from tests.processes.handlers import define
from tests.processes.history import Run, most_at_once
from tests.waiting import eventually, wait_until

pytestmark = [
    pytest.mark.failover,
    pytest.mark.slow,
    pytest.mark.blocks_the_loop,
]  # blocking calls start what is killed

_TASKS = 20_000
_GROUPS = 40
_RUNNING = 60
_GROUP_RUNNING = 3
_WORKERS = 4
_CONCURRENCY = 30
_HOUR_MS = 3_600_000


@pytest.fixture
def nodes() -> Iterator[ThreeNodes]:
    with quick_directory() as directory, three_nodes(directory) as started:
        yield started


async def test_limits_hold_and_leak_nothing_whoever_is_killed(nodes: ThreeNodes, database: str, tmp_path: Path) -> None:
    with Fleet(nodes.uri, database, tmp_path / "fleet") as fleet, MongoClient[dict[str, Any]](nodes.uri) as client:
        async with TaskMesh(nodes.uri, database=database) as mesh:
            handlers = define(mesh)
            await mesh.set_limit("default", running=_RUNNING, group_running=_GROUP_RUNNING)
            await mesh.set_limit("default", rate=10 * _TASKS, per_ms=_HOUR_MS)  # counts, and holds up nothing
            for group in range(_GROUPS):
                keys = {f"{group}-{n}": {"ms": n % 20} for n in range(_TASKS // _GROUPS)}
                await handlers.work.configure(group=f"g{group}").publish_many(keys)
            failovers = await _trouble(mesh, nodes, fleet, random.Random(20))
            await eventually(lambda: _all_done(mesh), 600.0, what="all are done")
            assert await mesh.listing.count("status:SUCCESS") == _TASKS

            async def nothing_is_counted() -> bool:
                (queue,) = await mesh.queues.all()
                slots = client[database]["limits"].find_one({"_id": "default"}, {"slots": 1}) or {}
                return (queue.running, queue.running_by_group, slots["slots"]) == (0, {}, [])

            await eventually(nothing_is_counted, 60.0, what="no slot is kept")
            (queue,) = await mesh.queues.all()
        runs, died = fleet.runs, fleet.died
    assert most_at_once(runs, died) <= _RUNNING
    of_group: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        of_group[run.start.key.partition("-")[0]].append(run)
    assert {group: most_at_once(each, died) for group, each in of_group.items() if most_at_once(each, died) > 3} == {}
    assert len({run.task for run in runs}) == _TASKS
    # A booking whose worker was killed, or had no answer to its claim, counts as a start until it leaves the window.
    in_vain = (len(died) + failovers * _WORKERS) * _CONCURRENCY
    assert len(runs) <= queue.started <= len(runs) + in_vain, (len(runs), queue.started, in_vain)


async def _all_done(mesh: TaskMesh) -> bool:
    """Whether nothing waits and nothing runs; who polls should not count thousands each time."""
    for status in ("INIT", "RUNNING"):
        async for _ in mesh.find(status=status, limit=1):
            return False
    return True


async def _trouble(mesh: TaskMesh, nodes: ThreeNodes, fleet: Fleet, chance: random.Random) -> int:
    """Until nearly all is done, kill a worker now and then, and let the primary go, by SIGKILL or by stepping down.

    Return how often the primary went.
    """
    living: list[Worker] = list(fleet.start_many(_WORKERS, concurrency=_CONCURRENCY))
    failovers = 0
    for n in range(1_000):
        await asyncio.sleep(1.0 + 3.0 * chance.random())  # the moment of a kill is what the test is about
        with suppress(PyMongoError):
            if await mesh.listing.count("status:SUCCESS") > 0.9 * _TASKS:
                break
        if n % 4 == 3:
            nodes.primary_goes(killed=n % 8 == 7)
            failovers += 1
        wait_until(lambda: any("ready" in worker.told for worker in living), 60.0, what="one of them is at work")
        victim = chance.choice([worker for worker in living if "ready" in worker.told])
        living.remove(victim)
        victim.kill()
        living.append(fleet.start(victim.worker_id, concurrency=_CONCURRENCY))
    nodes.heal()
    return failovers
