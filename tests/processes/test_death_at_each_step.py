"""A worker process that dies between any two steps of claim → run → record leaves what the table in docs/tasks.md says."""

from __future__ import annotations

import signal

from taskmesh import Status, TaskMesh
from tests.docs.tables import table
from tests.processes.fleet import Fleet
from tests.processes.handlers import Handlers
from tests.processes.history import runs_by_task
from tests.waiting import eventually

PART_OF = {
    "before the claim": "dies_before_the_claim",
    "after the claim, before the handler": "dies_before_the_handler",
    "in the handler": "dies_in_the_handler",
    "after the handler, before the record is sent": "dies_before_the_record",
    "when the record is written, and not answered": "dies_before_the_record_is_answered",
    "after the record": "dies_after_the_record",
}
ROWS = {
    row["the worker dies"]: row
    for row in table("docs/tasks.md", "the worker dies", "the task", "lost executions", "runs")
}


async def test_t18_a_process_killed_at_each_step_leaves_what_the_table_says(
    fleet: Fleet, mesh: TaskMesh, handlers: Handlers
) -> None:
    assert list(PART_OF) == list(ROWS)
    victims = {}
    for number, (step, part) in enumerate(PART_OF.items()):
        victim = f"victim{number}"
        # At first only the victim may have it; the heir, which is not there yet, is next.
        only = handlers.work.configure(specific_worker_ids=(victim, "heir"))
        if ROWS[step]["lost executions"] == "0":  # however slow the machine is
            only = only.configure(ping_interval_ms=5_000, worker_timeout_ms=60_000)
        await only.publish(part, ms=0 if part != "dies_in_the_handler" else 60_000, slow_on="heir", slow_ms=0)
        victims[step] = fleet.start(victim, broken=[part])
    for step, victim_process in victims.items():
        assert victim_process.wait() == -signal.SIGKILL, step
    fleet.start("heir").wait_ready()

    async def is_success(key: str) -> bool:
        return (await mesh.get("work", key)).status is Status.SUCCESS

    runs = {}
    for step, part in PART_OF.items():
        await eventually(lambda part=part: is_success(part), 60.0, what=f"who dies {step} has an heir")  # type: ignore[misc]
    runs = runs_by_task(fleet.runs)
    for step, part in PART_OF.items():
        task, row = await mesh.get("work", part), ROWS[step]
        victim_id = victims[step].worker_id
        [success] = task.task_state.worker_states
        finished_by_the_victim = row["the task"] == "is finished"
        assert (success.worker_id == victim_id) == finished_by_the_victim, step
        assert task.task_state.lost_cnt == int(row["lost executions"]), step
        assert [loss.worker_id for loss in task.task_state.losses] == [victim_id] * task.task_state.lost_cnt, step
        assert len(runs.get(f"work:{part}", [])) == int(row["runs"]), step
        if row["the task"] == "is claimed again when the lease is over":
            [loss] = task.task_state.losses
            assert success.start_time is not None
            assert loss.ping_expire_time is not None
            assert success.start_time >= loss.ping_expire_time, step
