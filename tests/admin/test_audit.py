"""Who changed what is written down by what changes it: Python code is listed like the command line and the dashboard."""

from __future__ import annotations

import getpass
import socket

import pytest
from pymongo import AsyncMongoClient

from taskmesh import TaskMesh, TaskNotFound, TaskRunning
from taskmesh.model.task import Status
from taskmesh.store import registry
from tests.working import status_is, working

US = f"{getpass.getuser()}@{socket.gethostname()}"


async def listed(mesh: TaskMesh) -> list[tuple[str, str, str | None]]:
    """Return what is listed of single things, the first first."""
    return [(each.action, each.about, each.by) for each in reversed(await mesh.audit.actions())]


async def test_what_python_code_changes_is_listed_with_who_did_what_and_when(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> None: ...

    before = mesh.clock.now()
    await mesh.every(work, schedule_id="nightly", interval_ms=3_600_000)  # code does so at each start
    await mesh.every(work, schedule_id="weekly", interval_ms=3_600_000, by="ann")
    handle = await work.configure(delay_ms=3_600_000).publish("k")
    await registry.register(mesh.store, "w", "an instance", {"state": "running"})
    await mesh.set_option("work", "k", priority=5)
    await handle.cancel()
    await mesh.retry("work", "k", by="ann")
    await mesh.delete("work", "k")
    await mesh.pause("default", reason="a secret reason")
    await mesh.resume("default", by="bob")
    await mesh.set_limit("default", running=3)
    await mesh.queues.set_group_limit("default", "acme", 1, by="bob")
    await mesh.pause_worker("w")
    await mesh.resume_worker("w")
    await mesh.fleet.set_concurrency("w", 3, by="cid")
    await mesh.stop_worker("w")
    await mesh.schedules.pause("nightly", by="dan")
    await mesh.schedules.resume("nightly")
    await mesh.schedules.trigger("nightly", by="dan")
    await mesh.schedules.remove("nightly")
    assert await listed(mesh) == [
        ("schedule.declare", "name 'work', schedule_id 'weekly', interval_ms 3600000", "ann"),
        ("task.set_option", "name 'work', key 'k', changes {'priority': 5}", US),
        ("task.cancel", "name 'work', key 'k'", US),
        ("task.retry", "name 'work', key 'k'", "ann"),
        ("task.delete", "name 'work', key 'k'", US),
        ("queue.pause", "queue 'default'", US),
        ("queue.resume", "queue 'default'", "bob"),
        ("queue.set_limit", "queue 'default', running 3", US),
        ("queue.set_group_limit", "queue 'default', group 'acme', running 1", "bob"),
        ("worker.pause", "worker_id 'w'", US),
        ("worker.resume", "worker_id 'w'", US),
        ("worker.set_concurrency", "worker_id 'w', concurrency 3", "cid"),
        ("worker.stop", "worker_id 'w'", US),
        ("schedule.pause", "schedule_id 'nightly'", "dan"),
        ("schedule.resume", "schedule_id 'nightly'", US),
        ("schedule.trigger", "schedule_id 'nightly'", "dan"),
        ("schedule.remove", "schedule_id 'nightly'", US),
    ]
    times = [each.time for each in await mesh.audit.actions()]
    assert times == sorted(times, reverse=True)
    assert all(abs((time - before).total_seconds()) < 600 for time in times)


async def test_what_python_code_does_to_many_is_listed_once_with_its_undo(mesh: TaskMesh) -> None:
    await mesh.publisher.publish_many("work", {f"k{n}": {} for n in range(3)})
    done = await mesh.bulk.cancel("name:work")
    assert done.id is not None
    await mesh.bulk.undo(done.id, by="ann")
    await mesh.bulk.retry("name:work", by="bob", undo_ms=0)
    await mesh.bulk.purge("name:work")
    assert [(each.action, each.where, each.by, each.done) for each in reversed(await mesh.bulk.actions())] == [
        ("cancel", "name:work status:INIT,RUNNING", US, 3),
        ("retry", "name:work", "bob", 3),
        ("purge", "name:work status:SUCCESS,FAIL,CANCELLED,EXPIRED", US, 0),
    ]
    assert await listed(mesh) == [("bulk.undo", f"id {done.id!r}", "ann")]


async def test_what_was_refused_and_what_workers_do_is_not_listed(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> None: ...

    await work.publish("k")
    async with working(mesh, "w1"):
        await status_is(mesh, "work", "k", Status.SUCCESS)
    for refused in (mesh.cancel("work", "none"), mesh.retry("work", "none"), mesh.stop_worker("nobody")):
        with pytest.raises((TaskNotFound, TaskRunning)):
            await refused
    assert await listed(mesh) == []
    assert await mesh.bulk.actions() == []


async def test_an_audit_that_cannot_be_written_keeps_nobody_from_acting(
    mesh: TaskMesh, mongo_uri: str, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    await mesh.publish("work", "k")
    async with AsyncMongoClient[dict[str, object]](mongo_uri) as client:
        # As a server does that takes no writes there: every document of the audit is refused.
        await client[database].drop_collection(mesh.store.actions)
        await client[database].create_collection(mesh.store.actions, validator={"never": True})
    task = await mesh.cancel("work", "k")
    assert task.status == Status.CANCELLED
    assert "could not be written" in caplog.text
