"""What if: what a change of an option or of a limit would do, judged by the rule's own expressions. Nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import islice
from math import inf
from typing import Unpack
from zoneinfo import ZoneInfo

from taskmesh.admin.explain import Explanation, judged
from taskmesh.admin.queues import LimitFields, checked_limits, read_queue
from taskmesh.admin.store import limit_usage, task_counts
from taskmesh.admin.store.gates import as_if_option
from taskmesh.admin.words import first_three
from taskmesh.client.connection import Connection
from taskmesh.client.tasks import Tasks
from taskmesh.model.ids import checked_count, checked_group
from taskmesh.model.option import OptionFields
from taskmesh.model.queue import QueueInfo, QueueLimits, checked_queue
from taskmesh.model.read_only import ReadOnly
from taskmesh.model.recurrence import checked_timing
from taskmesh.model.task import Status, checked_key, task_id
from taskmesh.store import Store
from taskmesh.store.queues.limits import WINDOWS
from taskmesh.store.triggers import schedules

_COUNTED_TO = 10_000


class OptionEffect(ReadOnly):
    """What a change of a task's option would do."""

    name: str
    key: str
    status_now: Status
    status_then: Status
    next_claim_time_now: datetime | None
    """When the first worker could claim it now."""
    next_claim_time_then: datetime | None
    opens: list[str]
    """Workers that cannot claim it now, but could then."""
    shuts: list[str]
    """Workers that can claim it now, but could not then."""
    stops: list[str]
    """Workers whose execution would be stopped."""

    @property
    def sentence(self) -> str:
        """Return the effect as a sentence for people."""
        parts = [
            f"it would be {self.status_then} instead of {self.status_now}"
            if self.status_then != self.status_now
            else "",
            f"{first_three(self.opens)} could claim it then" if self.opens else "",
            f"{first_three(self.shuts)} could not claim it any more" if self.shuts else "",
            f"its execution on {first_three(self.stops)} would be stopped" if self.stops else "",
        ]
        return "; ".join(filter(None, parts)) or "nothing would change about who can claim it now"


class LimitEffect(ReadOnly):
    """What a change of a queue's limits would do. What runs already would run on."""

    queue: str
    limits_now: QueueLimits
    limits_then: QueueLimits
    waiting: int
    """Tasks that are due; counted up to 10 000."""
    running: int
    claimable_now: int
    """How many of the waiting tasks the limits have room for now."""
    claimable_then: int
    too_many: int
    """How many running tasks exceed the new limits: this many have to end before another one starts."""

    @property
    def sentence(self) -> str:
        """Return the effect as a sentence for people."""
        most = "10000 or more" if self.waiting >= _COUNTED_TO else str(self.waiting)
        said = f"{self.running} run and {most} wait, of which {self.claimable_now} could start now and {self.claimable_then} then"
        over = f"; {self.too_many} of those that run have to end before another one starts" if self.too_many else ""
        return said + over


class ScheduleEffect(ReadOnly):
    """When a schedule with this timing would run."""

    words: str
    """`At 06:00 every day (Europe/Berlin)`."""
    times: list[datetime]
    """The next runs, if it were declared now; for a schedule that already has this timing, its own next runs."""

    @property
    def sentence(self) -> str:
        """Return the effect as a sentence for people."""
        times = ", ".join(time.isoformat(" ", "seconds") for time in self.times) or "never"
        return f"{self.words}; next {times}"


def _able(explanations: list[Explanation]) -> set[str]:
    return {each.worker_id for each in explanations if each.claimable}


def _first_time(explanations: list[Explanation]) -> datetime | None:
    return min((each.next_claim_time for each in explanations if each.next_claim_time is not None), default=None)


async def effect_of_limit(store: Store, queue: str, change: Callable[[QueueLimits], QueueLimits]) -> LimitEffect:
    """Return what this change of a queue's limits would do. Raises as `change` does."""
    found = await read_queue(store, queue)
    then = change(found.limits)
    counted_then = await _counted(store, found, then)
    waiting = await task_counts.waiting_by_group(store, queue, _COUNTED_TO)
    over = [found.running - then.running] if then.running is not None else []
    for group, running in found.running_by_group.items():
        limit = then.of_group(group)
        over += [running - limit] if limit is not None else []
    return LimitEffect(
        queue=queue,
        limits_now=found.limits,
        limits_then=then,
        waiting=min(_COUNTED_TO, sum(waiting.values())),
        running=found.running,
        claimable_now=_room_for(waiting, found, found.limits),
        claimable_then=_room_for(waiting, counted_then, then),
        too_many=max([0, *over]),
    )


async def _counted(store: Store, queue: QueueInfo, then: QueueLimits) -> QueueInfo:
    """Return the queue with its starts counted under these limits: a shorter window counts fewer."""
    lengths = {window: (getattr(queue.limits, window), getattr(then, window)) for window in WINDOWS}
    longer_ms = {window: new - old for window, (old, new) in lengths.items() if None not in (old, new) and new != old}
    if not longer_ms:
        return queue
    used = (await limit_usage.usage(store, [queue.queue], longer_ms))[queue.queue]
    by_group = {group: count for group, (count, _) in used.group_starts.items()}
    return queue.model_copy(update={"started": used.starts, "started_by_group": by_group})


def _room_for(waiting: Mapping[str | None, int], queue: QueueInfo, limits: QueueLimits) -> int:
    """Return how many of the waiting tasks could start at once."""
    if queue.paused:
        return 0
    count: float = 0
    for group, wanted in waiting.items():
        count += wanted if group is None else max(0, min(wanted, *_rooms_of_group(group, queue, limits)))
    rooms = [limits.running - queue.running] if limits.running is not None else []
    rooms += [limits.rate - queue.started] if limits.rate is not None else []
    return int(max(0, min([count, *rooms])))


def _rooms_of_group(group: str, queue: QueueInfo, limits: QueueLimits) -> list[float]:
    """Return the room that each limit leaves for a group."""
    if group in queue.paused_groups:
        return [0]
    limit = limits.of_group(group)
    rooms: list[float] = [inf if limit is None else limit - queue.running_by_group.get(group, 0)]
    return rooms + ([] if limits.group_rate is None else [limits.group_rate - queue.started_by_group.get(group, 0)])


class WhatIf:
    """Return what a change would do, without making it."""

    def __init__(self, connection: Connection, tasks: Tasks) -> None:
        self._connection = connection
        self._tasks = tasks

    async def option(self, name: str, key: str, **changes: Unpack[OptionFields]) -> OptionEffect:
        """Return what `set_option` with these arguments would do: who could claim the task, whose execution would be stopped.

        Changes nothing. Raises `InvalidOption`, `TaskNotFound`.
        """
        task = await self._tasks.get(name, key)
        stored = task.task_option.changed(**changes).stored()
        store, id_ = self._connection.store, task_id(name, key)
        changed = as_if_option({field: stored.get(field) for field in changes}, store.now)
        before, now = await judged(store, id_, None)
        after, then = await judged(store, id_, None, changed)
        able_now, able_then = _able(now), _able(then)
        return OptionEffect(
            name=name,
            key=key,
            status_now=Status(before.status),
            status_then=Status(after.status),
            next_claim_time_now=_first_time(now),
            next_claim_time_then=_first_time(then),
            opens=sorted(able_then - able_now),
            shuts=sorted(able_now - able_then),
            stops=sorted(set(before.running_on) - set(after.running_on)),
        )

    async def limit(self, queue: str, **given: Unpack[LimitFields]) -> LimitEffect:
        """Return what `set_limit` with these arguments would do: how many tasks could start. Changes nothing."""

        def changed(now: QueueLimits) -> QueueLimits:
            return now.model_copy(update=checked_limits(given, now.model_dump()))

        return await effect_of_limit(self._connection.store, checked_queue(queue), changed)

    async def schedule(
        self,
        schedule_id: str | None = None,
        *,
        cron: str | None = None,
        interval_ms: int | None = None,
        timezone: str | None = None,
        count: int = 5,
    ) -> ScheduleEffect:
        """Return when a schedule with this timing would run the next `count` times (at most 100). Changes nothing.

        `schedule_id`: what is not given is as that schedule has it, if there is one, as in `mesh.schedules.put`. `timezone`: else
        UTC. Raises `InvalidOption`.
        """
        most = min(checked_count("count", count), 100)
        stored = None
        if schedule_id is not None:
            stored = await schedules.read(self._connection.store, checked_key(schedule_id))
        if stored is not None:
            if cron is None and interval_ms is None:
                cron, interval_ms = stored["cron"], stored["interval_ms"]
            timezone = timezone or stored["timezone"]
        zone = timezone or "UTC"
        timing = checked_timing(cron, interval_ms, zone)
        now = self._connection.clock.now()
        # An interval that stays is counted from where it began.
        stays = stored is not None and stored["interval_ms"] == interval_ms
        ticks = timing.ticks_after(now, stored["anchor_time"] if stored is not None and stays else now)
        times = [time.astimezone(ZoneInfo(zone)) for time in islice(ticks, most)]
        return ScheduleEffect(words=timing.words, times=times)

    async def group_limit(self, queue: str, group: str, running: int | None) -> LimitEffect:
        """Return what `set_group_limit` would do: how many tasks could start. Changes nothing."""
        checked_limits({"running": running}, {})
        own = {checked_group(group): running}

        def changed(now: QueueLimits) -> QueueLimits:
            groups = {name: limit for name, limit in (now.groups | own).items() if limit is not None}
            return now.model_copy(update={"groups": groups})

        return await effect_of_limit(self._connection.store, checked_queue(queue), changed)
