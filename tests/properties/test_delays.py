"""Delays: `Retry` and `Snooze` are exact and bind every worker; an ordinary failure's grows with each further one."""

from __future__ import annotations

from datetime import timedelta

import pytest

from taskmesh.store import rules
from tests.properties.life import Life


@pytest.mark.parametrize("ending", ["snoozed", "conflicted", "failed"])
@pytest.mark.parametrize("others_ending", ["released", "failed", "snoozed", "succeeded"])
async def test_a_delay_that_a_handler_asked_for_outlasts_how_the_others_end(
    life: Life, ending: str, others_ending: str
) -> None:
    """Two run the task at once; what the second does later must not shorten the delay that binds everybody."""
    await life.publish(concurrent_worker_cnt=2, max_unexpected_retries=9)
    first, second = await life.claim("w1"), await life.claim("w2")
    await life.end(first, ending, delay_ms=60_000)  # type: ignore[arg-type]  # the kinds of the parameters
    until = life.now + timedelta(seconds=60)
    life.later(1_000)
    await life.end(second, others_ending, delay_ms=5_000 if others_ending == "snoozed" else None)  # type: ignore[arg-type]  # as above
    assert (await life.document())["next_claim_time"] == until
    life.later(58_999)
    assert [await life.try_claim(worker) for worker in ("w1", "w2", "w3")] == [None, None, None]
    life.later(1)
    await life.claim("w3")


async def test_the_longest_of_two_such_delays_counts(life: Life) -> None:
    await life.publish(concurrent_worker_cnt=2)
    first, second = await life.claim("w1"), await life.claim("w2")
    await life.end(first, "snoozed", delay_ms=1_000)
    await life.end(second, "snoozed", delay_ms=9_000)
    life.later(1_000)
    assert await life.try_claim("w3") is None


async def test_t29_backoff_goes_on_growing_when_old_failures_are_no_longer_kept(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "KEPT_FAILS", 2)
    await life.publish(unexpected_retry_delay_ms=100, unexpected_retry_backoff=2.0, max_unexpected_retries=9)
    for further_failures in range(6):
        await life.fail(await life.claim())
        life.later(100 * 2**further_failures - 1)
        assert await life.try_claim() is None
        life.later(1)


async def test_a_failure_for_good_is_not_forgotten_among_many_others(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several workers says that the task can never succeed; failures of the others must not push that out."""
    monkeypatch.setattr(rules, "KEPT_FAILS", 2)
    await life.publish(concurrent_worker_cnt=5, max_unexpected_retries=9)
    held = [await life.claim(f"w{number}") for number in range(5)]
    await life.fail(held[0], final=True)
    for other in held[1:]:
        await life.fail(other)
    assert await life.status() == "FAIL"
    assert await life.try_claim("w9") is None


async def test_a_failure_without_recorded_jitter_waits_all_the_same(life: Life) -> None:
    await life.publish(unexpected_retry_delay_ms=1_000, unexpected_retry_jitter=0.5)
    await life.end(await life.claim(), "failed", retry_jitter=None)
    assert await life.try_claim() is None
    life.later(1_000)
    await life.claim()


async def test_with_scope_worker_a_failure_binds_its_worker_until_as_many_newer_ones_as_are_kept(life: Life) -> None:
    """A weakness that docs/tasks.md admits: more workers than that would have to fail within the delay of one."""
    await life.publish(
        max_unexpected_retries=100, unexpected_retry_delay_ms=60_000, unexpected_retry_delay_scope="worker"
    )
    await life.fail(await life.claim("first"))
    for number in range(rules.KEPT_FAILS - 1):
        await life.fail(await life.claim(f"w{number}"))
        assert await life.try_claim("first") is None
    await life.fail(await life.claim("one more"))
    assert await life.try_claim("w0") is None, "whose failure is kept"
    assert await life.try_claim("first") is not None
    state = (await life.document())["task_state"]
    assert state["dropped_fail_cnt"] == 1, "it counts all the same"
