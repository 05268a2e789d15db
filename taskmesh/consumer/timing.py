"""Pauses of the loops: until something happens, or a time has passed, with a little chance in it."""

from __future__ import annotations

import asyncio
import contextlib
import random


async def until(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for the event, at most so long; return whether it is set. It is not cleared."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def by_chance(longest: float) -> float:
    """Return a time up to this, so that those who met each other do not meet again."""
    return random.uniform(0, longest)  # noqa: S311 — nobody gains by guessing it


def varied(value: float, share: float) -> float:
    """Return the value, off by up to this share of it, so that what started together does not go on together."""
    return value * random.uniform(1 - share, 1 + share)  # noqa: S311 — nobody gains by guessing it
