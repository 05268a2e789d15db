"""Publish one key many times at once, in a process of its own: `python -m tests.publish.publishers URI DATABASE COUNT`.

Prints `ready`, waits for a line, publishes, then prints how many of its handles said `created`.
"""

from __future__ import annotations

import asyncio
import sys

from taskmesh import TaskMesh


async def main(uri: str, database: str, count: int) -> None:
    mesh = TaskMesh(uri, database=database)

    @mesh.task
    async def job(n: int) -> int:
        return n

    async with mesh:
        print("ready", flush=True)  # noqa: T201  # the protocol with the test
        await asyncio.to_thread(sys.stdin.readline)
        handles = await asyncio.gather(*(job.publish("the key", n=n) for n in range(count)))
        print(sum(handle.created for handle in handles), flush=True)  # noqa: T201  # its answer


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
