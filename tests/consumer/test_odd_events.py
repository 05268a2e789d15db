"""T22: the stream meets changes that no task of ours makes. It goes on, and names what it cannot read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from bson import ObjectId
from pymongo import AsyncMongoClient
from pymongo.errors import WriteError

from taskmesh import TaskMesh
from taskmesh.client.definition import TaskDefinition
from tests.waiting import eventually
from tests.working import working

_PATIENCE_S = 30.0
_A_THIRD_OF_THE_LARGEST = 5_700_000
_CACHE_FULL = 388

Tasks = Any
Job = TaskDefinition[[], str]


async def _a_task_is_deleted(job: Job, tasks: Tasks) -> None:
    await job.configure(delay_ms=3_600_000).publish("deleted")
    await tasks.delete_one({"_id": "job:deleted"})


async def _a_task_is_forgotten_by_the_ttl_monitor(job: Job, tasks: Tasks) -> None:
    await job.configure(retain_success_ms=1).publish("forgotten")

    async def is_gone() -> bool:
        return await tasks.find_one({"_id": "job:forgotten"}) is None

    await eventually(is_gone, _PATIENCE_S)


async def _a_stranger_stands_there(_: Job, tasks: Tasks) -> None:
    await tasks.insert_one({"_id": ObjectId(), "hello": "world"})


async def _a_stranger_has_the_name_of_a_task(_: Job, tasks: Tasks) -> None:
    await tasks.insert_one({"_id": "job:stranger", "name": "job"})


async def _a_stranger_looks_like_a_task(_: Job, tasks: Tasks) -> None:
    now = datetime.now(UTC)
    await tasks.insert_one({"_id": 17, "name": "job", "queue": "default", "next_claim_time": now, "task_option": 3})


async def _the_option_of_a_task_is_odd(_: Job, tasks: Tasks) -> None:
    odd = {"task_option": {"concurrent_worker_cnt": "many", "priority": "high"}, "task_state": {"worker_states": []}}
    place = {"name": "job", "key": "odd", "queue": "default", "status": "INIT", "next_claim_time": datetime.now(UTC)}
    await tasks.insert_one({"_id": "job:odd", **place, **odd})


async def _a_task_is_replaced_by_what_is_none(job: Job, tasks: Tasks) -> None:
    await job.configure(delay_ms=3_600_000).publish("replaced")
    await tasks.replace_one({"_id": "job:replaced"}, {"name": "job", "queue": ["default"]})


async def _the_word_of_what_happened_is_spoilt(job: Job, tasks: Tasks) -> None:
    await job.configure(delay_ms=3_600_000).publish("spoilt")
    await tasks.update_one({"_id": "job:spoilt"}, {"$set": {"event": "succeeded", "next_claim_time": 7}})
    await tasks.update_one({"_id": "job:spoilt"}, {"$set": {"event": {"no": "text"}, "status": 5}})


async def _an_event_is_larger_than_a_document_may_be(_: Job, tasks: Tasks) -> None:
    """It tells of the `_id` three times, once in hexadecimal digits."""

    async def inserted() -> bool:
        try:
            await tasks.insert_one({"_id": "x" * _A_THIRD_OF_THE_LARGEST, "name": "job"})
        except WriteError as error:
            if error.code != _CACHE_FULL:
                raise
            return False
        return True

    await eventually(inserted, what="the small cache of this server has room for it")


ODD: list[Callable[[Job, Tasks], Awaitable[None]]] = [
    _a_task_is_deleted,
    _a_task_is_forgotten_by_the_ttl_monitor,
    _a_stranger_stands_there,
    _a_stranger_has_the_name_of_a_task,
    _a_stranger_looks_like_a_task,
    _the_option_of_a_task_is_odd,
    _a_task_is_replaced_by_what_is_none,
    _the_word_of_what_happened_is_spoilt,
    _an_event_is_larger_than_a_document_may_be,
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__[1:])
async def test_t22_odd_events_stop_neither_workers_nor_readers(
    mesh: TaskMesh, mongo_uri: str, database: str, caplog: pytest.LogCaptureFixture, odd: Any
) -> None:
    caplog.set_level(logging.WARNING, "taskmesh")

    @mesh.task
    async def job() -> str:
        return "done"

    told: list[str] = []
    async with (
        AsyncMongoClient[dict[str, Any]](mongo_uri) as client,
        working(mesh, "w1") as consumer,
        mesh.events() as events,
    ):
        assert await (await job.publish("before")).result(_PATIENCE_S) == "done"
        await odd(job, client[database]["tasks"])
        for n in range(3):
            assert await (await job.publish(f"after {n}")).result(_PATIENCE_S) == "done"
        async with asyncio.timeout(_PATIENCE_S):
            async for event in events:
                told.append(f"{event.kind} {event.key}")
                if told[-1] == "finished after 2":
                    break
        assert consumer.state == "running"
        assert mesh.feed.offered
    assert told.index("finished before") < told.index("published after 2")
    # The pinger tells, besides, of a loop that stood still: on a busy machine.
    lines = [record.getMessage() for record in caplog.records if record.name != "taskmesh.pinger"]
    assert len(lines) <= 2, ("it is said, and not again and again", lines)
    if odd in (_a_stranger_has_the_name_of_a_task, _a_task_is_replaced_by_what_is_none):
        named = "job:stranger" if odd is _a_stranger_has_the_name_of_a_task else "job:replaced"
        assert any(named in line for line in lines), lines


async def test_t22_a_task_that_somebody_wrote_by_hand_runs(mesh: TaskMesh, mongo_uri: str, database: str) -> None:
    @mesh.task
    async def job() -> str:
        return "done"

    await job.configure(delay_ms=3_600_000).publish("by hand")
    async with AsyncMongoClient[dict[str, Any]](mongo_uri, tz_aware=True) as client, working(mesh, "w1"):
        tasks = client[database]["tasks"]
        document = await tasks.find_one({"_id": "job:by hand"})
        assert document is not None
        document["task_state"]["start_time"] = document["next_claim_time"] = datetime.now(UTC)
        await tasks.replace_one({"_id": "job:by hand"}, document)
        handle = await job.publish("by hand")
        assert not handle.created
        assert await handle.result(_PATIENCE_S) == "done"
