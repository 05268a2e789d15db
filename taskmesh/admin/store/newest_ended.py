"""The newest tasks that ended: how long each waited and ran. Reads a bounded number of tasks, however many there are.

No index has tasks in the order of their ends; the index of retention nearly has. Among tasks that are kept equally long, the
last to be removed are the last that ended. So for each retention that is in use the last tasks are read.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from taskmesh.admin.store.task_counts import union_of
from taskmesh.model.option import TaskOption
from taskmesh.store import rules
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.registry import retentions_ms
from taskmesh.store.store import Store

LOOKED_AT = 1_000
"""How many tasks of each retention are read, and how many are returned."""
_MOST_RETENTIONS = 6
"""Tasks with another retention are found among those of the next longer one."""
_USUAL = TaskOption()


class Ended(NamedTuple):
    """A task that ended."""

    queue: str
    wait_ms: float | None
    """From when it could start, as far as its times tell, to its first start. None if that start is no longer known."""
    run_ms: float | None
    """The duration of its last execution. None if that has no end."""


async def newest_ended(store: Store) -> list[Ended]:
    """Return the newest tasks that ended, the newest first."""
    usual = {ms for ms in (_USUAL.retain_success_ms, _USUAL.retain_failed_ms) if ms is not None}
    others = sorted(await retentions_ms(store) - usual)[: _MOST_RETENTIONS - len(usual)]
    stages = union_of(store, [_last_removed(store, ms) for ms in [*usual, *others]])
    rows = await store.driver.rows(store.tasks, stages, hint="taskmesh_delete")
    # A task may be among the last of several retentions; and a foreign one has not ended.
    found = {row["_id"]: row for row in rows if _is_ended(row)}
    newest = sorted(found.values(), key=lambda row: row["finished"], reverse=True)[:LOOKED_AT]
    return [
        Ended(row["queue"], _ms(row.get("due"), row.get("started")), _ms(row.get("last_started"), row.get("ended")))
        for row in newest
    ]


def _last_removed(store: Store, retained_ms: int) -> list[Document]:
    """Return the stages for the last tasks to be removed within a retention from now."""
    until = {"$add": [store.now, retained_ms]}
    entries = {"$cond": [{"$isArray": [rules.ENTRIES]}, rules.ENTRIES, []]}
    first_start = {"$min": f"{rules.ENTRIES}.start_time"}
    # The last of its times that was over when it started: publication, what it had to wait for, the end of a delay.
    times = [f"$task_state.{name}" for name in ("create_time", "start_time", "resume_time")]
    due: rules.Expression = {"$max": {"$filter": {"input": times, "cond": {"$lte": ["$$this", first_start]}}}}
    # If it lost a worker, was suspended or failed very often, its entries do not tell its first start.
    cut_off: list[rules.Expression] = [
        {"$gt": [{"$ifNull": [f"$task_state.{count}", 0]}, 0]} for count in ("lost_cnt", "dropped_fail_cnt")
    ]
    put_aside = {"$ne": [rules.STEPS, []]}
    due = {"$cond": [{"$or": [*cut_off, put_aside]}, None, due]}
    last = {"$last": entries}
    return [
        # The last to be removed, along the index of retention, no more than are returned.
        {"$match": {"delete_time": {"$type": "date"}, "$expr": {"$lte": ["$delete_time", until]}}},
        {"$sort": {"delete_time": -1}},
        {"$limit": LOOKED_AT},
        # When it ended, when it could start and did, and from when to when its last execution ran.
        {
            "$project": {
                "queue": 1,
                "finished": "$finish_time",
                "due": due,
                "started": first_start,
                "last_started": {"$getField": {"field": "start_time", "input": last}},
                "ended": {
                    "$ifNull": [
                        {"$getField": {"field": "success_time", "input": last}},
                        {"$getField": {"field": "fail_time", "input": last}},
                    ]
                },
            }
        },
    ]


def _is_ended(row: Document) -> bool:
    return isinstance(row.get("finished"), datetime) and isinstance(row.get("queue"), str)


def _ms(begin: object, end: object) -> float | None:
    """Return the time between two moments. None if one of them is unknown."""
    if not isinstance(begin, datetime) or not isinstance(end, datetime):
        return None
    return max(0.0, (end - begin).total_seconds() * 1000)
