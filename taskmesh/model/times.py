"""Times as users give them. A naive one is taken as UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from math import isnan
from typing import Any

from taskmesh.model.errors import InvalidOption
from taskmesh.model.ids import shown


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
