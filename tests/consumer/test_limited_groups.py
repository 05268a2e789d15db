"""Groups under a limit of their own, with several workers: how often these ask, look and scan while others have the room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from taskmesh import TaskMesh
from taskmesh.consumer.candidates import tasks_for_room
from taskmesh.consumer.scanner import Scanner
from taskmesh.store.claim import claim
from taskmesh.store.queues import limits as store_limits
from taskmesh.store.queues.first_of import first_of
from taskmesh.store.queues.limits import Wish
from tests.waiting import eventually
from tests.working import all_working, parts_of, working

QUEUE = "narrow"


async def in_groups(mesh: TaskMesh, handler: Any, groups: int, each: int) -> None:
    """Publish so many tasks of each group, of which one may run at a time."""
    task = mesh.task(name="work", queue=QUEUE)(handler)
    await mesh.set_limit(QUEUE, group_running=1)
    for group in range(groups):
        await task.configure(group=f"g{group}").publish_many({f"{group}-{n}": {} for n in range(each)})


async def test_nobody_looks_for_tasks_of_a_group_that_wait_for_their_turn_here(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, each = 16, 15
    ran, looked_at = list[int](), list[int]()

    async def counted(store: Any, me: Any, looks: Sequence[Any], until: Any) -> Any:
        looked_at.append(len(looks))
        return await first_of(store, me, looks, until)

    async def work() -> None:
        await asyncio.sleep(0.005)
        ran.append(1)

    monkeypatch.setattr(tasks_for_room, "first_of", counted)
    await in_groups(mesh, work, groups, each)
    async with all_working(mesh, ["a", "b"], concurrency=4):
        await eventually(lambda: len(ran) == groups * each, 120)
    assert sum(looked_at) < len(ran) / 2, "1.1 for each task, if it is done whenever one has ended"


async def test_room_of_several_groups_is_asked_for_together_and_for_no_more_than_there_can_be(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, each = 8, 10
    asked: list[list[str | None]] = []
    book = store_limits.book

    async def noted(store: Any, queue: str, worker_id: str, wishes: Sequence[Wish], **settings: Any) -> Any:
        if worker_id == "waits":
            asked.append([wish.group for wish in wishes])
        return await book(store, queue, worker_id, wishes, **settings)

    async def work() -> None:
        await asyncio.Event().wait()

    await in_groups(mesh, work, groups, each)
    async with working(mesh, "holds", concurrency=groups) as holder:
        await eventually(lambda: len(holder.running) == groups)
        monkeypatch.setattr(store_limits, "book", noted)
        async with working(mesh, "waits", concurrency=100):
            await eventually(lambda: len(asked) >= 20)
    later = asked[5:]
    assert max(len(of) for of in later) <= groups
    assert sum(len(set(of)) for of in later) >= 2 * len(later), "1, if each group were asked for by itself"


async def test_a_worker_does_not_scan_all_the_time_for_groups_of_which_others_have_the_room(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, soon, help_others = list[int](), list[bool](), Scanner._help_others

    async def noted(scanner: Scanner, now: float) -> int:
        brought = await help_others(scanner, now)
        soon.append(scanner._again_soon)
        return brought

    async def work() -> None:
        await asyncio.sleep(0.02)
        ran.append(1)

    monkeypatch.setattr(Scanner, "_help_others", noted)
    await in_groups(mesh, work, groups=3, each=200)
    async with all_working(mesh, ["a", "b", "c"], concurrency=20) as consumers:
        await eventually(lambda: all(parts_of(consumer).partitions.others_cnt == 2 for consumer in consumers))
        soon.clear()
        await eventually(lambda: len(soon) >= 12)
        assert len(ran) < 600
    assert sum(soon) < len(soon) / 2, soon


async def test_a_claim_wins_only_what_stands_where_it_was_booked(mesh: TaskMesh) -> None:
    async def work() -> None: ...

    task = mesh.task(name="work", queue=QUEUE)(work)
    await mesh.set_limit(QUEUE, group_running=5)
    await mesh.set_limit("other", running=5)
    await task.configure(group="a").publish_many({"stays-a": {}, "to-b": {}, "to-none": {}, "to-other": {}})
    await task.configure(group="b").publish("stays-b")
    await task.publish("stays-none")
    await task.configure(queue="other").publish_many({"stays-other": {}, "to-group": {}})
    ids = {"a": ["stays-a", "to-b", "to-none", "to-other"], "b": ["stays-b"], None: ["stays-none"]}
    booked = {
        QUEUE: [Wish(f"work:{key}", group) for group, keys in ids.items() for key in keys],
        "other": [Wish("work:stays-other", None), Wish("work:to-group", None)],
    }
    booking = await store_limits.book(mesh.store, QUEUE, "w", booked[QUEUE])
    assert booking is not None
    moves = task.configure(update_existing_params=True)
    await moves.configure(group="b").publish("to-b")
    await mesh.store.driver.collection(mesh.store.tasks).update_one({"_id": "work:to-none"}, {"$unset": {"group": 1}})
    await moves.configure(queue="other").publish("to-other")
    await moves.configure(queue="other", group="a").publish("to-group")
    where = store_limits.booked_until(mesh.store, booking.until, booked, by_group=[QUEUE])
    every = [wish.id for wishes in booked.values() for wish in wishes]
    await claim(mesh.store, every, "w", "r1", narrowed_by=where)
    won = {task.key async for task in mesh.find(status="RUNNING", limit=0)}
    # (Where groups have no limit, any group will do.)
    assert won == {"stays-a", "stays-b", "stays-none", "stays-other", "to-group"}
