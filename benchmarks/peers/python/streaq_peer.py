"""streaq: concurrency 200, uvloop, results not kept."""

import asyncio
import logging
import sys
import time

import tally
import uvloop
from streaq import Worker

logging.disable(logging.WARNING)
worker = Worker(redis_url=tally.BROKER_URL, concurrency=200)


@worker.task(ttl=0)
async def noop(sent: float = 0.0) -> None:
    tally.done(sent)


async def publish(count: int, pause: float) -> None:
    async with worker:
        for start in range(0, count, 500):
            number = min(500, count - start)
            if pause:
                for _ in range(number):
                    await noop.enqueue(time.time())
                    await asyncio.sleep(pause)
            else:
                await worker.enqueue_many([noop.enqueue() for _ in range(number)])


if __name__ == "__main__":
    uvloop.run(worker.run_async() if sys.argv[1] == "work" else publish(int(sys.argv[1]), float(sys.argv[2])))
