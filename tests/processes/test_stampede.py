"""T14: more workers on one backlog do not get into each other's way."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pymongo.collection import Collection

from taskmesh import TaskMesh
from tests.processes.fleet import Fleet
from tests.processes.handlers import Handlers
from tests.waiting import eventually


@pytest.mark.lasting
@pytest.mark.parametrize("processes", [2, *(pytest.param(many, marks=pytest.mark.slow) for many in (1, 8))])
async def test_t14_few_claims_are_lost_however_many_processes_share_a_backlog(
    fleet: Fleet, mesh: TaskMesh, handlers: Handlers, documents: Collection[dict[str, Any]], processes: int
) -> None:
    work = handlers.work.configure(worker_timeout_ms=60_000, ping_interval_ms=30_000)
    workers = fleet.start_many(processes, concurrency=100)
    await eventually(lambda: _know_each_other(documents), what="every worker knows of all others")
    await mesh.pause("default")
    count = 5_000
    await work.publish_many({f"k{number}": {} for number in range(count)})
    await mesh.resume("default")
    await eventually(lambda: documents.count_documents({"status": "SUCCESS"}) == count, 60.0)
    for worker in workers:
        worker.terminate()
    assert [worker.wait() for worker in workers] == [0] * processes
    assert len(fleet.runs) == count
    tried, won = (sum(worker.told[counter] for worker in workers) for counter in ("tried", "won"))
    assert won == count, "with long leases, whatever is won is run"
    share = (tried - won) / tried
    # A server that stands still for a moment costs a set or two of each worker; without lanes, half of all are lost.
    assert share < 0.10


def _know_each_other(documents: Collection[dict[str, Any]]) -> bool:
    """Whether every live worker has read the registry since the last of them entered it."""
    living = list(documents.database["workers"].find({"state": "running"}))
    newest = max(worker["start_time"] for worker in living)
    return all(worker["last_seen"] > newest for worker in living if worker["start_time"] != newest)


@pytest.mark.timed
@pytest.mark.slow
async def test_t14_throughput_does_not_fall_as_processes_are_added(
    fleet: Fleet, handlers: Handlers, documents: Collection[dict[str, Any]]
) -> None:
    rates: dict[int, float] = {}
    conflicts: dict[int, float] = {}
    for processes in (1, 2, 8):
        workers = fleet.start_many(processes, concurrency=200)
        await eventually(lambda: _know_each_other(documents), what="every worker knows of all others")
        documents.delete_many({})
        began, server = time.monotonic(), _writes(documents)
        await handlers.work.publish_many({f"{processes}-{number}": {} for number in range(5_000)})
        await eventually(lambda: documents.count_documents({"status": "SUCCESS"}) == 5_000, 120.0)
        rates[processes] = 5_000 / (time.monotonic() - began)
        conflicts[processes] = (_writes(documents)[1] - server[1]) / (_writes(documents)[0] - server[0])
        for worker in workers:
            worker.terminate()  # not killed: what the dead have left is taken a moment later
        assert [worker.wait() for worker in workers] == [0] * processes
    assert max(conflicts.values()) < 0.05, conflicts
    # Eight processes share the two cores of a small machine with the server: no gain is asked for, but no collapse.
    assert min(rates.values()) > 0.4 * rates[1], rates


@pytest.mark.timed
@pytest.mark.slow
async def test_t14_what_a_killed_worker_leaves_is_worked_off_as_fast_as_the_rest(
    fleet: Fleet, handlers: Handlers, documents: Collection[dict[str, Any]]
) -> None:
    """Once the other has seen that nobody moves it. Four times as slow while it waited a second for each two hundred."""
    workers = fleet.start_many(2, concurrency=200)
    await eventually(lambda: _know_each_other(documents), what="every worker knows of all others")
    workers[0].kill()
    count = 20_000
    await handlers.work.publish_many({f"k{number}": {} for number in range(count)})

    def is_done(share: float) -> bool:
        return documents.count_documents({"status": "SUCCESS"}) >= share * count

    began = time.monotonic()
    await eventually(lambda: is_done(0.45), 120.0)
    own_s = time.monotonic() - began
    await eventually(lambda: is_done(1), 120.0)
    assert time.monotonic() - began - own_s < 2.5 * own_s + 1.5


def _writes(documents: Collection[dict[str, Any]]) -> tuple[int, int]:
    """Return how many documents the server has updated, and how many write conflicts it met."""
    metrics = documents.database.client.admin.command("serverStatus")["metrics"]
    return metrics["document"]["updated"], metrics["operation"]["writeConflicts"]


@pytest.mark.slow
async def test_t14_one_task_for_many_idle_workers_costs_a_few_attempts(fleet: Fleet, handlers: Handlers) -> None:
    workers = fleet.start_many(8)
    assert await (await handlers.work.publish("lonely", ms=200)).result(60)
    for worker in workers:
        worker.terminate()
    assert [worker.wait() for worker in workers] == [0] * 8
    assert sum(worker.told["won"] for worker in workers) == 1
    assert 1 <= sum(worker.told["tried"] for worker in workers) <= 6
