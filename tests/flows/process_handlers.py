"""Handlers that run in child processes."""

from __future__ import annotations

from typing import Any

from taskmesh import Next, TaskMesh, current_blocking_task

mesh = TaskMesh("mongodb://nowhere")
"""Not the one that runs them: it holds the definitions that they publish."""


@mesh.task
async def book(x: int, times: int = 1) -> int:
    """Multiply; `x` comes from a dependency."""
    return x * times


def publishes_what_is_fed() -> None:
    """Publish it again, with what does not come from there."""
    again: Any = book.configure(run_again=True)
    current_blocking_task().publish(again, "b", times=2)


def joined_elsewhere() -> int:
    """Count what was waited for."""
    return len(current_blocking_task().dependencies())


def probe_elsewhere(n: int) -> int:
    """Go on elsewhere, once."""
    if n == 1:
        raise Next(queue="other", params={"n": 2})
    return n
