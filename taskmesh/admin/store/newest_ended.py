"""The newest tasks that ended: how long each waited and ran. Reads a bounded number of tasks, however many there are.

No index has tasks in the order of their ends; the index of retention nearly has. Of all tasks that are kept equally long, the
last to be removed are the last that ended. So of each length of retention that is in use the last are looked at.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from taskmesh.admin.store.task_counts import union_of
from taskmesh.model.option import TaskOption
from taskmesh.store import rules
from taskmesh.store.driver import Document
from taskmesh.store.registry import retentions_ms
from taskmesh.store.store import Store

LOOKED_AT = 1_000
"""So many tasks of each length of retention are looked at, and so many are told."""
_MOST_RETENTIONS = 6
"""Tasks that are kept for another time are found where they stand among those of the next longer one."""
_USUAL = TaskOption()


class Ended(NamedTuple):
    """A task that ended."""

    queue: str
    wait_ms: float | None
    """From when it could start, as far as its times tell, to its first start; None if that start is not known any more."""
    run_ms: float | None
    """Of its last execution; None if that has no end."""


async def newest_ended(store: Store) -> list[Ended]:
    """Return the newest tasks that ended, the newest first."""
    usual = {ms for ms in (_USUAL.retain_success_ms, _USUAL.retain_failed_ms) if ms is not None}
    others = sorted(await retentions_ms(store) - usual)[: _MOST_RETENTIONS - len(usual)]
    stages = union_of(store, [_last_removed(store, ms) for ms in [*usual, *others]])
    rows = await store.driver.rows(store.tasks, stages, hint="taskmesh_delete")
    # A task may be among the last of several retentions; and one that a stranger wrote is none that ended.
    found = {row["_id"]: row for row in rows if _is_ended(row)}
    newest = sorted(found.values(), key=lambda row: row["finished"], reverse=True)[:LOOKED_AT]
    return [
        Ended(row["queue"], _ms(row.get("due"), row.get("started")), _ms(row.get("last_started"), row.get("ended")))
        for row in newest
    ]


def _last_removed(store: Store, retained_ms: int) -> list[Document]:
    """The stages that tell of the last tasks to be removed within a length of retention from now."""
    until = {"$add": [store.now, retained_ms]}
    entries = {"$cond": [{"$isArray": [rules.ENTRIES]}, rules.ENTRIES, []]}
    first_start = {"$min": f"{rules.ENTRIES}.start_time"}
    # The last of its times that was over when it started: publication, what it was to wait for, the end of a delay.
    times = [f"$task_state.{name}" for name in ("create_time", "start_time", "resume_time")]
    due: rules.Expression = {"$max": {"$filter": {"input": times, "cond": {"$lte": ["$$this", first_start]}}}}
    # Of what lost a worker, was put aside or failed very often, the first start is not told by its entries.
    cut_off: list[rules.Expression] = [
        {"$gt": [{"$ifNull": [f"$task_state.{count}", 0]}, 0]} for count in ("lost_cnt", "dropped_fail_cnt")
    ]
    put_aside = {"$ne": [rules.STEPS, []]}
    due = {"$cond": [{"$or": [*cut_off, put_aside]}, None, due]}
    last = {"$last": entries}
    return [
        # The last to be removed, along the index of retention, no more than are told.
        {"$match": {"delete_time": {"$type": "date"}, "$expr": {"$lte": ["$delete_time", until]}}},
        {"$sort": {"delete_time": -1}},
        {"$limit": LOOKED_AT},
        # Of each when it ended, when it could start and did, and from when to when its last execution ran.
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
    """Return the time between two moments; None if one of them is not known."""
    if not isinstance(begin, datetime) or not isinstance(end, datetime):
        return None
    return max(0.0, (end - begin).total_seconds() * 1000)
