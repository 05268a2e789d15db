"""Waits inside PyMongo's async client, mended: a cancellation is neither lost in them, nor leaves anything behind.

Up to Python 3.11 `asyncio.wait_for` runs a coroutine as a task of its own, and that goes wrong in two ways:

- PyMongo waits for a server, and for a free connection, by `wait_for(condition.wait(), …)`. Whoever is cancelled just when
  that task takes the condition's lock back leaves the lock behind, taken by nobody; every later call of the client, its
  `close()` included, then waits for ever.
- It sends by `wait_for(conn.write(…), …)`. Whoever is cancelled just when the last byte goes out gets no `CancelledError`:
  a handler that was told to stop goes on, and for ever if it is a loop.

Waiting in the same task, as later Pythons do, can do neither, and costs less.

On every Python, whoever is cancelled while PyMongo connects leaves a socket to the garbage collector, which warns of it
(`ResourceWarning`): an error in the test suite of whoever treats warnings so.

What is promised here is tested in tests/store/test_cancelled_waits.py.
"""

from __future__ import annotations

import asyncio
import socket
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


class _AsyncioToConnect(_Asyncio):
    """The same, with loops that have another `sock_connect`."""

    @staticmethod
    def get_running_loop() -> Any:
        """Return the loop as the driver is to see it."""
        return _Loop(asyncio.get_running_loop())


class _Loop:
    """An event loop that closes a socket whose connect is cancelled."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Connect, or close the socket."""
        try:
            await self._loop.sock_connect(sock, address)
        except asyncio.CancelledError:
            sock.close()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


async def _wait_in_this_task(condition: Any, timeout: float | None) -> bool:
    try:
        return bool(await _Asyncio.wait_for(condition.wait(), timeout))
    except TimeoutError:
        return False


def mend() -> None:
    """Replace the waits where they are flawed, and where they are: a later PyMongo may have mended them itself."""
    # Names that these modules import.
    if hasattr(pool_shared, "asyncio"):
        pool_shared.asyncio = _AsyncioToConnect()
    if sys.version_info < (3, 12):
        if hasattr(network_layer, "asyncio"):
            network_layer.asyncio = _Asyncio()
        for module in (pool, topology):
            if hasattr(module, _NAME):
                setattr(module, _NAME, _wait_in_this_task)
