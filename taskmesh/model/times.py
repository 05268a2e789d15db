"""Times as users give them: a naive one is UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from math import isnan
from typing import Any

from taskmesh.model.errors import InvalidOption
from taskmesh.model.ids import shown


def in_utc(moment: datetime) -> datetime:
    """Return a datetime as aware and in UTC; a naive one is UTC already."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def checked_timeout(timeout: Any) -> float | None:
    """Return how many seconds to wait, None for ever; or raise `InvalidOption`. What is below 0 is no time at all."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or isnan(timeout)):
        raise InvalidOption(f"timeout must be a number of seconds, or None to wait for ever, got {shown(timeout)}")
    return timeout


def checked_time(name: str, value: Any) -> datetime:
    """Return the time in UTC, or raise `InvalidOption`, which calls it `name`."""
    if not isinstance(value, datetime):
        raise InvalidOption(f"{name} must be a datetime (a naive one is UTC), got {shown(value)}")
    try:
        return in_utc(value)
    except OverflowError:
        raise InvalidOption(f"{name}={value!r} is out of range: use a time that exists in UTC") from None
