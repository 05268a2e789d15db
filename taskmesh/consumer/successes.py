"""What the log says of successes: a line for each while they are few, and a count of the rest where they are many."""

from __future__ import annotations

import asyncio
import logging
import time

from taskmesh.consumer.execution import Execution
from taskmesh.consumer.logs import fields_of

logger = logging.getLogger("taskmesh.executor")

_WINDOW_S = 10.0
_TOLD_SINGLY = 20
"""In each window. A busy worker would else write thousands of lines a second, and do little else."""


class Successes:
    """The successes of one worker."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._window_ends = float("-inf")
        self._told = 0
        self._counted = 0

    def tell(self, execution: Execution) -> None:
        """Log that an execution has been recorded as SUCCESS, or count it."""
        if not logger.isEnabledFor(logging.INFO):
            return
        now = time.monotonic()
        if now >= self._window_ends:
            self.tell_rest()
            self._window_ends, self._told = now + _WINDOW_S, 0
        if self._told < _TOLD_SINGLY:
            self._told += 1
            took = now - execution.started
            logger.info("task %s succeeded after %.3f s", execution.id, took, extra=fields_of(execution))
            return
        if self._counted == 0:
            asyncio.get_running_loop().call_later(self._window_ends - now, self.tell_rest)
        self._counted += 1

    def tell_rest(self) -> None:
        """Log how many successes were only counted, if any were."""
        counted, self._counted = self._counted, 0
        if counted:
            logger.info("%d more tasks succeeded within %g s", counted, _WINDOW_S, extra={"worker": self._worker_id})
