"""Pauses of the loops: until something happens or a time has passed, with a random share."""

from __future__ import annotations

import asyncio
import contextlib
import random


async def until(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for the event, at most so long. Return whether it is set. It is not cleared."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def random_up_to(longest: float) -> float:
    """Return a random time up to this, so that those who collided do not collide again."""
    return random.uniform(0, longest)  # noqa: S311 — nobody gains by guessing it


def varied(value: float, share: float) -> float:
    """Return the value, changed randomly by up to this share, so that what started together does not stay in step."""
    return value * random.uniform(1 - share, 1 + share)  # noqa: S311 — nobody gains by guessing it
