"""Procrastinate: PostgreSQL, concurrency 50, LISTEN/NOTIFY, finished jobs deleted."""

import asyncio
import logging
import sys
import time

import procrastinate
import tally

logging.getLogger("procrastinate").setLevel(logging.ERROR)
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=tally.BROKER_URL, min_size=2, max_size=20))


@app.task(name="noop")
async def noop(sent: float = 0.0) -> None:
    tally.done(sent)


async def publish(count: int, pause: float) -> None:
    async with app.open_async():
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()
        for start in range(0, count, 500):
            number = min(500, count - start)
            if pause:
                for _ in range(number):
                    await noop.defer_async(sent=time.time())
                    await asyncio.sleep(pause)
            else:
                await noop.batch_defer_async(*({"sent": 0.0} for _ in range(number)))


async def work() -> None:
    async with app.open_async():
        await app.run_worker_async(concurrency=50, delete_jobs="always", install_signal_handlers=False)


if __name__ == "__main__":
    asyncio.run(work() if sys.argv[1] == "work" else publish(int(sys.argv[1]), float(sys.argv[2])))
