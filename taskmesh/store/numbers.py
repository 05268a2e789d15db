"""The order of publication: a number that each task gets when it is published, and keeps across retries.

It is the time of the call, by the server's clock as well as it is known here, and a count. So the tasks of one process have the
order of their calls, even within a millisecond and when the clock is set back; those of several processes have the order of
their clocks.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

_COUNT_BITS = 20
NUMBERS_PER_MS = 1 << _COUNT_BITS
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)


class Numbers:
    """The numbers that one process gives to the tasks of one mesh. Any thread may take some."""

    def __init__(self) -> None:
        self._next = 0
        self._lock = threading.Lock()

    def take(self, count: int, now: datetime) -> int:
        """Return the first of `count` numbers in a row, greater than all before."""
        with self._lock:
            first = max(self._next, number_at(now))
            self._next = first + count
        return first


def number_at(moment: datetime) -> int:
    """Return the first number of a moment. It serves as the number of a task that has none."""
    return ((moment - _EPOCH) // _MS) << _COUNT_BITS


def moment_of(number: int) -> datetime:
    """Return when a number was given, to the millisecond."""
    return _EPOCH + (number >> _COUNT_BITS) * _MS
