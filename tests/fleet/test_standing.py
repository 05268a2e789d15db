"""What INIT holds: ready, scheduled or retrying, derived by the server, shown beside the status and asked for by filters."""

from __future__ import annotations

import re

import pytest

from taskmesh import Status, TaskMesh, TaskOption
from taskmesh.admin.filters import TaskFilter
from tests.waiting import eventually
from tests.web.conftest import browser
from tests.working import working


async def test_ready_scheduled_and_retrying_are_told_apart_and_filtered(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=600_000))
    async def work() -> None:
        raise ValueError("no")

    await work.publish("retrying")
    async with working(mesh, "w1"):

        async def waits() -> bool:
            task = await mesh.get("work", "retrying")
            return task.status == Status.INIT and bool(task.task_state.worker_states)

        await eventually(waits)
    await work.publish("ready")
    await work.configure(delay_ms=600_000).publish("scheduled")
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
        assert '<span class="dim">scheduled</span>' in page
        links = dict(re.findall(r'<a class="chip" href="/tasks\?([^"]+)">(\w+)</a>', page))
        by_word = {word: link for link, word in links.items()}
        assert "No task matches" in (await client.get(f"/tasks?{by_word['ready']}")).text
        assert 'data-key="work:scheduled"' in (await client.get(f"/tasks?{by_word['scheduled']}")).text


@pytest.mark.parametrize("where", ["status:waiting", "status:ready,nonsense"])
async def test_no_other_word_is_a_status(mesh: TaskMesh, where: str) -> None:
    with pytest.raises(Exception, match="filter"):
        await mesh.listing.count(where)
