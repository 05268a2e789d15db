"""Publishing a key that exists: what changes nothing says so, and of many the others are done all the same."""

from __future__ import annotations

import pytest

from taskmesh.model.errors import TaskRunning
from taskmesh.store import control
from taskmesh.store.publish import Publication, publish
from tests.properties.life import Life

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
    option = life.publication().option
    many = [Publication("job", str(n), "default", {"n": 7}, option, update_existing_params=True) for n in range(1, 121)]
    await publish(life.store, [Publication("job", p.key, "default", {}, option) for p in many], life.now)
    for publication in many:
        publication.not_update_running = True
    with pytest.raises(TaskRunning):
        await publish(life.store, many, life.now)
    unchanged = await life.store.find({"params.n": {"$ne": 7}}, {"_id": 1})
    assert [document["_id"] for document in unchanged] == [life.id]
