"""T5, T34: a worker that is asked to stop finishes what it can, renews to the end, and gives the rest back unharmed."""

from __future__ import annotations

import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo.collection import Collection

from taskmesh import Status, TaskMesh
from tests.processes.fleet import Fleet, Worker
from tests.processes.handlers import Handlers
from tests.waiting import eventually, slowness_of_the_machine


async def test_t5_a_draining_worker_renews_its_leases_until_its_task_is_done(
    fleet: Fleet, mesh: TaskMesh, handlers: Handlers
) -> None:
    draining = fleet.start("draining").wait_ready()
    await handlers.work.configure(worker_timeout_ms=3_000).publish("long", ms=7_000)
    await eventually(lambda: fleet.history, what="it runs")
    fleet.start("idle").wait_ready()
    draining.terminate()

    assert draining.wait() == 0
    task = await mesh.get("work", "long")
    [entry] = task.task_state.worker_states
    assert (entry.worker_id, entry.state, task.task_state.lost_cnt) == ("draining", "SUCCESS", 0)
    assert entry.success_time is not None
    assert entry.start_time is not None
    assert entry.success_time - entry.start_time > timedelta(seconds=6), "it took several leases"
    assert len(fleet.runs) == 1


@pytest.mark.timed
async def test_t34_after_the_grace_the_rest_is_given_back_uncharged_and_runs_elsewhere_at_once(
    fleet: Fleet, mesh: TaskMesh, handlers: Handlers, documents: Collection[dict[str, Any]]
) -> None:
    leaving = await _works_on_short_and_long_tasks(fleet, handlers, grace_ms=3_000)
    fleet.start("staying", concurrency=20).wait_ready()
    leaving.terminate()
    await eventually(lambda: "gracefully" in leaving.log, what="the signal is heard")
    await handlers.work.publish("after", ms=0)
    assert leaving.wait() == 0
    gone = _server_time(documents)
    async with slowness_of_the_machine(mesh) as slowness:
        await eventually(lambda: documents.count_documents({"status": "SUCCESS"}) == 7, what="all are done")

    for number in range(3):
        assert (await mesh.get("work", f"short-{number}")).task_state.worker_states[0].worker_id == "leaving"
    for number in range(3):
        task = await mesh.get("work", f"long-{number}")
        [entry] = task.task_state.worker_states
        assert (entry.worker_id, task.task_state.lost_cnt, task.task_state.timeout_cnt) == ("staying", 0, 0)
        assert entry.start_time is not None
        assert entry.start_time - gone < timedelta(seconds=1) + slowness.allows
    assert (await mesh.get("work", "after")).task_state.worker_states[0].worker_id == "staying", "it claims no more"
    long_runs = [run for run in fleet.runs if run.start.key.startswith("long") and run.start.worker_id == "leaving"]
    assert [run.end.more["error"] for run in long_runs if run.end is not None] == ["CancelledError"] * 3


async def test_t34_a_second_signal_ends_a_worker_at_once(
    fleet: Fleet, mesh: TaskMesh, handlers: Handlers, documents: Collection[dict[str, Any]]
) -> None:
    leaving = await _works_on_short_and_long_tasks(fleet, handlers, grace_ms=60_000)
    leaving.terminate()
    await eventually(lambda: "gracefully" in leaving.log, what="the first signal is heard")
    leaving.process.send_signal(signal.SIGINT)
    assert leaving.wait(30.0) == 0, "long before the grace is over"

    for task in [await mesh.get("work", f"long-{number}") for number in range(3)]:
        assert (task.status, task.task_state.worker_states) == (Status.INIT, []), "given back, nothing counted"
        assert (task.task_state.timeout_cnt, task.task_state.lost_cnt) == (0, 0)
    [registered] = documents.database["workers"].find()
    assert registered["state"] == "stopped"


async def test_t34_a_kill_while_stopping_costs_one_timeout_each(
    fleet: Fleet, mesh: TaskMesh, handlers: Handlers
) -> None:
    leaving = await _works_on_short_and_long_tasks(fleet, handlers, grace_ms=60_000)
    leaving.terminate()
    await eventually(lambda: "gracefully" in leaving.log, what="the signal is heard")
    leaving.kill()
    fleet.start("staying").wait_ready()

    for number in range(3):
        task = await eventually(lambda key=f"long-{number}": _done(mesh, key), 30.0)  # type: ignore[misc]  # the key is bound now
        assert (task.task_state.worker_states[0].worker_id, task.task_state.lost_cnt) == ("staying", 1)


async def _works_on_short_and_long_tasks(fleet: Fleet, handlers: Handlers, grace_ms: int) -> Worker:
    leaving = fleet.start("leaving", grace_ms=grace_ms).wait_ready()
    await handlers.work.publish_many({f"short-{number}": {"ms": 1_000} for number in range(3)})
    long = {"ms": 0, "slow_on": "leaving", "slow_ms": 60_000}
    await handlers.work.publish_many({f"long-{number}": long for number in range(3)})
    await eventually(lambda: len(fleet.history) == 6, what="all run")
    return leaving


async def _done(mesh: TaskMesh, key: str) -> Any:
    task = await mesh.get("work", key)
    return task if task.status is Status.SUCCESS else None


def _server_time(documents: Collection[dict[str, Any]]) -> datetime:
    moment: datetime = documents.database.client.admin.command("hello")["localTime"]
    return moment.replace(tzinfo=UTC)
