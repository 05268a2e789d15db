"""Counts of tasks, the lag of the oldest that could be claimed, and the fleet's throughput."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from taskmesh.admin.store import task_counts
from taskmesh.store import Store, registry


class Stats(BaseModel):
    """The state of a mesh at a glance."""

    model_config = ConfigDict(frozen=True)

    counts: dict[str, dict[str, int]]
    """How many tasks there are, by name, then status."""
    oldest_claimable_ms: float | None
    """For how long the oldest claimable task has been waiting, or None if none is. The number to scale workers by."""
    started_per_s: float
    finished_per_s: float
    """Executions of all live workers, per second, as of their last signs of life."""


async def read_stats(store: Store) -> Stats:
    """Count, and look at the oldest task that waits and at the fleet."""
    counts = await read_counts(store)
    now, oldest = await task_counts.oldest_claimable(store)
    live = [worker for worker in await registry.workers(store) if worker.get("live")]
    return Stats(
        counts=counts,
        oldest_claimable_ms=None if oldest is None else max(0.0, (now - oldest).total_seconds() * 1000),
        started_per_s=sum(float(worker.get("started_per_s", 0)) for worker in live),
        finished_per_s=sum(float(worker.get("finished_per_s", 0)) for worker in live),
    )


async def read_counts(store: Store, statuses: Sequence[str] | None = None) -> dict[str, dict[str, int]]:
    """Count by name and status, from the indexes, and correct for what time alone has changed. `statuses`: only these."""
    counts: dict[str, dict[str, int]] = {}
    for row in await task_counts.counts(store, statuses):
        counts.setdefault(str(row["_id"].get("name")), {})[str(row["_id"].get("status"))] = row["count"]
    for row in await task_counts.stale_counts(store):
        by_status = counts.setdefault(str(row["_id"].get("name")), {})
        for status, change in ((row["_id"].get("stored"), -row["count"]), (row["_id"].get("now"), row["count"])):
            by_status[str(status)] = by_status.get(str(status), 0) + change
    wanted = {name: {s: n for s, n in by_status.items() if n > 0} for name, by_status in counts.items()}
    if statuses is None:
        return wanted
    return {name: {s: n for s, n in by_status.items() if s in statuses} for name, by_status in wanted.items()}
