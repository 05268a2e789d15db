"""A dependency's finish and the opening of what waits for it survive a crash between them."""

from __future__ import annotations

import signal

from taskmesh import Status, TaskMesh
from tests.processes.fleet import Fleet
from tests.processes.handlers import Handlers, define
from tests.working import status_is


async def test_what_waits_for_a_task_whose_worker_was_killed_after_its_record_runs_within_seconds(
    fleet: Fleet, mesh: TaskMesh
) -> None:
    handlers: Handlers = define(mesh)
    only = handlers.work.configure(specific_worker_ids=("victim",))
    parts = [await only.publish("a")]
    join = await handlers.work.configure(after=parts, specific_worker_ids=("heir",)).publish("join")
    heir = fleet.start("heir").wait_ready()
    victim = fleet.start("victim", broken=["dies_after_the_record"])
    assert victim.wait() == -signal.SIGKILL
    assert (await mesh.get("work", "a")).status is Status.SUCCESS
    joined = await status_is(mesh, "work", "join", Status.SUCCESS, 20.0)
    finish_time, [entry] = (await mesh.get("work", "a")).finish_time, joined.task_state.worker_states
    assert entry.worker_id == heir.worker_id
    assert finish_time is not None
    assert entry.start_time is not None
    assert (entry.start_time - finish_time).total_seconds() < 10  # two seconds on a machine that is not busy
    assert await join.result(5) == "heir"
