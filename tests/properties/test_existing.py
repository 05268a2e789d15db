"""Publishing a key that exists: what changes nothing says so, and of many the others are done all the same."""

from __future__ import annotations

from datetime import timedelta

import pytest

from taskmesh.admin.explain import explain
from taskmesh.model.errors import TaskRunning
from taskmesh.store import control
from taskmesh.store.publication import Publication
from taskmesh.store.publish import publish
from tests.properties.life import LEASE, Life

FLAGS = ("clean_failed", "clean_success", "update_existing_params", "not_update_running")


@pytest.mark.parametrize("flag", FLAGS)
async def test_m28_what_changes_nothing_says_so_also_of_a_cancelled_task(life: Life, flag: str) -> None:
    await life.publish()
    await control.cancel(life.store, life.id)
    before = await life.document()
    published = await life.publish(flags=(flag,))
    assert (published.created, published.updated) == (False, False)
    assert await life.document() == before


async def test_of_many_publications_one_that_meets_a_running_task_holds_up_no_other(life: Life) -> None:
    """More than are changed at once, and the running one is the first."""
    await life.publish()
    await life.claim()
    plain = life.publication().configuration
    changing = plain.changed(update_existing_params=True, not_update_running=True)
    many = [Publication("job", str(n), {"n": 7}, changing) for n in range(1, 121)]
    await publish(life.store, [Publication("job", p.key, {}, plain) for p in many], life.now)
    with pytest.raises(TaskRunning):
        await publish(life.store, many, life.now)
    unchanged = await life.store.find({"params.n": {"$ne": 7}}, {"_id": 1})
    assert [document["_id"] for document in unchanged] == [life.id]


async def test_a_task_whose_worker_is_gone_moves_when_its_lease_is_over_though_its_old_queue_has_no_worker(
    life: Life,
) -> None:
    await life.publish()
    await life.claim()
    elsewhere = life.publication(flags=("update_existing_params",))
    elsewhere.configuration = elsewhere.configuration.changed(queue="bulk", group="g")
    await life.publish(publication=elsewhere)
    assert (await life.document())["queue"] == "default"
    life.later(3_000)
    await life.settle()
    task = await life.document()
    assert (task["queue"], task["group"]) == ("bulk", "g")
    assert "moves_to" not in task["task_state"]
    await life.claim("w2")


async def test_explain_tells_when_one_that_is_to_move_could_be_claimed(life: Life) -> None:
    await life.publish()
    await life.claim()
    wanted = life.publication(flags=("update_existing_params",))
    wanted.configuration = wanted.configuration.changed(group="g")
    await life.publish(publication=wanted)
    (explanation,) = await explain(life.store, life.id, "w2")
    assert explanation.next_claim_time == life.now + timedelta(milliseconds=LEASE["worker_timeout_ms"])
