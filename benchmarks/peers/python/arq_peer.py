"""arq: 500 jobs at once, a poll delay of 10 ms, uvloop, results not kept."""

import asyncio
import sys
import time

import tally
import uvloop
from arq import create_pool, func
from arq.connections import RedisSettings
from arq.worker import Worker

settings = RedisSettings.from_dsn(tally.BROKER_URL)


async def noop(_: object, sent: float = 0.0) -> None:
    tally.done(sent)


async def publish(count: int, pause: float) -> None:
    pool = await create_pool(settings)
    for start in range(0, count, 50):
        if pause:
            for _ in range(min(50, count - start)):
                await pool.enqueue_job("noop", time.time())
                await asyncio.sleep(pause)
        else:
            await asyncio.gather(*(pool.enqueue_job("noop") for _ in range(min(50, count - start))))
    await pool.aclose()


async def work() -> None:
    worker = Worker(
        [func(noop, name="noop", keep_result=0)],
        redis_settings=settings,
        max_jobs=500,
        poll_delay=0.01,
        handle_signals=False,
        log_results=False,
    )
    await worker.main()


if __name__ == "__main__":
    uvloop.run(work() if sys.argv[1] == "work" else publish(int(sys.argv[1]), float(sys.argv[2])))
