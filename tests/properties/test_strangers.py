"""A stranger's document, or one of ours that somebody has spoilt, harms no other task: every reader and every pass goes on."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import anyio
import pytest
from pymongo.errors import BulkWriteError

from taskmesh import Status, TaskFilter, TaskMesh
from taskmesh.admin.explain import explain
from taskmesh.admin.store.listing import find
from taskmesh.admin.store.task_counts import counts, oldest_claimable, stale_counts
from taskmesh.store.find import ScanRange, get, look_up, queues_in_use, unfinished_left
from tests.properties.life import BEGIN, Life
from tests.properties.strangers import strangers
from tests.properties.world import all_found

_CANNOT_INDEX_PARALLEL_ARRAYS = 171
DUE, LOST, EXPIRED = "job:due", "job:lost", "job:expired"


@pytest.fixture
async def crowded(life: Life) -> Life:
    """Three tasks of ours among all the strangers: one due, one whose last lease ran out, one past its time."""
    ours = life.publication()
    for key in ("due", "lost", "expired"):
        ours.key = key
        expire_time = BEGIN + timedelta(seconds=1) if key == "expired" else None
        option = ours.configuration.option.changed(max_timeouts=0)
        ours.configuration = replace(ours.configuration, expire_time=expire_time, option=option)
        life.id = f"job:{key}"
        await life.publish(publication=ours)
        if key == "lost":
            await life.claim()
    life.later(3_000)
    odd = [document for _, document in strangers(life.now)]
    try:
        await life.store.driver.collection(life.store.tasks).insert_many(odd, ordered=False)
    except BulkWriteError as error:  # two arrays where an index wants one at most: such a document cannot be there
        if {failure["code"] for failure in error.details["writeErrors"]} != {_CANNOT_INDEX_PARALLEL_ARRAYS}:
            raise
    return life


async def test_settle_goes_on(crowded: Life) -> None:
    await crowded.settle()
    stored = await crowded.store.find({"_id": {"$in": [DUE, LOST, EXPIRED]}}, {"status": 1})
    assert {task["_id"]: task["status"] for task in stored} == {DUE: "INIT", LOST: "FAIL", EXPIRED: "EXPIRED"}


async def test_scan_and_look_up_go_on(crowded: Life) -> None:
    what = ScanRange(["job"], ["default"], None, crowded.now)
    found = await all_found(crowded.store, "w9", what)
    assert DUE in {row.id for row in found}
    rows = await look_up(crowded.store, "w9", [DUE, *(row.id for row in found)])
    assert DUE in {row.id for row in rows}
    assert "default" in await queues_in_use(crowded.store)
    assert await unfinished_left(crowded.store, "w9", ["job"], None)


async def test_readers_go_on(crowded: Life) -> None:
    found = {task["_id"]: task["status"] for task in await get(crowded.store, [DUE, LOST, EXPIRED])}
    assert found == {DUE: "INIT", LOST: "FAIL", EXPIRED: "EXPIRED"}
    listed = {str(task["_id"]): task["status"] async for task in find(crowded.store, TaskFilter(name="job"), limit=0)}
    assert {id_: listed[id_] for id_ in found} == found
    assert (await explain(crowded.store, DUE, "w9"))[0].claimable


async def test_statistics_go_on(crowded: Life) -> None:
    assert sum(row["count"] for row in await counts(crowded.store)) > 1_000
    assert await stale_counts(crowded.store)
    await oldest_claimable(crowded.store)


@pytest.mark.usefixtures("crowded")
async def test_the_public_readers_go_on(mongo_uri: str, database: str, subtests: pytest.Subtests) -> None:
    """On the server's own clock, for which our tasks are in the far future: so they are INIT and RUNNING."""
    ours = {"due": "INIT", "lost": "RUNNING", "expired": "INIT"}
    async with TaskMesh(mongo_uri, database=database) as mesh:
        for status in (None, *Status):
            with subtests.test(status=status):
                found = {task.key: task.status async for task in mesh.find("job", status=status, limit=0)}
                assert {key: s for key, s in ours.items() if status in (None, s)}.items() <= found.items()
        assert (await mesh.get("job", "due")).key == "due"
        assert (await mesh.stats()).counts["job"]
        assert (await mesh.stats()).standing["job"]["scheduled"] >= 2
        assert {"due", "expired"} <= {task.key async for task in mesh.find("job", "scheduled", limit=0)}


@pytest.mark.usefixtures("crowded")
async def test_bulk_actions_go_on(mongo_uri: str, database: str) -> None:
    async with TaskMesh(mongo_uri, database=database) as mesh:
        cancelled = await mesh.bulk.cancel("name:job status:INIT,RUNNING")
        assert 3 <= cancelled.done < cancelled.matched, "ours, and not what is spoilt"
        for key in ("due", "lost", "expired"):
            assert (await mesh.get("job", key)).status is Status.CANCELLED
        await mesh.bulk.retry("name:job status:CANCELLED")
        assert (await mesh.get("job", "due")).status is Status.INIT


async def test_an_option_that_lacks_a_field_can_be_changed(life: Life, mongo_uri: str, database: str) -> None:
    """As an older release may have stored it: the missing field stands for its default."""
    await life.publish()
    await life.store.driver.collection(life.store.tasks).update_one({}, {"$unset": {"task_option.run_timeout_ms": 1}})
    async with TaskMesh(mongo_uri, database=database) as mesh:
        with anyio.fail_after(20):
            task = await mesh.set_option("job", "1", priority=7)
    assert task.task_option.priority == 7
