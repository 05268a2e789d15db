"""Time. The server's clock decides everything; this file only estimates its offset from ours.

The client uses only monotonic time, so a wall clock that is hours off, or jumps, changes nothing.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime, timedelta

_SAMPLE_TRUSTED_S = 30.0
_JUMP_S = 0.5
_TICK_S = 0.001


class Jumps:
    """Whether other clocks of this machine have jumped against the monotonic clock since this object was created.

    Then the machine may have been suspended while monotonic time stood still: what was timed by it may be long over. The wall
    clock shows that, unless it stood still, too, as in a paused virtual machine, until somebody sets it right.
    """

    def __init__(self) -> None:
        monotonic = time.monotonic()
        self._wall = time.time() - monotonic
        self._awake = _since_boot() - monotonic

    def any_since(self) -> bool:
        """Whether a clock has jumped."""
        monotonic = time.monotonic()
        return (
            abs(time.time() - monotonic - self._wall) > _JUMP_S
            or abs(_since_boot() - monotonic - self._awake) > _JUMP_S
        )


def _since_boot() -> float:
    """Return the clock that includes suspended time, where there is one (Linux)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


class ServerClock:
    """An estimate of the server's clock, from round trips that are made anyway.

    It is good to about half a round trip. It tells when to wake up, and stamps new tasks; it never judges a lease.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._uncertainty = float("inf")
        self._sampled = float("-inf")
        self._jumps = Jumps()

    @property
    def stale(self) -> bool:
        """Whether the last sample is too old to be trusted, or this machine may have been suspended since."""
        return self.aged or self._jumps.any_since()

    @property
    def aged(self) -> bool:
        """Whether the last sample is too old to be trusted, even if the machine was not suspended."""
        return time.monotonic() - self._sampled > _SAMPLE_TRUSTED_S

    def observe(self, server_time: datetime, sent: float, received: float) -> None:
        """Take a sample: the server's time in a reply, and when (monotonic) its command was sent and answered."""
        uncertainty = (received - sent) / 2
        offset = server_time.timestamp() + _TICK_S / 2 - (sent + received) / 2  # server times are cut to milliseconds
        # Two true samples cannot differ by more: one of the clocks has jumped, or stood still.
        contradicts = abs(offset - self._offset) > uncertainty + self._uncertainty + _TICK_S
        if uncertainty <= self._uncertainty * 1.2 or contradicts or self.stale:
            self._offset = offset
            self._uncertainty = uncertainty
            self._sampled = received
            self._jumps = Jumps()

    def move_on(self, step: timedelta) -> None:
        """Add this to all later times."""
        self._offset += step.total_seconds()

    def now(self) -> datetime:
        """Return the server's time as we know it, in whole milliseconds like all stored times."""
        moment = datetime.fromtimestamp(time.monotonic() + self._offset, UTC)
        return moment.replace(microsecond=moment.microsecond // 1000 * 1000)

    def monotonic(self, server_time: datetime) -> float:
        """Return when it is `server_time` on our monotonic clock."""
        return server_time.timestamp() - self._offset


def later(moment: datetime, milliseconds: float) -> datetime:
    """Return the moment that is so much later."""
    return moment + timedelta(milliseconds=milliseconds)
