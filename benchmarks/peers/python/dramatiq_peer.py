"""dramatiq: one thread, a prefetch of 500 (as its guide advises for tasks that take no time), no results."""

import sys
import time

import dramatiq
import tally
from dramatiq.brokers.redis import RedisBroker

broker = RedisBroker(url=tally.BROKER_URL)
dramatiq.set_broker(broker)


@dramatiq.actor
def noop(sent: float = 0.0) -> None:
    tally.done(sent)


if __name__ == "__main__":
    count, pause = int(sys.argv[1]), float(sys.argv[2])
    for _ in range(count):
        noop.send(time.time() if pause else 0.0)
        if pause:
            time.sleep(pause)
