"""Run time: how long an execution may still take under `run_timeout_ms`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class RunTime:
    """How long an execution may still take under `run_timeout_ms`. It starts counting when user code can run."""

    __slots__ = ("_ends", "_left_s", "_timer")

    def __init__(self, limit_ms: int | None) -> None:
        self._left_s = None if limit_ms is None else limit_ms / 1000
        self._ends: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left_s(self) -> float | None:
        """How much is left. None if there is no limit."""
        return self._left_s if self._ends is None else self._ends - time.monotonic()

    def go_on(self, over: Callable[[], None]) -> None:
        """Start counting. `over` is called in the running loop when nothing is left."""
        if self._left_s is not None and self._ends is None:
            self._ends = time.monotonic() + self._left_s
            self._timer = asyncio.get_running_loop().call_later(self._left_s, over)

    def stand_still(self) -> None:
        """Stop counting until `go_on`."""
        if self._ends is None:
            return
        self._left_s, self._ends = self.left_s, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


UNLIMITED = RunTime(None)
"""For all executions without a limit: it never counts."""
