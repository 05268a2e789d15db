"""What workers are told of a queue's limits is the newest change, though two people change them at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskmesh import TaskMesh
from taskmesh.store.queues import limits


@pytest.mark.parametrize("early", [{"running": None}, {"running": 5}], ids=["taken away", "set"])
async def test_a_change_that_is_told_late_does_not_undo_a_newer_one(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, early: dict[str, int | None]
) -> None:
    """The first has changed the limits, and is held up before it tells the workers."""
    check, held_up, go_on = limits.check, asyncio.Event(), asyncio.Event()

    async def check_slowly(*arguments: Any) -> None:
        await check(*arguments)
        if not held_up.is_set():
            held_up.set()
            await go_on.wait()

    monkeypatch.setattr(limits, "check", check_slowly)
    async with asyncio.TaskGroup() as both:
        both.create_task(mesh.set_limit("q", **early))  # type: ignore[arg-type]  # no `by` is among them
        await held_up.wait()
        await mesh.set_limit("q", running=3)
        go_on.set()
    (queue,) = [queue for queue in await mesh.queues.all() if queue.queue == "q"]
    assert queue.limits is not None
    assert queue.limits.running == 3


async def test_limits_are_told_anew_after_their_collection_is_gone(mesh: TaskMesh) -> None:
    for running in (1, 2, 3):
        await mesh.set_limit("q", running=running)
    await mesh.store.driver.collection("limits").drop()
    await mesh.set_limit("q", running=4)
    (queue,) = await mesh.queues.all()
    assert queue.limits is not None
    assert queue.limits.running == 4
