"""Who loses a race changes nothing: a claim that is refused leaves the document as it was, to the last byte."""

from __future__ import annotations

from datetime import timedelta

from taskmesh.store.claim import claim, claim_one, won
from tests.properties.life import BEGIN, Life


async def test_a_refused_claim_changes_nothing_though_time_has_passed(life: Life) -> None:
    """Time alone has made the task fail, or expire: to write that down, with its evidence, is for `settle`."""
    await life.publish(max_timeouts=0)
    await life.claim("w1")
    life.later(3_000)
    await refused_and_unchanged(life)
    await life.settle()
    assert [loss["worker_id"] for loss in (await life.document())["task_state"]["losses"]] == ["w1"]


async def test_a_refused_claim_of_an_expired_task_changes_nothing(life: Life) -> None:
    await life.publish(expire_time=BEGIN + timedelta(seconds=1))
    life.later(1_000)
    await refused_and_unchanged(life)


async def test_a_refused_claim_of_a_task_that_others_may_have_changes_nothing(life: Life) -> None:
    await life.publish(specific_worker_ids=("w1", "w3"), concurrent_worker_cnt=2)
    await life.claim("w1")
    life.later(3_000)
    await refused_and_unchanged(life)


async def refused_and_unchanged(life: Life) -> None:
    tasks = life.store.driver.collection(life.store.tasks)
    before = await tasks.find_one({})
    assert await claim(life.store, [life.id], "w2", "late") == 0
    assert await won(life.store, [life.id], "late", {}) == []
    assert await claim_one(life.store, life.id, "w2", "later", fields={"task_state": 1}) is None
    assert await tasks.find_one({}) == before
