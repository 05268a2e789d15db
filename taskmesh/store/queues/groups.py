"""Groups: in which queues there are any, and in which groups of a queue anything is due. What is first in each: `first_of`."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from pymongo.errors import OperationFailure

from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import Code
from taskmesh.store.store import Store

_KEYS_READ = 1_000


async def queues_with_groups(store: Store, queues: Collection[str]) -> set[str]:
    """Return the queues in which tasks with a group can be claimed, now or later: one look for each such queue."""
    # (Not `$exists`: an index cannot tell that from null, and every such document would be read.)
    query = {"queue": {"$in": sorted(queues)}, "group": {"$gte": ""}, "next_claim_time": {"$type": "date"}}
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
