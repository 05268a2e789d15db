"""taskiq: a list queue in Redis (its fastest broker; it acknowledges nothing), uvloop, no results."""

import asyncio
import sys
import time

import tally
from taskiq_redis import ListQueueBroker

broker = ListQueueBroker(tally.BROKER_URL, socket_timeout=None)  # its pops wait longer than redis-py does by default


@broker.task("noop")
async def noop(sent: float = 0.0) -> None:
    tally.done(sent)


async def publish(count: int, pause: float) -> None:
    await broker.startup()
    for start in range(0, count, 50):
        if pause:
            for _ in range(min(50, count - start)):
                await noop.kiq(time.time())
                await asyncio.sleep(pause)
        else:
            await asyncio.gather(*(noop.kiq() for _ in range(min(50, count - start))))
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(publish(int(sys.argv[1]), float(sys.argv[2])))
