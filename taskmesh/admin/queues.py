"""Queues: pause and limit them over the whole fleet, and see how much of their limits is used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack

from taskmesh.admin.filters import TaskFilter
from taskmesh.admin.store import limit_usage, listing, newest_ended, task_counts
from taskmesh.client.connection import Connection
from taskmesh.model.errors import InvalidOption, QueueNotEmpty, TaskMeshError, TaskNotFound
from taskmesh.model.ids import checked_group, checked_remark
from taskmesh.model.queue import (
    PAUSES_ITSELF,
    FailurePause,
    GroupPause,
    Percentiles,
    QueueInfo,
    QueueLatency,
    QueueLimits,
    checked_queue,
)
from taskmesh.model.task import Status
from taskmesh.model.times import checked_time, duration
from taskmesh.store import Store, audit, registry
from taskmesh.store.find import queues_in_use
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.queues import failure_pauses, limits

_LARGEST = 1_000_000
_DEFAULT_WINDOW_MS = 1_000
_LONGEST_WINDOW_MS = 7 * 86_400_000
NEWEST_ENDED = newest_ended.LOOKED_AT
"""Latencies are those of this many tasks that ended."""
COUNTED_TO = 1_000
"""Waiting tasks of a queue are counted up to this number: each takes the server some 10 µs."""


async def read_queues(store: Store, *, counted_to: int = COUNTED_TO, latencies: bool = False) -> list[QueueInfo]:
    """Return all queues that have settings or unfinished tasks, and those that workers have registered for dead letters.

    With `latencies` also those in which a task ended recently.
    """
    settings = await registry.queues(store)
    of_the_dead = await registry.dead_letter_queues(store)
    latency = await _latencies(store) if latencies else {}
    queues = sorted({*settings, *await queues_in_use(store), *of_the_dead, *latency})
    dead = {queue: await listing.count(store, _dead_in(queue), COUNTED_TO) or 0 for queue in of_the_dead}
    return [
        info.model_copy(update={"dead_letters": dead.get(info.queue, 0), "latency": latency.get(info.queue)})
        for info in await _infos(store, queues, settings, counted_to)
    ]


async def _latencies(store: Store) -> dict[str, QueueLatency]:
    """Return how long tasks waited and ran, by queue, of the newest that ended."""
    by_queue: defaultdict[str, list[newest_ended.Ended]] = defaultdict(list)
    for ended in await newest_ended.newest_ended(store):
        by_queue[ended.queue].append(ended)
    return {
        queue: QueueLatency(
            ended=len(tasks),
            wait=Percentiles.of(task.wait_ms for task in tasks if task.wait_ms is not None),
            run=Percentiles.of(task.run_ms for task in tasks if task.run_ms is not None),
        )
        for queue, tasks in by_queue.items()
    }


def _dead_in(queue: str) -> TaskFilter:
    return TaskFilter(queue=queue, status=(Status.FAIL,))


async def read_queue(store: Store, queue: str) -> QueueInfo:
    """Return one queue, which may be empty. Says whether any task waits, not how many."""
    (info,) = await _infos(store, [queue], await registry.queues(store), 1)
    return info


async def _infos(
    store: Store, queues: Sequence[str], settings: Mapping[str, Document], counted_to: int
) -> list[QueueInfo]:
    usage = await limit_usage.usage(store, queues)
    waiting = await task_counts.waiting(store, queues, counted_to + 1)
    return [_info(queue, settings.get(queue, {}), usage[queue], waiting[queue], counted_to) for queue in queues]


def _info(queue: str, settings: Document, usage: limit_usage.Usage, waiting: int, counted_to: int) -> QueueInfo:
    failing = settings.get("failing") or {}
    stored = QueueLimits.from_document(settings.get("own_limits" if failing else "limits") or {})
    used_up = {
        group: leaves
        for group, (count, leaves) in usage.group_starts.items()
        if stored.group_rate is not None and count >= stored.group_rate
    }
    pause = ("paused_by", "paused_reason", "pause_time", "paused_until") if settings.get("paused") else ()
    told = {name: settings.get(name) for name in pause}
    if failing:
        each = duration(settings["failure_pause"]["canary_ms"])
        why = f"{failing['failed']} of the last {failing['of']} executions failed; one is tried every {each}"
        own = {} if pause else {"paused_by": PAUSES_ITSELF, "paused_reason": why, "pause_time": failing["since"]}
        told |= {**own, "failing_because": why}
    return QueueInfo(
        queue=queue,
        paused=bool(pause or failing),
        failure_pause=settings.get("failure_pause"),
        failing=bool(failing),
        limits=stored,
        paused_groups={pause["g"]: GroupPause.model_validate(pause) for pause in settings.get("paused_groups") or ()},
        running=usage.running,
        running_by_group=dict(usage.running_by_group),
        started=usage.starts,
        next_start=usage.next_start,
        started_by_group={group: count for group, (count, _) in usage.group_starts.items()},
        next_start_by_group=used_up,
        waiting=min(waiting, counted_to),
        more_waiting=waiting > counted_to,
        **told,
    )


class LimitFields(TypedDict, total=False):
    """What `set_limit` takes as keywords. None removes the limit."""

    rate: int | None
    per_ms: int | None
    running: int | None
    group_running: int | None
    group_rate: int | None
    group_per_ms: int | None


_BOUNDS: dict[str, tuple[int, int]] = {
    "rate": (0, _LARGEST),
    "per_ms": (1, _LONGEST_WINDOW_MS),
    "running": (0, _LARGEST),
    "group_running": (0, _LARGEST),
    "group_rate": (0, _LARGEST),
    "group_per_ms": (1, _LONGEST_WINDOW_MS),
}


def checked_limits(given: LimitFields, stored: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the changes to the `stored` limits of a queue. Raises `InvalidOption`."""
    changes: dict[str, int | None] = {}
    for name, value in given.items():
        if name not in _BOUNDS:
            raise InvalidOption(f"there is no limit {name!r}: set one of {', '.join(_BOUNDS)}")
        changes[name] = _whole(name, value, *_BOUNDS[name])
    for window, rate in (("per_ms", "rate"), ("group_per_ms", "group_rate")):
        if changes.get(window) is not None and changes.get(rate, stored.get(rate)) is None:
            raise InvalidOption(f"{window}={changes[window]!r} has no meaning without {rate}: set both or neither")
        if rate in changes and changes[rate] is None:
            changes[window] = None
        elif changes.get(rate, stored.get(rate)) is not None and changes.get(window, stored.get(window)) is None:
            changes[window] = _DEFAULT_WINDOW_MS
    return changes


async def set_group_limit(store: Store, queue: str, group: str, running: int | None) -> None:
    """Check and set how many executions of one group of the queue may run at a time. Raises `InvalidOption`."""
    await limits.set_group_limit(store, queue, checked_group(group), _whole("running", running, 0, _LARGEST))


def _whole(name: str, value: Any, least: int, most: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidOption(
            f"{name} must be a whole number from {least} to {most}, or None for no limit, got {value!r}"
        )
    return value


def checked_failure_pause(share: Any, of_last: Any, canary_ms: Any) -> FailurePause:
    """Return the settings of a pause on failures. Raises `InvalidOption`."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise InvalidOption(
            f"the share of failures must be more than 0 and at most 1, like 0.5 for half, got {share!r}"
        )
    for name, value, least, most in (("of_last", of_last, 1, 1_000), ("canary_ms", canary_ms, 100, 86_400_000)):
        if _whole(name, value, least, most) is None:
            raise InvalidOption(f"{name} must be a whole number from {least} to {most}, got None")
    return FailurePause(share=float(share), of_last=of_last, canary_ms=canary_ms)


class Queues:
    """Queues: list, pause and limit them. `by`: who, for the audit, as told at `TaskMesh`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._declared: dict[str, FailurePause | None] = {}
        self._declared_limits: dict[str, dict[str, int | None]] = {}

    async def pause(
        self,
        queue: str,
        *,
        group: str | None = None,
        reason: str | None = None,
        by: str | None = None,
        until: datetime | None = None,
    ) -> None:
        """Pause a queue, or one group of it. See `TaskMesh.pause`."""
        who, why = audit.author(by), checked_remark("reason", reason)
        ends = None if until is None else checked_time("until", until)
        begins = self._connection.clock.now()
        about: dict[str, Any] = {"until": None if until is None else until.isoformat()}
        if group is not None:
            about["group"] = group
            pause = {"by": who, "reason": why, "time": begins, "until": ends}
            await registry.pause_group(self._connection.store, checked_queue(queue), checked_group(group), pause)
        else:
            settings = {
                "paused": True,
                "paused_reason": why,
                "paused_by": who,
                "paused_until": ends,
                "pause_time": begins,
            }
            await registry.set_queue(self._connection.store, checked_queue(queue), settings)
        await self._changed("queue.pause", who, queue, **about)

    async def resume(self, queue: str, *, group: str | None = None, by: str | None = None) -> None:
        """Resume a queue, or one group of it. See `TaskMesh.resume`."""
        who = audit.author(by)
        if group is not None:
            await registry.pause_group(self._connection.store, checked_queue(queue), checked_group(group), None)
            await self._changed("queue.resume", who, queue, group=group)
        else:
            await registry.set_queue(
                self._connection.store, checked_queue(queue), {"paused": False, "paused_until": None}
            )
            await failure_pauses.reopen(self._connection.store, queue)
            await self._changed("queue.resume", who, queue)

    async def forget(self, queue: str, *, by: str | None = None) -> None:
        """Remove all settings of a queue: pauses, limits, `pause_on_failures`. A mistyped name is then no longer listed.

        Refused while the queue has unfinished tasks: a pause or limit that holds them back must not vanish unnoticed. A setting
        that somebody makes at the same moment stays. Code that declares the queue brings its settings back.
        Raises `TaskNotFound` if nothing is set, `QueueNotEmpty` if there are tasks.
        """
        who = audit.author(by)
        if checked_queue(queue) not in await registry.queues(self._connection.store):
            raise TaskNotFound(f"nothing is set for a queue {queue!r}: `taskmesh queues` lists them")
        if queue in await queues_in_use(self._connection.store):
            raise QueueNotEmpty(
                f"queue {queue!r} has unfinished tasks: resume it, or take its limits away; it can be forgotten when it is empty"
            )
        await limits.forget(self._connection.store, queue)
        await self._changed("queue.forget", who, queue)

    def declare(self, queue: str, limited: LimitFields, pause: tuple[float | None, int, int] | None = None) -> None:
        """Keep a declaration until the mesh connects. `pause`: the settings of a pause on failures; None: not declared."""
        queue = checked_queue(queue)
        checked = checked_limits(limited, {})
        if pause is None and not checked:
            raise InvalidOption(
                f"nothing is declared about queue {queue!r}: give pause_on_failures, or a limit like running=5"
            )
        if self._connection.is_open:
            raise TaskMeshError(
                f"this mesh is connected already: declare queue {queue!r} before, or await mesh.queues.pause_on_failures(…) "
                "and mesh.set_limit(…)"
            )
        if checked:
            self._declared_limits[queue] = checked
        if pause is not None:
            share, of_last, canary_ms = pause
            self._declared[queue] = None if share is None else checked_failure_pause(share, of_last, canary_ms)

    async def store_declared(self) -> None:
        """Store what was declared before the mesh connected, where it differs; limits only where nobody has set any."""
        stored = await registry.queues(self._connection.store) if self._declared else {}
        for queue, pause in self._declared.items():
            settings = None if pause is None else pause.model_dump()
            if stored.get(queue, {}).get("failure_pause") != settings:
                await failure_pauses.set_failure_pause(self._connection.store, queue, settings)
        for queue, limited in self._declared_limits.items():
            await limits.set_first_limits(self._connection.store, queue, limited)

    async def pause_on_failures(
        self, queue: str, share: float | None, *, of_last: int = 50, canary_ms: int = 30_000, by: str | None = None
    ) -> None:
        """Let a queue pause automatically when `share` (0.5: half) of its newest `of_last` executions failed. None: never.

        While it is paused that way, one task is let through every `canary_ms`, in the whole fleet; when one of them SUCCEEDs,
        the queue is open again, and counts from zero. `resume` opens it at once. Failures are those of executions, retried
        or not; lost ones are not counted. The setting outlives the process. Raises `InvalidOption`.
        """
        who = audit.author(by)
        settings = None if share is None else checked_failure_pause(share, of_last, canary_ms).model_dump()
        await failure_pauses.set_failure_pause(self._connection.store, checked_queue(queue), settings)
        await self._changed("queue.pause_on_failures", who, queue, **(settings or {"share": None}))

    async def set_limit(self, queue: str, *, by: str | None = None, **given: Unpack[LimitFields]) -> None:
        """Limit a queue over the whole fleet. See `TaskMesh.set_limit`."""
        who = audit.author(by)
        limited = checked_limits(given, await limits.read_limits(self._connection.store, checked_queue(queue)))
        if not limited:
            return
        await limits.set_limits(self._connection.store, queue, limited)
        await self._changed("queue.set_limit", who, queue, **limited)

    async def set_group_limit(self, queue: str, group: str, running: int | None, *, by: str | None = None) -> None:
        """Limit one group of a queue to `running` executions at a time. None: to as many as every other group."""
        who = audit.author(by)
        await set_group_limit(self._connection.store, checked_queue(queue), group, running)
        await self._changed("queue.set_group_limit", who, queue, group=group, running=running)

    async def _changed(self, action: str, by: str, queue: str, **about: Any) -> None:
        """Tell our own consumers before returning (others learn it from their change streams), and record the change."""
        await self._connection.queues_changed()
        await audit.note(self._connection.store, action, by, queue=queue, **about)

    async def all(self, *, counted_to: int = COUNTED_TO, latencies: bool = False) -> list[QueueInfo]:
        """Return the queues that have settings or unfinished tasks, with their pauses and limits.

        `counted_to`: how far to count the tasks that wait in each. `latencies`: add, as `QueueInfo.latency`, how long the tasks
        of each waited and ran; then queues in which a task ended recently are listed, too. Latencies cover the newest 1,000
        tasks that ended, in whatever queue, except for those that are kept for ever, or not at all.
        """
        return await read_queues(self._connection.store, counted_to=counted_to, latencies=latencies)
