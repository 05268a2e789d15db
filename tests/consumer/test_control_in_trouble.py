"""Cancel, retry, delete and set_option while the database falters: nobody has to ask twice, and nothing is done twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import pytest

from taskmesh import Status, TaskMesh, TaskNotFound, TaskOption, current_task
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import finished, working

CONTROLS: dict[str, Callable[[TaskMesh], Awaitable[Any]]] = {
    "cancel": lambda mesh: mesh.cancel("job", "k"),
    "retry": lambda mesh: mesh.retry("job", "k"),
    "delete": lambda mesh: mesh.delete("job", "k"),
    "set_option": lambda mesh: mesh.set_option("job", "k", priority=7),
}
FAULTS: dict[str, dict[str, Any]] = {
    "not the primary": {"errorCode": 10107},
    "cut off": {"closeConnection": True},
    "applied, not confirmed": {"writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("control", CONTROLS)
async def test_it_is_done_in_spite_of_a_fault(mongo_uri: str, database: str, control: str, fault: str) -> None:
    mesh = TaskMesh(mongo_uri, database=database)

    @mesh.task
    async def job() -> None: ...

    async with mesh:
        await job.configure(delay_ms=3_600_000).publish("k")
        async with failing_commands(mongo_uri, ["update", "findAndModify"], times=2, **FAULTS[fault]):
            await CONTROLS[control](mesh)
        match control:
            case "delete":
                with pytest.raises(TaskNotFound):
                    await mesh.get("job", "k")
            case "cancel":
                assert (await mesh.get("job", "k")).status is Status.CANCELLED
            case "set_option":
                assert (await mesh.get("job", "k")).task_option.priority == 7
            case "retry":
                assert (await mesh.get("job", "k")).task_state.start_time is None


async def test_a_retry_whose_answer_is_lost_makes_the_task_run_once_more_and_not_twice(
    mongo_uri: str, database: str
) -> None:
    mesh = TaskMesh(mongo_uri, database=database)
    runs: list[str] = []

    @mesh.task
    async def job() -> None:
        runs.append(current_task().key)

    async with mesh:
        await job.publish("k")
        async with working(mesh):
            await finished(mesh, "job", "k")
            update_one = mesh.store.update_one

            async def update_without_an_answer(*arguments: Any) -> Any:
                mesh.store.update_one = update_one  # type: ignore[method-assign]
                await update_one(*arguments)
                await finished(mesh, "job", "k")  # it has run again by the time that its owner asks once more
                async with failing_commands(mongo_uri, ["findAndModify"], times=1, errorCode=10107):
                    return await update_one(*arguments)

            mesh.store.update_one = update_without_an_answer  # type: ignore[method-assign, assignment]  # it takes anything
            await mesh.retry("job", "k")
            await finished(mesh, "job", "k")
        assert runs == ["k", "k"]


async def test_a_retry_returns_the_task_as_it_was_retried_though_a_worker_has_run_it_since(mesh: TaskMesh) -> None:
    runs: list[Decimal] = []

    @mesh.task
    async def job(price: Decimal) -> None:
        runs.append(price)

    await job.publish("k", price=Decimal("1.10"))
    async with working(mesh):
        await finished(mesh, "job", "k")
        update_one = mesh.store.update_one

        async def update_that_is_answered_late(*arguments: Any) -> Any:
            mesh.store.update_one = update_one  # type: ignore[method-assign]  # for the worker's claim
            changed = await update_one(*arguments)
            await eventually(lambda: len(runs) == 2)
            await finished(mesh, "job", "k")
            return changed

        mesh.store.update_one = update_that_is_answered_late  # type: ignore[method-assign, assignment]  # it takes anything
        retried = await mesh.retry("job", "k")
    assert (retried.status, retried.standing, list(retried.task_state.worker_states)) == (Status.INIT, "ready", [])
    assert retried.params == {"price": Decimal("1.10")}
    assert retried.task_state.create_time.tzinfo is not None
    assert (await mesh.get("job", "k")).status is Status.SUCCESS


async def test_what_is_cancelled_and_kept_for_no_time_is_returned_all_the_same(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(retain_failed_ms=0))
    async def job() -> None: ...

    await job.configure(delay_ms=3_600_000).publish("k")
    assert (await mesh.cancel("job", "k")).status is Status.CANCELLED
