"""The server refuses a claim: nothing is blamed that is not at fault, and all is well again soon after the cause has gone."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from taskmesh import Consumer, Status, TaskMesh
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import finished, parts_of, working

SOON_S = 20.0
NOT_ABOUT_A_DOCUMENT = [13, 391, 8000, 11601]
"""No right to do that; and what others forbid: a server in another mode, a quota, somebody who ends operations by hand."""


@pytest.mark.parametrize("count", [1, 60])
@pytest.mark.parametrize("code", NOT_ABOUT_A_DOCUMENT)
async def test_tasks_run_soon_after_whatever_made_the_server_refuse_all_claims_has_gone(
    mesh: TaskMesh, mongo_uri: str, caplog: pytest.LogCaptureFixture, code: int, count: int
) -> None:
    caplog.set_level(logging.ERROR, "taskmesh.claimer")

    @mesh.task
    async def job() -> None: ...

    async with working(mesh, "w", concurrency=50) as consumer:
        async with failing_commands(mongo_uri, ["update", "findAndModify"], errorCode=code):
            await job.publish_many({f"k{n}": {} for n in range(count)})
            await eventually(lambda: caplog.records and not parts_of(consumer).candidates.being_claimed)
        for n in range(count):
            assert (await finished(mesh, "job", f"k{n}", SOON_S)).status is Status.SUCCESS


async def test_a_filter_of_on_claim_that_the_server_refuses_harms_no_task(
    mesh: TaskMesh, caplog: pytest.LogCaptureFixture
) -> None:
    narrowed_by: dict[str, Any] = {"$nonsense": 1}

    def on_claim(_: Consumer) -> dict[str, Any]:
        return narrowed_by

    @mesh.task
    async def job() -> None: ...

    async with working(mesh, on_claim=on_claim):
        await job.publish_many({f"k{n}": {} for n in range(60)})
        await eventually(lambda: "$nonsense" in caplog.text, what="it is said, by the scan or the claim")
        narrowed_by = {}
        for n in range(60):
            await finished(mesh, "job", f"k{n}", SOON_S)


async def test_a_spoilt_document_holds_up_no_other_and_runs_when_it_is_mended(
    mesh: TaskMesh, caplog: pytest.LogCaptureFixture
) -> None:
    @mesh.task
    async def job() -> None: ...

    count = 30
    tasks = mesh.store.driver.collection("tasks")
    await job.publish_many({f"k{n}": {} for n in range(count)})
    await tasks.update_one({"_id": "job:k7"}, {"$set": {"task_option.worker_timeout_ms": "a minute"}})
    async with working(mesh):
        for n in range(count):
            if n != 7:
                await finished(mesh, "job", f"k{n}", SOON_S)
        await eventually(lambda: "task job:k7 cannot be claimed" in caplog.text)
        await tasks.update_one({"_id": "job:k7"}, {"$set": {"task_option.worker_timeout_ms": 60_000}})
        await finished(mesh, "job", "k7", 2 * SOON_S)
    assert sum("job:k7 cannot be claimed" in record.getMessage() for record in caplog.records) == 1, "said once"
