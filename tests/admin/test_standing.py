"""What INIT holds: ready, scheduled or retrying, derived by the server, shown beside the status and asked for by filters."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest

from taskmesh import Status, TaskDefinition, TaskMesh, TaskOption, current_task
from taskmesh.admin import stats as admin_stats
from taskmesh.admin.filters import TaskFilter
from taskmesh.admin.store import task_counts
from tests.waiting import eventually
from tests.web.conftest import browser
from tests.working import working


async def test_ready_scheduled_and_retrying_are_told_apart_and_filtered(mesh: TaskMesh) -> None:
    work = await _three(mesh)
    await work.configure(delay_ms=600_000).publish("cancelled")
    await mesh.cancel("work", "cancelled")
    page = await mesh.listing.page("", newest_first=False)
    assert {task.key: task.standing for task in page.tasks} == {
        "cancelled": None,
        "ready": "ready",
        "retrying": "retrying",
        "scheduled": "scheduled",
    }
    for where, keys in (
        ("status:ready", ["ready"]),
        ("status:scheduled", ["scheduled"]),
        ("status:retrying,CANCELLED", ["cancelled", "retrying"]),
        ("status:init", ["ready", "retrying", "scheduled"]),
        ("status:init,ready", ["ready", "retrying", "scheduled"]),
    ):
        assert [task.key async for task in mesh.find(where=where)] == keys, where
        assert await mesh.listing.count(where) == len(keys), where
        again = TaskFilter.parse(str(TaskFilter.parse(where)))
        assert again == TaskFilter.parse(where)


async def test_the_list_of_tasks_says_it_and_leads_to_each(mesh: TaskMesh) -> None:
    await mesh.publish("work", "scheduled", delay_ms=600_000)
    async with browser(mesh) as client:
        page = (await client.get("/tasks?where=name:work")).text
        assert '<span class="status scheduled" title="scheduled">scheduled</span>' in page
        links = dict(re.findall(r'<a class="chip" href="/tasks\?([^"]+)">(\w+)</a>', page))
        by_word = {word: link for link, word in links.items()}
        assert "No task matches" in (await client.get(f"/tasks?{by_word['ready']}")).text
        assert 'data-key="work:scheduled"' in (await client.get(f"/tasks?{by_word['scheduled']}")).text


async def test_the_overview_counts_it_and_leads_to_each(mesh: TaskMesh) -> None:
    await mesh.publish("work", "now")
    await mesh.publish("work", "scheduled", delay_ms=600_000)
    async with browser(mesh) as client:
        page = (await client.get("/")).text
        assert '<a class="tile init" href="/tasks?status=INIT"><b>2</b> pending</a>' in page
        held = re.findall(r'<a href="/(tasks\?status=\w+)">(\d+) (\w+)</a>', page)
        assert [(word, count) for _, count, word in held] == [("ready", "1"), ("scheduled", "1")]
        cells = re.findall(r'data-label="(\w+)">(?:<a href="([^"]*)">)?(?:<span class="dim">)?(\d+)', page)
        assert [(word, count) for word, _, count in cells[:4]] == [
            ("pending", "2"),
            ("ready", "1"),
            ("scheduled", "1"),
            ("retrying", "0"),
        ]
        for link in (held[1][0], cells[2][1].replace("&amp;", "&")):
            listed = (await client.get(link)).text
            assert 'data-key="work:scheduled"' in listed
            assert 'data-key="work:now"' not in listed


@pytest.mark.parametrize("where", ["status:waiting", "status:ready,nonsense"])
async def test_no_other_word_is_a_status(mesh: TaskMesh, where: str) -> None:
    with pytest.raises(Exception, match="filter"):
        await mesh.listing.count(where)


async def _three(mesh: TaskMesh) -> TaskDefinition[[], None]:
    """Publish three tasks of `work`, and return it: one ready, one scheduled, one that failed and retries in ten minutes."""

    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=600_000))
    async def work() -> None:
        raise ValueError("no")

    await work.publish("retrying")
    async with working(mesh, "w1"):

        async def waits() -> bool:
            return (await mesh.get("work", "retrying")).standing == "retrying"

        await eventually(waits)
    await work.publish("ready")
    await work.configure(delay_ms=600_000).publish("scheduled")
    return work


async def test_a_task_says_what_init_means_for_it(mesh: TaskMesh) -> None:
    await _three(mesh)
    for word in ("ready", "scheduled", "retrying"):
        task = await mesh.get("work", word)
        assert (task.status, task.standing) == (Status.INIT, word)
        assert [(task.key, task.standing) async for task in mesh.find("work", word)] == [(word, word)]
    await mesh.cancel("work", "ready")
    assert (await mesh.get("work", "ready")).standing is None
    assert [task.key async for task in mesh.find("work", ["scheduled", Status.CANCELLED])] == ["ready", "scheduled"]


async def test_a_field_of_the_users_that_is_called_standing_stays_theirs(mesh: TaskMesh) -> None:
    await mesh.publish("work", "k")
    await mesh.store.driver.collection(mesh.store.tasks).update_one({"_id": "work:k"}, {"$set": {"standing": "tall"}})
    for task in (await mesh.get("work", "k"), *[task async for task in mesh.find()]):
        assert (task.standing, task.extra) == ("ready", {"standing": "tall"})


async def test_counts_say_what_init_holds(mesh: TaskMesh) -> None:
    assert (await mesh.stats()).standing == {}
    await _three(mesh)
    await mesh.publish("named", "now", specific_worker_ids=("w9",))
    await mesh.publish("named", "later", specific_worker_ids=("w9",), delay_ms=600_000)
    await mesh.publisher.publish_many("other", {str(n): {} for n in range(5)}, queue="q")
    await mesh.publish("other", "ended")
    await mesh.cancel("other", "ended")
    stats = await mesh.stats()
    assert stats.standing == {
        "work": {"ready": 1, "scheduled": 1, "retrying": 1},
        "named": {"ready": 1, "scheduled": 1},
        "other": {"ready": 5},
    }
    assert stats.standing_at_least == ()


async def test_what_waits_for_no_time_is_not_counted_as_ready(mesh: TaskMesh) -> None:
    @mesh.task
    async def asks() -> None:
        await current_task().wait_for("answer")

    await asks.publish("1")
    async with working(mesh, "w1"):

        async def waits() -> bool:
            return (await mesh.get("asks", "1")).task_state.suspended_for is not None

        await eventually(waits)
    blocker = await mesh.publish("work", "scheduled", delay_ms=600_000)
    for key in ("a", "b"):
        await mesh.publish("work", key, after=[blocker])
    await mesh.publish("work", "named", specific_worker_ids=("w9",))
    stats = await mesh.stats()
    assert stats.standing == {"asks": {"scheduled": 1}, "work": {"ready": 1, "scheduled": 3}}
    assert (await mesh.get("asks", "1")).standing == "scheduled"
    await mesh.delete("work", "named")
    assert (await mesh.stats()).oldest_claimable_ms is None


async def test_what_waits_for_a_time_is_counted_however_many_are_ready(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_stats, "_LOOKED_AT", 20)
    await mesh.publisher.publish_many("work", {f"ready-{n}": {} for n in range(30)})
    await mesh.publisher.publish_many("work", {f"later-{n}": {} for n in range(5)}, delay_ms=600_000)
    stats = await mesh.stats()
    assert (stats.standing, stats.standing_at_least) == ({"work": {"ready": 30, "scheduled": 5}}, ())


@pytest.mark.parametrize("rows", [2_000, 0])
@pytest.mark.parametrize("option", [{}, {"specific_worker_ids": ("w9",)}])
async def test_where_more_wait_than_are_looked_at_the_counts_say_so(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, rows: int, option: dict[str, Any]
) -> None:
    """`rows`: whether there are few enough to ask about each."""
    monkeypatch.setattr(admin_stats, "_LOOKED_AT", 20)
    monkeypatch.setattr(task_counts, "_MOST_ROWS", rows)
    await mesh.publisher.publish_many("work", {f"later-{n}": {} for n in range(30)}, delay_ms=600_000, **option)
    await mesh.publish("work", "now")
    stats = await mesh.stats()
    assert stats.standing_at_least == ("work",)
    assert stats.standing["work"]["scheduled"] == 20
    assert stats.standing["work"].get("ready", 0) == (1 if rows else 0)
    assert stats.counts == {"work": {"INIT": 31}}


async def test_what_a_lost_worker_held_is_counted_as_it_stands_now(mesh: TaskMesh) -> None:
    """Its stored status is RUNNING until somebody writes it down anew."""
    await _three(mesh)
    stale = {"$set": {"status": "RUNNING", "settle_time": datetime(2020, 1, 1, tzinfo=UTC)}}
    await mesh.store.driver.collection(mesh.store.tasks).update_one({"_id": "work:scheduled"}, stale)
    stats = await mesh.stats()
    assert stats.counts == {"work": {"INIT": 3}}
    assert stats.standing == {"work": {"ready": 1, "scheduled": 1, "retrying": 1}}


async def test_a_filter_that_names_a_standing_alone_means_no_other_tasks(mesh: TaskMesh) -> None:
    await mesh.publish("work", "ready")
    await mesh.publish("work", "later", delay_ms=3_600_000)
    await mesh.publish("work", "done")
    await mesh.cancel("work", "done")
    which = TaskFilter(name="work", standing=("ready",))
    assert TaskFilter.parse(str(which)) == which
    deleted = await mesh.bulk.delete(which)
    assert (deleted.done, deleted.where) == (1, "name:work status:ready")
    assert [task.key async for task in mesh.find("work")] == ["done", "later"]
