"""The registry of workers says what its workers said last."""

from __future__ import annotations

from taskmesh import TaskMesh
from taskmesh.store import registry

DESCRIBED = {"host": "h", "pid": 1, "version": "0", "names": ["job"], "queues": None, "concurrency": 1, "running": 0}


async def test_a_sign_of_life_that_arrives_late_does_not_bring_back_a_worker_that_has_stopped(mesh: TaskMesh) -> None:
    """It was sent before, and cancelled; the server has it all the same, on another connection."""
    await registry.register(mesh.store, "w", "instance", DESCRIBED | {"state": "running"})
    assert await registry.heartbeat(mesh.store, "w", "instance", DESCRIBED | {"state": "stopped"}) is not None
    assert await registry.heartbeat(mesh.store, "w", "instance", DESCRIBED | {"state": "stopping"}) is None
    assert [(worker.worker_id, worker.state) for worker in await mesh.workers()] == [("w", "stopped")]


async def test_a_worker_that_somebody_took_for_dead_enters_again(mesh: TaskMesh) -> None:
    await registry.register(mesh.store, "w", "instance", DESCRIBED | {"state": "running"})
    await registry.forget(mesh.store, "w", "instance")
    assert await registry.heartbeat(mesh.store, "w", "instance", DESCRIBED | {"state": "running"}) is None
    assert await registry.register(mesh.store, "w", "instance", DESCRIBED | {"state": "running"}) is not None
    assert [worker.state for worker in await mesh.workers()] == ["running"]
