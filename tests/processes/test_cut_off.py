"""M36: a worker that is cut off from the database stops its handlers before anybody else is let in."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from taskmesh import TaskMesh
from tests.chaos.proxy import Proxy
from tests.mongod import Mongod
from tests.processes.fleet import Fleet
from tests.processes.handlers import Handlers
from tests.waiting import eventually


@pytest.fixture
def proxy(mongod: Mongod) -> Iterator[Proxy]:
    with Proxy(mongod.port) as started:
        yield started


@pytest.mark.lasting
@pytest.mark.parametrize("how", ["hangs", "refuses"])
async def test_m36_a_worker_that_is_cut_off_cancels_its_handlers_before_their_leases_end(
    fleet: Fleet, mesh: TaskMesh, handlers: Handlers, proxy: Proxy, how: str
) -> None:
    cut_off = fleet.start("cut-off", uri=f"mongodb://127.0.0.1:{proxy.port}/?directConnection=true").wait_ready()
    # So long that it ends a second before its end: a busy machine may be late by most of that.
    work = handlers.work.configure(worker_timeout_ms=10_000, ping_interval_ms=500)
    published = await work.publish_many({f"k{n}": {"slow_on": "cut-off", "slow_ms": 60_000} for n in range(5)})
    await eventually(lambda: len(fleet.history) == 5, what="they run")
    fleet.start("other").wait_ready()
    if how == "hangs":
        proxy.hang(True)
    else:
        proxy.refuse(True)

    assert [await handle.result(60) for handle in published] == ["other"] * 5
    cancelled = {run.start.key: run.end for run in fleet.runs if run.start.worker_id == "cut-off"}
    for handle in published:
        ended = cancelled[handle.key]
        assert ended is not None, "its handler runs on"
        assert ended.more["error"] == "CancelledError"
        [loss] = (await mesh.get("work", handle.key)).task_state.losses
        assert loss.ping_expire_time is not None
        assert datetime.fromtimestamp(ended.wall, UTC) < loss.ping_expire_time

    proxy.heal()
    assert await (await work.configure(specific_worker_ids=["cut-off"]).publish("afterwards")).result(60) == "cut-off"
    assert cut_off.running
