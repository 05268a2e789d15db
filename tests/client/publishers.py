"""One key, published many times at once in a process of its own: arguments URI DATABASE COUNT START (see `tests.warm`).

Prints `ready`, waits until the file START is there, publishes, then prints how many of its handles said `created`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from taskmesh import TaskMesh
from tests.waiting import eventually


def main() -> None:
    """Do so."""
    uri, database, count, start = sys.argv[1:]
    asyncio.run(_publish(uri, database, int(count), Path(start)))


async def _publish(uri: str, database: str, count: int, start: Path) -> None:
    mesh = TaskMesh(uri, database=database)

    @mesh.task
    async def job(n: int) -> int:
        return n

    async with mesh:
        print("ready", flush=True)  # noqa: T201  # the protocol with the test
        await eventually(start.exists)
        handles = await asyncio.gather(*(job.publish("the key", n=n) for n in range(count)))
        print(sum(handle.created for handle in handles), flush=True)  # noqa: T201  # its answer
