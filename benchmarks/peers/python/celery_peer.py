"""Celery: prefork, prefetch of 500, results ignored, no gossip, no mingle, no heartbeat."""

import sys
import time

import tally
from celery import Celery

app = Celery("peer", broker=tally.BROKER_URL)
app.conf.update(
    task_ignore_result=True,
    worker_prefetch_multiplier=500,
    worker_disable_rate_limits=True,
    task_acks_late=False,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
)


@app.task(name="noop")
def noop(sent: float = 0.0) -> None:
    tally.done(sent)


if __name__ == "__main__":
    count, pause = int(sys.argv[1]), float(sys.argv[2])
    with app.producer_or_acquire() as producer:
        for _ in range(count):
            noop.apply_async((time.time() if pause else 0.0,), producer=producer)
            if pause:
                time.sleep(pause)
