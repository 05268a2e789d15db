"""`max_timeouts` counts executions lost in a row: which signs of life break the row, and which do not."""

from __future__ import annotations

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
