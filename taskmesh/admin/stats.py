"""Counts of tasks, the lag of the oldest that could be claimed, and the fleet's throughput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from taskmesh.admin.store import task_counts
from taskmesh.model.read_only import ReadOnly
from taskmesh.model.task import Standing
from taskmesh.store import Store, registry
from taskmesh.store.mongodb.driver import Document

_LOOKED_AT = 10_000
"""Up to this many tasks that wait for a time are read, to distinguish scheduled from retrying ones."""


class Stats(ReadOnly):
    """The state of a mesh at a glance."""

    counts: dict[str, dict[str, int]]
    """How many tasks there are, by name, then status."""
    standing: dict[str, dict[Standing, int]] = {}
    """What INIT means, by name: how many are ready, scheduled, retrying. Those that wait for a time are examined one by one, at
    most 10 000 of them, the same share of each name and queue; the rest of INIT is ready. Tasks that wait for no time (for a
    signal, for other tasks) count as scheduled; but if more than 50 000 are ready they are counted as ready with them."""
    standing_at_least: tuple[str, ...] = ()
    """Names of which more tasks wait for a time than were examined: there are at least as many as `standing` says."""
    oldest_claimable_ms: float | None
    """How long the oldest claimable task has been waiting. None if none is claimable. Use this number to scale workers."""
    oldest_claimable_ms_by_queue: dict[str, float] = {}
    """How long the oldest claimable task of each queue has been waiting. Queues without one are left out."""
    started_per_s: float
    finished_per_s: float
    """Executions of all live workers per second, as of their last heartbeats."""


async def read_stats(store: Store) -> Stats:
    """Count, and look at the oldest task that waits and at the fleet."""
    stale = await task_counts.stale_counts(store)
    counts = _counted(await task_counts.counts(store), stale)
    standing, at_least = await _standing(store, counts, stale)
    now, oldest = await task_counts.oldest_claimable(store)
    waits = {queue: max(0.0, (now - time).total_seconds() * 1000) for queue, time in oldest.items()}
    live = await registry.workers(store, live_only=True)
    return Stats(
        counts=counts,
        standing=standing,
        standing_at_least=at_least,
        oldest_claimable_ms=max(waits.values(), default=None),
        oldest_claimable_ms_by_queue=waits,
        started_per_s=sum(float(worker.get("started_per_s", 0)) for worker in live),
        finished_per_s=sum(float(worker.get("finished_per_s", 0)) for worker in live),
    )


async def read_counts(store: Store, statuses: Sequence[str]) -> dict[str, dict[str, int]]:
    """Count by name and status, only these statuses, from the indexes, and correct for what time alone has changed."""
    counts = _counted(await task_counts.counts(store, statuses), await task_counts.stale_counts(store))
    return {name: {s: n for s, n in by_status.items() if s in statuses} for name, by_status in counts.items()}


def _counted(rows: Sequence[Document], stale: Sequence[Document]) -> dict[str, dict[str, int]]:
    """Return the counts by name and status, those whose stored status is wrong by time alone under the true one."""
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        counts.setdefault(str(row["_id"].get("name")), {})[str(row["_id"].get("status"))] = row["count"]
    for row in stale:
        by_status = counts.setdefault(str(row["_id"].get("name")), {})
        for status, change in ((row["_id"].get("stored"), -row["count"]), (row["_id"].get("now"), row["count"])):
            by_status[str(status)] = by_status.get(str(status), 0) + change
    return {name: {s: n for s, n in by_status.items() if n > 0} for name, by_status in counts.items()}


async def _standing(
    store: Store, counts: dict[str, dict[str, int]], stale: Sequence[Document]
) -> tuple[dict[str, dict[Standing, int]], tuple[str, ...]]:
    """Return what INIT means, by name, and the names of which there may be more."""
    later = await task_counts.later(store, _LOOKED_AT)
    for row in stale:
        later.found[str(row["_id"].get("name")), str(row["_id"].get("standing"))] += row["count"]
    found: dict[str, dict[Standing, int]] = {}
    known: tuple[Standing, ...] = get_args(Standing)
    for name in [name for name, by_status in counts.items() if by_status.get("INIT")]:
        stand = {word: later.found[name, word] for word in known}
        stand["scheduled"] += min(later.never[name], counts[name]["INIT"])
        # What is not known to wait is ready, if all that wait were examined.
        waiting = sum(stand.values()) - stand["ready"]
        rest = 0 if later.any_name else max(0, counts[name]["INIT"] - waiting)
        stand["ready"] = later.ready.get(name, rest)
        found[name] = {word: n for word, n in stand.items() if n}
    return found, tuple(sorted(found if later.any_name else set(later.ready) & set(found)))
