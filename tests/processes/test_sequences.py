"""Tasks of one sequence key run in order, one after the other, in several processes that are killed meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from pymongo.collection import Collection

from tests.processes.fleet import Fleet
from tests.processes.handlers import Handlers
from tests.processes.history import Run, end_of
from tests.waiting import eventually, wait_until

_KEYS = ("ada", "bob", "cyd", "dan", "eve", "fay")
_TASKS = 8
_KILLS = 2
_MANY_KEYS = 1_000
_MANY_TASKS = 50
_MANY_WORKERS = 8


@pytest.mark.lasting
async def test_with_workers_killed_at_work_each_key_is_worked_off_in_order_none_skipped_none_beside_another(
    fleet: Fleet, handlers: Handlers, documents: Collection[dict[str, Any]]
) -> None:
    fleet.start_many(3, concurrency=4)  # first: one that starts long before the others would have done it all
    for key in _KEYS:
        line = handlers.work.configure(sequence_key=key, worker_timeout_ms=3_000)
        await line.publish_many({f"{key}-{place}": {"ms": 60} for place in range(_TASKS)})
    for _ in range(_KILLS):
        busy = wait_until(lambda: _at_work(fleet), what="a handler is at work")
        victim = next(worker for worker in fleet.workers if worker.running and worker.pid == busy)
        victim.kill()
        fleet.start(victim.worker_id, concurrency=4).wait_ready()
    total = len(_KEYS) * _TASKS
    await eventually(lambda: documents.count_documents({"status": "SUCCESS"}) == total, 90.0, what="all are done")
    _check_order(fleet, set(_KEYS), _TASKS)
    assert sum(run.end is None for run in fleet.runs) >= 1, "a handler was at work when its worker was killed"


@pytest.mark.slow
async def test_so_are_a_thousand_keys_by_eight_workers_of_which_one_is_killed_every_few_seconds(
    fleet: Fleet, handlers: Handlers, documents: Collection[dict[str, Any]]
) -> None:
    keys = {f"c{n}" for n in range(_MANY_KEYS)}
    for key in sorted(keys):
        line = handlers.work.configure(sequence_key=key, worker_timeout_ms=3_000)
        await line.publish_many({f"{key}-{place}": {} for place in range(_MANY_TASKS)})
    living = fleet.start_many(_MANY_WORKERS, concurrency=50)
    chance = random.Random(50)
    while documents.find_one({"status": {"$in": ["INIT", "RUNNING"]}}, {"_id": 1}) is not None:
        await asyncio.sleep(1.0 + 3.0 * chance.random())  # the moment of a kill is what the test is about
        victim = living.pop(0)
        victim.wait_ready().kill()
        living.append(fleet.start(victim.worker_id, concurrency=50))
    assert documents.count_documents({"status": "SUCCESS"}) == _MANY_KEYS * _MANY_TASKS
    _check_order(fleet, keys, _MANY_TASKS)


def _check_order(fleet: Fleet, keys: set[str], tasks: int) -> None:
    """Each key's tasks ran one after the other in order of publication; only what a killed worker had ran again."""
    died = fleet.died
    by_key: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(fleet.runs, key=lambda run: run.start.mono):
        by_key[run.start.key.rpartition("-")[0]].append(run)
    assert by_key.keys() == keys
    for key, runs in by_key.items():
        assert {_place(run) for run in runs} == set(range(tasks)), "none is skipped"
        for one, after in pairwise(runs):
            again = _place(after) == _place(one)
            assert again or _place(after) == _place(one) + 1, (key, one, after)
            assert not again or one.start.pid in died, f"only a task of a killed worker runs again: {one}"
            assert end_of(one, died) <= after.start.mono, f"two of one key at once: {one}, {after}"


def _at_work(fleet: Fleet) -> int | None:
    """The process id of a worker that has begun to run a handler, and has not ended it."""
    living = {worker.pid for worker in fleet.workers if worker.running}
    return next((run.start.pid for run in fleet.runs if run.end is None and run.start.pid in living), None)


def _place(run: Run) -> int:
    return int(run.start.key.rpartition("-")[2])
