"""The only place in the tests that sleeps: wait until something observable is true, or fail saying what was not."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar, overload

import anyio

from taskmesh import TaskMesh

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


class Slowness:
    """How slow the machine was for a test about time: it had other things to do than run the test and its server."""

    _ROUND_TRIPS = 8
    """What it takes to start a task, to look for it and to claim it; each may take as long as the longest did."""

    def __init__(self) -> None:
        self._longest_s = 0.0

    @property
    def allows(self) -> timedelta:
        """What to add to the bound: some milliseconds on a machine that has time."""
        return timedelta(seconds=self._longest_s * self._ROUND_TRIPS)

    async def measure(self, mesh: TaskMesh) -> None:
        """Take turns with what is tested, for ever: sleep shortly, and have the server answer."""
        while True:
            due = time.monotonic() + 0.1
            await anyio.sleep(0.1)
            await mesh.store.driver.command({"ping": 1})
            self._longest_s = max(self._longest_s, time.monotonic() - due)


@asynccontextmanager
async def slowness_of_the_machine(mesh: TaskMesh) -> AsyncIterator[Slowness]:
    """Measure while the block lasts how long the event loop and the server were kept waiting."""
    slowness = Slowness()
    measuring = asyncio.create_task(slowness.measure(mesh))
    try:
        yield slowness
    finally:
        measuring.cancel()
        await asyncio.wait([measuring])


def _pause_s(began: float) -> float:
    first, later = _POLL_S
    return first if time.monotonic() < began + 50 * first else later


def _missed(condition: object, value: object, deadline_s: float, what: str | None) -> str:
    name = what or getattr(condition, "__name__", repr(condition))
    return f"not within {deadline_s:g} s: {name} (last value: {value!r})"
