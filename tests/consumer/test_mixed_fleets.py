"""Workers that differ: tasks that a few can run are divided among these, and wait for nobody who cannot."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from taskmesh import Consumer, TaskMesh
from tests.faults import another_mesh
from tests.waiting import eventually
from tests.working import parts_of, working

OTHERS = 4
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "names": ({}, {"names": ["easy"]}, {}),
    "queues": ({}, {"queues": ["default"]}, {"queue": "special"}),
    "labels": ({"labels": {"gpu": True}}, {}, {"needs": {"gpu": True}}),
}
"""How the worker that can run a task is set up, how the others are, and how the task is published."""


async def _add(fleet: AsyncExitStack, mesh: TaskMesh, worker_id: str, **settings: Any) -> Consumer:
    """Let one more worker work, in a process of its own as far as the stream goes."""
    uri, database = mesh.connection.client, mesh.connection.database
    assert isinstance(uri, str)
    its_own = await fleet.enter_async_context(another_mesh(uri, database, worker_id))
    for name in ("easy", "hard"):

        async def handler() -> None: ...

        its_own.task(name=name)(handler)
    return await fleet.enter_async_context(working(its_own, worker_id, **settings))


async def _all_know(consumers: list[Consumer]) -> None:
    def others_are_known() -> bool:
        return all(len(parts_of(consumer).registration.fleet) == len(consumers) for consumer in consumers)

    await eventually(others_are_known, what="each worker knows all others")


@pytest.mark.parametrize("kind", SETTINGS)
async def test_tasks_that_one_worker_can_run_are_heard_of_by_it_in_every_lane(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    able, others, task = SETTINGS[kind]
    monkeypatch.setattr("taskmesh.consumer.scanner.SCAN_EVERY_S", 600.0)  # so that hints alone bring work
    monkeypatch.setattr("taskmesh.consumer.listener._TOO_LATE_S", 60.0)  # and late ones too, on a busy machine

    @mesh.task
    async def hard() -> None: ...

    publishing = hard.configure(**task)
    async with AsyncExitStack() as fleet:
        consumers = [await _add(fleet, mesh, "able", **able)]
        consumers += [await _add(fleet, mesh, f"other{n}", **others) for n in range(OTHERS)]
        await _all_know(consumers)
        for n in range(40):
            await (await publishing.publish(str(n))).result(30)
        await eventually(lambda: consumers[0].finished == 40, what="it has run them all")
        for n in range(40):
            await mesh.retry("hard", str(n))
        await eventually(lambda: consumers[0].finished == 80, what="what is claimable again is heard of, too")


@pytest.mark.parametrize("kind", SETTINGS)
async def test_a_backlog_that_one_worker_can_run_is_read_as_fast_as_if_it_were_alone(mesh: TaskMesh, kind: str) -> None:
    able, others, task = SETTINGS[kind]
    queue = task.get("queue", "default")

    @mesh.task
    async def hard() -> None: ...

    async def passes(consumer: Consumer, prefix: str) -> int:
        """Return how often it looks for work until it has worked off a backlog."""
        await mesh.pause(queue)
        await hard.configure(**task).publish_many({f"{prefix}{n}": {} for n in range(400)})
        scanner = parts_of(consumer).scanner
        before, done = scanner.scans, consumer.finished
        await mesh.resume(queue)
        await eventually(lambda: consumer.finished == done + 400, what="the backlog is worked off")
        return scanner.scans - before

    async with AsyncExitStack() as fleet:
        one = await _add(fleet, mesh, "able", concurrency=10, **able)
        alone = await passes(one, "alone")
        all_of_them = [one, *[await _add(fleet, mesh, f"other{n}", **others) for n in range(OTHERS)]]
        await _all_know(all_of_them)
        assert await passes(one, "beside") <= 2 * alone + 5
