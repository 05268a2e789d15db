"""T1: the server's clock decides, whatever the workers' own clocks say."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo.collection import Collection

from tests.processes.fleet import Fleet
from tests.processes.handlers import Handlers
from tests.waiting import eventually

_TWO_HOURS_S = 7_200.0


@pytest.mark.timed
async def test_t1_m4_workers_whose_clocks_are_hours_off_run_every_task_once_and_on_time(
    fleet: Fleet, handlers: Handlers, documents: Collection[dict[str, Any]]
) -> None:
    fleet.start("fast", clock_offset_s=_TWO_HOURS_S)
    fleet.start("slow", clock_offset_s=-_TWO_HOURS_S)
    for worker in fleet.workers:
        worker.wait_ready()
    timed = handlers.work.configure(worker_timeout_ms=3_000, ping_interval_ms=1_000)
    began = datetime.now(UTC)
    await timed.publish_many({f"now-{number}": {"ms": 300} for number in range(200)})
    delayed = await timed.configure(delay_ms=3_000).publish_many({f"later-{number}": {} for number in range(10)})

    await eventually(lambda: documents.count_documents({"status": "SUCCESS"}) == 210, 60.0, what="all are done")
    assert not any(handle.warnings for handle in delayed)
    ended = datetime.now(UTC)

    assert len(fleet.runs) == 210, "every task ran once"
    by_worker = {id_: [run for run in fleet.runs if run.start.worker_id == id_] for id_ in ("fast", "slow")}
    assert all(by_worker.values()), "both took part"
    for worker_id, sign in (("fast", 1), ("slow", -1)):
        off = by_worker[worker_id][0].start.wall - by_worker[worker_id][0].start.mono - (time.time() - time.monotonic())
        assert abs(off - sign * _TWO_HOURS_S) < 60, "its clock was wrong indeed"
    for task in documents.find():
        state, [entry] = task["task_state"], task["task_state"]["worker_states"]
        assert state["timeout_cnt"] == 0
        assert "losses" not in state
        room = timedelta(seconds=1)
        for moment in (entry["start_time"], entry["ping_expire_time"] - timedelta(seconds=3), entry["success_time"]):
            assert began - room <= moment <= ended + room, "what is stored is the server's time"
        if task["key"].startswith("later"):
            late = entry["start_time"] - state["start_time"]
            assert timedelta(0) <= late < timedelta(seconds=2), "it starts at the server's time"
