"""The life of a consumer: its state, and whether it has to stop. Its user, signals and its parts read and change it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Literal

logger = logging.getLogger("taskmesh.consumer")

State = Literal["ready", "running", "stopping", "stopped"]
DEFAULT_GRACE_MS = 30_000
_CUT_OFF_WITHIN_S = 0.5


class Life:
    """The life of one consumer."""

    def __init__(self) -> None:
        self.state: State = "ready"
        self.paused = False
        self.grace_ms = DEFAULT_GRACE_MS
        """How long running executions may go on after a stop was requested."""
        self.stop_asked = asyncio.Event()
        self.stop_asked_again = asyncio.Event()
        """Set at each call of `stop`. Whoever enforces the grace period clears it."""
        self.ended_by: Exception | None = None
        """The error that keeps it from going on, if there is one."""

    @property
    def claims(self) -> bool:
        """Whether it takes new tasks."""
        return self.state == "running" and not self.paused

    def stop(self, grace_ms: int) -> None:
        """Ask it to stop. Can be called again: a shorter grace period speeds up a stop that has begun."""
        self.grace_ms = min(self.grace_ms, grace_ms) if self.stop_asked.is_set() else grace_ms
        self.stop_asked.set()
        self.stop_asked_again.set()

    def end_by(self, error: Exception) -> None:
        """Stop at once, since it cannot go on. `run` raises the error when it has stopped."""
        self.ended_by = error
        logger.error("%s", error)
        self.stop(0)

    async def unless_stopped(self, beginning: Awaitable[None]) -> bool:
        """Await `beginning`, unless the consumer is asked to stop meanwhile: then it is cut off.

        Return whether it was completed.
        """
        task = asyncio.ensure_future(beginning)
        asked = asyncio.ensure_future(self.stop_asked.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            task.cancel()
        if task.done():
            task.result()
            return True
        await asyncio.wait((task,), timeout=_CUT_OFF_WITHIN_S)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("stopped before it had begun: %s", error)
        return False
