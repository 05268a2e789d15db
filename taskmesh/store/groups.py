"""Groups: look for claimable tasks group by group, stepping over groups that have no room.

The ordinary scan reads tasks in the order of claiming. Where a full group has a million tasks in front, it would read all of
them to find one of another group; here each step is one look into an index that is ordered by group.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from taskmesh.store.find import Claimable, read_claimable
from taskmesh.store.store import Store

_TASKS_PER_GROUP = 16


async def scan_groups(
    store: Store,
    worker_id: str,
    queue: str,
    names: Sequence[str],
    full: Collection[str],
    behind: str | None,
    *,
    groups: int,
) -> tuple[list[Claimable], str | None]:
    """Return due tasks of up to so many groups that are not `full`, and the last group seen, to go on `behind` it.

    None for that group: the end was reached, begin anew.
    """
    found: list[Claimable] = []
    for _ in range(groups):
        rows = await _next_group(store, worker_id, queue, names, full, behind)
        if not rows:
            return found, None
        behind = rows[0].group
        found += [row for row in rows if row.group == behind]
    return found, behind


async def _next_group(
    store: Store, worker_id: str, queue: str, names: Sequence[str], full: Collection[str], behind: str | None
) -> list[Claimable]:
    """Return the first tasks in the order of the index, so beginning with those of the next group."""
    query = {
        "queue": queue,
        "group": {"$gt": behind or "", "$nin": sorted(full)},
        "name": {"$in": list(names)},
        "pinned": False,
        "next_claim_time": {"$exists": True},
        "$expr": {"$lte": ["$next_claim_time", store.now]},
    }
    order = [("group", 1), ("name", 1), ("task_option.priority", -1), ("next_claim_time", 1)]
    hint = "taskmesh_claimable_by_group"
    return await read_claimable(store, worker_id, query, order, limit=_TASKS_PER_GROUP, hint=hint)
