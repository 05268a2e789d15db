"""T28: a task that kills its worker each time leaves the circle."""

from __future__ import annotations

from taskmesh import Status, TaskMesh
from tests.processes.fleet import Fleet
from tests.processes.handlers import Handlers
from tests.waiting import eventually


async def test_t28_m13_a_task_that_kills_its_worker_runs_max_timeouts_plus_one_times_and_then_fails(
    fleet: Fleet, mesh: TaskMesh, handlers: Handlers
) -> None:
    deadly = handlers.poison.configure(max_timeouts=2, worker_timeout_ms=1_000, ping_interval_ms=300)
    fleet.start_many(2)
    await deadly.publish("poison")
    bystanders = await handlers.work.publish_many({f"k{number}": {"ms": 400} for number in range(5)})

    def restart_the_dead() -> bool:
        for worker_id in {worker.worker_id for worker in fleet.workers}:
            newest = [worker for worker in fleet.workers if worker.worker_id == worker_id][-1]
            if not newest.running:
                assert newest.process.returncode == 1
                fleet.start(worker_id)
        return True

    async def has_failed() -> bool:
        restart_the_dead()
        return (await mesh.get("poison", "poison")).status is Status.FAIL

    await eventually(has_failed, 60.0)
    await eventually(lambda: _settled(mesh), what="the last loss is written down")
    task = await mesh.get("poison", "poison")
    assert len([run for run in fleet.runs if run.start.name == "poison"]) == 3
    assert (task.task_state.timeout_cnt, task.task_state.lost_cnt) == (3, 3)
    assert len(task.fail_reasons) == 3
    for loss, reason in zip(task.task_state.losses, task.fail_reasons, strict=True):
        assert loss.ping_expire_time is not None
        assert loss.worker_id in reason
        assert f"{loss.ping_expire_time:%H:%M:%S}" in reason
    assert len([worker for worker in fleet.workers if worker.process.returncode == 1]) == 3

    for handle in bystanders:
        await handle.result(60)
        bystander = await handle.task()
        killed = [run for run in fleet.runs if run.task == f"work:{handle.key}" and run.end is None]
        # A worker may also die between the claim of a bystander and its handler's first line.
        assert len(killed) <= bystander.task_state.lost_cnt <= 3, "charged for what was really lost, and for no more"


async def _settled(mesh: TaskMesh) -> bool:
    return (await mesh.get("poison", "poison")).finish_time is not None
