"""How many tasks have started from each queue in which window, as the committed claims tell, and what its rate allowed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

HEARD_OF_A_RATE_WITHIN = timedelta(seconds=5)
"""How soon every worker books before it claims."""


@dataclass(frozen=True, slots=True)
class Window:
    """The fullest window that one start is in."""

    rate: int
    per_ms: int
    starts: int


@dataclass
class _Rate:
    rate: int
    per_ms: int
    since: datetime
    starts: list[datetime] = field(default_factory=list)


class Rates:
    """The rates of all queues, and what started under them."""

    def __init__(self) -> None:
        self._of: dict[str, _Rate] = {}

    def learn(self, queue: str, limits: Mapping[str, Any], time: datetime) -> None:
        """Note what a queue is limited to from now on."""
        rate, per_ms = limits.get("rate"), limits.get("per_ms")
        known = self._of.get(queue)
        if rate is None or per_ms is None:
            self._of.pop(queue, None)
        elif known is None or (known.rate, known.per_ms) != (rate, per_ms):
            self._of[queue] = _Rate(rate, per_ms, time + HEARD_OF_A_RATE_WITHIN)

    def started(self, queue: str, time: datetime) -> Window | None:
        """Note a start; None if no rate was in force."""
        known = self._of.get(queue)
        if known is None or time < known.since:
            return None
        insort(known.starts, time)
        per = timedelta(milliseconds=known.per_ms)
        around = known.starts[bisect_right(known.starts, time - per) : bisect_left(known.starts, time + per)]
        first = most = 0
        for last, moment in enumerate(around):
            while moment - around[first] >= per:
                first += 1
            most = max(most, last - first + 1)
        return Window(known.rate, known.per_ms, most)
