"""Queues as their users see them: paused or open, their limits, and how much of those is used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from taskmesh.model.errors import InvalidName, InvalidOption
from taskmesh.model.ids import shown
from taskmesh.model.read_only import ReadOnly
from taskmesh.model.task import checked_name

Reason = tuple[str, datetime | None]
"""Why nothing is claimed, and when that ends by itself. None: not by time alone."""

PAUSES_ITSELF = "taskmesh"
"""The author of the pause, if a queue is paused for its failures."""


class QueueLimits(ReadOnly):
    """The limits of a queue, over the whole fleet. None: no limit."""

    rate: int | None = None
    """The most starts in any `per_ms`."""
    per_ms: int | None = None
    running: int | None = None
    """The most executions at a time."""
    group_running: int | None = None
    """The most executions of one group at a time."""
    group_rate: int | None = None
    """The most starts of one group in any `group_per_ms`."""
    group_per_ms: int | None = None
    groups: dict[str, int] = {}
    """The most executions at a time of groups that have a limit of their own."""

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> QueueLimits:
        """Read the limits as they are stored with the queue."""
        groups = {entry["g"]: entry["n"] for entry in document.get("groups") or []}
        return cls.model_validate({**document, "groups": groups})

    @property
    def starts_nothing(self) -> bool:
        """Whether nothing starts until somebody changes them."""
        return 0 in (self.running, self.rate)

    @property
    def ever_start_nothing(self) -> bool:
        """Whether nothing starts in the queue, or in some group of it, until somebody changes them."""
        return self.starts_nothing or 0 in (self.group_running, self.group_rate, *self.groups.values())

    def starts_nothing_of(self, group: str | None) -> bool:
        """Whether nothing of this group starts until somebody changes the limits of groups."""
        return group is not None and 0 in (self.of_group(group), self.group_rate)

    def most_running(self, group: str | None) -> int | None:
        """Return how many tasks of this group may run at a time, or of the queue (None)."""
        return self.running if group is None else self.of_group(group)

    def of_group(self, group: str | None) -> int | None:
        """Return how many tasks of this group may run at a time."""
        return None if group is None else self.groups.get(group, self.group_running)


class GroupPause(ReadOnly):
    """Why nothing of a group is claimed."""

    by: str | None = None
    reason: str | None = None
    time: datetime | None = None
    until: datetime | None = None
    """When the pause ends by itself."""

    @property
    def sentence(self) -> str:
        """Return it in words."""
        return _paused(self.by, self.reason, self.until)


class FailurePause(ReadOnly):
    """When a queue pauses automatically: `share` of its newest `of_last` executions failed."""

    share: float
    of_last: int
    canary_ms: int
    """How often one task is tried while it is paused. When one SUCCEEDs, the queue is open again."""


class Percentiles(ReadOnly):
    """The 50th, 95th and 99th percentile of some times, in ms."""

    p50_ms: float
    p95_ms: float
    p99_ms: float

    @classmethod
    def of(cls, times_ms: Iterable[float]) -> Percentiles | None:
        """Return the percentiles of these times, each of them one that occurred. None if there are none."""
        ordered = sorted(times_ms)
        if not ordered:
            return None
        p50, p95, p99 = (ordered[max(0, math.ceil(len(ordered) * share) - 1)] for share in (0.5, 0.95, 0.99))
        return cls(p50_ms=p50, p95_ms=p95, p99_ms=p99)


class QueueLatency(ReadOnly):
    """How long tasks of a queue waited and ran, of those that ended last."""

    ended: int
    """How many tasks this is about: those of the newest 1,000 that ended, in whatever queue, that belong to this one."""
    wait: Percentiles | None = None
    """From publication, or its `start_time` or the end of its last delay, to its first start. Tasks that were suspended, or
    lost a worker, are not counted."""
    run: Percentiles | None = None
    """How long the last execution ran, from its claim to its outcome."""


class QueueInfo(ReadOnly):
    """A queue: its settings, and how much of its limits is used."""

    queue: str
    paused: bool = False
    paused_by: str | None = None
    paused_reason: str | None = None
    pause_time: datetime | None = None
    paused_until: datetime | None = None
    """When the pause ends by itself."""
    failure_pause: FailurePause | None = None
    """When it pauses automatically, if it has that setting."""
    failing: bool = False
    """Whether it is paused for its failures now. `paused_reason` and `pause_time` describe that, unless somebody has paused it,
    too."""
    failing_because: str | None = None
    """How many executions failed, if it is paused for that now."""
    limits: QueueLimits = QueueLimits()
    running: int = 0
    """Executions that run now."""
    running_by_group: dict[str, int] = {}
    paused_groups: dict[str, GroupPause] = {}
    """Groups of which nothing is claimed, while the rest of the queue is open."""
    started: int = 0
    """Starts that count against the rate now."""
    next_start: datetime | None = None
    """When the rate has room again, if it has none now."""
    started_by_group: dict[str, int] = {}
    """Starts that count against `group_rate` now."""
    next_start_by_group: dict[str, datetime] = {}
    """When the rate of a group has room again, for groups for which it has none now."""
    waiting: int = 0
    """Tasks that could be claimed now if the queue has room."""
    more_waiting: bool = False
    """Whether there are more of them, which were not counted."""
    dead_letters: int = 0
    """For a dead-letter queue: failed tasks that are in it. At most 1,000 are counted."""
    latency: QueueLatency | None = None
    """None: not requested (`mesh.queues.all(latencies=True)`), or none of the newest tasks that ended belonged to this queue."""

    @property
    def shut_because(self) -> str | None:
        """Why nothing can be claimed from the queue now, whatever the task. None if something can."""
        return next((why for why, _ in self._reasons), None)

    @property
    def paused_twice(self) -> bool:
        """Whether somebody has paused it while it is paused for its failures, or vice versa."""
        return self.failing and self.paused_reason != self.failing_because

    @property
    def _reasons(self) -> list[Reason]:
        reasons: list[Reason] = []
        if self.paused_twice:  # no time ends the other one
            by_hand = _paused(self.paused_by, self.paused_reason, self.paused_until)
            reasons.append((f"{by_hand}, and {_paused(PAUSES_ITSELF, self.failing_because, None)}", None))
        elif self.paused:
            reasons.append((_paused(self.paused_by, self.paused_reason, self.paused_until), self.paused_until))
        if self.limits.running is not None and self.running >= self.limits.running:
            reasons.append((f"{self.running} of at most {self.limits.running} executions run", None))
        if self.limits.rate == 0:
            reasons.append(("its rate is 0: nothing starts until somebody changes that", None))
        elif self.next_start is not None:
            most = f"{self.limits.rate} starts in {self.limits.per_ms} ms"
            reasons.append((f"{self.started} of at most {most} are used up", self.next_start))
        return reasons

    def reasons_for(self, group: str | None) -> list[Reason]:
        """Return all that keeps tasks of this group (None: of none) from being claimed now; reasons of the whole queue first."""
        reasons = [(f"queue {self.queue!r} is shut: {why}", until) for why, until in self._reasons]
        if group is None:
            return reasons
        limits, running = self.limits, self.running_by_group.get(group, 0)
        limit = limits.of_group(group)
        if (pause := self.paused_groups.get(group)) is not None:
            reasons.append((f"group {group!r} is {pause.sentence}", pause.until))
        if limit is not None and running >= limit:
            reasons.append((f"{running} of at most {limit} executions of group {group!r} run", None))
        if limits.group_rate == 0:
            zero = f"the rate of each group is 0: nothing of group {group!r} starts until somebody changes that"
            reasons.append((zero, None))
        elif group in self.next_start_by_group:
            started = self.started_by_group.get(group, 0)
            most = f"{limits.group_rate} starts in {limits.group_per_ms} ms"
            used_up = f"{started} of at most {most} of group {group!r} are used up"
            reasons.append((used_up, self.next_start_by_group[group]))
        return reasons


def _paused(by: str | None, reason: str | None, until: datetime | None) -> str:
    return "".join(
        (
            "paused",
            f" by {by}" if by else "",
            f", until {until.isoformat()}" if until else "",
            f": {reason}" if reason else "",
        )
    )


def checked_queue(queue: Any) -> str:
    """Return the queue's name. Raises `InvalidOption`."""
    try:
        return checked_name(queue)
    except InvalidName:
        raise InvalidOption(
            f"a queue's name must be 1 to 100 characters of letters, digits, '_', '.' and '-', got {shown(queue)}"
        ) from None
