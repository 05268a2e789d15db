"""Reading queues with their limits and how far these are used up, and checking limits that are to be set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from taskmesh.admin.store import task_counts
from taskmesh.model.errors import InvalidOption
from taskmesh.model.ids import checked_group
from taskmesh.model.queue import QueueInfo, QueueLimits
from taskmesh.store import Store, limits, registry
from taskmesh.store.driver import Document
from taskmesh.store.find import queues_in_use

_LARGEST = 1_000_000
_LONGEST_WINDOW_MS = 7 * 86_400_000
_DEFAULT_WINDOW_MS = 1_000
COUNTED_TO = 1_000
"""How far the tasks that wait in a queue are counted: each takes the server some 10 µs."""


async def read_queues(store: Store, *, counted_to: int = COUNTED_TO) -> list[QueueInfo]:
    """Return all queues that have settings or unfinished tasks."""
    settings = await registry.queues(store)
    return await _infos(store, sorted({*settings, *await queues_in_use(store)}), settings, counted_to)


async def read_queue(store: Store, queue: str) -> QueueInfo:
    """Return one queue, which need not have anything in it. Whether anything waits is told, not how much."""
    (info,) = await _infos(store, [queue], await registry.queues(store), 1)
    return info


async def _infos(
    store: Store, queues: Sequence[str], settings: Mapping[str, Document], counted_to: int
) -> list[QueueInfo]:
    usage = await limits.usage(store, queues)
    waiting = await task_counts.waiting(store, queues, counted_to + 1)
    return [_info(queue, settings.get(queue, {}), usage[queue], waiting[queue], counted_to) for queue in queues]


def _info(queue: str, settings: Document, usage: limits.Usage, waiting: int, counted_to: int) -> QueueInfo:
    pause = ("paused_by", "paused_reason", "pause_time", "paused_until") if settings.get("paused") else ()
    return QueueInfo(
        queue=queue,
        paused=bool(settings.get("paused")),
        limits=QueueLimits.from_document(settings.get("limits") or {}),
        running=usage.running,
        running_by_group=dict(usage.running_by_group),
        started=usage.starts,
        next_start=usage.next_start,
        waiting=min(waiting, counted_to),
        more_waiting=waiting > counted_to,
        **{name: settings.get(name) for name in pause},
    )


def checked_limits(
    *, rate: int | None, per_ms: int | None, running: int | None, group_running: int | None
) -> dict[str, int | None]:
    """Return what a queue is to be limited to, `per_ms` with its default. Raises `InvalidOption`."""
    if per_ms is not None and rate is None:
        raise InvalidOption(f"per_ms={per_ms!r} says nothing without rate: set both, or none")
    if rate is not None and per_ms is None:
        per_ms = _DEFAULT_WINDOW_MS
    return {
        "rate": _whole("rate", rate, 1, _LARGEST),
        "per_ms": _whole("per_ms", per_ms, 1, _LONGEST_WINDOW_MS),
        "running": _whole("running", running, 0, _LARGEST),
        "group_running": _whole("group_running", group_running, 0, _LARGEST),
    }


async def set_group_limit(store: Store, queue: str, group: str, running: int | None) -> None:
    """Check and set how many executions of one group of the queue may run at a time. Raises `InvalidOption`."""
    await limits.set_group_limit(store, queue, checked_group(group), _whole("running", running, 0, _LARGEST))


def _whole(name: str, value: Any, least: int, most: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidOption(f"{name} is a whole number from {least} to {most}, or None for no limit, not {value!r}")
    return value
