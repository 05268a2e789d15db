"""A worker with a memory budget: it claims only tasks whose declared need fits into what is left.

    python examples/memory_budget.py

`on_claim` lets the server leave out what is too large now. A set of tasks may be claimed at once, each of which would fit
alone: so `before` is where memory is really taken, and who does not fit after all is put off by `Snooze`, which is not
counted. `after` gives it back however the execution ended. What is large waits until enough is free at one time: with many
small tasks beside it, give it a worker of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

from taskmesh import Consumer, Ending, Snooze, Task, TaskMesh, TaskOption, current_task

mesh = TaskMesh(database="memory_budget")


class MemoryBudget:
    """So many megabytes, and who has how many of them."""

    def __init__(self, total_mb: int) -> None:
        self.total_mb = total_mb
        self.peak_mb = 0
        self._taken_mb: dict[str, int] = {}

    @property
    def free_mb(self) -> int:
        """What nobody has."""
        return self.total_mb - sum(self._taken_mb.values())

    def narrow(self, _: Consumer) -> dict[str, Any] | None:
        """Claim what fits; nothing while nothing is left: `on_claim`."""
        return {"params.memory_mb": {"$lte": self.free_mb}} if self.free_mb else None

    def take(self, task: Task) -> None:
        """Take what the task needs. Raises `Snooze` if others of the same claim were first: `before`."""
        needed_mb = (task.params or {})["memory_mb"]
        if needed_mb > self.free_mb:
            raise Snooze(f"{needed_mb} MB are more than the {self.free_mb} MB that are free", delay_ms=100)
        self._taken_mb[task.key] = needed_mb
        self.peak_mb = max(self.peak_mb, self.total_mb - self.free_mb)

    def give_back(self, task: Task, _: Ending) -> None:
        """Give back what it took, if it did: `after`."""
        self._taken_mb.pop(task.key, None)


budget = MemoryBudget(total_mb=1_000)


@mesh.task(option=TaskOption(unexpected_retry_delay_ms=0))
async def render(scene: int, memory_mb: int) -> int:
    """Need so much memory for a moment; every third scene fails at first."""
    await asyncio.sleep(0.02)
    if scene % 3 == 0 and current_task().attempt == 1:
        raise RuntimeError(f"scene {scene} does not render at the first attempt")
    return memory_mb


async def main() -> int:
    """Render forty scenes; return how much memory they needed together."""
    async with mesh:
        scenes = {f"scene-{n}": {"scene": n, "memory_mb": 50 + 70 * n % 600} for n in range(40)}
        handles = await render.publish_many(scenes)
        consumer = mesh.consumer(concurrency=30, on_claim=budget.narrow, before=budget.take, after=budget.give_back)
        working = asyncio.create_task(consumer.run())
        needed_mb = sum(await asyncio.gather(*(handle.result(timeout=60) for handle in handles)))
        await consumer.stop()
        await working
    print(
        f"{needed_mb} MB in all, at most {budget.peak_mb} MB at once, {budget.free_mb} of {budget.total_mb} MB are free"
    )
    return needed_mb


if __name__ == "__main__":
    asyncio.run(main())
