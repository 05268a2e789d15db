"""Time. The server's clock decides everything; this file only knows how far it is from ours.

On the client's side only monotonic time is used, so a wall clock that is hours off, or jumps, changes nothing.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

_SAMPLE_TRUSTED_S = 30.0


class ServerClock:
    """An estimate of the server's clock, from round trips that are made anyway.

    Good to about half a round trip. It tells when to wake up and stamps new tasks; it never judges a lease.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._uncertainty = float("inf")
        self._sampled = 0.0

    def observe(self, server_time: datetime, sent: float, received: float) -> None:
        """Take a sample: the server's time in a reply, and when (monotonic) its command was sent and answered."""
        uncertainty = (received - sent) / 2
        is_stale = received - self._sampled > _SAMPLE_TRUSTED_S
        if uncertainty <= self._uncertainty * 1.2 or is_stale:
            half_a_tick = 0.0005  # server times are cut to milliseconds
            self._offset = server_time.timestamp() + half_a_tick - (sent + received) / 2
            self._uncertainty = uncertainty
            self._sampled = received

    def now(self) -> datetime:
        """Return the server's time, as well as we know it, in whole milliseconds like everything stored."""
        moment = datetime.fromtimestamp(time.monotonic() + self._offset, UTC)
        return moment.replace(microsecond=moment.microsecond // 1000 * 1000)

    def monotonic(self, server_time: datetime) -> float:
        """Return when, on our monotonic clock, it is `server_time`."""
        return server_time.timestamp() - self._offset


def later(moment: datetime, milliseconds: float) -> datetime:
    """Return the moment so much later."""
    return moment + timedelta(milliseconds=milliseconds)


def in_utc(moment: datetime) -> datetime:
    """Return a datetime as aware and in UTC; a naive one is UTC already."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
