"""How many executions a worker starts and ends per second, for its signs of life."""

from __future__ import annotations

import time

from taskmesh.store.driver import Document

SHORTEST_S = 1.0
"""Signs of life can follow each other closely; a rate over less than this would be noise."""


class Throughput:
    """Turns the worker's counts into rates over the last second or more."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._counted = (0, 0)
        self._rates = (0.0, 0.0)

    def rates(self, started: int, finished: int) -> Document:
        """Return what to write, given the counts as they are now."""
        now = time.monotonic()
        elapsed = now - self._since
        if elapsed >= SHORTEST_S:
            before = self._counted
            self._rates = (started - before[0]) / elapsed, (finished - before[1]) / elapsed
            self._since, self._counted = now, (started, finished)
        return {"started_per_s": round(self._rates[0], 1), "finished_per_s": round(self._rates[1], 1)}
