"""Time. The server's clock decides everything; this file only knows how far it is from ours.

On the client's side only monotonic time is used, so a wall clock that is hours off, or jumps, changes nothing.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

_SAMPLE_TRUSTED_S = 30.0
_JUMP_S = 0.5
_TICK_S = 0.001


class ServerClock:
    """An estimate of the server's clock, from round trips that are made anyway.

    Good to about half a round trip. It tells when to wake up and stamps new tasks; it never judges a lease.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._uncertainty = float("inf")
        self._sampled = float("-inf")
        self._wall_ahead = _wall_ahead()

    @property
    def stale(self) -> bool:
        """Whether the last sample is too old to be trusted, or this machine was suspended since: monotonic time stood still."""
        too_old = time.monotonic() - self._sampled > _SAMPLE_TRUSTED_S
        return too_old or abs(_wall_ahead() - self._wall_ahead) > _JUMP_S

    def observe(self, server_time: datetime, sent: float, received: float) -> None:
        """Take a sample: the server's time in a reply, and when (monotonic) its command was sent and answered."""
        uncertainty = (received - sent) / 2
        offset = server_time.timestamp() + _TICK_S / 2 - (sent + received) / 2  # server times are cut to milliseconds
        # Two true samples cannot lie further apart: one of the clocks has jumped, or stood still.
        contradicts = abs(offset - self._offset) > uncertainty + self._uncertainty + _TICK_S
        if uncertainty <= self._uncertainty * 1.2 or contradicts or self.stale:
            self._offset = offset
            self._uncertainty = uncertainty
            self._sampled = received
            self._wall_ahead = _wall_ahead()

    def now(self) -> datetime:
        """Return the server's time, as well as we know it, in whole milliseconds like everything stored."""
        moment = datetime.fromtimestamp(time.monotonic() + self._offset, UTC)
        return moment.replace(microsecond=moment.microsecond // 1000 * 1000)

    def monotonic(self, server_time: datetime) -> float:
        """Return when, on our monotonic clock, it is `server_time`."""
        return server_time.timestamp() - self._offset


def _wall_ahead() -> float:
    """How far this machine's wall clock is ahead of its monotonic one: nothing else is asked of it but whether that changes."""
    return time.time() - time.monotonic()


def later(moment: datetime, milliseconds: float) -> datetime:
    """Return the moment so much later."""
    return moment + timedelta(milliseconds=milliseconds)


def in_utc(moment: datetime) -> datetime:
    """Return a datetime as aware and in UTC; a naive one is UTC already."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
