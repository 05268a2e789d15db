"""Migration: jobs that another program keeps in MongoDB become tasks. Agenda's (6) and mscheduler's (0.3) are known.

Finished jobs stay where they are; so do running ones, and those that have no counterpart here, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from taskmesh.admin.store.migration import Source
from taskmesh.client.publisher import Publisher
from taskmesh.client.schedules import Schedules
from taskmesh.model.configuration import Configuration
from taskmesh.model.errors import InvalidOption, TaskMeshError
from taskmesh.model.option import TaskOption
from taskmesh.model.schedule import Declaration, checked_declaration
from taskmesh.model.task import task_id

Job = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a job becomes: a task or, with a `schedule` (`cron` and `timezone`, or `interval_ms`), one at each tick."""

    name: str
    key: str
    params: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of a job."""

    job: str
    what: str
    """`moved`, `would move`, or `left`."""
    name: str | None = None
    key: str | None = None
    """The key of the task, or the id of the schedule."""
    why: str | None = None


class Peer(Protocol):
    """Reads the jobs of another program."""

    def read(self, job: Job, now: datetime) -> Wish | str | None:
        """Return what a job becomes, or why it is left; None if it is finished. Raises what publishing it would."""

    def unchanged(self, job: Job) -> dict[str, Any]:
        """Return the condition that the job has not changed."""

    def stopped(self, job: Job) -> dict[str, Any]:
        """Return the fields that make that program ignore the job."""


async def migrate(
    source: Source, peer: Peer, publisher: Publisher, schedules: Schedules, *, take: bool
) -> AsyncIterator[Moved]:
    """Move the unfinished jobs of another program here, and yield what became of each. Safe to repeat.

    Without `take`, only tell what would be done. A task has the key of its job, so that a job that is moved twice is one task.
    """
    async for job, begun in source.jobs():
        label = str(job["_id"])
        try:
            wish = peer.read(job, datetime.now(UTC))
            if isinstance(wish, Wish):
                _check(wish)
        except TaskMeshError as error:
            wish = str(error)
        if isinstance(wish, str):
            yield Moved(label, "left", why=wish)
        elif wish is not None and not take:
            yield Moved(label, "would move", wish.name, wish.key)
        elif wish is not None:
            changes = peer.stopped(job)
            if not begun and not await source.take(dict(job), peer.unchanged(job), changes):
                yield Moved(label, "left", why="it has changed meanwhile: run this again")
                continue
            try:
                await _published(wish, publisher, schedules)
            except TaskMeshError as error:
                await source.give_back(dict(job), changes)
                yield Moved(label, "left", why=str(error))
                continue
            await source.taken(dict(job))
            yield Moved(label, "moved", wish.name, wish.key)


def _check(wish: Wish) -> None:
    """Raise what publishing it would raise, as far as can be checked before."""
    task_id(wish.name, wish.key)
    Configuration().changed(**wish.settings)
    _declaration(wish)


def _declaration(wish: Wish) -> Declaration | None:
    if wish.schedule is None:
        return None
    return checked_declaration(
        wish.name,
        wish.key,
        cron=wish.schedule.get("cron"),
        interval_ms=wish.schedule.get("interval_ms"),
        timezone=wish.schedule.get("timezone", "UTC"),
        params=wish.params,
        missed="latest",
        overlap="allow",
        jitter_ms=0,
        settings=wish.settings,
    )


async def _published(wish: Wish, publisher: Publisher, schedules: Schedules) -> None:
    declaration = _declaration(wish)
    if declaration is None:
        await publisher.publish_many(wish.name, {wish.key: wish.params}, **wish.settings)
    else:
        await schedules.store(declaration)


# --- Agenda -----------------------------------------------------------------------------------------------------------

_UNIT_MS = {
    "second": 1_000,
    "minute": 60_000,
    "hour": 3_600_000,
    "day": 86_400_000,
    "week": 7 * 86_400_000,
    "month": 30 * 86_400_000,
    "year": 365 * 86_400_000,  # as Agenda takes them
}
_PART = re.compile(r"(?P<count>\d+(?:\.\d+)?|an?|one)?\s*(?P<unit>second|minute|hour|day|week|month|year)s?")
_CRON = re.compile(r"\S+( \S+){4,5}")


@dataclass(frozen=True, slots=True)
class Agenda:
    """Jobs as Agenda 6 stores them, in `agendaJobs`. `names`: what its jobs are called here."""

    names: Mapping[str, str] = field(default_factory=dict)

    def read(self, job: Job, now: datetime) -> Wish | str | None:
        """Return what a job becomes, or why it is left; None if it is finished."""
        if job.get("lockedAt") is not None:
            return "it is running, or was when its process died"
        starts = job.get("nextRunAt")
        if starts is None:
            return None
        if job.get("disabled"):
            return "it is disabled"
        for name in ("repeatAt", "skipDays", "fork"):
            if job.get(name):
                return f"{name}={job[name]!r} has no counterpart: publish it from code"
        name = self.names.get(job["name"]) or re.sub(r"[^\w.-]+", "_", job["name"], flags=re.ASCII)
        data = job.get("data")
        params = dict(data) if isinstance(data, Mapping) else {} if data is None else {"data": data}
        settings: dict[str, Any] = {"priority": int(job.get("priority") or 0)}
        if job.get("repeatInterval") is not None:
            if job.get("startDate") is not None or job.get("endDate") is not None:
                return "startDate and endDate have no counterpart in a schedule: declare it in code for as long as it should run"
            key = name if job.get("type") == "single" else f"{name}-{job['_id']}"
            return Wish(name, key, params, settings, _schedule(job))
        starts = max(filter(None, (starts, job.get("startDate"))))
        if starts > now:
            settings["start_time"] = starts
        if job.get("endDate") is not None:
            settings["expire_time"] = job["endDate"]
        return Wish(name, f"agenda-{job['_id']}", params, settings)

    def unchanged(self, job: Job) -> dict[str, Any]:
        """Return the condition that the job has not changed."""
        return {name: job.get(name) for name in ("nextRunAt", "lockedAt", "disabled", "lastRunAt")}

    def stopped(self, _job: Job) -> dict[str, Any]:
        """Return the fields that make Agenda ignore the job."""
        return {"disabled": True}


def _schedule(job: Job) -> dict[str, Any]:
    """Return when it repeats. Raises `InvalidOption` for what is neither an interval nor a cron expression."""
    repeats = job["repeatInterval"]
    if isinstance(repeats, (int, float)):
        return {"interval_ms": round(repeats)}
    text = str(repeats).strip().lower()
    if text.isdecimal():
        return {"interval_ms": int(text)}
    parts = [_PART.fullmatch(part.strip()) for part in re.split(r",|\band\b", text)]
    if all(parts):
        return {"interval_ms": round(sum(_milliseconds(part) for part in parts if part is not None))}
    if _CRON.fullmatch(str(repeats).strip()):
        return {"cron": str(repeats).strip(), "timezone": job.get("repeatTimezone") or "UTC"}
    raise InvalidOption(f"repeatInterval={repeats!r} is neither an interval nor a cron expression: declare it in code")


def _milliseconds(part: re.Match[str]) -> float:
    count = part["count"]
    return (float(count) if count and count[0].isdigit() else 1.0) * _UNIT_MS[part["unit"]]


# --- mscheduler -------------------------------------------------------------------------------------------------------

_MOVED = "moved to taskmesh"


@dataclass(frozen=True, slots=True)
class MScheduler:
    """Tasks as mscheduler 0.3 stores them: a collection of one kind, whose fields have the names that they have here.

    `name`: what they are called here. `param`: the handler's parameter that gets params which are no document.
    """

    name: str
    param: str = "params"

    def read(self, job: Job, now: datetime) -> Wish | str | None:
        """Return what a task becomes, or why it is left; None if it is finished."""
        option, state = job["task_option"], job["task_state"]
        entries = state["worker_states"]
        done = [entry for entry in entries if entry.get("success_time") is not None]
        failed = [entry for entry in entries if entry.get("fail_time") is not None]
        wanted = option["concurrent_worker_cnt"]
        if len(done) >= wanted or len(failed) > option["max_unexpected_retries"]:
            return None
        live = [entry for entry in entries if entry not in done and entry not in failed]
        if any((until := entry.get("ping_expire_time")) is not None and until > now for entry in live):
            return "it is running"
        if done:
            return f"{len(done)} of {wanted} workers have done it: all of them would do it again"
        params = job.get("params")
        if not isinstance(params, Mapping):
            params = {} if params is None else {self.param: params}
        settings = {name: value for name, value in option.items() if name in TaskOption.model_fields}
        if state["start_time"] > now:
            settings["start_time"] = state["start_time"]
        return Wish(self.name, job["key"], dict(params), settings)

    def unchanged(self, job: Job) -> dict[str, Any]:
        """Return the condition that the job has not changed."""
        return {name: job[name] for name in ("task_state", "task_option")}

    def stopped(self, job: Job) -> dict[str, Any]:
        """Return the fields that make its consumers ignore the task: no worker may run it."""
        return {"task_option": {**job["task_option"], "specific_worker_ids": [_MOVED]}}
