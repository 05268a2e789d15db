"""Ending: what has to come to its end, though nobody answers any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

CLOSE_DEADLINE_S = 5.0
"""How long a goodbye to the server may take. A connection whose other end is frozen would wait for ever."""


async def ended_in_time(ending: Awaitable[object], deadline_s: float) -> bool:
    """Wait for this so long, and then leave it to itself; whether it has ended. What it raises is raised here."""
    task = asyncio.ensure_future(ending)
    await asyncio.wait([task], timeout=deadline_s)
    if task.done() and not task.cancelled():
        task.result()
    return task.done()
