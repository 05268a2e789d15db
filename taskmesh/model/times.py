"""Times as users give them, a naive one taken as UTC; and lengths of time as people read and write them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from itertools import pairwise
from math import isnan
from typing import Any

from taskmesh.model.errors import InvalidOption
from taskmesh.model.ids import shown

_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
_WRITTEN = re.compile(r"(\d{1,12}(?:\.\d{1,3})?)(ms|s|m|h|d|w)\Z")  # ten years in ms have twelve digits
_READ = [("d", _MS["d"]), ("h", _MS["h"]), ("min", _MS["m"]), ("s", _MS["s"])]
_SHOWN_WITH_REST = 10
"""From so many units on, the next smaller unit is not shown."""


def in_utc(moment: datetime) -> datetime:
    """Return a datetime as aware and in UTC. A naive one is taken as UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def checked_timeout(timeout: Any) -> float | None:
    """Return how many seconds to wait, None for ever. Less than 0 counts as 0. Raises `InvalidOption`."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or isnan(timeout)):
        raise InvalidOption(f"timeout must be a number of seconds, or None to wait for ever, got {shown(timeout)}")
    return timeout


def checked_time(name: str, value: Any) -> datetime:
    """Return the time in UTC. Raises `InvalidOption`, which calls it `name`."""
    if not isinstance(value, datetime):
        raise InvalidOption(f"{name} must be a datetime (a naive one is UTC), got {shown(value)}")
    try:
        return in_utc(value)
    except OverflowError:
        raise InvalidOption(f"{name}={value!r} is out of range: use a time that exists in UTC") from None


def duration(milliseconds: float) -> str:
    """Return a length of time in its largest unit, with the next one where that says more: `1 h 5 min`, `3.2 s`, `40 ms`."""
    value = abs(milliseconds)
    for (unit, size), (smaller, part) in pairwise(_READ):
        if value >= size:
            whole, rest = int(value // size), int(value % size // part)
            return f"{whole} {unit} {rest} {smaller}" if rest and whole < _SHOWN_WITH_REST else f"{whole} {unit}"
    return f"{value / _MS['s']:.3g} s" if value >= _MS["s"] else f"{value:.3g} ms"


def age(moment: datetime, now: datetime) -> str:
    """Return how long ago a moment was, or in how long it will be. Clocks may differ by a second."""
    since_ms = (now - moment).total_seconds() * 1_000
    return f"in {duration(since_ms)}" if since_ms < -_MS["s"] else f"{duration(max(0.0, since_ms))} ago"


def milliseconds(text: str) -> int:
    """Read a duration like `90s`, `1.5h` or `2d`. Raises `InvalidOption`."""
    match = _WRITTEN.match(text)
    if match is None:
        raise InvalidOption(
            f"a duration must be a number with its unit, one of {', '.join(_MS)}, like 90s or 2d, got {text!r}"
        )
    return round(float(match.group(1)) * _MS[match.group(2)])


def written(milliseconds: int) -> str:
    """Return the shortest text that the function `milliseconds` reads as exactly this: `90s`, `2d`."""
    for unit in ("w", "d", "h", "m", "s"):
        if milliseconds and milliseconds % _MS[unit] == 0:
            return f"{milliseconds // _MS[unit]}{unit}"
    return f"{milliseconds}ms"
