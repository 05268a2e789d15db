"""How much of the limits of queues is used, for display."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import NoneType

from taskmesh.store import rules
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.queues.limits import WINDOWS, leaving_later
from taskmesh.store.store import Store


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of the limits of a queue is used, derived from the entries."""

    running: int
    running_by_group: Mapping[str, int]
    starts: int
    next_start: datetime | None
    """When the rate has room again, if it has none now."""
    group_starts: Mapping[str, tuple[int, datetime]]
    """How many starts of each group count against its rate, and when the first of them leaves the window."""


async def usage(store: Store, queues: Collection[str], longer_ms: Mapping[str, int] | None = None) -> dict[str, Usage]:
    """Return how much of the limits of these queues is used now.

    `longer_ms`: as if the windows of these fields (`per_ms`, `group_per_ms`) were so much longer, or shorter: what
    `store.queues.limits.set_limits` does to the counted starts.
    """
    longer = longer_ms or {}
    running: dict[str, dict[str | None, int]] = {queue: {} for queue in queues}
    entries = {"$cond": [{"$isArray": [rules.ENTRIES]}, rules.ENTRIES, []]}
    live = {"$size": {"$filter": {"input": entries, "cond": rules.is_live(store.now)}}}
    counting: list[Document] = [
        # What runs in these queues, by the index on status.
        {"$match": {"status": "RUNNING", "queue": {"$in": list(queues)}}},
        # How many executions hold a lease, by queue and group.
        {"$group": {"_id": {"queue": "$queue", "group": "$group"}, "live": {"$sum": live}}},
    ]
    for row in await store.driver.rows(store.tasks, counting):
        group = row["_id"].get("group")
        if row["live"] and isinstance(group, (str, NoneType)):
            running[row["_id"]["queue"]][group] = row["live"]
    in_window = {"$and": [{"$gt": ["$$this.leaves", store.now]}, {"$gt": ["$$this.n", 0]}]}
    starts, group_starts = (
        {"$filter": {"input": leaving_later(name, longer.get(window, 0)), "cond": in_window}}
        for window, name in WINDOWS.items()
    )
    stages: list[Document] = [
        # The bookings of these queues.
        {"$match": {"_id": {"$in": list(queues)}}},
        # The starts that are still in their window.
        {"$project": {"rate": 1, "starts": starts, "group_starts": group_starts}},
        # How many they are, and when the first of them leaves. A stage of its own: it reads the list shortened above.
        {
            "$project": {
                "rate": 1,
                "used": {"$sum": "$starts.n"},
                "next": {"$min": "$starts.leaves"},
                "group_starts": 1,
            }
        },
    ]
    booked = {row["_id"]: row for row in await store.driver.rows(store.limits, stages)}
    return {queue: _usage(by_group, booked.get(queue, {})) for queue, by_group in running.items()}


def _usage(running: Mapping[str | None, int], booked: Document) -> Usage:
    exhausted = booked.get("rate") is not None and booked["used"] >= booked["rate"]
    by_group = {group: count for group, count in running.items() if group is not None}
    next_start = booked.get("next") if exhausted else None
    group_starts: dict[str, tuple[int, datetime]] = {}
    for start in booked.get("group_starts") or ():
        count, leaves = group_starts.get(start["g"], (0, start["leaves"]))
        group_starts[start["g"]] = count + int(start["n"]), min(leaves, start["leaves"])
    return Usage(sum(running.values()), by_group, int(booked.get("used", 0)), next_start, group_starts)
