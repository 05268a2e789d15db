"""A process that publishes one key many times at once: `python -m tests.processes.publisher URI DATABASE COUNT START`."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from taskmesh import TaskMesh
from tests.processes.handlers import define
from tests.waiting import eventually


async def _publish(uri: str, database: str, count: int, start: Path) -> int:
    mesh = TaskMesh(uri, database=database)
    handlers = define(mesh)
    async with mesh:
        start.with_name(f"{start.name}.{time.monotonic_ns()}.ready").touch()
        await eventually(start.exists, 60.0)
        handles = await asyncio.gather(*(handlers.work.publish("the-one", ms=1) for _ in range(count)))
    return sum(handle.created for handle in handles)


if __name__ == "__main__":
    print(asyncio.run(_publish(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))))  # noqa: T201 -- its answer
