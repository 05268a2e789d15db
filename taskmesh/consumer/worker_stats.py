"""Worker statistics: a worker's rates, and what was not well in the last hour.

That is claims in vain, how close leases came to their end, and how long its loop was blocked; kept in buckets of five minutes,
so that old figures expire by themselves.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from taskmesh.store.mongodb.driver import Document

_BUCKET_S = 300.0
_BUCKETS = 13
"""Twelve whole ones, and the one that is being filled."""


SHORTEST_S = 1.0
"""Heartbeats can follow each other closely. A rate over less than this would be noise."""


@dataclass(slots=True)
class _Bucket:
    begun_at: float
    tried: int = 0
    won: int = 0
    stood_still_s: float = 0.0
    lease_left: dict[str, float] = field(default_factory=dict)


class WorkerStats:
    """Counts for one worker. The pinger's thread writes, the event loop reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets = deque([_Bucket(time.monotonic())], maxlen=_BUCKETS)
        self._counted = (0, 0)

    def renewed(self, name: str, share_left: float) -> None:
        """A lease of a task of this name was renewed when this share of it was left."""
        with self._lock:
            least = self._bucket().lease_left
            least[name] = min(share_left, least.get(name, 1.0))

    def stood_still(self, seconds: float) -> None:
        """The event loop has been blocked for so long."""
        with self._lock:
            bucket = self._bucket()
            bucket.stood_still_s = max(bucket.stood_still_s, seconds)

    def described(self, tried: int, won: int) -> Document:
        """Return what to write, given how many tasks it has tried to claim, and won, since it started."""
        with self._lock:
            now = self._bucket()
            now.tried += tried - self._counted[0]
            now.won += won - self._counted[1]
            self._counted = tried, won
            buckets = [bucket for bucket in self._buckets if bucket.begun_at > now.begun_at - _BUCKETS * _BUCKET_S]
            least: dict[str, float] = {}
            for bucket in buckets:
                for name, share in bucket.lease_left.items():
                    least[name] = min(share, least.get(name, 1.0))
            return {
                "claims_tried": sum(bucket.tried for bucket in buckets),
                "claims_won": sum(bucket.won for bucket in buckets),
                "stood_still_ms": round(max(bucket.stood_still_s for bucket in buckets) * 1000),
                "lease_left": [{"name": name, "share": round(share, 3)} for name, share in sorted(least.items())],
            }

    def _bucket(self) -> _Bucket:
        now = time.monotonic()
        if now - self._buckets[-1].begun_at >= _BUCKET_S:
            self._buckets.append(_Bucket(now))
        return self._buckets[-1]


class Throughput:
    """Turns the worker's counts into rates over the last second or more, and measures its process."""

    def __init__(self) -> None:
        self._cpu_s = time.process_time()
        self._cpu_share = 0.0
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
            cpu_s = time.process_time()
            self._cpu_share, self._cpu_s = (cpu_s - self._cpu_s) / elapsed, cpu_s
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "started_per_s": round(self._rates[0], 1),
            "finished_per_s": round(self._rates[1], 1),
            "cpu_share": round(self._cpu_share, 2),
            "memory_peak_bytes": peak if sys.platform == "darwin" else peak * 1024,
        }
