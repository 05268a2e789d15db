"""The only place in the tests that sleeps: wait until something observable is true, or fail saying what was not."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

import anyio

_POLL_S = 0.01

T = TypeVar("T")


def wait_until(condition: Callable[[], T], deadline_s: float = 10.0, *, what: str | None = None) -> T:
    """Call `condition` until what it returns is true, and return that. For tests without an event loop.

    Raises:
        AssertionError: it was not within `deadline_s`; the message shows `what` and the last value.
    """
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() >= end:
            raise AssertionError(_missed(condition, value, deadline_s, what))
        time.sleep(_POLL_S)
    return value


@overload
async def eventually(
    condition: Callable[[], Awaitable[T | None]], deadline_s: float = 10.0, *, what: str | None = None
) -> T: ...
@overload
async def eventually(condition: Callable[[], T | None], deadline_s: float = 10.0, *, what: str | None = None) -> T: ...
async def eventually(condition: Callable[[], Any], deadline_s: float = 10.0, *, what: str | None = None) -> Any:
    """Do as `wait_until` does, in an event loop; `condition` may be plain or async."""
    end = time.monotonic() + deadline_s
    while True:
        found = condition()
        value = await found if inspect.isawaitable(found) else found
        if value:
            return value
        if time.monotonic() >= end:
            raise AssertionError(_missed(condition, value, deadline_s, what))
        await anyio.sleep(_POLL_S)


def _missed(condition: object, value: object, deadline_s: float, what: str | None) -> str:
    name = what or getattr(condition, "__name__", repr(condition))
    return f"not within {deadline_s:g} s: {name} (last value: {value!r})"
