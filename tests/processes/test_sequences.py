"""Tasks of one sequence key run in order, one after the other, in several processes that are killed meanwhile."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from pymongo.collection import Collection

from tests.processes.fleet import Fleet
from tests.processes.handlers import Handlers
from tests.processes.history import Run
from tests.waiting import eventually, wait_until

_KEYS = ("ada", "bob", "cyd", "dan", "eve", "fay")
_TASKS = 8
_KILLS = 2


@pytest.mark.lasting
async def test_with_workers_killed_at_work_each_key_is_worked_off_in_order_none_skipped_none_beside_another(
    fleet: Fleet, handlers: Handlers, documents: Collection[dict[str, Any]]
) -> None:
    for key in _KEYS:
        line = handlers.work.configure(sequence_key=key, worker_timeout_ms=3_000)
        await line.publish_many({f"{key}-{place}": {"ms": 60} for place in range(_TASKS)})
    fleet.start_many(3, concurrency=4)
    for _ in range(_KILLS):
        busy = wait_until(lambda: _at_work(fleet), what="a handler is at work")
        victim = next(worker for worker in fleet.workers if worker.running and worker.pid == busy)
        victim.kill()
        fleet.start(victim.worker_id, concurrency=4).wait_ready()
    total = len(_KEYS) * _TASKS
    await eventually(lambda: documents.count_documents({"status": "SUCCESS"}) == total, 90.0, what="all are done")

    died = fleet.died
    for key in _KEYS:
        runs = sorted((run for run in fleet.runs if run.start.key.startswith(key)), key=lambda run: run.start.mono)
        assert {_place(run) for run in runs} == set(range(_TASKS)), "none is skipped"
        for one, after in pairwise(runs):
            again = _place(after) == _place(one)
            assert again or _place(after) == _place(one) + 1, (key, one, after)
            assert not again or one.start.pid in died, f"only a task of a killed worker runs again: {one}"
            ended = one.end.mono if one.end is not None else died[one.start.pid][0]
            assert ended <= after.start.mono, f"two of one key at once: {one}, {after}"
    assert sum(run.end is None for run in fleet.runs) >= 1, "a handler was at work when its worker was killed"


def _at_work(fleet: Fleet) -> int | None:
    """The process id of a worker that has begun to run a handler, and has not ended it."""
    living = {worker.pid for worker in fleet.workers if worker.running}
    return next((run.start.pid for run in fleet.runs if run.end is None and run.start.pid in living), None)


def _place(run: Run) -> int:
    return int(run.start.key.rpartition("-")[2])
