"""Counts and the oldest that waits, from index keys alone, are what reading every task would tell."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from taskmesh import TaskMesh
from taskmesh.admin.store import task_counts
from tests.waiting import eventually


async def test_counts_are_of_every_name_and_status_whatever_the_queue(mesh: TaskMesh) -> None:
    for name, queue, count in (("a", "q1", 3), ("a", "q2", 2), ("b", "q1", 4)):
        await mesh.publisher.publish_many(name, {f"{queue}-{number}": {} for number in range(count)}, queue=queue)
    await mesh.cancel("a", "q2-0")
    assert (await mesh.stats()).counts == {"a": {"INIT": 4, "CANCELLED": 1}, "b": {"INIT": 4}}


async def test_with_too_many_rows_the_counts_are_the_same(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        await mesh.publisher.publish_many(name, {"1": {}, "2": {}})
    row_by_row = (await mesh.stats()).counts
    monkeypatch.setattr(task_counts, "_MOST_ROWS", 2)
    assert (await mesh.stats()).counts == row_by_row == {name: {"INIT": 2} for name in ("a", "b", "c")}


async def _first_due(mesh: TaskMesh) -> datetime:
    [task] = [task async for task in mesh.find(sort="oldest", limit=1)]
    assert task.next_claim_time is not None
    return task.next_claim_time


@pytest.mark.parametrize("priorities", [3, 25])
async def test_the_oldest_that_waits_is_found_under_whatever_is_more_urgent(mesh: TaskMesh, priorities: int) -> None:
    """`priorities`: few enough for a look at each, and more than that."""
    assert (await task_counts.oldest_claimable(mesh.store))[1] == {}
    await mesh.publish("work", "oldest", priority=-priorities)
    oldest = await _first_due(mesh)
    await eventually(lambda: mesh.clock.now() > oldest + timedelta(milliseconds=20))
    for priority in range(priorities):
        await mesh.publish("work", f"more-urgent-{priority}", priority=-priority)
    await mesh.publish("work", "later", delay_ms=60_000, priority=9)
    assert (await task_counts.oldest_claimable(mesh.store))[1] == {"default": oldest}


@pytest.mark.parametrize("option", [{"specific_worker_ids": ("w",)}, {}])
async def test_a_pinned_task_that_waits_counts_like_any_other(mesh: TaskMesh, option: dict[str, Any]) -> None:
    await mesh.publish("work", "k", **option)
    assert (await task_counts.oldest_claimable(mesh.store))[1] == {"default": await _first_due(mesh)}
    assert [(queue.waiting, queue.more_waiting) for queue in await mesh.queues.all()] == [(1, False)]


async def test_how_long_the_oldest_waits_is_told_of_each_queue(mesh: TaskMesh) -> None:
    await mesh.publish("work", "first", queue="slow")
    await mesh.publish("work", "then", queue="quick")
    await mesh.publish("work", "pinned", queue="pinned", specific_worker_ids=("w",))
    await mesh.publish("work", "held", queue="paused")
    await mesh.publish("work", "later", queue="later", delay_ms=60_000)
    await mesh.pause("paused")
    stats = await mesh.stats()
    waits = stats.oldest_claimable_ms_by_queue
    assert waits.keys() == {"slow", "quick", "pinned"}
    assert waits["slow"] >= waits["quick"]
    assert stats.oldest_claimable_ms == max(waits.values())


async def test_what_waits_is_counted_as_far_as_asked_for(mesh: TaskMesh) -> None:
    await mesh.publisher.publish_many("work", {str(number): {} for number in range(5)}, queue="long")
    await mesh.publish("work", "k", queue="short")
    found = {queue.queue: (queue.waiting, queue.more_waiting) for queue in await mesh.queues.all(counted_to=3)}
    assert found == {"long": (3, True), "short": (1, False)}
