"""However an execution ends, the entry, what is counted and the task's status are those of the table in docs/tasks.md."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from taskmesh import Retry, Snooze, Status, Task, TaskFailed, TaskMesh, TaskNotFound, TaskOption, current_blocking_task
from taskmesh.store.renew import extend
from tests.docs.tables import table
from tests.waiting import eventually
from tests.working import parts_of, working

FIRST = "the handler, or its worker"
ROWS = {row[FIRST]: row for row in table("docs/tasks.md", FIRST, "entry", "counted", "then the task is")}
_LAST = "then the task is"
OPTION = TaskOption(unexpected_retry_delay_ms=60_000, unexpected_retry_jitter=0.0)
DELAY_MS = 60_000

Happening = Callable[[TaskMesh], Awaitable[Any]]


async def nothing(_: TaskMesh) -> None: ...


async def lose_the_lease(mesh: TaskMesh) -> None:
    """Make the lease run out: what its worker sends from then on is refused."""
    [entry] = (await mesh.get("job", "k")).task_state.worker_states
    assert await extend(mesh.store, "job:k", entry.running_id, lease_ms=0)


def cancel(mesh: TaskMesh) -> Awaitable[Any]:
    return mesh.cancel("job", "k")


def delete(mesh: TaskMesh) -> Awaitable[Any]:
    return mesh.delete("job", "k")


def exclude(mesh: TaskMesh) -> Awaitable[Any]:
    return mesh.set_option("job", "k", specific_worker_ids=("another",))


HANDLERS: dict[str, Callable[[], Any]] = {
    "returns a value": lambda: 42,
    "returns what cannot be stored, or does not fit its return annotation": lambda: {"deep": object()},
    "raises an exception": lambda: raise_it(ValueError("as asked")),
    "raises `TaskFailed`": lambda: raise_it(TaskFailed("as asked")),
    "raises `Retry`": lambda: raise_it(Retry("as asked", delay_ms=DELAY_MS)),
    "raises `Snooze`": lambda: raise_it(Snooze(delay_ms=DELAY_MS)),
}
HAPPENINGS: dict[str, Happening] = {
    "takes longer than `run_timeout_ms`": nothing,
    "loses its lease": lose_the_lease,
    "is cancelled": cancel,
    "finds its task deleted": delete,
    "is excluded by `specific_worker_ids`": exclude,
    "is stopped, after the grace": nothing,
}


def raise_it(error: Exception) -> None:
    raise error


def test_the_table_has_every_ending_and_no_other() -> None:
    assert list(ROWS) == [*HANDLERS, *HAPPENINGS]


@pytest.mark.parametrize("ending", ROWS)
async def test_an_ending_leaves_what_the_table_says(mesh: TaskMesh, ending: str) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    @mesh.task(option=OPTION)
    async def job() -> Any:
        started.set()
        try:
            if ending in HANDLERS:
                return HANDLERS[ending]()
            await asyncio.sleep(60)
        finally:
            ended.set()

    limited: dict[str, Any] = {"run_timeout_ms": 300} if "run_timeout_ms" in ending else {}
    quick: dict[str, Any] = {"ping_interval_ms": 300, "worker_timeout_ms": 20_000} if "lease" in ending else {}
    handle = await job.configure(**limited, **quick).publish("k")
    async with working(mesh, "w") as consumer:
        await started.wait()
        if ending in HAPPENINGS:
            await HAPPENINGS[ending](mesh)
        if "stopped" in ending:
            await consumer.stop(grace_ms=0)
        await asyncio.wait_for(ended.wait(), 60)
        row = ROWS[ending]
        if "lease" in ending:  # the loss is noted by whoever claims next, which is at once
            await eventually(lambda: _lost_once(mesh))
            return
        await eventually(lambda: not consumer.running, what="its slot is free")
        if row["then the task is"] == "gone":
            with pytest.raises(TaskNotFound):
                await handle.task()
            return
        check(await handle.task(), row)


async def _lost_once(mesh: TaskMesh) -> bool:
    assert ROWS["loses its lease"] | {FIRST: ""} == {FIRST: "", "entry": "none", "counted": "a timeout", _LAST: "INIT"}
    state = (await mesh.get("job", "k")).task_state
    return (state.timeout_cnt, state.lost_cnt, len(state.losses)) == (1, 1, 1)


def check(task: Task, row: dict[str, str]) -> None:
    entries = [entry.state for entry in task.task_state.worker_states]
    assert entries == ([] if row["entry"] == "none" else [row["entry"]])
    assert task.task_state.timeout_cnt == int(row["counted"] == "a timeout")
    assert task.status is Status(row["then the task is"])
    if row["counted"] == "a failure":
        assert entries == ["FAIL"]
    waits = task.next_claim_time is not None and task.next_claim_time > task.task_state.create_time
    asked = row[FIRST] not in ("is excluded by `specific_worker_ids`", "is stopped, after the grace")
    assert waits == (task.status is Status.INIT and asked), "after a failure or a delay asked for it waits"


async def test_the_reason_of_a_failure_is_bounded_whatever_is_raised(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def job(depth: int) -> None:
        if depth:
            await job(depth - 1)
        raise ValueError("x" * 100_000)

    await job.publish("k", depth=100)
    await mesh.consumer().run(until_idle=True)
    [entry] = (await mesh.get("job", "k")).task_state.worker_states
    reason = entry.fail_reason or ""
    assert reason.startswith("ValueError: xxx")
    assert len(reason) <= 4_000
    assert 1 <= reason.count("test_endings.py") <= 8, "the last frames, those of a recursion once"


async def test_a_failure_tells_nothing_of_the_environment(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "swordfish")

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def job() -> None:
        import os  # noqa: PLC0415 -- a handler that reads a secret

        password = os.environ["DATABASE_PASSWORD"]
        raise ConnectionError(f"refused, with a password of {len(password)} characters")

    await job.publish("k")
    await mesh.consumer().run(until_idle=True)
    stored = await mesh.store.driver.collection(mesh.store.tasks).find_one({"_id": "job:k"})
    assert "refused, with a password of 9 characters" in str(stored)
    assert "swordfish" not in str(stored)


async def test_the_kept_lines_of_a_thread_and_the_progress_are_bounded_and_coalesced(mesh: TaskMesh) -> None:
    """A thousand calls cost a few writes, and of the lines the newest hundred are kept."""

    @mesh.task
    def job() -> int:
        task = current_blocking_task()
        for number in range(1_000):
            task.progress(number / 1_000, f"step {number}")
            task.log(f"line {number}")
        return 1

    await job.publish("k")
    async with working(mesh) as consumer:
        written = 0
        reporter = parts_of(consumer).reporter
        flush = reporter._flush

        async def counted() -> None:
            nonlocal written
            written += bool(reporter._dirty)
            await flush()

        reporter._flush = counted  # type: ignore[method-assign]  # only to count
        await eventually(lambda: consumer.finished == 1)
    task = await mesh.get("job", "k")
    [entry] = task.task_state.worker_states
    assert [line.message for line in entry.logs] == [f"line {number}" for number in range(900, 1_000)]
    assert entry.dropped_log_cnt == 900
    assert task.task_state.progress is not None
    assert (task.task_state.progress.fraction, task.task_state.progress.message) == (0.999, "step 999")
    assert written <= 10
