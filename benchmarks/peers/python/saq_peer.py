"""SAQ: concurrency 100, uvloop, results not kept."""

import asyncio
import sys
import time

import tally
import uvloop
from saq import Queue, Worker

queue = Queue.from_url(tally.BROKER_URL)


async def noop(_: object, *, sent: float = 0.0) -> None:
    tally.done(sent)


async def publish(count: int, pause: float) -> None:
    await queue.connect()
    for start in range(0, count, 50):
        if pause:
            for _ in range(min(50, count - start)):
                await queue.enqueue("noop", sent=time.time(), ttl=-1)
                await asyncio.sleep(pause)
        else:
            await asyncio.gather(*(queue.enqueue("noop", ttl=-1) for _ in range(min(50, count - start))))
    await queue.disconnect()


async def work() -> None:
    worker = Worker(queue, functions=[noop], concurrency=100)
    await worker.start()


if __name__ == "__main__":
    uvloop.run(work() if sys.argv[1] == "work" else publish(int(sys.argv[1]), float(sys.argv[2])))
