"""RQ: SimpleWorker, which does not fork for each job; results are not kept."""

import sys
import time

import tally
from redis import Redis
from rq import Queue, SimpleWorker

CONNECTION = Redis.from_url(tally.BROKER_URL)


def noop(sent: float = 0.0) -> None:
    tally.done(sent)


if __name__ == "__main__":
    import rq_peer

    queue = Queue("bench", connection=CONNECTION)
    if sys.argv[1] == "work":
        SimpleWorker([queue], connection=CONNECTION).work(logging_level="ERROR")
    else:
        count, pause = int(sys.argv[1]), float(sys.argv[2])
        for _ in range(count):
            queue.enqueue(rq_peer.noop, time.time() if pause else 0.0, result_ttl=0)
            if pause:
                time.sleep(pause)
