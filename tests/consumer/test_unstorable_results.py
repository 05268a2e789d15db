"""T30: a result that cannot be stored FAILs its own task, and no other one of the same commit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from benchmarks.commands import Commands
from taskmesh import Status, TaskMesh, TaskOption
from tests.waiting import eventually
from tests.working import finished, working

ONCE = TaskOption(max_unexpected_retries=0)
UNSTORABLE: dict[str, tuple[Any, str]] = {
    "an object": ({"found": [1, {"deep": object()}]}, "found"),
    "int of 70 bits": ({"big": 2**70}, "big"),
    "17 MB": ("x" * 17_000_000, "result has"),
    "NUL in a key": ({"a\0b": 1}, "a"),
    "lone surrogate": ({"text": "\ud800"}, "text"),
}


async def test_t30_results_that_cannot_be_stored_fail_alone_and_name_the_place(mesh: TaskMesh) -> None:
    release = asyncio.Event()

    @mesh.task(option=ONCE)
    async def job(kind: str | None = None) -> Any:
        await release.wait()
        return UNSTORABLE[kind][0] if kind else {"fine": True}

    kinds = list(UNSTORABLE)
    await job.publish_many({f"k{n}": {"kind": kinds[n]} if n < len(kinds) else {} for n in range(100)})
    async with working(mesh, "w", concurrency=100) as consumer:
        await eventually(lambda: len(consumer.running) == 100)
        release.set()  # all end in the same turn of the loop
        tasks = [await finished(mesh, "job", f"k{n}") for n in range(100)]

    assert [task.status for task in tasks[len(kinds) :]] == [Status.SUCCESS] * (100 - len(kinds))
    for kind, task in zip(kinds, tasks, strict=False):
        assert task.status is Status.FAIL, kind
        assert UNSTORABLE[kind][1] in task.fail_reasons[0], kind
        assert len(task.fail_reasons[0]) < 5_000, kind


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
async def test_t30_a_commit_of_large_results_is_split_by_bytes(mongo_uri: str, database: str, count: int) -> None:
    commands = Commands(sizes=True)
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(mongo_uri, event_listeners=[commands], tz_aware=True)
    async with client, TaskMesh(client, database=database) as mesh:
        release = asyncio.Event()

        @mesh.task(option=ONCE)
        async def job() -> str:
            await release.wait()
            return "x" * 1_000_000

        await job.publish_many({f"k{n}": {} for n in range(count)})
        async with working(mesh, "w", concurrency=count) as consumer:
            await eventually(lambda: len(consumer.running) == count)
            updates, sent = commands.by_name["update"], commands.bytes_sent
            release.set()
            await eventually(lambda: consumer.finished == count, 60)
            updates, sent = commands.by_name["update"] - updates, commands.bytes_sent - sent
        found = [task async for task in mesh.find("job", limit=0)]

    assert [task.status for task in found] == [Status.SUCCESS] * count
    assert sent < 1.5 * count * 1_000_000, "none was sent in vain"
    assert count / 16 < updates < count, "several in a message, and none too large"
