"""Huey: a blocking Redis queue without results, four threads."""

import logging
import sys
import time

import tally
from huey import RedisHuey

huey = RedisHuey("bench", url=tally.BROKER_URL, results=False)
logging.getLogger("huey").setLevel(logging.ERROR)


@huey.task()
def noop(sent: float = 0.0) -> None:
    tally.done(sent)


if __name__ == "__main__":
    import huey_peer

    count, pause = int(sys.argv[1]), float(sys.argv[2])
    for _ in range(count):
        huey_peer.noop(time.time() if pause else 0.0)
        if pause:
            time.sleep(pause)
