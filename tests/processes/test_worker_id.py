"""T7: never do two live processes act under one worker id."""

from __future__ import annotations

from typing import Any

import pytest
from pymongo.collection import Collection

from tests.processes.fleet import Fleet
from tests.processes.handlers import Handlers
from tests.waiting import eventually


async def test_t7_a_second_process_with_the_id_of_a_live_worker_refuses_to_start(
    fleet: Fleet, handlers: Handlers
) -> None:
    first = fleet.start("w1").wait_ready()
    second = fleet.start("w1")
    twice = handlers.work.configure(concurrent_worker_cnt=2)
    await twice.publish("for-two", ms=0)

    assert second.wait() == 1
    assert f"worker id 'w1' is in use by process {first.pid}" in second.log
    assert "ready" not in second.told
    assert first.running
    await eventually(lambda: fleet.runs, what="the first has run it")
    assert [run.start.pid for run in fleet.runs] == [first.pid], "the rule 'not twice' holds per process"


async def test_t7_a_process_that_was_killed_leaves_its_id_to_the_next_at_once(fleet: Fleet, handlers: Handlers) -> None:
    first = fleet.start("w1").wait_ready()
    first.kill()
    second = fleet.start("w1").wait_ready()

    assert await (await handlers.work.publish("k")).result(60) == "w1"
    assert [run.start.pid for run in fleet.runs] == [second.pid]


@pytest.mark.slow
async def test_t7_a_worker_that_slept_while_another_took_its_id_stops(
    fleet: Fleet, handlers: Handlers, documents: Collection[dict[str, Any]]
) -> None:
    sleeper = fleet.start("w1").wait_ready()
    await handlers.work.publish("k", ms=1_000)
    await eventually(lambda: fleet.history, what="the first runs it")
    sleeper.suspend()
    heir = fleet.start("w1").wait_ready()  # once the first has been silent for long enough
    await eventually(lambda: documents.count_documents({"status": "SUCCESS"}) == 1, what="the second has done it")
    sleeper.resume()

    assert sleeper.wait() == 1
    assert "was taken over by another process" in sleeper.log
    assert heir.running
    [entry] = documents.find()[0]["task_state"]["worker_states"]
    assert entry["running_id"] == fleet.runs[-1].start.running_id
    assert fleet.runs[-1].start.pid == heir.pid
