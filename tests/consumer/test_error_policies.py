"""`retry_on` and `fail_on`: which errors are tried again, and which make a task FAIL for good."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskmesh import (
    InvalidOption,
    LeaseLost,
    Next,
    Retry,
    Snooze,
    Status,
    Task,
    TaskFailed,
    TaskMesh,
    TaskOption,
    UnstorableValue,
    current_blocking_task,
    current_task,
)
from tests.consumer import process_handlers
from tests.working import finished, working

AT_ONCE = TaskOption(unexpected_retry_delay_ms=0)
LOOKUP = "Elsewhere is a LookupError, which is in fail_on"


class Broken(ValueError):
    """Derived from what is named."""


def made(kind: str) -> BaseException:
    """Return the error of this kind."""
    group = ExceptionGroup("some", [TimeoutError("a"), ValueError("b") if "bad" in kind else TimeoutError("c")])
    kinds: dict[str, BaseException] = {
        "value": ValueError("v"),
        "broken": Broken("v"),
        "timeout": TimeoutError("t"),
        "other": OSError("o"),
        "a group": group,
        "a bad group": group,
        "failed": TaskFailed("f"),
        "retry": Retry("r", delay_ms=0),
        "snooze": Snooze("s", delay_ms=100),
        "exit": SystemExit(3),
    }
    return kinds[kind]


def how(task: Task) -> tuple[Status, list[str | None]]:
    """How a task ended, and why each of its failures was for good."""
    return task.status, [entry.final_because for entry in task.task_state.worker_states if entry.state == "FAIL"]


WITH_BOTH = {
    "value": (Status.FAIL, ["ValueError is in fail_on"]),
    "broken": (Status.FAIL, ["Broken is a ValueError, which is in fail_on"]),
    "timeout": (Status.SUCCESS, [None]),
    "other": (Status.FAIL, ["OSError is not in retry_on"]),
    "a group": (Status.SUCCESS, [None]),
    "a bad group": (Status.FAIL, ["ValueError is in fail_on"]),
    "failed": (Status.FAIL, [None]),
    "retry": (Status.SUCCESS, [None]),
    "snooze": (Status.SUCCESS, []),
    "exit": (Status.FAIL, ["SystemExit is not in retry_on"]),
}


@pytest.mark.parametrize("run", ["async", "thread"])
async def test_what_is_raised_decides_whether_it_is_tried_again(mesh: TaskMesh, run: str) -> None:
    tried: set[str] = set()

    def decide(kind: str) -> int:
        if kind in tried:
            return 1
        tried.add(kind)
        raise made(kind)

    async def decide_in_the_loop(kind: str) -> int:
        return decide(kind)

    fn: Any = decide_in_the_loop if run == "async" else decide
    # A ValueError is in both: fail_on wins.
    job = mesh.task(fn, name="job", option=AT_ONCE, retry_on=(TimeoutError, ValueError), fail_on=ValueError)
    await job.publish_many({kind: {"kind": kind} for kind in WITH_BOTH})
    async with working(mesh):
        assert {kind: how(await finished(mesh, "job", kind)) for kind in WITH_BOTH} == WITH_BOTH
    told = (await mesh.explain("job", "broken"))[0].gates[0]
    assert told.reason.startswith(
        "stored status FAIL, 0 of 1 SUCCESS; FAILed for good: Broken is a ValueError, which is in fail_on"
    )


async def test_errors_of_a_child_process_are_judged_by_their_classes_also_where_these_are_unknown_here(
    mesh: TaskMesh,
) -> None:
    kinds = {
        "derived": (Status.FAIL, [LOOKUP]),
        "unknown to the parent": (Status.FAIL, ["OnlyHere is a LookupError, which is in fail_on"]),
        "a group": (Status.FAIL, ["KeyError is a LookupError, which is in fail_on"]),
        "timeout": (Status.SUCCESS, [None]),
        "other": (Status.FAIL, ["ValueError is not in retry_on"]),
        "dies": (Status.SUCCESS, [None]),  # as where a worker dies: no handler has raised it
    }
    settings: Any = {"run": "process", "retry_on": [TimeoutError], "fail_on": (LookupError,)}
    job = mesh.task(process_handlers.raise_by_policy, name="job", option=AT_ONCE, **settings)
    await job.publish_many({kind: {"kind": kind} for kind in kinds})
    async with working(mesh, concurrency=2):
        assert {kind: how(await finished(mesh, "job", kind)) for kind in kinds} == kinds


async def test_a_run_that_takes_too_long_is_a_timeout_error(mesh: TaskMesh) -> None:
    short = TaskOption(run_timeout_ms=50, unexpected_retry_delay_ms=0)

    async def job() -> int:
        if current_task().attempt == 1:
            await asyncio.sleep(60)
        return 1

    again = mesh.task(job, name="again", option=short, retry_on=TimeoutError)
    at_once = mesh.task(job, name="at_once", option=short, fail_on=TimeoutError)
    await again.publish("k")
    await at_once.publish("k")
    async with working(mesh):
        assert how(await finished(mesh, "again", "k")) == (Status.SUCCESS, [None])
        assert how(await finished(mesh, "at_once", "k")) == (Status.FAIL, ["TimeoutError is in fail_on"])


async def test_what_a_step_the_hook_before_and_a_check_of_params_raise_counts_too(mesh: TaskMesh) -> None:
    """But a handler may catch what a step raises; then nothing has failed."""

    def charge(kind: str) -> int:
        raise made(kind)

    @mesh.task(option=AT_ONCE, fail_on=ValueError)
    async def order(kind: str, *, caught: bool = False) -> str:
        try:
            await current_task().step("charge", charge, kind)
        except ValueError:
            if not caught:
                raise
        return "done"

    @mesh.task(run="thread", option=AT_ONCE, fail_on=ValueError)
    def blocking(kind: str) -> None:
        current_blocking_task().step("charge", charge, kind)

    @mesh.task(option=AT_ONCE, retry_on=())
    async def refused(number: int) -> int:
        return number

    def before(task: Task) -> None:
        if task.key == "refused by the hook":
            raise Broken("hook")

    await order.publish("k", kind="value")
    await order.publish("caught", kind="value", caught=True)
    await order.publish("refused by the hook", kind="value")
    await blocking.publish("k", kind="value")
    await refused.publish("k", number=1)
    await mesh.store.driver.collection("tasks").update_one({"_id": "refused:k"}, {"$set": {"params.number": "none"}})
    in_fail_on = (Status.FAIL, ["ValueError is in fail_on"])
    async with working(mesh, before=before):
        assert how(await finished(mesh, "order", "k")) == in_fail_on
        assert how(await finished(mesh, "order", "caught")) == (Status.SUCCESS, [])
        assert how(await finished(mesh, "blocking", "k")) == in_fail_on
        by_the_hook = how(await finished(mesh, "order", "refused by the hook"))
        assert by_the_hook == (Status.FAIL, ["Broken is a ValueError, which is in fail_on"])
        assert how(await finished(mesh, "refused", "k")) == (Status.FAIL, ["InvalidParams is not in retry_on"])
    await mesh.retry("order", "k")
    again = await mesh.get("order", "k")
    assert (again.status, again.steps) == (Status.INIT, []), "the error of a step is not recorded"


async def test_a_queue_s_own_handler_has_the_policy_of_its_task_or_one_of_its_own(mesh: TaskMesh) -> None:
    @mesh.task(option=AT_ONCE, fail_on=ValueError)
    async def video() -> None:
        raise ValueError

    @video.on_queue("same")
    async def same() -> None:
        raise ValueError

    @video.on_queue("own", fail_on=KeyError)
    async def own() -> int:
        if current_task().attempt == 1:
            raise ValueError
        return 1

    for queue in ("default", "same", "own"):
        await video.configure(queue=queue).publish(queue)
    async with working(mesh):
        for queue in ("default", "same"):
            assert how(await finished(mesh, "video", queue)) == (Status.FAIL, ["ValueError is in fail_on"])
        assert how(await finished(mesh, "video", "own")) == (Status.SUCCESS, [None])


@pytest.mark.parametrize("name", ["retry_on", "fail_on"])
def test_what_is_no_type_of_error_or_says_itself_how_an_execution_ends_is_refused(name: str) -> None:
    mesh = TaskMesh()
    for wrong, told in (
        ("ValueError", "types? of exception"),
        ([ValueError, "KeyError"], "'KeyError' in it"),
        (int, "<class 'int'> in it"),
        ((ValueError("v"),), r"ValueError\('v'\) in it"),
        ({ValueError}, r"like \(ValueError, KeyError\), got"),
        (Retry, "Retry says by itself"),
        ((ValueError, Next), "Next says by itself"),
        (LeaseLost, "LeaseLost says by itself"),
    ):
        settings: Any = {name: wrong}
        with pytest.raises(InvalidOption, match=f"^{name}.*{told}"):
            mesh.task(name="job", **settings)(made)
    assert not mesh.definitions


def test_what_always_fails_for_good_is_never_tried_again() -> None:
    for wrong in (TaskFailed, UnstorableValue):
        with pytest.raises(InvalidOption, match=f"retry_on: {wrong.__name__} makes a task FAIL for good"):
            TaskMesh().task(print, name="job", retry_on=(TimeoutError, wrong))
