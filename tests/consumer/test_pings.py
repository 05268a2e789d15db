"""Pings renew every lease that is held, whatever happens around them, and nothing that is better left alone."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import datetime, timedelta
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import ConfigurationError

from taskmesh import TaskMesh, TaskOption, current_task
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import parts_of, working

SHORT = TaskOption(worker_timeout_ms=1_000, ping_interval_ms=200, max_unexpected_retries=0)


async def test_a_gap_in_the_stream_does_not_undo_an_open_transaction(
    mesh: TaskMesh, mongo_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After a gap a worker looks at all that it runs. A ping would write to the task that the transaction is to write to."""
    caplog.set_level(logging.WARNING, "taskmesh.feed")
    attempts: list[int] = []

    @mesh.task(option=SHORT)
    async def order() -> None:
        task = current_task()
        attempts.append(task.attempt)
        async with task.transaction() as session:
            orders = session.client[mesh.store.driver.database.name]["orders"]
            await orders.insert_one({"attempt": len(attempts)}, session=session)
            async with failing_commands(mongo_uri, ["getMore"], times=1, errorCode=286):
                await eventually(lambda: "lost its place" in caplog.text, what="there is a gap")
                await asyncio.sleep(1.5)  # seven intervals
            task.set_result("kept")

    async with working(mesh):
        handle: Any = await order.publish("k")
        assert await handle.result(60) == "kept"
    assert len(attempts) == 1


async def test_leases_are_kept_though_the_name_server_did_not_answer_at_the_start(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client for `mongodb+srv://` asks a name server as it is made."""
    silences = 2

    def make_client(**settings: Any) -> MongoClient[Any]:
        nonlocal silences
        if silences:
            silences -= 1
            raise ConfigurationError("The DNS operation timed out")
        return MongoClient(**settings)

    monkeypatch.setattr("taskmesh.store.mongodb.driver.MongoClient", make_client)

    @mesh.task(option=TaskOption(worker_timeout_ms=3_000, ping_interval_ms=300, max_timeouts=0))
    async def job() -> str:
        await asyncio.sleep(4.0)  # longer than a lease
        return "done"

    async with working(mesh):
        await eventually(lambda: silences == 0, what="it was asked again")
        handle = await job.publish("k")
        assert await handle.result(timeout=60) == "done"
    assert (await handle.task()).task_state.lost_cnt == 0
    assert "could not create a client for pings" in caplog.text


async def test_one_task_with_a_short_interval_does_not_keep_the_pinger_awake_when_it_has_ended(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None:
        if current_task().key == "short":
            return
        await asyncio.sleep(60)

    async with working(mesh) as consumer:
        await job.publish("long")
        pinger = parts_of(consumer).pinger
        usual_s = pinger._tick_s
        await (await job.configure(ping_interval_ms=40).publish("short")).result(timeout=60)
        await eventually(lambda: pinger._tick_s == usual_s, what="it looks as seldom as before")


@pytest.mark.parametrize("hours", [1, -1])
async def test_t6_when_the_wall_clock_jumps_every_lease_is_checked_at_once(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """While a machine is suspended its monotonic clock may stand still, by which a lease is over when it is not."""
    cancelled: list[str] = []

    @mesh.task(option=TaskOption(ping_interval_ms=600_000, worker_timeout_ms=1_200_000))
    async def job() -> None:
        try:
            await asyncio.sleep(120)
        except asyncio.CancelledError:
            cancelled.append(current_task().key)
            raise

    async def lease_end(key: str) -> datetime:
        [entry] = (await mesh.get("job", key)).task_state.worker_states
        assert entry.ping_expire_time is not None
        return entry.ping_expire_time

    await job.publish_many({"kept": {}, "taken over": {}})
    async with working(mesh) as consumer:
        await eventually(lambda: len(consumer.running) == 2)
        kept_until = await lease_end("kept")
        consumer.pause()
        tasks = mesh.store.driver.collection("tasks")
        long_ago = {"$set": {"task_state.worker_states.0.ping_expire_time": mesh.clock.now() - timedelta(hours=1)}}
        await tasks.update_one({"_id": "job:taken over"}, long_ago)

        true_time = time.time
        monkeypatch.setattr(time, "time", lambda: true_time() + 3_600 * hours)

        await eventually(lambda: cancelled, 20, what="the handler whose lease is lost is told")

        async def renewed() -> bool:
            return await lease_end("kept") > kept_until

        await eventually(renewed)
        assert cancelled == ["taken over"]
        assert consumer.running == ["kept"]
        monkeypatch.undo()
