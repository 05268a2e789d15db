"""Pages and listings stay fast however many tasks there are: an index serves each, and none looks at everything.

`python -m benchmarks.pages` measures the same on a million.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest
from pymongo import MongoClient

from benchmarks.pages import fill, measured, templates
from taskmesh import TaskMesh
from taskmesh.admin.listing import TaskSummary
from taskmesh.admin.store import index_choice
from taskmesh.model.task import Status
from taskmesh.web import pages
from tests.working import status_is

_COUNTED_TO = 500
"""How far pages count what fits, here."""
# How many there are, and how many documents one query looks at, at the most: for a page of 50 that are rare, along the
# index of the newest, some thousands; as many however many there are.
SIZES = [(3_000, _COUNTED_TO), pytest.param(50_000, 5_000, marks=pytest.mark.slow)]


@pytest.mark.usefixtures("never_used")
@pytest.mark.parametrize(("size", "looked_at"), SIZES)
async def test_no_page_no_listing_and_no_command_looks_at_everything(
    mesh: TaskMesh, mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch, size: int, looked_at: int
) -> None:
    # So few that they can be told from all that there are.
    for module, limit in ((pages, "_COUNT_AT_MOST"), (pages, "_ERRORS_AMONG"), (index_choice, "FEW")):
        monkeypatch.setattr(module, limit, _COUNTED_TO)
    kinds = await templates(mesh)
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        await asyncio.to_thread(fill, client[database], kinds, size)
        found = await measured(mesh, client[database], 1)
    assert {what for what, one in found.items() if one.scans} == set()
    assert {what: one.documents for what, one in found.items() if one.documents > looked_at} == {}
    assert len(found) > 40


async def listed(mesh: TaskMesh, where: str) -> list[TaskSummary]:
    page = await mesh.listing.page(where, newest_first=False)
    assert len(page.tasks) == await mesh.listing.count(where)
    return page.tasks


async def test_a_filter_on_status_knows_what_time_alone_has_changed(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    """Nobody writes it down: there is no worker. Yet it is found under the status that it has now."""
    soon = mesh.clock.now() + timedelta(milliseconds=300)
    await mesh.publisher.publish_many("work", {"expires": {}, "expires-too": {}}, expire_time=soon)
    await mesh.publish("work", "stays")
    await status_is(mesh, "work", "expires-too", Status.EXPIRED)
    assert [task.key for task in await listed(mesh, "status:EXPIRED")] == ["expires", "expires-too"]
    assert [task.key for task in await listed(mesh, "status:EXPIRED,FAIL name:work")] == ["expires", "expires-too"]
    assert [task.key for task in await listed(mesh, "status:INIT")] == ["stays"]
    assert [task.key for task in await listed(mesh, "status:INIT,EXPIRED")] == ["expires", "expires-too", "stays"]
    assert "2</b> tasks match" in (await client.get("/bulk?action=retry&where=status:EXPIRED")).text


async def test_the_beginning_of_a_key_is_found_whatever_the_tasks_name(mesh: TaskMesh) -> None:
    for name in ("a", "a-b", "a.b", "a1", "b"):
        await mesh.publisher.publish_many(name, {"order-1": {}, "order-2": {}, "other": {}})
    found = [(task.name, task.key) for task in await listed(mesh, "key:order-")]
    assert found == [(name, key) for name in ("a-b", "a.b", "a1", "a", "b") for key in ("order-1", "order-2")]
    assert await listed(mesh, "key:nothing") == []
    newest = await mesh.listing.page("key:order-", limit=3)
    assert [task.name for task in newest.tasks] == ["b", "b", "a1"]
