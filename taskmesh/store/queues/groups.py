"""Groups: in which groups of a queue anything is due, and what is first in each.

A scan reads tasks in the order of claiming: if one group has a million tasks in front, it would have to read all of them to
find a task of another group. Here each group costs one look into an index by group, whatever waits in it, and many groups one
command.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from pymongo.errors import OperationFailure

from taskmesh.model.worker import Claimant
from taskmesh.store.find import IN_ORDER, KEY_FIELDS, Claimable, judged
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import Code
from taskmesh.store.store import Store

_KEYS_READ = 1_000


async def queues_with_groups(store: Store, queues: Collection[str]) -> set[str]:
    """Return the queues in which tasks with a group can be claimed, now or later: one look for each such queue."""
    query = {"queue": {"$in": sorted(queues)}, "group": {"$gte": ""}, "next_claim_time": {"$exists": True}}
    stages: list[Document] = [
        # Any task of a group in these queues; the index has no others.
        {"$match": query},
        # Each queue once: the server steps from one to the next.
        {"$group": {"_id": "$queue"}},
    ]
    return {row["_id"] for row in await store.driver.rows(store.tasks, stages, hint="taskmesh_by_group")}


async def groups_due(
    store: Store, queue: str, names: Collection[str], until: datetime, behind: str
) -> tuple[list[str], str]:
    """Return the groups in which tasks of these names become due by then, and after which group to continue; "": these are all.

    Steps along the index from group to group, so a backlog costs nothing. Only if there are more than one reply can name, it
    returns some of them, after the group `behind`.
    """
    query: Document = {
        "queue": queue,
        "group": {"$gte": ""},
        "name": {"$in": sorted(names)},
        "next_claim_time": {"$lte": until},
    }
    tasks = store.driver.collection(store.tasks)
    try:
        found = await tasks.distinct("group", query)
    except OperationFailure as error:
        if error.code != Code.DISTINCT_TOO_LARGE:
            raise
    else:
        return [group for group in found if isinstance(group, str)], ""
    cursor = tasks.find(query | {"group": {"$gt": behind}}, {"_id": 0, "group": 1}, limit=_KEYS_READ)
    rows = await cursor.sort([("group", 1)]).hint("taskmesh_by_group").to_list(None)
    groups = [row["group"] for row in rows if isinstance(row["group"], str)]
    return list(dict.fromkeys(groups)), groups[-1] if len(rows) == _KEYS_READ else ""


async def first_of_groups(
    store: Store,
    worker: Claimant | str,
    queue: str,
    wanted: Mapping[str, int],
    names: Collection[str],
    lanes: Sequence[int] | None,
    until: datetime,
) -> dict[str, tuple[list[Claimable], bool]]:
    """Return the first tasks of each group that anybody may claim by then, and whether there may be more of it.

    As many as are `wanted` of each are read, all in one command.
    """
    (first, *others) = [_first_of(queue, group, count, names, lanes, until) for group, count in wanted.items()]
    # Each group by itself: the first in the index's order, so that no more is read of it.
    stages = [*first, *({"$unionWith": {"coll": store.tasks, "pipeline": stages}} for stages in others)]
    rows_read = await store.driver.rows(store.tasks, stages)
    found = [row for row in rows_read if isinstance(row["_id"], str) and isinstance(row["group"], str)]
    read = Counter(row["group"] for row in found)
    rows: dict[str, list[Claimable]] = {group: [] for group in wanted}
    for row in await judged(store, worker, found):
        rows[str(row.group)].append(row)
    return {group: (rows[group], read[group] >= count) for group, count in wanted.items()}


def _first_of(
    queue: str, group: str, count: int, names: Collection[str], lanes: Sequence[int] | None, until: datetime
) -> list[Document]:
    which: dict[str, Any] = {"queue": queue, "group": {"$eq": group}, "name": {"$in": sorted(names)}}
    # Not `pinned: False`: for that the server would take the index of all that waits, where other groups are in front.
    which |= {"next_claim_time": {"$lte": until}, "task_option.specific_worker_ids.0": {"$exists": False}}
    return [
        # What is due of the group, for anybody, in these lanes.
        {"$match": which | ({} if lanes is None else {"lane": {"$in": list(lanes)}})},
        # In the order of claiming.
        {"$sort": dict(IN_ORDER)},
        # No more than is wanted.
        {"$limit": count},
        # What a scan reads.
        {"$project": KEY_FIELDS},
    ]
