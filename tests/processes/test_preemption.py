"""A worker that dies loses its tasks to the next one, right after its leases have run out."""

from __future__ import annotations

from statistics import median

import pytest

from taskmesh import Status, TaskMesh
from tests.processes.fleet import Fleet
from tests.processes.handlers import Handlers
from tests.waiting import eventually, slowness_of_the_machine


@pytest.mark.timed
async def test_the_next_worker_starts_within_a_second_of_the_end_of_a_killed_workers_lease(
    fleet: Fleet, mesh: TaskMesh, handlers: Handlers
) -> None:
    keys = [f"k{number}" for number in range(10)]
    victim = fleet.start("victim").wait_ready()
    published = await handlers.work.publish_many({key: {"slow_on": "victim", "slow_ms": 60_000} for key in keys})
    await eventually(lambda: len(fleet.history) == len(keys), what="the victim runs everything")
    fleet.start("heir").wait_ready()
    victim.kill()

    async with slowness_of_the_machine(mesh) as slowness:
        assert [await handle.result(60) for handle in published] == ["heir"] * len(keys)
    tasks = [await mesh.get("work", key) for key in keys]
    late = []
    for task in tasks:
        [loss], [entry] = task.task_state.losses, task.task_state.worker_states
        assert (loss.worker_id, entry.worker_id, task.task_state.lost_cnt) == ("victim", "heir", 1)
        assert entry.start_time is not None
        assert loss.ping_expire_time is not None
        assert entry.start_time >= loss.ping_expire_time, "the heir was let in while the lease was live"
        late.append((entry.start_time - loss.ping_expire_time).total_seconds())
    # All leases end at the same moment, so there is but one measurement.
    allowed = slowness.allows.total_seconds()
    assert median(late) < 1.0 + allowed
    assert max(late) < 5.0 + allowed, "even on a busy machine"
    assert sorted(run.start.worker_id for run in fleet.runs) == ["heir"] * len(keys) + ["victim"] * len(keys)


@pytest.mark.slow
async def test_a_task_for_two_workers_is_preempted_from_the_dead_one_alone(
    fleet: Fleet, mesh: TaskMesh, handlers: Handlers
) -> None:
    victim = fleet.start("victim").wait_ready()
    fleet.start("living").wait_ready()
    both = handlers.work.configure(concurrent_worker_cnt=2)
    handle = await both.publish("both", ms=6_000, slow_on="victim", slow_ms=60_000)
    await eventually(lambda: len(fleet.history) == 2, what="both run it")
    fleet.start("heir").wait_ready()
    victim.kill()

    assert set(await handle.results(60)) == {"living", "heir"}
    task = await mesh.get("work", "both")
    assert task.status is Status.SUCCESS
    assert [loss.worker_id for loss in task.task_state.losses] == ["victim"]
    assert sorted(run.start.worker_id for run in fleet.runs) == ["heir", "living", "victim"]
