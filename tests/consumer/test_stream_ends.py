"""The change stream ends or loses its place: workers go on, and nothing that was published meanwhile is left behind."""

from __future__ import annotations

import logging
import time
from itertools import pairwise
from typing import Any

import pytest
from pymongo import AsyncMongoClient, monitoring

from taskmesh import TaskMesh
from taskmesh.client.definition import TaskDefinition
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import all_working

_PATIENCE_S = 30.0


def _job(mesh: TaskMesh) -> TaskDefinition[[], str]:
    @mesh.task
    async def job() -> str:
        return "done"

    return job


async def _works(job: TaskDefinition[[], str], key: str) -> None:
    assert await (await job.publish(key)).result(timeout=_PATIENCE_S) == "done"


@pytest.mark.parametrize("how", ["dropped", "renamed"])
async def test_t21_workers_go_on_when_the_collection_is_gone_under_them(
    mesh: TaskMesh, mongo_uri: str, database: str, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    caplog.set_level(logging.WARNING, "taskmesh")
    job = _job(mesh)
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client, all_working(mesh, ["w1", "w2"]):
        await _works(job, "before")
        tasks = client[database]["tasks"]
        indexes = set(await tasks.index_information())
        if how == "dropped":
            await tasks.drop()
        else:
            await tasks.rename("set_aside")

        async def indexes_are_there() -> bool:
            return set(await tasks.index_information()) == indexes

        await eventually(indexes_are_there, _PATIENCE_S)
        for n in range(3):
            await _works(job, f"after {n}")
    told = [record.getMessage() for record in caplog.records if "dropped or renamed" in record.getMessage()]
    assert 1 <= len(told) <= 2, "each worker says it in one line"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("code", [286, 280, 260])
async def test_t20_a_place_that_is_lost_costs_a_scan_and_readers_are_told_of_the_gap(
    mesh: TaskMesh, mongo_uri: str, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    caplog.set_level(logging.WARNING, "taskmesh.feed")
    job = _job(mesh)
    told: list[tuple[str, str]] = []
    async with all_working(mesh, ["w1"]), mesh.events() as events:

        async def hear_of_the_end_of(key: str) -> None:
            async for event in events:
                told.append((event.kind, event.key))
                if told[-1] == ("finished", key):
                    break

        await _works(job, "before")
        await hear_of_the_end_of("before")
        # The stream's next read fails, and so does the first try to go on behind its last event.
        async with failing_commands(mongo_uri, ["getMore"], times=1, errorCode=code):
            await _works(job, "meanwhile")
            await eventually(lambda: "lost its place" in caplog.text, what="there is a gap")
        await eventually(lambda: mesh.feed.position, what="the stream is open again")
        await _works(job, "after")
        await hear_of_the_end_of("after")
    gap = told.index(("gap", ""))
    assert told.index(("finished", "before")) < gap, "in its place, and before the last of what came after it"


class _Openings(monitoring.CommandListener):
    """When somebody tried to open a change stream."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if event.command_name == "aggregate" and "$changeStream" in next(iter(event.command["pipeline"]), {}):
            self.at.append(time.monotonic())

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...

    def failed(self, event: monitoring.CommandFailedEvent) -> None: ...


async def test_t20_a_stream_that_cannot_be_opened_is_tried_once_in_a_growing_while(
    mongo_uri: str, database: str
) -> None:
    openings = _Openings()
    client = AsyncMongoClient[dict[str, Any]](mongo_uri, appname="taskmesh", event_listeners=[openings], tz_aware=True)
    async with client, TaskMesh(client, database=database) as mesh:
        job = _job(mesh)
        async with all_working(mesh, ["w1"]):
            await _works(job, "before")
            openings.at.clear()
            async with failing_commands(mongo_uri, ["getMore", "aggregate"], errorCode=286):
                await eventually(lambda: len(openings.at) >= 4)
            tried = openings.at[:4]
            await _works(job, "after")
    pauses_s = [after - before for before, after in pairwise(tried)]
    assert [pause for pause, at_least in zip(pauses_s, (0.2, 0.4, 0.8), strict=True) if pause < 0.9 * at_least] == []


async def test_t19_a_stream_whose_cursor_is_killed_again_and_again_loses_nothing(
    mesh: TaskMesh, mongo_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "taskmesh")
    job = _job(mesh)
    async with all_working(mesh, ["w1"]):
        for n in range(20):
            how: dict[str, Any] = {"errorCode": 43} if n % 2 else {"closeConnection": True}
            async with failing_commands(mongo_uri, ["getMore"], times=1, **how):
                await _works(job, str(n))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_stream_that_does_not_open_again_under_a_backlog_does_not_stop_the_scans(
    mongo_uri: str, database: str
) -> None:
    """Under a backlog a worker no longer asks its stream for new work: it opens another."""
    count = 2_500
    async with (
        AsyncMongoClient[dict[str, Any]](mongo_uri, appname="soon deaf", tz_aware=True) as client,
        TaskMesh(client, database=database) as mesh,
    ):
        job = _job(mesh)
        await job.publish_many({f"k{n}": {} for n in range(count)})
        # Three are asked for before that: who lives, which queues are paused, and the first stream.
        async with (
            failing_commands(mongo_uri, ["aggregate"], skip=3, appname="soon deaf", errorCode=6),
            all_working(mesh, ["w"], concurrency=50) as [consumer],
        ):
            await eventually(lambda: consumer.finished == count)
            assert not mesh.feed._subscriptions[0].ready.is_set(), "the stream has not come back"
