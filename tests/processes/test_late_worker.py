"""T6: a worker that was suspended until somebody else has taken its task over comes back, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from tests.processes.fleet import Fleet, Worker
from tests.processes.handlers import Handlers
from tests.waiting import eventually


@pytest.mark.parametrize("then", ["return", "raise"])
async def test_t6_a_worker_that_slept_learns_that_its_lease_is_lost_and_writes_nothing(
    fleet: Fleet, handlers: Handlers, mongo_uri: str, then: str
) -> None:
    sleeper = await _sleeps_until_its_task_is_done_by_another(fleet, handlers, then)
    taken_over = _bytes_of(fleet, mongo_uri)

    sleeper.resume()
    await eventually(lambda: _noted(fleet, "insisted"), what="the late handler has tried everything")
    sleeper.terminate()
    assert sleeper.wait() == 0

    assert len(_noted(fleet, "cancelled")) == 1, "the late handler is cancelled"
    assert {(mark.more["call"], mark.more["error"]) for mark in _noted(fleet, "refused")} == {
        ("progress", "LeaseLost"),
        ("publish", "LeaseLost"),
    }
    assert "lease lost: task stubborn:k" in sleeper.log
    assert _bytes_of(fleet, mongo_uri) == taken_over, "the document is byte for byte the other worker's"


@pytest.mark.parametrize("then", ["return", "raise"])
async def test_t6_what_a_late_worker_sends_all_the_same_is_refused_by_the_server(
    fleet: Fleet, handlers: Handlers, mongo_uri: str, then: str
) -> None:
    sleeper = await _sleeps_until_its_task_is_done_by_another(
        fleet, handlers, then, broken=["notices_no_loss"], slow_ms=4_000
    )
    taken_over = _bytes_of(fleet, mongo_uri)

    sleeper.resume()
    await eventually(lambda: _noted(fleet, "insisted"), what="the late handler has tried everything")
    sleeper.terminate()
    assert sleeper.wait() == 0

    assert not _noted(fleet, "cancelled"), "it was made not to notice"
    assert {mark.more["call"] for mark in _noted(fleet, "accepted")} == {"progress", "log", "publish"}
    assert _bytes_of(fleet, mongo_uri) == taken_over, "the document is byte for byte the other worker's"


async def _sleeps_until_its_task_is_done_by_another(
    fleet: Fleet, handlers: Handlers, then: str, slow_ms: int = 60_000, **setting: Any
) -> Worker:
    sleeper = fleet.start("sleeper", **setting).wait_ready()
    handle = await handlers.stubborn.publish("k", slow_on="sleeper", slow_ms=slow_ms, then=then)
    await eventually(lambda: _noted(fleet, "started"), what="the sleeper runs the task")
    sleeper.suspend()
    fleet.start("other").wait_ready()
    assert await handle.result(60) == "other"
    return sleeper


def _noted(fleet: Fleet, what: str) -> list[Any]:
    return [mark for mark in fleet.history if mark.what == what]


def _bytes_of(fleet: Fleet, mongo_uri: str) -> list[bytes]:
    """All task documents, chained ones too, as the server sends them."""
    with MongoClient[RawBSONDocument](mongo_uri, document_class=RawBSONDocument) as client:
        return [bytes(document.raw) for document in client[fleet.database]["tasks"].find(sort=[("_id", 1)])]
