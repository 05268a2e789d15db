"""The registry of workers says what its workers said last."""

from __future__ import annotations

from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from taskmesh import TaskMesh
from taskmesh.consumer import registration
from taskmesh.store import registry
from tests.waiting import eventually
from tests.working import parts_of, working

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


async def test_workers_that_have_stopped_keep_nobody_from_seeing_who_comes_and_goes(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each job is a worker there are thousands of them within the hour for which they are kept."""
    monkeypatch.setattr(registration, "_ALL_LOOK", 8)
    await _stopped(mesh, 1_000)
    mesh.task(name="job")(lambda: None)
    async with working(mesh, "w") as consumer:
        parts = parts_of(consumer)
        await eventually(lambda: [worker.worker_id for worker in parts.registration.fleet] == ["w"])
        async with working(mesh, "comes"):
            await eventually(lambda: parts.partitions.others_cnt == 1)
        await eventually(lambda: parts.partitions.alone)


class _Workers(CommandListener):
    """How many registrations the largest answer had."""

    def __init__(self) -> None:
        self.most = -1

    def started(self, event: CommandStartedEvent) -> None: ...

    def succeeded(self, event: CommandSucceededEvent) -> None:
        cursor = event.reply.get("cursor", {})
        if str(cursor.get("ns")).endswith(".workers"):
            self.most = max(self.most, len(cursor["firstBatch"]))

    def failed(self, event: CommandFailedEvent) -> None: ...


async def test_a_publisher_does_not_read_workers_that_have_stopped(mongo_uri: str, database: str) -> None:
    seen = _Workers()
    async with (
        AsyncMongoClient[dict[str, Any]](mongo_uri, event_listeners=[seen]) as client,
        TaskMesh(client, database=database) as mesh,
    ):
        await _stopped(mesh, 100)
        handle = await mesh.publish("job", "k")
        assert "no worker is alive" in handle.warnings[0]
        assert seen.most == 0


async def _stopped(mesh: TaskMesh, many: int) -> None:
    first = await registry.register(mesh.store, "gone", "instance", DESCRIBED | {"state": "stopped"}) or {}
    workers = mesh.store.driver.collection(mesh.store.workers)
    await workers.insert_many([first | {"_id": f"gone{n}"} for n in range(1, many)])
