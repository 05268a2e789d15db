"""Failures: how often and when a task is tried again, and what is kept of each."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from taskmesh import Retry, Status, Task, TaskError, TaskFailed, TaskMesh, TaskOption, current_task
from taskmesh.consumer.candidates.backup_claims import BackupClaims
from taskmesh.consumer.candidates.claim_queue import Candidate, ClaimQueue
from taskmesh.consumer.listener import Listener
from tests.waiting import eventually, slowness_of_the_machine
from tests.working import all_working, finished, parts_of, working

SIX = [f"w{i}" for i in range(6)]


def gaps_s(task: Task, worker_id: str | None = None) -> list[float]:
    """How long after each failure the next execution started: of the whole task, or of one worker's own."""
    entries = [e for e in task.task_state.worker_states if worker_id in (None, e.worker_id)]
    found = []
    for before, after in pairwise(entries):
        assert before.fail_time is not None
        assert after.start_time is not None
        found.append((after.start_time - before.fail_time).total_seconds())
    return found


async def test_t29_m10_six_workers_try_a_failing_task_four_times_in_all_each_after_the_delay(mesh: TaskMesh) -> None:
    ran: list[str] = []
    option = TaskOption(max_unexpected_retries=3, unexpected_retry_delay_ms=400, unexpected_retry_jitter=0.0)

    @mesh.task(option=option)
    async def job() -> None:
        ran.append(current_task().worker_id)
        raise ValueError("always")

    handle = await job.publish("k")
    async with all_working(mesh, SIX):
        with pytest.raises(TaskError, match="always") as caught:
            await handle.result(timeout=60)
        assert len(caught.value.reasons) == 4
    task = await handle.task()
    assert len(ran) == 4
    assert [entry.state for entry in task.task_state.worker_states] == ["FAIL"] * 4
    assert all(gap >= 0.4 for gap in gaps_s(task))
    assert task.finish_time == task.task_state.worker_states[-1].fail_time, "FAIL is written with the last failure"
    assert task.next_claim_time is None


@pytest.mark.timed
async def test_t29_with_scope_worker_only_the_worker_that_failed_waits(mesh: TaskMesh) -> None:
    option = TaskOption(
        max_unexpected_retries=3,
        unexpected_retry_delay_ms=4_000,
        unexpected_retry_jitter=0.0,
        unexpected_retry_delay_scope="worker",
    )

    @mesh.task(option=option)
    async def job() -> None:
        raise ValueError("always")

    await job.publish("k")
    async with all_working(mesh, SIX[:2]), slowness_of_the_machine(mesh) as slowness:
        task = await finished(mesh, "job", "k")
    entries = task.task_state.worker_states
    assert [entry.state for entry in entries] == ["FAIL"] * 4
    assert {entry.worker_id for entry in entries[:2]} == set(SIX[:2]), "the other tries at once"
    assert gaps_s(task)[0] < 1.0 + slowness.allows.total_seconds()
    for worker_id in SIX[:2]:
        assert all(gap >= 4.0 for gap in gaps_s(task, worker_id))


async def test_m11_failures_of_all_workers_count_together(mesh: TaskMesh) -> None:
    option = TaskOption(
        max_unexpected_retries=2, unexpected_retry_delay_ms=60_000, unexpected_retry_delay_scope="worker"
    )

    @mesh.task(option=option)
    async def job() -> None:
        raise ValueError(current_task().worker_id)

    await job.publish("k")
    async with all_working(mesh, SIX):
        task = await finished(mesh, "job", "k")
    assert task.status is Status.FAIL
    assert len({entry.worker_id for entry in task.task_state.worker_states}) == 3


async def test_the_delay_grows_with_backoff_and_varies_by_jitter(mesh: TaskMesh) -> None:
    growing = TaskOption(
        max_unexpected_retries=3,
        unexpected_retry_delay_ms=100,
        unexpected_retry_backoff=3.0,
        unexpected_retry_jitter=0.0,
    )

    @mesh.task(option=growing)
    async def grow() -> None:
        raise ValueError

    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=100_000, unexpected_retry_jitter=0.5))
    async def vary() -> None:
        raise ValueError

    await grow.publish("k")
    await vary.publish_many({f"k{i}": {} for i in range(30)})

    async def all_have_failed() -> bool:
        return all(
            [task.task_state.worker_states[:1] and task.status is Status.INIT async for task in mesh.find("vary")]
        )

    async with working(mesh), slowness_of_the_machine(mesh) as slowness:
        gaps = gaps_s(await finished(mesh, "grow", "k"))
        await eventually(all_have_failed)
    for gap, delay in zip(gaps, [0.1, 0.3, 0.9], strict=True):
        assert delay <= gap < delay + 2 + slowness.allows.total_seconds()
    delays = []
    async for task in mesh.find("vary"):
        failed = task.task_state.worker_states[0].fail_time
        assert failed is not None
        assert task.next_claim_time is not None
        delays.append((task.next_claim_time - failed).total_seconds())
    assert len(delays) == 30
    assert all(50 <= delay <= 150 for delay in delays)
    assert max(delays) - min(delays) > 20


async def test_m12_a_failure_keeps_type_message_and_frames_and_a_success_its_value(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=0))
    async def job() -> dict[str, int]:
        if current_task().attempt == 1:
            secret = "not for the log"  # a variable's value, which must not get into the reason
            raise LookupError(f"no such thing, {len(secret)}")
        return {"answer": 42}

    handle = await job.publish("k")
    async with working(mesh, "w"):
        assert await handle.result(timeout=60) == {"answer": 42}
    fail, success = (await handle.task()).task_state.worker_states
    assert fail.fail_reason is not None
    assert fail.fail_reason.startswith("LookupError: no such thing, 15\n")
    assert "test_retries.py" in fail.fail_reason
    assert "in job" in fail.fail_reason
    assert "not for the log" not in fail.fail_reason.replace('secret = "not for the log"', "")
    assert (fail.worker_id, fail.state, fail.returns) == ("w", "FAIL", None)
    assert (success.state, success.returns, success.fail_reason) == ("SUCCESS", {"answer": 42}, None)
    assert fail.fail_time is not None
    assert success.success_time is not None
    assert fail.fail_time < success.success_time


async def test_task_failed_is_for_good_whatever_retries_are_left(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(max_unexpected_retries=10, unexpected_retry_delay_ms=0))
    async def job() -> None:
        raise TaskFailed("the picture is broken")

    handle = await job.publish("k")
    async with working(mesh):
        with pytest.raises(TaskError, match="the picture is broken"):
            await handle.result(timeout=60)
    (entry,) = (await handle.task()).task_state.worker_states
    assert (entry.final, entry.fail_reason) == (True, "the picture is broken")


async def test_retry_sets_an_exact_delay_for_everybody_and_counts(mesh: TaskMesh) -> None:
    option = TaskOption(
        max_unexpected_retries=1,
        unexpected_retry_delay_ms=60_000,
        unexpected_retry_jitter=1.0,
        unexpected_retry_delay_scope="worker",
    )

    @mesh.task(option=option)
    async def job() -> None:
        raise Retry("the other side is busy", delay_ms=500)

    await job.publish("k")
    async with all_working(mesh, SIX[:3]), slowness_of_the_machine(mesh) as slowness:
        task = await finished(mesh, "job", "k")
    assert task.status is Status.FAIL
    assert [entry.fail_reason for entry in task.task_state.worker_states] == ["the other side is busy"] * 2
    assert 0.5 <= gaps_s(task)[0] < 3 + slowness.allows.total_seconds()


async def test_a_run_that_takes_too_long_is_cancelled_and_fails(mesh: TaskMesh) -> None:
    cancelled: list[str] = []

    @mesh.task(option=TaskOption(run_timeout_ms=300, max_unexpected_retries=0))
    async def job() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(current_task().key)

    await job.publish("k")
    async with working(mesh):
        task = await finished(mesh, "job", "k")
    (entry,) = task.task_state.worker_states
    assert entry.fail_reason == "run_timeout_ms: the execution took more than 300 ms"
    assert entry.start_time is not None
    assert entry.fail_time is not None
    assert timedelta(seconds=0.25) <= entry.fail_time - entry.start_time < timedelta(seconds=5)
    assert cancelled == ["k"]


async def _raise_base_exception() -> None:
    raise BaseException("rude")  # noqa: TRY002  # that is the point


async def _raise_system_exit() -> None:
    raise SystemExit(3)


async def _cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


async def _raise_group() -> None:
    raise ExceptionGroup("two", [ValueError("a"), TypeError("b")])


async def _raise_generator_exit() -> None:
    raise GeneratorExit


async def _raise_stop_iteration() -> None:
    raise StopIteration("enough")  # Python makes a RuntimeError of it


RUDE: dict[str, tuple[Callable[[], Awaitable[None]], str]] = {
    "base exception": (_raise_base_exception, "BaseException: rude"),
    "exit": (_raise_system_exit, "SystemExit: 3"),
    "cancels itself": (_cancel_itself, "CancelledError: the handler was cancelled, and not by taskmesh"),
    "group": (_raise_group, "ExceptionGroup: two (2 sub-exceptions)"),
    "generator exit": (_raise_generator_exit, "GeneratorExit"),
    "stop iteration": (_raise_stop_iteration, "RuntimeError: coroutine raised StopIteration"),
}


async def test_m21_whatever_a_handler_raises_fails_its_own_execution_alone(
    mesh: TaskMesh, subtests: pytest.Subtests
) -> None:
    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def rude() -> None:
        ending, _ = RUDE[current_task().key]
        await ending()

    @mesh.task
    async def fine() -> int:
        await asyncio.sleep(0.2)
        return 1

    async with working(mesh, concurrency=2) as consumer:
        for key, (_, reason) in RUDE.items():
            with subtests.test(key):
                handle = await fine.publish(key)
                await rude.publish(key)
                task = await finished(mesh, "rude", key)
                assert task.status is Status.FAIL
                assert (task.task_state.worker_states[0].fail_reason or "").startswith(reason)
                assert await handle.result(timeout=60) == 1
                await eventually(lambda: consumer.running == [])


async def test_m35_the_handler_sees_its_own_execution_and_the_current_params(mesh: TaskMesh) -> None:
    seen: list[Any] = []

    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=0, priority=3))
    async def job(n: int) -> None:
        task = current_task()
        stored = (await mesh.get("job", "k")).task_state.worker_states
        mine = [entry for entry in stored if entry.running_id == task.running_id]
        seen.append(
            (task.attempt, n, task.name, task.key, task.worker_id, task.option.priority, len(mine), len(stored))
        )
        if task.attempt == 1:
            await job.configure(update_existing_params=True).publish("k", n=2)
            raise ValueError

    await job.publish("k", n=1)
    async with working(mesh, "w"):
        await finished(mesh, "job", "k")
    assert seen == [(1, 1, "job", "k", "w", 3, 1, 1), (2, 2, "job", "k", "w", 3, 1, 2)]


async def test_a_hundred_failures_do_not_let_the_document_grow(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(max_unexpected_retries=99, unexpected_retry_delay_ms=0, unexpected_retry_jitter=0.0))
    async def job() -> None:
        raise ValueError("x" * 10_000)

    await job.publish("k")
    async with working(mesh):
        task = await finished(mesh, "job", "k")
    assert task.status is Status.FAIL
    assert len(task.task_state.worker_states) + task.task_state.dropped_fail_cnt == 100
    assert len(task.task_state.worker_states) == 32


async def test_more_tasks_than_a_scan_reads_are_tried_again_after_their_failures(mesh: TaskMesh) -> None:
    """What was not read may have failed less often, and go first: but it stands behind them."""
    many, ran = 1_300, Counter[str]()

    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=50))
    async def job() -> None:
        ran[current_task().key] += 1
        if current_task().attempt == 1:
            raise ValueError("all of them fail at first")

    await job.publish_many({f"k{n}": {} for n in range(many)})
    async with working(mesh, concurrency=100):
        await eventually(lambda: ran.total() >= 2 * many)
    assert set(ran.values()) == {2}


async def test_of_what_has_to_wait_for_a_scan_only_what_it_has_read_and_has_failed_may_go(mesh: TaskMesh) -> None:
    async with working(mesh) as consumer:
        candidates, now = parts_of(consumer).candidates, time.monotonic()
        candidates.know_to((0, 0, 100))
        for id_, number, fail_cnt in (("read", 50, 1), ("new", 150, 0), ("behind", 150, 1)):
            assert not candidates.offer(Candidate(id_, "default", now, now, number, fail_cnt=fail_cnt))
        assert candidates.let_failed_go() == 1
        assert [id_ for id_ in ("read", "new", "behind") if id_ in candidates] == ["read"]
        assert not candidates.offer(Candidate("newer", "default", now, now, 151))


async def test_what_is_due_in_a_moment_is_not_tried_before(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried too early, it would be refused, and wait for a scan."""
    heard: dict[tuple[str, int], bool] = {}
    due: dict[tuple[str, int], float] = {}
    hear, offer = Listener._offer, ClaimQueue.offer

    def heard_of(listener: Listener, id_: str, queue: str, moment: datetime, written: datetime, *rest: Any) -> None:
        before = len(due)
        hear(listener, id_, queue, moment, written, *rest)
        if len(due) > before:
            each = list(due)[-1]
            heard[each] = due[each] >= listener._clock.monotonic(moment) or moment <= written

    def offered(candidates: ClaimQueue, candidate: Candidate) -> bool:
        due.setdefault((candidate.id, candidate.fail_cnt), candidate.due)
        return offer(candidates, candidate)

    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=40, unexpected_retry_jitter=0.0))
    async def job() -> None:
        raise ValueError("always")

    monkeypatch.setattr(Listener, "_offer", heard_of)
    monkeypatch.setattr(ClaimQueue, "offer", offered)
    monkeypatch.setattr(BackupClaims, "offer_found", lambda *_, **__: 0)  # scans bring nothing
    monkeypatch.setattr("taskmesh.consumer.listener._TOO_LATE_S", 60.0)  # so a late hint must not be left to them
    async with working(mesh, "w"):
        await job.configure(delay_ms=40).publish("soon")
        await job.publish("now")
        await eventually(lambda: {("job:soon", 0), ("job:now", 0), ("job:now", 1)} <= heard.keys())
    assert all(heard.values()), heard
