"""Hooks: what users have called before and after each execution, and what the second one is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from taskmesh.model.task import Task


@dataclass(frozen=True, slots=True)
class Ending:
    """How an execution ended, as the hook `after` is told."""

    kind: Literal["succeeded", "failed", "snoozed", "suspended", "moved", "released", "cancelled", "lost"]
    value: Any = None
    reason: str | None = None
    error: BaseException | None = None
    fail_type: str | None = None
    """The type of the error that made it fail, if an error did."""
    fail_frame: str | None = None
    """File, line and function where that error was raised."""


BeforeHook = Callable[[Task], Awaitable[None] | None]
AfterHook = Callable[[Task, Ending], Awaitable[None] | None]
