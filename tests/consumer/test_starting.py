"""Starting: a consumer can be stopped at any moment of it, is started once, and is not started with what makes no sense."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from taskmesh import Consumer, InvalidOption, TaskMesh
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import parts_of, working, working_in_a_thread

HELD_UP: dict[str, Any] = {"blockConnection": True, "blockTimeMS": 1_500}


def _job(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...


def _state(consumer: Consumer) -> str:
    return consumer.state


async def test_a_stop_while_it_registers_is_heard_and_returns_when_the_consumer_has_stopped(
    mesh: TaskMesh, mongo_uri: str
) -> None:
    _job(mesh)
    consumer = mesh.consumer(worker_id="w")
    async with failing_commands(mongo_uri, ["findAndModify"], times=1, **HELD_UP) as have_begun:
        running = asyncio.create_task(consumer.run())
        await have_begun()
        assert _state(consumer) == "ready", "it is not registered yet"
        async with asyncio.timeout(30):
            await consumer.stop()
        assert consumer.state == "stopped"
        async with asyncio.timeout(30):
            await running
    assert consumer.state == "stopped", "and stays so"
    assert not [worker for worker in await mesh.workers() if worker.live]


async def test_it_is_started_once_though_it_is_asked_twice_at_the_same_time(mesh: TaskMesh) -> None:
    _job(mesh)
    async with working(mesh, "w") as consumer:
        with pytest.raises(RuntimeError, match="this consumer is running"):
            await consumer.run()
    again = mesh.consumer(worker_id="w")
    first = asyncio.create_task(again.run())
    second = asyncio.create_task(again.run())
    with pytest.raises(RuntimeError, match="this consumer is starting: a consumer runs once"):
        await second
    await again.stop()
    await first


async def test_a_start_that_failed_may_be_tried_again(mesh: TaskMesh, mongo_uri: str) -> None:
    _job(mesh)
    consumer = mesh.consumer(worker_id="w")
    async with failing_commands(mongo_uri, ["findAndModify"], times=1, errorCode=13):
        with pytest.raises(Exception, match="Failing command"):
            await consumer.run()
    assert _state(consumer) == "ready"
    async with asyncio.timeout(60):
        await consumer.run(until_idle=True)
    assert consumer.state == "stopped"


async def test_a_stop_is_heard_while_the_stream_does_not_open(mongo_uri: str, database: str) -> None:
    """As when the database goes away just then."""
    async with (
        AsyncMongoClient[dict[str, Any]](mongo_uri, appname="without a stream", tz_aware=True) as client,
        TaskMesh(client, database=database) as other,
    ):
        _job(other)
        consumer = other.consumer(worker_id="w")
        # Two are asked for before the stream: who lives, and which queues are paused.
        async with failing_commands(mongo_uri, ["aggregate"], skip=2, appname="without a stream", errorCode=6):
            running = asyncio.create_task(consumer.run())
            await eventually(lambda: other.feed._subscriptions, what="it opens its stream")
            assert not other.feed._subscriptions[0].ready.is_set()
            async with asyncio.timeout(30):
                await consumer.stop(grace_ms=0)
                await running
        assert consumer.state == "stopped"


@pytest.mark.parametrize("setting", ["queues", "names"])
async def test_a_text_in_place_of_a_list_of_names_is_refused(mesh: TaskMesh, setting: str) -> None:
    _job(mesh)
    with pytest.raises(InvalidOption, match=rf"{setting} must be a list of .*, got a str: write \['job'\]"):
        mesh.consumer(**{setting: "job"})  # type: ignore[arg-type]  # that is the point


async def test_a_queue_that_cannot_exist_is_refused(mesh: TaskMesh) -> None:
    with pytest.raises(InvalidOption, match="a queue's name must be 1 to 100 characters"):
        mesh.consumer(queues=["default", "no such queue"])


async def test_signals_stop_consumers_in_all_threads_whichever_began_first(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    _job(mesh)
    before = signal.getsignal(signal.SIGTERM)
    with working_in_a_thread(mongo_uri, database, _job, "elsewhere") as elsewhere:
        consumer = mesh.consumer(worker_id="here")
        running = asyncio.create_task(consumer.run())
        await eventually(lambda: consumer.state == "running" and parts_of(consumer).scanner.scans)
        assert signal.getsignal(signal.SIGTERM) is not before, "else it would end this process"
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            await running
        await eventually(lambda: elsewhere.state == "stopped")
    assert signal.getsignal(signal.SIGTERM) is before


async def test_a_consumer_in_a_thread_ends_in_peace_when_the_one_in_the_main_thread_has_gone(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    _job(mesh)
    ended: list[str] = []
    async with working(mesh, "here") as here:
        with working_in_a_thread(mongo_uri, database, _job, "elsewhere") as elsewhere:
            await here.stop()
            assert elsewhere.state == "running"
        ended.append(elsewhere.state)
    assert ended == ["stopped"]
