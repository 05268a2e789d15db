"""The registry of workers says what its workers said last."""

from __future__ import annotations

from taskmesh import TaskMesh
from taskmesh.store import fleet

DESCRIBED = {"host": "h", "pid": 1, "version": "0", "names": ["job"], "queues": None, "concurrency": 1, "running": 0}


async def test_a_sign_of_life_that_arrives_late_does_not_bring_back_a_worker_that_has_stopped(mesh: TaskMesh) -> None:
    """It was sent before, and cancelled; the server has it all the same, on another connection."""
    await fleet.register(mesh.store, "w", "instance", DESCRIBED | {"state": "running"})
    assert await fleet.heartbeat(mesh.store, "w", "instance", DESCRIBED | {"state": "stopped"}) is not None
    assert await fleet.heartbeat(mesh.store, "w", "instance", DESCRIBED | {"state": "stopping"}) is None
    assert [(worker.worker_id, worker.state) for worker in await mesh.workers()] == [("w", "stopped")]


async def test_a_worker_that_somebody_took_for_dead_enters_again(mesh: TaskMesh) -> None:
    await fleet.register(mesh.store, "w", "instance", DESCRIBED | {"state": "running"})
    await fleet.forget(mesh.store, "w", "instance")
    assert await fleet.heartbeat(mesh.store, "w", "instance", DESCRIBED | {"state": "running"}) is None
    assert await fleet.register(mesh.store, "w", "instance", DESCRIBED | {"state": "running"}) is not None
    assert [worker.state for worker in await mesh.workers()] == ["running"]
