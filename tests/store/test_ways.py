"""Whichever index a listing is read along, it lists the same tasks in the same order, page by page."""

from __future__ import annotations

from datetime import timedelta

import pytest

from taskmesh import TaskMesh
from taskmesh.admin import listing
from taskmesh.admin.store import index_choice
from taskmesh.model.task import Status
from tests.working import status_is

FILTERS = (
    "",
    "name:a",
    "status:INIT",
    "status:INIT,EXPIRED,CANCELLED",
    "status:EXPIRED queue:q1",
    "status:FAIL,EXPIRED",
    "queue:q2",
    "queue:q2 name:b",
    "key:k-1",
    "key:k-1 status:INIT,CANCELLED",
    "name:b key:k-1 status:INIT",
    "status:INIT age<1h",
    "queue:nobody",
)


@pytest.fixture
async def shelf(mesh: TaskMesh) -> TaskMesh:
    """Tasks of two names in two queues; some are cancelled, and some have expired with nobody to write it down."""
    for name in ("a", "b"):
        for queue in ("q1", "q2"):
            await mesh.publisher.publish_many(name, {f"k-{number}-{queue}": {} for number in range(12)}, queue=queue)
        await mesh.cancel(name, "k-1-q1")
        await mesh.cancel(name, "k-10-q2")
    soon = mesh.clock.now() + timedelta(milliseconds=300)
    await mesh.publisher.publish_many("a", {"k-1-gone": {}, "x-gone": {}}, queue="q1", expire_time=soon)
    await status_is(mesh, "a", "x-gone", Status.EXPIRED)
    return mesh


async def _pages(mesh: TaskMesh, where: str, *, newest_first: bool) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    after: str | None = None
    while True:
        page = await mesh.listing.page(where, newest_first=newest_first, limit=5, after=after, deadline_ms=60_000)
        assert page.newest_first is newest_first
        found += [(task.name, task.key) for task in page.tasks]
        after = page.following
        if after is None:
            return found


async def test_every_way_leads_to_the_same_tasks(shelf: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_NEWEST_WITHIN_MS", 60_000)  # on a busy machine it would be listed by key
    expected: dict[str, list[tuple[str, str]]] = {}
    everything = [task async for task in shelf.find(limit=0)]
    assert len(everything) == 50
    for few, rows, names in ((5_000, 200, 200), (0, 200, 200), (5_000, 0, 0), (0, 0, 0)):
        monkeypatch.setattr(index_choice, "FEW", few)
        monkeypatch.setattr(index_choice, "_ROWS", rows)
        monkeypatch.setattr(index_choice, "_NAMES", names)
        for where in FILTERS:
            by_key = await _pages(shelf, where, newest_first=False)
            assert by_key == sorted(by_key, key=":".join), where
            assert by_key == expected.setdefault(where, by_key), where
            assert sorted(await _pages(shelf, where, newest_first=True)) == sorted(by_key), where
            newest = [task async for task in shelf.find(where=where, sort="newest", limit=0)]
            oldest = [task async for task in shelf.find(where=where, sort="oldest", limit=0)]
            assert newest == oldest[::-1], where
            assert sorted((task.name, task.key) for task in newest) == sorted(by_key), where
            assert await shelf.listing.count(where) == len(by_key), where
            assert await shelf.listing.count(where, at_most=3) == min(3, len(by_key)), where
    assert expected[""] == [(task.name, task.key) for task in everything]
    assert {where: len(found) for where, found in expected.items()} == {
        "": 50,
        "name:a": 26,
        "status:INIT": 44,
        "status:INIT,EXPIRED,CANCELLED": 50,
        "status:EXPIRED queue:q1": 2,
        "status:FAIL,EXPIRED": 2,
        "queue:q2": 24,
        "queue:q2 name:b": 12,
        "key:k-1": 13,
        "key:k-1 status:INIT,CANCELLED": 12,
        "name:b key:k-1 status:INIT": 4,
        "status:INIT age<1h": 44,
        "queue:nobody": 0,
    }


async def test_a_strangers_array_in_the_index_makes_a_listing_slower_and_not_wrong(
    shelf: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server then tells the values of a field by reading every key, and is not asked for long."""
    await shelf.store.driver.collection("tasks").insert_one({"_id": "x", "status": "INIT", "queue": ["q1", "q9"]})
    before = await _pages(shelf, "status:INIT", newest_first=False)

    async def given_up(*_: object) -> None:
        return None

    monkeypatch.setattr(index_choice, "values_of", given_up)
    assert await _pages(shelf, "status:INIT", newest_first=False) == before
    assert await _pages(shelf, "key:k-1", newest_first=False)
