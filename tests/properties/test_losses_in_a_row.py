"""`max_timeouts` counts executions lost in a row: which signs of life break the row, and which do not."""

from __future__ import annotations

from datetime import timedelta

import pytest

from taskmesh.store.finish import Outcome, report
from tests.properties.life import LEASE, Life


@pytest.mark.parametrize(
    ("sign", "counted"),
    [("nothing", 2), ("a log", 2), ("a release", 2), ("progress", 1), ("a snooze", 1), ("a failure", 1)],
)
async def test_a_row_of_losses_is_broken_by_what_shows_that_the_task_gets_on(
    life: Life, sign: str, counted: int
) -> None:
    """A log does not: what a handler logs before it kills its worker, each time, would keep it circling for ever."""
    await life.publish(max_timeouts=10, max_unexpected_retries=10)
    await life.claim()
    life.later(LEASE["worker_timeout_ms"])
    held = await life.claim("w2")
    match sign:
        case "a log":
            entry = {"logs": [{"time": life.now, "message": "begins"}]}
            assert await report(life.store, "w2", [Outcome(life.id, held.running_id, "succeeded", entry)])
        case "progress":
            assert await life.progress(held)
        case "a snooze" | "a release":
            assert await life.end(held, "snoozed" if sign == "a snooze" else "released", delay_ms=None)
            held = await life.claim("w2")
        case "a failure":
            assert await life.fail(held)
            life.later(10_000_000)
            held = await life.claim("w2")
    life.later(LEASE["worker_timeout_ms"])
    await life.claim("w3")
    assert (await life.document())["task_state"]["timeout_cnt"] == counted


async def test_progress_success_and_fail_set_timeout_cnt_to_zero_and_lost_cnt_is_the_total(life: Life) -> None:
    """The reading in API.md: `timeout_cnt` counts losses in a row."""
    await life.publish(concurrent_worker_cnt=2, max_timeouts=9, max_unexpected_retries=9)
    for lost, ends in enumerate((life.progress, life.fail, life.succeed), 1):
        await life.claim()
        life.later(3_000)
        held = await life.claim("w2" if ends == life.succeed else "w3")
        state = (await life.document())["task_state"]
        assert (state["timeout_cnt"], state["lost_cnt"]) == (1, lost)
        assert await ends(held)
        state = (await life.document())["task_state"]
        assert (state["timeout_cnt"], state["lost_cnt"]) == (0, lost)
        if ends == life.progress:
            assert await life.end(held, "released")


async def test_a_task_that_waits_for_a_retry_expires_like_one_that_has_never_run(life: Life) -> None:
    await life.publish(expire_time=life.now + timedelta(milliseconds=2_000), unexpected_retry_delay_ms=5_000)
    await life.fail(await life.claim())
    assert await life.status() == "INIT"
    life.later(2_000)
    assert await life.status() == "EXPIRED"
    assert await life.try_claim("w2") is None
    await life.settle()
    assert await life.status() == "EXPIRED"
