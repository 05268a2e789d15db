"""T32: however executions end, their slots are free again and nothing of them is left."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest

from taskmesh import Retry, Snooze, TaskFailed, TaskMesh, TaskOption, current_task
from tests.waiting import eventually
from tests.working import working

QUICK = TaskOption(max_unexpected_retries=0, max_timeouts=0, run_timeout_ms=300)


class Odd(BaseException):
    """Not an `Exception`: what only a bare `except` catches."""


RAISED: dict[str, Callable[[], BaseException]] = {
    "raise": lambda: ValueError("as asked"),
    "odd": Odd,
    "cancelled": asyncio.CancelledError,
    "fail": lambda: TaskFailed("as asked"),
    "snooze": lambda: Snooze(delay_ms=0),
    "retry": lambda: Retry(delay_ms=0),
}


async def _end(mesh: TaskMesh, key: str, ending: str) -> None:
    """End an execution in some way."""
    if error := RAISED.get(ending):
        raise error()
    if ending == "late":
        await asyncio.sleep(10)  # past its `run_timeout_ms`
    elif ending in ("delete", "cancel"):
        await (mesh.delete if ending == "delete" else mesh.cancel)("job", key)
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
async def test_t32_no_slot_leaks_however_handlers_end(mesh: TaskMesh, count: int) -> None:
    chance = random.Random(32)
    endings = ["return", *RAISED] * 3 + ["late", "delete", "cancel"]
    seen: dict[str, str] = {}

    @mesh.task(option=QUICK)
    async def job() -> None:
        key = current_task().key
        if key not in seen:
            seen[key] = chance.choice(endings)
            await _end(mesh, key, seen[key])

    side_by_side = asyncio.Barrier(11)

    @mesh.task
    async def long() -> None:
        await side_by_side.wait()

    async def unfinished() -> Any:
        return await mesh.store.driver.collection("tasks").count_documents({"status": {"$in": ["INIT", "RUNNING"]}})

    async def all_finished() -> bool:
        return bool(await unfinished() == 0)

    async with working(mesh, "w", concurrency=10) as consumer:
        for start in range(0, count, 5_000):
            await job.publish_many({f"k{n}": {} for n in range(start, min(start + 5_000, count))})
        await eventually(all_finished, 60 + count / 50, what="all are finished")
        await eventually(lambda: not consumer.running, what="nothing runs")
        assert len(seen) == count
        assert {"late", "delete", "cancel", "odd", "cancelled"} <= set(seen.values())

        await long.publish_many({f"k{n}": {} for n in range(10)})
        async with asyncio.timeout(60):
            await side_by_side.wait()  # passes only if all ten slots are there
        await eventually(lambda: not consumer.running)

    gc.collect()
    left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(("task ", "taskmesh "))]
    assert [name for name in left if name != "taskmesh feed"] == []
