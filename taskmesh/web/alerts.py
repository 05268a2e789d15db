"""What the overview shows first: each problem that needs attention, in a sentence, with a link to where it is solved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from taskmesh.admin.stats import Stats
from taskmesh.model.queue import QueueInfo
from taskmesh.model.schedule import ScheduleInfo
from taskmesh.model.times import duration
from taskmesh.model.worker import WorkerInfo, known_names
from taskmesh.web.templating import number, query

_LONG_WAIT_MS = 60_000


@dataclass(frozen=True, slots=True)
class Remark:
    """One problem that needs attention."""

    kind: Literal["bad", "warn"]
    text: str
    link: str
    """The page to go to, without the prefix."""
    since: datetime | None = None


def remarks(
    stats: Stats, workers: Sequence[WorkerInfo], queues: Iterable[QueueInfo], schedules: Iterable[ScheduleInfo]
) -> list[Remark]:
    """Return what needs attention, the worst first."""
    found = [*_workers(stats, workers), *_pauses(queues, schedules)]
    oldest = stats.oldest_claimable_ms
    if oldest is not None and oldest > _LONG_WAIT_MS:
        text = f"The oldest task that could be claimed has been waiting for {duration(oldest)}."
        found.append(Remark("warn", text, "/tasks?" + query(where="status:INIT", order="key")))
    return sorted(found, key=lambda remark: remark.kind)


def _workers(stats: Stats, workers: Sequence[WorkerInfo]) -> Iterator[Remark]:
    live = [worker for worker in workers if worker.live]
    waiting = {name: counts["INIT"] for name, counts in stats.counts.items() if counts.get("INIT")}
    if not live and waiting:
        yield Remark("bad", f"No worker is alive, and {_tasks(sum(waiting.values()))}.", "/workers")
    elif live:
        for name in sorted(waiting.keys() - known_names(live)):
            text = f"No live worker runs {name}, and {_tasks(waiting[name])}."
            yield Remark("bad", text, "/tasks?" + query(where="status:INIT", name=name))
    gone = [worker for worker in workers if worker.state == "gone"]
    if len(gone) == 1:
        yield Remark("warn", f"Worker {gone[0].worker_id} disappeared without stopping.", "/workers", gone[0].last_seen)
    elif gone:
        latest = max(worker.last_seen for worker in gone)
        yield Remark("warn", f"{len(gone)} workers disappeared without stopping, the latest", "/workers", latest)


def _pauses(queues: Iterable[QueueInfo], schedules: Iterable[ScheduleInfo]) -> Iterator[Remark]:
    for queue in queues:
        if queue.paused:
            text = f"Queue {queue.queue} is paused{_why(queue.paused_by, queue.paused_reason)}."
            yield Remark("warn", text, "/queues", queue.pause_time)
        for group, pause in queue.paused_groups.items():
            text = f"Group {group} of queue {queue.queue} is paused{_why(pause.by, pause.reason)}."
            yield Remark("warn", text, "/queues", pause.time)
    for schedule in schedules:
        if schedule.paused:
            text = f"Schedule {schedule.schedule_id} is paused{_why(schedule.paused_by, schedule.paused_reason)}."
            yield Remark("warn", text, "/schedules", schedule.pause_time)


def _tasks(count: int) -> str:
    return "1 task waits" if count == 1 else f"{number(count)} tasks wait"


def _why(by: str | None, reason: str | None) -> str:
    return (f" by {by}" if by else "") + (f": {reason}" if reason else "")
