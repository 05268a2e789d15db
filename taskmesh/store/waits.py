"""Waits inside PyMongo's async client, mended for Python 3.11, whose `asyncio.wait_for` can lose a cancellation.

Up to Python 3.11 `wait_for` runs a coroutine as a task of its own, and that goes wrong in two ways:

- PyMongo waits for a server, and for a free connection, by `wait_for(condition.wait(), …)`. Whoever is cancelled just when
  that task takes the condition's lock back leaves the lock behind, taken by nobody; every later call of the client, its
  `close()` included, then waits for ever.
- It sends by `wait_for(conn.write(…), …)`. Whoever is cancelled just when the last byte goes out gets no `CancelledError`:
  a handler that was told to stop goes on, and for ever if it is a loop.

Waiting in the same task, as later Pythons do, can do neither (tests/store/test_cancelled_waits.py), and costs less.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from typing import Any, TypeVar

from pymongo import network_layer, pool_shared
from pymongo.asynchronous import pool, topology

T = TypeVar("T")

_NAME = "_async_cond_wait"


class _Asyncio:
    """The module `asyncio`, with another `wait_for`."""

    @staticmethod
    async def wait_for(awaitable: Awaitable[T], timeout: float | None) -> T:
        """Wait in this task."""
        async with asyncio.timeout(timeout):
            return await awaitable

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


async def _wait_in_this_task(condition: Any, timeout: float | None) -> bool:
    try:
        return bool(await _Asyncio.wait_for(condition.wait(), timeout))
    except TimeoutError:
        return False


def mend() -> None:
    """Replace the waits where they are flawed, and where they are: a later PyMongo may have mended them itself."""
    if sys.version_info < (3, 12):
        for module in (pool, topology):
            if hasattr(module, _NAME):
                setattr(module, _NAME, _wait_in_this_task)
        for sending in (network_layer, pool_shared):
            if hasattr(sending, "asyncio"):
                sending.asyncio = _Asyncio()  # type: ignore[attr-defined]  # a name that the module imports
