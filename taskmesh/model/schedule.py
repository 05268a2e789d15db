"""Periodic tasks: schedules as declared and as stored, and which tasks have to be published when.

Each tick becomes one task whose key names the tick (`report@2026-11-21T06:00:00Z`). The loop that publishes them, in every
worker, is `consumer/ticker.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from taskmesh.model.errors import InvalidOption
from taskmesh.model.read_only import ReadOnly
from taskmesh.model.recurrence import Timing, checked_timing

Document = Mapping[str, Any]
Missed = Literal["skip", "latest", "all"]
Overlap = Literal["allow", "skip"]
KEY_KEPT_MS = 60_000
"""How long a tick's key stays taken at least: after that, nobody can publish it any more."""
_AT_ONCE = 500
"""The most ticks of one schedule that are published at one look. More follow at the next."""


@dataclass(frozen=True, slots=True)
class Attendance:
    """The server's time, and the last period in which nobody looked after the schedules."""

    now: datetime
    outage_from: datetime | None = None
    outage_to: datetime | None = None

    def missed(self, tick: datetime) -> bool:
        """Whether no worker was there when it ticked."""
        return self.outage_from is not None and self.outage_to is not None and self.outage_from < tick < self.outage_to


class Tick(ReadOnly):
    """A tick of a schedule, and what became of it."""

    time: datetime
    key: str
    kind: Literal["published", "triggered", "overlapped"]
    """`triggered`: by hand. `overlapped`: left out, since the task before it was not finished."""


class ScheduleInfo(ReadOnly):
    """A schedule as it is stored."""

    schedule_id: str
    name: str
    cron: str | None = None
    interval_ms: int | None = None
    timezone: str = "UTC"
    params: dict[str, Any] = {}
    missed: Missed = "latest"
    overlap: Overlap = "allow"
    jitter_ms: int = 0
    settings: dict[str, Any] = {}
    """Other declared settings of its tasks, as in `configure`."""
    paused: bool = False
    paused_by: str | None = None
    paused_reason: str | None = None
    pause_time: datetime | None = None
    create_time: datetime
    next_time: datetime | None = None
    ticks: list[Tick] = []
    """The last ten, the newest last."""

    @classmethod
    def from_document(cls, document: Document) -> ScheduleInfo:
        """Read a stored schedule."""
        return cls.model_validate({**document, "schedule_id": document["_id"]})

    @property
    def words(self) -> str:
        """When it runs, in words."""
        return Timing(self.cron, self.interval_ms, self.timezone).words

    @property
    def timing(self) -> str:
        """When it runs, as it was declared."""
        if self.cron is not None:
            return f"{self.cron} ({self.timezone})"
        return f"every {(self.interval_ms or 0) / 1000:g} s"


@dataclass(frozen=True, slots=True)
class Declaration:
    """A schedule as it is declared in code."""

    schedule_id: str
    name: str
    timing: Timing
    params: Mapping[str, Any]
    missed: Missed
    overlap: Overlap
    jitter_ms: int
    settings: Mapping[str, Any] = field(default_factory=dict)


def checked_declaration(
    name: str,
    schedule_id: str,
    *,
    cron: Any,
    interval_ms: Any,
    timezone: Any,
    params: Any,
    missed: Any,
    overlap: Any,
    jitter_ms: Any,
    settings: Mapping[str, Any],
) -> Declaration:
    """Return the declaration. Raises `InvalidOption`."""
    if missed not in ("skip", "latest", "all"):
        raise InvalidOption(f"missed must be 'skip', 'latest' or 'all', got {missed!r}")
    if overlap not in ("allow", "skip"):
        raise InvalidOption(f"overlap must be 'allow' or 'skip', got {overlap!r}")
    if isinstance(jitter_ms, bool) or not isinstance(jitter_ms, int) or not 0 <= jitter_ms <= 86_400_000:
        raise InvalidOption(f"jitter_ms must be a whole number from 0 to one day, got {jitter_ms!r}")
    if not isinstance(params, Mapping):
        raise InvalidOption(f"params must be a mapping by parameter name, got {params!r}")
    if unfit := sorted({"start_time", "expire_time", "delay_ms", "session", "after"} & set(settings)):
        raise InvalidOption(f"{', '.join(unfit)} cannot be set for a schedule: it would be the same for every tick")
    timing = checked_timing(cron, interval_ms, timezone)
    return Declaration(schedule_id, name, timing, dict(params), missed, overlap, jitter_ms, dict(settings))


def stored(declaration: Declaration, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a schedule as they are stored; `params` as they were checked."""
    return {
        "name": declaration.name,
        "cron": declaration.timing.cron,
        "interval_ms": declaration.timing.interval_ms,
        "timezone": declaration.timing.timezone,
        "params": dict(params),
        "missed": declaration.missed,
        "overlap": declaration.overlap,
        "jitter_ms": declaration.jitter_ms,
        "settings": {n: list(v) if isinstance(v, tuple) else v for n, v in declaration.settings.items()},
    }


def timing_of(schedule: Document) -> Timing:
    """Return when a stored schedule ticks. Raises `InvalidOption` if this worker cannot read it."""
    return checked_timing(schedule.get("cron"), schedule.get("interval_ms"), schedule.get("timezone", "UTC"))


def key_of(schedule_id: str, tick: datetime, mark: str = "") -> str:
    """Return the key of a tick's task."""
    moment = tick.astimezone(UTC).isoformat(timespec="milliseconds" if tick.microsecond else "seconds")
    return f"{schedule_id}@{mark}{moment.removesuffix('+00:00')}Z"


def ticks_to_publish(schedule: Document, attendance: Attendance) -> tuple[list[datetime], datetime | None]:
    """Return which ticks of a schedule have to be published now, and when it ticks next after those."""
    timing, anchor, now = timing_of(schedule), schedule["anchor_time"], attendance.now
    following: datetime | None = schedule["next_time"]
    latest_missed = None
    ticked: list[datetime] = []
    while following is not None and following <= now and len(ticked) < _AT_ONCE:
        if schedule["missed"] != "all" and attendance.missed(following):
            assert attendance.outage_to is not None
            latest_missed = timing.before(attendance.outage_to, anchor)
            following = timing.after(latest_missed or attendance.outage_to, anchor)
        else:
            ticked.append(following)
            following = timing.after(following, anchor)
    if schedule["missed"] == "latest" and latest_missed is not None and latest_missed > max(ticked, default=anchor):
        ticked.append(latest_missed)
    return ticked, following
