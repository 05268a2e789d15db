"""Events: what happens to a task, as `mesh.events()` reports it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

EventKind = Literal[
    "published",
    "claimed",
    "progressed",
    "succeeded",
    "failed",
    "snoozed",
    "step_recorded",
    "suspended",
    "signalled",
    "released",
    "timed_out",
    "cancelled",
    "retried",
    "restored",
    "deleted",
    "option_changed",
    "dependency_failed",
    "moved",
    "finished",
    "missed",
    "gap",
]


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """One thing that happened to a task."""

    kind: EventKind
    name: str
    key: str
    worker_id: str | None
    time: datetime
    status: str | None = None
    """For `finished`: the final status."""
    missed: int = 0
    """For `missed`: how many events the reader has missed, since it was too slow."""
    token: str | None = None
    """The position in the stream: `mesh.events(after=token)` continues after this event. Valid as long as the oplog reaches
    back."""
