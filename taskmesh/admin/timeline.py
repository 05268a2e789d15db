"""A task's life over time: its executions as bars, and what happened in order, all derived from the task itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from taskmesh.admin.store.gates import read_with_losses
from taskmesh.model.task import Task
from taskmesh.store import Store
from taskmesh.store.payloads import Payloads

_INSTANT = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Bar:
    """One execution, as a share of the time from the start of the first one to the end of the last, or now."""

    worker_id: str
    state: str
    """`RUNNING`, `SUCCESS`, `FAIL`; `LOST` if its lease ran out."""
    running_id: str
    start: datetime
    end: datetime | None
    begins: float
    lasts: float


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that happened to a task."""

    time: datetime
    what: str
    worker_id: str | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """A task, and what happened to it."""

    task: Task
    bars: list[Bar]
    """Its executions, including lost ones, in order."""
    happenings: list[Happening]
    """What is known to have happened, in order."""


async def read_timeline(store: Store, payloads: Payloads, id_: str) -> Timeline | None:
    """Read a task and its history; None if it does not exist. The claim rule says whether a lease ran out."""
    found = await read_with_losses(store, id_)
    if found is None:
        return None
    document, lost, now = found
    task = payloads.task(await payloads.fetched(store, document))
    bars = _bars(task, lost, now)
    return Timeline(task, bars, _happenings(task, bars))


def _bars(task: Task, lost: Collection[str], now: datetime) -> list[Bar]:
    spans = sorted(_spans(task, lost), key=lambda span: span[3])
    if not spans:
        return []
    first = spans[0][3]  # not the publication: after a retry it may be long ago, and the picture would be empty
    whole = max([end or now for *_, end in spans] + [first + _INSTANT]) - first
    return [
        Bar(worker, state, running_id, start, end, (start - first) / whole, max(0.0, ((end or now) - start) / whole))
        for worker, state, running_id, start, end in spans
    ]


def _spans(task: Task, lost: Collection[str]) -> Iterator[tuple[str, str, str, datetime, datetime | None]]:
    for loss in task.task_state.losses:
        if loss.start_time is not None:
            yield loss.worker_id, "LOST", loss.running_id, loss.start_time, loss.ping_expire_time
    for entry in task.task_state.worker_states:
        if entry.start_time is not None:
            state = "LOST" if entry.running_id in lost else entry.state
            end = entry.success_time or entry.fail_time or (entry.ping_expire_time if state == "LOST" else None)
            yield entry.worker_id, state, entry.running_id, entry.start_time, end


def _happenings(task: Task, bars: Iterable[Bar]) -> list[Happening]:
    state = task.task_state
    found = [Happening(state.create_time, "published")]
    for bar in bars:
        found.append(Happening(bar.start, "claimed", bar.worker_id))
        if bar.state == "LOST" and bar.end is not None:
            found.append(Happening(bar.end, "lost: the lease ran out without a ping", bar.worker_id))
    for entry in state.worker_states:
        found += [Happening(line.time, line.message, entry.worker_id) for line in entry.logs]
        if entry.success_time is not None:
            found.append(Happening(entry.success_time, "SUCCESS", entry.worker_id))
        if entry.fail_time is not None:
            reason = (entry.fail_reason or "").partition("\n")[0]
            found.append(Happening(entry.fail_time, f"FAIL: {reason}" if reason else "FAIL", entry.worker_id))
    found += [
        Happening(
            step.time, f"{step.kind} {step.name} {'failed' if step.error is not None else 'recorded'}", step.worker_id
        )
        for step in task.steps
        if step.time is not None
    ]
    if state.progress is not None:
        said = f"progress {state.progress.fraction:.0%} {state.progress.message or ''}".strip()
        found.append(Happening(state.progress.time, said))
    if state.cancel_time is not None:
        found.append(Happening(state.cancel_time, "cancelled"))
    if task.finish_time is not None:
        found.append(Happening(task.finish_time, f"finished: {task.status}"))
    return sorted(found, key=lambda happening: happening.time)
