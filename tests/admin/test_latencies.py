"""`mesh.queues.all(latencies=True)`: how long tasks of each queue waited and ran, of the newest that ended."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import MongoClient

from taskmesh import Retry, TaskFailed, TaskMesh, TaskOption, current_task
from taskmesh.admin.store import newest_ended
from taskmesh.model.queue import Percentiles, QueueLatency
from tests.working import finished, working


async def latency_of(mesh: TaskMesh) -> dict[str, QueueLatency]:
    return {queue.queue: queue.latency for queue in await mesh.queues.all(latencies=True) if queue.latency is not None}


def test_percentiles_are_times_that_occurred() -> None:
    assert Percentiles.of([]) is None
    assert Percentiles.of([7]) == Percentiles(p50_ms=7, p95_ms=7, p99_ms=7)
    assert Percentiles.of(range(100, 0, -1)) == Percentiles(p50_ms=50, p95_ms=95, p99_ms=99)
    assert Percentiles.of([1, 1_000]) == Percentiles(p50_ms=1, p95_ms=1_000, p99_ms=1_000)


async def test_waits_and_runs_are_told_by_queue(mesh: TaskMesh) -> None:
    """Waits are counted from when a task could start: not its delay, nor that of a retry."""

    @mesh.task(queue="slow")
    async def slow() -> None:
        await asyncio.sleep(0.3)

    @mesh.task(queue="late", option=TaskOption(retain_success_ms=3_600_000))
    async def late() -> None:
        if current_task().attempt == 1:
            raise Retry(delay_ms=400)

    @mesh.task(queue="fails", option=TaskOption(max_unexpected_retries=0))
    async def fails() -> None:
        raise TaskFailed("no")

    assert await mesh.queues.all(latencies=True) == []
    for definition in (slow, late, fails):
        await definition.publish("k")
    await late.configure(delay_ms=500).publish("delayed")
    await slow.configure(delay_ms=86_400_000).publish("tomorrow")
    await slow.publish("never")
    await mesh.cancel("slow", "never")
    async with working(mesh, "w"):
        for name, key in (("slow", "k"), ("late", "k"), ("late", "delayed"), ("fails", "k")):
            await finished(mesh, name, key)
    found = await latency_of(mesh)
    assert {queue: latency.ended for queue, latency in found.items()} == {"fails": 1, "late": 2, "slow": 2}
    for queue, keys in {"slow": ["k"], "late": ["k", "delayed"], "fails": ["k"]}.items():
        runs = [await _last_run_ms(mesh, queue, key) for key in keys]
        run = found[queue].run
        assert run is not None
        assert run.p50_ms in runs
        assert run.p99_ms == max(runs)
    assert await _last_run_ms(mesh, "slow", "k") >= 300
    wait = found["late"].wait
    assert wait is not None
    for key in ("k", "delayed"):
        task = await mesh.get("late", key)
        (entry,) = [one for one in task.task_state.worker_states if one.success_time is not None]
        assert entry.start_time is not None
        assert task.task_state.start_time is None or task.task_state.start_time <= entry.start_time
    assert wait.p99_ms < (await mesh.get("late", "delayed")).task_option.worker_timeout_ms
    assert [queue.latency for queue in await mesh.queues.all()] == [None], (
        "nobody asked; only `slow` has anything unfinished"
    )


async def _last_run_ms(mesh: TaskMesh, name: str, key: str) -> int:
    """How long its last execution took, by its own times: however long a busy machine needed for it."""
    entry = (await mesh.get(name, key)).task_state.worker_states[-1]
    ended = entry.success_time or entry.fail_time
    assert ended is not None
    assert entry.start_time is not None
    return (ended - entry.start_time) // timedelta(milliseconds=1)


@pytest.mark.usefixtures("never_used")
async def test_the_newest_that_ended_are_looked_at_and_no_more(
    mesh: TaskMesh, mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are kept, and for however long each: what ended lately is not hidden behind what is kept for longer."""
    monkeypatch.setattr(newest_ended, "LOOKED_AT", 50)

    @mesh.task(queue="short", option=TaskOption(retain_success_ms=60_000, retain_failed_ms=None))
    async def short() -> None: ...

    await short.publish("k")
    async with working(mesh, "w"):
        await finished(mesh, "short", "k")

    def fill() -> None:
        with MongoClient[dict[str, Any]](mongo_uri, tz_aware=True) as client:
            tasks, now = client[database]["tasks"], datetime.now(UTC)
            template = tasks.find_one({}) or {}

            def old(number: int, status: str, age: timedelta, kept: timedelta) -> dict[str, Any]:
                key, ended = f"{status}-{number}", now - age - timedelta(seconds=number)
                own = {"_id": f"short:{key}", "key": key, "status": status, "queue": f"old-{status}"}
                return {**template, **own, "finish_time": ended, "delete_time": ended + kept}

            days = timedelta(days=1)
            tasks.insert_many([old(n, "FAIL", days / 2, 7 * days) for n in range(1_000)])
            tasks.insert_many([old(n, "SUCCESS", days / 4, days) for n in range(1_000)])

    await asyncio.to_thread(fill)
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        client[database].command("profile", 2)
        found = await latency_of(mesh)
        client[database].command("profile", 0)
        (told,) = client[database]["system.profile"].find(
            {"command.aggregate": "tasks", "command.hint": "taskmesh_delete"}
        )
    assert found["short"].ended == 1
    assert found["short"].run is not None
    assert found["old-SUCCESS"].ended == 49, "those that ended later go before those that FAILed"
    assert "old-FAIL" not in found
    assert told["docsExamined"] <= 3 * 50 + 3
    assert told["planSummary"].count("IXSCAN") == 1


async def test_what_a_stranger_wrote_does_no_harm(mesh: TaskMesh, mongo_uri: str, database: str) -> None:
    @mesh.task
    async def work() -> None: ...

    await work.publish("k")
    async with working(mesh, "w"):
        await finished(mesh, "work", "k")
    with MongoClient[dict[str, Any]](mongo_uri, tz_aware=True) as client:
        tasks = client[database]["tasks"]
        template = tasks.find_one({}) or {}
        strangers: list[dict[str, Any]] = [
            {"task_state.worker_states": 3},
            {"task_state.worker_states": [7]},
            {"task_state": None},
            {"task_state.worker_states.0.start_time": "yesterday"},
            {"task_state.create_time": [1]},
            {"finish_time": "now"},
            {"queue": 5},
            {"task_state.lost_cnt": {"$a": 1}},
        ]
        for number, spoilt in enumerate(strangers):
            tasks.insert_one({**template, "_id": f"work:{number}", "key": str(number)})
            tasks.update_one({"_id": f"work:{number}"}, {"$set": spoilt})
    found = await latency_of(mesh)
    assert found["default"].ended == 7
