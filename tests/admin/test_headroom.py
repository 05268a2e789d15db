"""How near it came: leases that were renewed late, loops that stood still, claims in vain. Told long before a task runs twice."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from taskmesh import Status, TaskMesh, TaskOption
from taskmesh.admin.doctor import LEASE_LEFT_WANTED
from taskmesh.consumer import worker_stats
from taskmesh.consumer.worker_stats import WorkerStats
from taskmesh.model.worker import WorkerInfo
from taskmesh.store import registry
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import status_is, working


async def told(mesh: TaskMesh) -> WorkerInfo:
    """Wait until the worker's sign of life says how its leases are, and return it."""

    async def worker() -> WorkerInfo | None:
        found = next((worker for worker in await mesh.workers() if worker.live), None)
        return found if found is not None and found.lease_left else None

    return await eventually(worker, what="a sign of life after a renewal")


@pytest.mark.parametrize("level", [pytest.param("warning", marks=pytest.mark.slow), "ok"])
async def test_the_doctor_knows_how_near_a_lease_came_to_its_end(mesh: TaskMesh, mongo_uri: str, level: str) -> None:
    @mesh.task(name="a.b", option=TaskOption(worker_timeout_ms=20_000, ping_interval_ms=500))
    async def work() -> None:
        await asyncio.sleep(600)

    await work.publish("k")
    async with working(mesh, "w1"):
        if level == "warning":
            await _renewed_late(mesh, mongo_uri)
        worker = await told(mesh)
        [left] = worker.lease_left
        assert left.name == "a.b"
        assert worker.least_lease_left == left
        assert 0 <= left.share <= 1
        assert (worker.claims_tried, worker.claims_won, worker.claims_lost_share) == (1, 1, 0.0)
        [finding] = [finding for finding in await mesh.inspect.doctor() if finding.subject == "headroom"]
        [later] = (await told(mesh)).lease_left
    # A renewal between two looks may have come nearer: the doctor looked at one of both.
    assert finding.level in {"warning" if share < LEASE_LEFT_WANTED else "ok" for share in (left.share, later.share)}
    if finding.level == "warning":
        assert "'a.b' on w1" in finding.found
        assert "worker_timeout_ms" in str(finding.remedy)
    else:
        assert "every lease was renewed with" in finding.found


@pytest.mark.parametrize(
    ("tried", "won", "told_of"), [(200_000, 114_000, False), (200_000, 80_000, True), (10_000, 1_000, False)]
)
async def test_the_doctor_leaves_fleets_alone_that_lose_as_many_claims_as_healthy_ones_do(
    mesh: TaskMesh, tried: int, won: int, told_of: bool
) -> None:
    described = {"names": ["work"], "queues": None, "host": "h", "pid": 1, "version": "1", "state": "running"}
    described |= {"concurrency": 20, "running": 0, "claims_tried": tried, "claims_won": won}
    assert await registry.register(mesh.store, "w1", "instance", described) is not None
    findings = [finding for finding in await mesh.inspect.doctor() if finding.subject == "claims"]
    assert bool(findings) is told_of
    if told_of:
        assert "60% of the 200000 claims of w1" in findings[0].found


async def _renewed_late(mesh: TaskMesh, mongo_uri: str) -> None:
    """Let no renewal come through until little of the lease is left, and return when the worker has told of that."""

    async def left_s() -> float:
        [task] = [task async for task in mesh.find("a.b", Status.RUNNING)]
        end = task.task_state.worker_states[0].ping_expire_time
        assert end is not None
        return (end - mesh.clock.now()).total_seconds()

    async def little_is_left() -> bool:
        return await left_s() < 3.5

    async def is_told() -> bool:
        least = (await told(mesh)).least_lease_left
        return least is not None and least.share < LEASE_LEFT_WANTED

    await told(mesh)
    async with failing_commands(mongo_uri, ["update"], errorCode=6):
        await eventually(little_is_left)
    await eventually(is_told)


@pytest.mark.slow
@pytest.mark.blocks_the_loop
async def test_a_loop_that_stood_still_is_told_by_the_doctor(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> None:
        time.sleep(2.5)  # noqa: ASYNC251 — in the event loop, where it must not be

    await work.publish("k")
    async with working(mesh, "w1"):
        await status_is(mesh, "work", "k", Status.SUCCESS)

        async def finding() -> str | None:
            return next((each.found for each in await mesh.inspect.doctor() if each.subject == "event loop"), None)

        assert "the event loop of w1 was blocked for" in await eventually(finding)


async def test_a_schedule_that_nobody_can_run_is_told(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> None: ...

    await mesh.every("work", interval_ms=3_600_000, schedule_id="known")
    await mesh.every("of_the_next_release", interval_ms=3_600_000, schedule_id="unknown")
    async with working(mesh, "w1"):
        findings = [finding for finding in await mesh.inspect.doctor() if finding.subject == "schedules"]
    assert ["'unknown' publishes 'of_the_next_release'" in finding.found for finding in findings] == [True]


def test_what_is_older_than_an_hour_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(worker_stats, "time", SimpleNamespace(monotonic=lambda: now))
    seen = WorkerStats()
    seen.renewed("a", 0.3)
    seen.renewed("a", 0.1)
    seen.renewed("b", 0.5)
    seen.stood_still(4.0)
    first = seen.described(10, 8)
    assert first == {
        "claims_tried": 10,
        "claims_won": 8,
        "stood_still_ms": 4_000,
        "lease_left": [{"name": "a", "share": 0.1}, {"name": "b", "share": 0.5}],
    }
    now += 1_800
    seen.renewed("a", 0.4)
    assert seen.described(15, 13) == first | {"claims_tried": 15, "claims_won": 13}
    now += 2_400
    assert seen.described(15, 13) == {
        "claims_tried": 5,
        "claims_won": 5,
        "stood_still_ms": 0,
        "lease_left": [{"name": "a", "share": 0.4}],
    }
    now += 36_000
    assert seen.described(15, 13)["claims_tried"] == 0
