"""Each change of a collection becomes exactly one task, whoever is killed while he reads, and though tasks are soon forgotten."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from taskmesh import ChangeEvent, TaskMesh
from taskmesh.store.triggers import data_changes
from tests.faults import server_parameter
from tests.processes.change_handlers import READING, define
from tests.processes.fleet import Fleet
from tests.waiting import eventually
from tests.working import working

_HANDLERS = "tests.processes.change_handlers"
_READER = ["ordered.reader"]


@pytest.fixture
async def orders(mongo_uri: str, database: str) -> AsyncIterator[Any]:
    """The collection whose changes become tasks."""
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        yield client[database]["orders"]
        await client[database].drop_collection("orders")


async def is_begun(mesh: TaskMesh) -> bool:
    """Whether somebody has begun to read."""
    return bool([place for place in await data_changes.read_all(mesh.store) if "token" in place])


@pytest.mark.lasting
async def test_a_reader_that_is_killed_between_any_two_steps_loses_and_doubles_nothing(
    mesh: TaskMesh, fleet: Fleet, orders: Any, mongo_uri: str
) -> None:
    seen: list[ChangeEvent] = []
    define(mesh, seen=seen)
    made: list[Any] = []
    # What a killed reader has begun stays locked until the server ends it.
    async with server_parameter(mongo_uri, "transactionLifetimeLimitSeconds", 1), working(mesh, names=["ordered"]):
        for step in READING:
            victim = fleet.start(handlers=_HANDLERS, names=_READER, broken=[step])
            if "begun" not in step:
                made += (await orders.insert_many([{"step": step, "n": n} for n in range(3)])).inserted_ids
                made += [(await orders.insert_one({"step": step, "n": 3})).inserted_id]
            assert victim.wait() == -signal.SIGKILL, step
        fleet.start(handlers=_HANDLERS, names=_READER)
        await eventually(lambda: is_begun(mesh))
        made += (await orders.insert_many([{"n": n} for n in range(3)])).inserted_ids
        await eventually(lambda: len(seen) >= len(made), what="each change has become a task")
        # What comes after all others: so nothing is on its way any more.
        last = (await orders.insert_one({})).inserted_id
        await eventually(lambda: seen[-1].document_id == last)
    assert Counter(event.document_id for event in seen) == Counter([*made, last])


@pytest.mark.lasting
async def test_two_readers_at_once_publish_each_change_once_and_so_does_a_late_one(
    mesh: TaskMesh, fleet: Fleet, orders: Any
) -> None:
    """One is suspended in the middle, loses its lease, and goes on as if nothing had been."""
    seen: list[ChangeEvent] = []
    define(mesh, seen=seen)
    async with working(mesh, names=["ordered"]):
        first = fleet.start(handlers=_HANDLERS, names=_READER, broken=["notices_no_loss"])
        await eventually(lambda: is_begun(mesh))
        made = [(await orders.insert_one({"n": 0})).inserted_id]
        await eventually(lambda: len(seen) == 1)
        first.suspend()
        second = fleet.start(handlers=_HANDLERS, names=_READER, broken=["notices_no_loss"])
        made += (await orders.insert_many([{"n": n} for n in range(50)])).inserted_ids
        await eventually(lambda: len(seen) == len(made), what="the second has taken over")
        second.suspend()
        first.resume()
        made += (await orders.insert_many([{"n": n} for n in range(50)])).inserted_ids
        await eventually(lambda: len(seen) == len(made), what="the first goes on behind the second")
        second.resume()
        for n in range(20):  # both read
            made += [(await orders.insert_one({"n": n})).inserted_id]
        await eventually(lambda: len(seen) >= len(made))
        last = (await orders.insert_one({})).inserted_id
        await eventually(lambda: seen[-1].document_id == last)
    assert Counter(event.document_id for event in seen) == Counter([*made, last])
