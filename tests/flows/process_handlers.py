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


def starts_what_is_fed() -> int:
    """Start two children, of which one gets the result of the other."""
    task = current_blocking_task()
    first = task.start(book, "first", x=3)
    fed: Any = book.configure(after={"x": first})
    [value] = task.results([task.start(fed, "second", times=2)])
    return int(value)


def joined_elsewhere() -> int:
    """Count what was waited for."""
    return len(current_blocking_task().dependencies())


def probe_elsewhere(n: int) -> int:
    """Go on elsewhere, once."""
    if n == 1:
        raise Next(queue="other", params={"n": 2})
    return n
