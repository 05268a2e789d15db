"""Workers that die at any moment cost time and never a task; and never do more run a task than it allows."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pymongo.collection import Collection

from tests.processes.fleet import Fleet, Worker
from tests.processes.handlers import Handlers
from tests.processes.history import most_at_once, runs_by_task
from tests.waiting import eventually, wait_until


@pytest.mark.slow
async def test_t18_with_a_worker_killed_every_200_ms_every_task_ends_and_none_runs_oftener_than_kills_allow(
    fleet: Fleet, handlers: Handlers, documents: Collection[dict[str, Any]]
) -> None:
    await handlers.work.publish_many({f"k{number}": {"ms": 150} for number in range(300)})
    fleet.start_many(4, concurrency=5)
    _kill_at_random(fleet, 20, every_s=0.2, watch=lambda: _check_entries(documents), concurrency=5)

    await eventually(lambda: documents.count_documents({"status": "SUCCESS"}) == 300, 60.0, what="all are done")
    runs = runs_by_task(fleet.runs)
    assert len(runs) == 300
    for task, times in runs.items():
        killed = sum(run.end is None for run in times)
        assert len(times) <= 20 + 1
        assert len(times) == killed + 1 or _gap_between_end_and_record(times, killed), (task, times)
    _check_entries(documents)


@pytest.mark.lasting
async def test_never_do_more_workers_run_a_task_than_it_allows_whoever_dies(
    fleet: Fleet, handlers: Handlers, documents: Collection[dict[str, Any]]
) -> None:
    for allowed, share in ((1, 140), (2, 60), (3, 40)):
        tasks = {f"for-{allowed}-{number}": {"ms": number % 40 * 25} for number in range(share)}
        # Who stands still for longer than a lease, and not by a kill, would be another reason for more runs than are allowed.
        await handlers.work.configure(concurrent_worker_cnt=allowed, worker_timeout_ms=4_000).publish_many(tasks)
    fleet.start_many(4, concurrency=12)
    _kill_at_random(fleet, 5, every_s=0.7, watch=lambda: None, concurrency=12)

    await eventually(lambda: documents.count_documents({"status": "SUCCESS"}) == 240, 90.0, what="all are done")
    died = fleet.died
    for task, runs in runs_by_task(fleet.runs).items():
        allowed = int(task.split("-")[1])
        assert most_at_once(runs, died) <= allowed, task
        done = [run.start.running_id for run in runs if run.returned]
        assert len(done) >= allowed, task
    for document in documents.find({}, {"task_option": 1, "task_state": 1}):
        entries = document["task_state"]["worker_states"]
        assert [entry["state"] for entry in entries] == ["SUCCESS"] * document["task_option"]["concurrent_worker_cnt"]
        assert len({entry["worker_id"] for entry in entries}) == len(entries), "different workers"


def _kill_at_random(fleet: Fleet, kills: int, *, every_s: float, watch: Callable[[], None], concurrency: int) -> None:
    """Kill a random one of the workers that are at work, `kills` times, and start each again under its id."""
    chance = random.Random(18)
    living: list[Worker] = list(fleet.workers)
    for _ in range(kills):
        time.sleep(every_s)  # the rhythm of the kills is what the test is about
        wait_until(lambda: any("ready" in worker.told for worker in living), what="one of them is at work")
        victim = chance.choice([worker for worker in living if "ready" in worker.told])
        living.remove(victim)
        victim.kill()
        living.append(fleet.start(victim.worker_id, concurrency=concurrency))
        watch()


def _check_entries(documents: Collection[dict[str, Any]]) -> None:
    """What has to be true of every task at every moment."""
    for document in documents.find({}, {"task_option": 1, "task_state": 1, "status": 1}):
        entries = document["task_state"]["worker_states"]
        states = Counter(entry["state"] for entry in entries)
        assert states["RUNNING"] + states["SUCCESS"] <= document["task_option"]["concurrent_worker_cnt"], document
        assert states["FAIL"] == 0, document
        assert (document["status"] == "SUCCESS") == (states["SUCCESS"] == 1), document
        assert document["task_state"]["timeout_cnt"] <= document["task_state"].get("lost_cnt", 0), document


def _gap_between_end_and_record(times: list[Any], killed: int) -> bool:
    """Whether further runs are those that ended in a process that died before it could record them."""
    return len(times) > killed + 1 and sum(run.returned for run in times) == len(times) - killed
