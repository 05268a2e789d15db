"""Waits inside PyMongo's async client, mended for Python 3.11: a call that is cancelled there would lock the client for good.

PyMongo waits for a server, and for a free connection, by `asyncio.wait_for(condition.wait(), …)`. Up to Python 3.11 that
runs the inner wait as a task of its own. Whoever is cancelled just when that task takes the condition's lock back leaves the
lock behind, taken by nobody; every later call of the client, its `close()` included, then waits for ever
(tests/store/test_cancelled_waits.py). Waiting in the same task cannot do that, and is what later Pythons do.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from pymongo.asynchronous import pool, topology

_NAME = "_async_cond_wait"


async def _wait_in_this_task(condition: Any, timeout: float | None) -> bool:
    try:
        async with asyncio.timeout(timeout):
            return bool(await condition.wait())
    except TimeoutError:
        return False


def mend() -> None:
    """Replace the wait where it is flawed, and where it is: a later PyMongo may have mended it itself."""
    if sys.version_info < (3, 12):
        for module in (pool, topology):
            if hasattr(module, _NAME):
                setattr(module, _NAME, _wait_in_this_task)
