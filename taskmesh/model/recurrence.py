"""When a periodic task ticks: by cron expression in a time zone, or every so many milliseconds. No I/O here.

Daylight saving, for a cron expression with a fixed hour (`30 2 * * *`): if the clock skips that time, it ticks right after the
gap; if the clock shows it twice, it ticks only the first time. If minutes or hours start with a star (`*/15 * * * *`) real time
counts, so no quarter of an hour is left out or runs twice. (Debian's cron does the same, and so does cronsim, which does the
work.) With seconds in front it ticks so many seconds after such a minute starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from taskmesh.model import distribution
from taskmesh.model.errors import MAX_DURATION_MS, InvalidOption
from taskmesh.model.times import duration

MIN_INTERVAL_MS = 10
_FIELDS_WITH_SECONDS = 6
_MINUTE = timedelta(minutes=1)
_FAR_ENOUGH = timedelta(hours=3)
"""Back beyond any change of the clock."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When a schedule ticks: one of `cron` and `interval_ms`."""

    cron: str | None
    interval_ms: int | None
    timezone: str = "UTC"

    @property
    def words(self) -> str:
        """When it runs, in words: `At 06:00 every day (Europe/Berlin)`."""
        if self.interval_ms is not None:
            return f"Every {duration(self.interval_ms)}"
        try:
            said = _cronsim().CronSim(self.cron, datetime(2026, 1, 1, tzinfo=UTC)).explain()
        except InvalidOption:  # the extra is not installed
            said = self.cron
        return f"{said} ({self.timezone})"

    def after(self, moment: datetime, anchor: datetime) -> datetime | None:
        """Return the first tick after a moment, in UTC; None if there is none. Intervals are counted from `anchor`."""
        return next(self.ticks_after(moment, anchor), None)

    def before(self, moment: datetime, anchor: datetime) -> datetime | None:
        """Return the last tick before a moment, in UTC; None if there is none."""
        if self.interval_ms is not None:
            interval = timedelta(milliseconds=self.interval_ms)
            tick = anchor + -(-(moment - anchor) // interval) * interval - interval
            return tick if tick > anchor else None
        # Backwards only to find where to start: which ticks there are is computed forwards only.
        minutes, seconds = self._fields
        backwards = _cronsim().CronSim(minutes, moment.astimezone(_zone(self.timezone)), reverse=True)
        begun = (local.astimezone(UTC) for local in backwards if local.astimezone(UTC) + seconds[0] < moment)
        begin = next(begun, moment)
        last: datetime | None = None
        for following in self.ticks_after(begin - _FAR_ENOUGH, anchor):
            if following >= moment:
                break
            last = following
        return last

    def ticks_after(self, moment: datetime, anchor: datetime) -> Iterator[datetime]:
        """Yield the ticks after a moment, in order."""
        if self.interval_ms is not None:
            interval = timedelta(milliseconds=self.interval_ms)
            tick = anchor + ((moment - anchor) // interval + 1) * interval
            while True:
                yield tick
                tick += interval
        last = moment
        minutes, seconds = self._fields
        for local in _cronsim().CronSim(minutes, (moment - _MINUTE).astimezone(_zone(self.timezone))):
            for second in seconds:
                tick = local.astimezone(UTC) + second
                if tick > last:  # two times of a day may coincide where the clock skips an hour
                    last = tick
                    yield tick

    @property
    def _fields(self) -> tuple[str, list[timedelta]]:
        """The expression without seconds, and the seconds: cronsim handles daylight saving only for five fields."""
        assert self.cron is not None
        fields = self.cron.split()
        if len(fields) < _FIELDS_WITH_SECONDS:
            return self.cron, [timedelta(0)]
        seconds = _cronsim().CronSim(self.cron, datetime(2026, 1, 1, tzinfo=UTC)).seconds
        return " ".join(fields[1:]), [timedelta(seconds=second) for second in sorted(seconds)]


def checked_timing(cron: Any, interval_ms: Any, timezone: Any) -> Timing:
    """Return the timing. Raises `InvalidOption`."""
    if (cron is None) == (interval_ms is None):
        raise InvalidOption(
            f"a periodic task needs either cron or interval_ms, got cron={cron!r}, interval_ms={interval_ms!r}"
        )
    zone = _zone(timezone)
    if interval_ms is not None:
        whole = isinstance(interval_ms, int) and not isinstance(interval_ms, bool)
        if not whole or not MIN_INTERVAL_MS <= interval_ms <= MAX_DURATION_MS:
            raise InvalidOption(
                f"interval_ms must be a whole number from {MIN_INTERVAL_MS} to ten years, got {interval_ms!r}"
            )
        return Timing(None, interval_ms, timezone)
    if not isinstance(cron, str):
        raise InvalidOption(f"cron must be a str like '*/5 * * * *', got {cron!r}")
    cronsim = _cronsim()
    try:
        cronsim.CronSim(cron, datetime(2026, 1, 1, tzinfo=zone))
    except cronsim.CronSimError as error:
        raise InvalidOption(
            f"cron={cron!r} cannot be read ({error}): it has minute, hour, day of month, month and day of week, "
            "and may have seconds in front"
        ) from None
    return Timing(cron, None, timezone)


def _zone(name: Any) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, TypeError, OSError):  # unknown, a path, no text, a directory
        raise InvalidOption(f"there is no time zone {name!r}: use a name like 'Europe/Berlin', or 'UTC'") from None


def _cronsim() -> Any:
    try:
        import cronsim  # noqa: PLC0415 — an extra
    except ImportError:
        raise InvalidOption(
            f"cron needs the package cronsim: {distribution.install('cron')}, or use interval_ms"
        ) from None
    return cronsim
