"""First steps: an asyncio task for a handler or a call of the driver starts at once, at the cost of no turn of the loop.

It is an asyncio task like any other, with a context and a name of its own: `asyncio.current_task()`, `asyncio.timeout()` and
cancellation work as usual. Only its first step is not put off to the next turn of the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from asyncio.tasks import _enter_task, _leave_task  # documented, for those who run a task themselves
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class FirstSteps:
    """Starts tasks of one running event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._steps: list[Callable[[], object]] = []

    def begun(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Return a task whose first step is over; most likely it is done."""
        if self._loop.get_task_factory() is not None:  # somebody wants to create all tasks in their own way
            return self._loop.create_task(coroutine, name=name)
        if sys.version_info >= (3, 12):
            return asyncio.Task(coroutine, loop=self._loop, name=name, eager_start=True)
        return self._begun(coroutine, name)

    def _begun(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Do what `begun` does, on Python 3.11.

        There a new task can only ask its loop to call its first step soon, so we stand in for the loop.
        """
        context = contextvars.copy_context()
        attributes = vars(self._loop)
        before = attributes.get("call_soon")
        attributes["call_soon"] = self._keep
        try:
            task = asyncio.Task(coroutine, loop=self._loop, name=name, context=context)
        finally:
            if before is None:
                del attributes["call_soon"]
            else:
                attributes["call_soon"] = before
        outer = asyncio.current_task(self._loop)
        if outer is not None:
            _leave_task(self._loop, outer)
        try:
            context.run(self._steps.pop())
        finally:
            if outer is not None:
                _enter_task(self._loop, outer)
        return task

    def _keep(self, step: Callable[[], object], *, context: contextvars.Context) -> None:  # noqa: ARG002 — as a task calls it
        self._steps.append(step)
