"""The only place in the tests that sleeps: wait until something observable is true, or fail saying what was not."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

import anyio

_POLL_S = (0.01, 0.05)
"""How often to look: at first, and when it takes longer. Looking is work too, and others want to."""

T = TypeVar("T")


def wait_until(condition: Callable[[], T], deadline_s: float = 60.0, *, what: str | None = None) -> T:
    """Call `condition` until what it returns is true, and return that. For tests without an event loop.

    Raises:
        AssertionError: it was not within `deadline_s`; the message shows `what` and the last value.
    """
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() >= end:
            raise AssertionError(_missed(condition, value, deadline_s, what))
        time.sleep(_pause_s(end - deadline_s))
    return value


@overload
async def eventually(
    condition: Callable[[], Awaitable[T | None]], deadline_s: float = 60.0, *, what: str | None = None
) -> T: ...
@overload
async def eventually(condition: Callable[[], T | None], deadline_s: float = 60.0, *, what: str | None = None) -> T: ...
async def eventually(condition: Callable[[], Any], deadline_s: float = 60.0, *, what: str | None = None) -> Any:
    """Do as `wait_until` does, in an event loop; `condition` may be plain or async."""
    end = time.monotonic() + deadline_s
    while True:
        found = condition()
        value = await found if inspect.isawaitable(found) else found
        if value:
            return value
        if time.monotonic() >= end:
            raise AssertionError(_missed(condition, value, deadline_s, what))
        await anyio.sleep(_pause_s(end - deadline_s))


def _pause_s(began: float) -> float:
    first, later = _POLL_S
    return first if time.monotonic() < began + 50 * first else later


def _missed(condition: object, value: object, deadline_s: float, what: str | None) -> str:
    name = what or getattr(condition, "__name__", repr(condition))
    return f"not within {deadline_s:g} s: {name} (last value: {value!r})"
