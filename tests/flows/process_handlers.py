"""Handlers that run in child processes."""

from __future__ import annotations

from taskmesh import Next, current_blocking_task


def joined_elsewhere() -> int:
    """Count what was waited for."""
    return len(current_blocking_task().dependencies())


def probe_elsewhere(n: int) -> int:
    """Go on elsewhere, once."""
    if n == 1:
        raise Next(queue="other", params={"n": 2})
    return n
