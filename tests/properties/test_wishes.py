"""`run_again`, published at any moment of a task's life: exactly one more run with the newest params, never none."""

from __future__ import annotations

import pytest

from taskmesh.store import control, rules
from taskmesh.store.publish import publish
from tests.properties.life import Life

AGAIN = ("run_again",)


async def test_t36_a_wish_during_the_last_run_is_kept_when_that_run_fails_for_good(life: Life) -> None:
    await life.publish(max_unexpected_retries=0)
    running = await life.claim()
    await life.publish(n=2, flags=AGAIN)
    await life.fail(running)
    assert await life.status() == "INIT"
    await life.succeed(await life.claim())
    assert await life.status() == "SUCCESS"


async def test_t36_a_wish_during_a_run_is_kept_when_the_last_allowed_lease_runs_out(life: Life) -> None:
    """Nobody finishes such a task but `settle`."""
    await life.publish(max_timeouts=0)
    await life.claim()
    await life.publish(n=2, flags=AGAIN)
    life.later(3_000)
    assert await life.settle() == 1
    assert await life.status() == "INIT"
    assert (await life.document())["params"] == {"n": 2}
    await life.succeed(await life.claim("w2"))
    assert await life.status() == "SUCCESS"


async def test_t36_a_wish_is_kept_when_the_task_fails_while_another_lease_has_run_out_unnoticed(life: Life) -> None:
    await life.publish(concurrent_worker_cnt=2, max_unexpected_retries=0)
    await life.claim("w1")
    life.later(2_000)
    running = await life.claim("w2")
    await life.publish(n=2, flags=AGAIN)
    life.later(1_000)  # w1 has lost its lease, and nobody has looked
    await life.fail(running)
    assert await life.status() == "INIT"


async def test_t36_a_wish_that_a_lost_run_has_served_asks_for_no_other(life: Life) -> None:
    """The run after the wish was the one more run; that it was lost is its own ending, within `max_timeouts`."""
    await life.publish(max_timeouts=1)
    await life.claim()
    await life.publish(n=2, flags=AGAIN)
    life.later(3_000)
    await life.claim("w2")  # has seen the wish
    life.later(3_000)
    await life.settle()
    assert await life.status() == "FAIL"


@pytest.mark.parametrize("wishes", [1, 2, 5])
async def test_t36_many_wishes_during_one_run_make_exactly_one_more(life: Life, wishes: int) -> None:
    await life.publish()
    running = await life.claim()
    for n in range(wishes):
        await life.publish(n=n + 1, flags=AGAIN)
    await life.succeed(running)
    assert (await life.document())["params"] == {"n": wishes}
    await life.succeed(await life.claim())
    assert await life.status() == "SUCCESS"
    assert await life.try_claim("w2") is None


async def test_t36_a_repeated_publish_is_one_wish_even_if_the_run_came_between(life: Life) -> None:
    """The answer to a publish was lost, and the publisher asks again: the same publication, not another."""
    await life.publish()
    await life.succeed(await life.claim())
    again = life.publication(n=2, flags=AGAIN)
    (first,) = await publish(life.store, [again], life.now)
    await life.succeed(await life.claim())
    (repeated,) = await publish(life.store, [again], life.now)
    assert (first.created, first.updated) == (repeated.created, repeated.updated) == (False, True)
    assert await life.status() == "SUCCESS"


async def test_a_wish_does_not_outlive_cancel(life: Life) -> None:
    await life.publish()
    running = await life.claim()
    await life.publish(n=2, flags=AGAIN)
    await control.cancel(life.store, life.id)
    assert not await life.succeed(running)
    assert await life.status() == "CANCELLED"


async def test_clean_failed_also_forgets_leases_that_ran_out_unnoticed(life: Life) -> None:
    """FAILed by time alone and not settled yet: it has to run again just the same."""
    await life.publish(max_timeouts=0)
    await life.claim()
    life.later(3_000)
    assert await life.status() == "FAIL"
    await life.publish(flags=("clean_failed",))
    await life.claim("w2")


def test_the_evidence_of_a_lost_run_is_bounded() -> None:
    assert rules.KEPT_LOSSES <= 32
