"""`mesh.inspect.doctor()`: what is wrong is found, with a remedy; what is well is not complained about."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.database import AsyncDatabase

from taskmesh import TaskMesh
from taskmesh.admin.doctor import Finding
from taskmesh.admin.queues import COUNTED_TO
from taskmesh.store import flows
from tests.faults import failing_commands, server_parameter
from tests.waiting import eventually
from tests.working import working


@pytest.fixture
async def stored(mongo_uri: str, database: str) -> Any:
    """The test's database, to break it."""
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        yield client[database]


async def findings(mesh: TaskMesh, subject: str, *levels: str) -> list[Finding]:
    """Return what is found about something."""
    found = [finding for finding in await mesh.inspect.doctor() if finding.subject == subject]
    assert found, f"nothing is said about {subject}"
    return [finding for finding in found if not levels or finding.level in levels]


async def test_a_fresh_mesh_is_well(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> None: ...

    async with working(mesh, "w1"):
        await (await work.publish("k")).result(60)
        found = await mesh.inspect.doctor()
    assert [finding for finding in found if finding.level in ("warning", "error")] == []
    subjects = {finding.subject for finding in found}
    assert {"server", "topology", "clock", "oplog", "indexes", "schema", "retention", "workers"} <= subjects
    assert all(finding.remedy for finding in found if finding.level in ("warning", "error"))


async def test_tasks_without_any_worker_are_an_error(mesh: TaskMesh) -> None:
    assert (await findings(mesh, "workers"))[0].level == "note"
    await mesh.publish("orphan", "k")
    [finding] = await findings(mesh, "workers")
    assert (finding.level, finding.remedy) == ("error", "taskmesh worker MODULE:MESH")


async def test_tasks_whose_needs_no_live_worker_has_are_an_error(mesh: TaskMesh) -> None:
    @mesh.task
    async def train() -> None: ...

    async with working(mesh, "w1", labels={"gpu": 1, "zone": "a"}):
        await train.configure(needs={"gpu": 1}, delay_ms=60_000).publish("served")
        assert [finding for finding in await mesh.inspect.doctor() if finding.subject == "needs"] == []
        await train.configure(needs={"gpu": 2, "zone": "a"}).publish_many({"a": {}, "b": {}})
        [finding] = await findings(mesh, "needs")
    assert finding.level == "error"
    assert finding.found.startswith("2 tasks wait ('train' in 'default') for a worker with gpu=2, zone=\"a\"")
    assert finding.remedy == "taskmesh worker MODULE:MESH --label gpu=2 --label 'zone=\"a\"'"


async def test_t45_tasks_that_no_live_worker_knows_are_an_error(mesh: TaskMesh) -> None:
    @mesh.task
    async def known() -> None: ...

    async with working(mesh, "w1"):
        await mesh.publish("from_the_next_release", "k")
        [finding] = await findings(mesh, "workers", "error")
    assert "no live worker knows 'from_the_next_release'; 1 task of this name is unfinished" in finding.found
    assert finding.remedy is not None
    assert finding.remedy.endswith("taskmesh cancel --where 'name:from_the_next_release'")


async def test_a_worker_that_went_without_a_word_is_told(mesh: TaskMesh, stored: AsyncDatabase[dict[str, Any]]) -> None:
    @mesh.task
    async def work() -> None: ...

    async with working(mesh, "w1"):
        pass
    long_ago = datetime.now(UTC) - timedelta(minutes=5)
    await stored.workers.update_one({"_id": "w1"}, {"$set": {"state": "running", "last_seen": long_ago}})
    [finding] = await findings(mesh, "workers", "warning")
    assert "w1" in finding.found


async def test_a_paused_queue_in_which_tasks_wait_is_told(mesh: TaskMesh) -> None:
    await mesh.pause("slow", reason="maintenance")
    assert "queues" not in {finding.subject for finding in await mesh.inspect.doctor()}
    await mesh.publish("work", "k", queue="slow")
    [finding] = await findings(mesh, "queues")
    assert (finding.level, finding.remedy) == ("warning", "taskmesh resume slow")
    assert "maintenance" in finding.found
    assert finding.found.endswith(", and 1 task waits in it")
    await mesh.publisher.publish_many("work", {str(n): {} for n in range(COUNTED_TO)}, queue="slow")
    [finding] = await findings(mesh, "queues")
    assert finding.found.endswith(f", and {COUNTED_TO} or more tasks wait in it")


async def test_a_queue_from_which_nobody_takes_is_an_error(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> None: ...

    await work.configure(queue="forgotten").publish("k")
    async with working(mesh, "w1", queues=["default"]):
        [finding] = await findings(mesh, "queues")
    assert finding.level == "error"
    assert "'forgotten'" in finding.found


async def test_an_index_that_is_missing_is_an_error_and_a_foreign_one_a_warning(
    mesh: TaskMesh, stored: AsyncDatabase[dict[str, Any]]
) -> None:
    await stored.tasks.create_index("params.colour", name="mine")
    [warning] = await findings(mesh, "indexes", "warning", "error")
    assert "mine" in warning.found
    await stored.tasks.drop_index("taskmesh_settle")
    error, _ = await findings(mesh, "indexes", "warning", "error")
    assert (error.level, "taskmesh_settle" in error.found) == ("error", True)


async def test_leases_that_nobody_takes_over_are_told(mesh: TaskMesh, stored: AsyncDatabase[dict[str, Any]]) -> None:
    @mesh.task
    async def work() -> None: ...

    await work.publish("k")
    entry = {
        "running_id": "r",
        "worker_id": "w",
        "state": "RUNNING",
        "ping_expire_time": datetime.now(UTC) - timedelta(minutes=5),
    }
    expired = {"status": "RUNNING", "next_claim_time": entry["ping_expire_time"], "task_state.worker_states": [entry]}
    await stored.tasks.update_one({"_id": "work:k"}, {"$set": expired})
    [finding] = await findings(mesh, "leases")
    assert finding.level == "warning"
    assert "1 tasks lost their worker" in finding.found


async def test_leases_shorter_than_two_pings_are_told(mesh: TaskMesh) -> None:
    await mesh.publish("hasty", "k", worker_timeout_ms=1_500, ping_interval_ms=1_000)
    [finding] = await findings(mesh, "leases")
    assert "hasty" in finding.found


async def test_large_tasks_are_told(mesh: TaskMesh) -> None:
    await mesh.publish("big", "k", {"blob": b"x" * 5_000_000})
    [finding] = await findings(mesh, "tasks")
    assert "'big:k' has 5.0 MB" in finding.found


async def test_a_ttl_monitor_that_sleeps_is_told(
    mesh: TaskMesh, mongo_uri: str, stored: AsyncDatabase[dict[str, Any]]
) -> None:
    async with server_parameter(mongo_uri, "ttlMonitorEnabled", value=False):
        await mesh.publish("old", "k")
        long_ago = datetime.now(UTC) - timedelta(hours=1)
        await stored.tasks.update_one({"_id": "old:k"}, {"$set": {"delete_time": long_ago}})
        [finding] = await findings(mesh, "retention")
    assert (finding.level, finding.found[:9]) == ("warning", "1 tasks s")


async def test_a_transaction_that_stays_open_is_told(
    mesh: TaskMesh, mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskmesh.admin.doctor.TRANSACTION_S", 0.05)
    await mesh.publish("work", "k")
    with MongoClient[dict[str, Any]](mongo_uri) as client, client.start_session() as session:
        session.start_transaction()
        client[database].tasks.find_one({}, session=session)

        async def told() -> bool:
            return bool(await findings(mesh, "transactions", "warning"))

        await eventually(told)
        session.abort_transaction()


async def test_a_clock_that_is_off_is_told(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskmesh.admin.doctor.time.time", lambda: 1_000_000_000.0)
    [finding] = await findings(mesh, "clock")
    assert finding.level == "note"
    assert "off this host's" in finding.found


async def test_what_the_user_may_not_see_is_said_and_does_no_harm(mesh: TaskMesh, mongo_uri: str) -> None:
    async with failing_commands(mongo_uri, ["replSetGetStatus"], errorCode=13):
        [finding] = await findings(mesh, "topology")
    assert finding.level == "note"
    assert "may not see" in finding.found


async def test_what_waits_for_what_ended_otherwise_is_told(mesh: TaskMesh) -> None:
    waits: Any = {"on_dependency_failure": "wait"}
    first = await mesh.publish("first", "k", delay_ms=600_000)
    await mesh.publish("then", "k", after=[first], **waits)
    assert "dependencies" not in {finding.subject for finding in await mesh.inspect.doctor()}
    await first.cancel()
    [finding] = await findings(mesh, "dependencies", "warning")
    assert "then:k" in finding.found


async def test_a_flow_that_was_begun_and_not_completed_is_told_until_it_is_given_up(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(*_: object) -> None:
        raise KeyboardInterrupt

    @mesh.task
    async def part() -> None: ...

    async def publish() -> None:
        async with mesh.flow("import") as flow:
            flow.add(part, "1")

    with monkeypatch.context() as patch:
        patch.setattr(flows, "seal", die)
        with pytest.raises(KeyboardInterrupt):
            await publish()
    assert "flows" not in {finding.subject for finding in await mesh.inspect.doctor()}
    monkeypatch.setattr("taskmesh.admin.doctor.FLOW_OPEN_S", 0)
    [finding] = await findings(mesh, "flows", "warning")
    assert "'import'" in finding.found
    await mesh.flows.cancel("import")
    assert "flows" not in {finding.subject for finding in await mesh.inspect.doctor()}
