"""Error groups: why tasks fail, grouped by the server. Reads a bounded number of tasks, the same share of each name.

The index on status leads to them; no more are read than requested, however many tasks there are.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pymongo.errors import OperationFailure

from taskmesh.admin.store.task_counts import Row, rows, told, union_of
from taskmesh.model.task import is_name
from taskmesh.store import rules
from taskmesh.store.find import places_in_use
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import is_over_deadline
from taskmesh.store.store import Store

STATUSES = ("FAIL", "INIT", "RUNNING")
"""Those that failed for good, and those that may have failed and will be retried."""
_FEWEST_OF_EACH = 20
_AT_ONCE = 12
"""Names and queues that one command examines."""
_LINE_CHARS = 300
_BATCH = 500


@dataclass(slots=True)
class Sample:
    """What was found among the tasks that were examined."""

    rows: list[Document] = field(default_factory=list)
    """`name status line type frame lost`, how many `tasks` and `executions`, `first` and `last` time, the `key` of one."""
    looked_at: int = 0
    complete: bool = True
    """Whether these were all."""


async def sample(store: Store, name: str | None, at_most: int, deadline_ms: int) -> Sample:
    """Examine so many tasks, those with the last keys of each name and queue, for as long as the deadline allows."""
    found = Sample()
    until = time.monotonic() + deadline_ms / 1000
    # The name of a foreign document may be anything.
    crowds = [row for row in await _rows(store) if name in (None, row.name) and is_name(row.name)]
    share = max(_FEWEST_OF_EACH, at_most // max(1, len(crowds)))
    for start in range(0, len(crowds), _AT_ONCE):
        left_ms = round((until - time.monotonic()) * 1000)
        if left_ms <= 0 or found.looked_at >= at_most:
            found.complete = False
            break
        try:
            read = await _read(store, crowds[start : start + _AT_ONCE], share, left_ms)
        except OperationFailure as error:
            if not is_over_deadline(error):
                raise
            found.complete = False
            break
        looked_at: Counter[Row] = Counter()
        for row in read:
            looked_at[Row(**row["crowd"])] += row["tasks"]
        found.looked_at += looked_at.total()
        found.complete &= all(count < share for count in looked_at.values())
        found.rows += [{**row["crowd"], **row["_id"], **row} for row in read if row["_id"]]
    return found


async def _rows(store: Store) -> list[Row]:
    """Return where in the index on status such tasks are."""
    found = await rows(store, STATUSES)
    if found is None:  # very many, or the server cannot tell them at once
        found = [Row(status, queue, name) for status in STATUSES for queue, name in await places_in_use(store, status)]
    return found


async def _read(store: Store, crowds: Sequence[Row], at_most: int, deadline_ms: int) -> list[Document]:
    pipeline = union_of(store, [_sorted_out(crowd, at_most) for crowd in crowds])
    options: dict[str, Any] = {"maxTimeMS": deadline_ms, "batchSize": _BATCH, "allowDiskUse": False}
    return await store.driver.rows(store.tasks, pipeline, **options)


def _sorted_out(crowd: Row, at_most: int) -> list[Document]:
    """Return the stages that group the troubles of a row's tasks by where they were raised."""
    is_newest = {"$ifNull": ["$troubles.newest", True]}
    backwards = dict.fromkeys((*crowd._fields, "_id"), -1)
    return [
        # The tasks with the last keys of one status, queue and name, as their index has them.
        {"$match": crowd._asdict()},
        {"$sort": backwards},
        {"$limit": at_most},
        # What went wrong with each: its failures, or else its losses. One row for each; one without, if there are none.
        {"$project": {"key": 1, "troubles": _troubles()}},
        # A row for each trouble, and one without for a task that has none: it counts as examined.
        {"$unwind": {"path": "$troubles", "preserveNullAndEmptyArrays": True}},
        # One answer for all that failed alike: by text, type and place.
        {
            "$group": {
                "_id": {field: f"$troubles.{field}" for field in ("line", "type", "frame", "lost")},
                # A task counts where its newest trouble is; one that has none where there is no trouble.
                "tasks": {"$sum": {"$cond": [is_newest, 1, 0]}},
                "executions": {"$sum": 1},
                "first": {"$min": "$troubles.time"},
                "last": {"$max": "$troubles.time"},
                "key": {"$max": {"$cond": [is_newest, _if_of("string", "$key"), None]}},
            }
        },
        # Which tasks these were.
        {"$set": {"crowd": told(crowd)}},
    ]


def _troubles() -> rules.Expression:
    """Return the failures of a task, or else the executions that were lost: line, place, time, and whether it is the newest."""
    fails = _if_array(rules.ENTRIES, {"$eq": ["$$this.state", "FAIL"]})
    losses = _if_array("$task_state.losses", True)
    what: Document = {
        "line": _first_line(),
        "type": _if_of("string", "$$this.fail_type"),
        "frame": _if_of("string", "$$this.fail_frame"),
    }
    failed = _marked("$$fails", {**what, "time": _if_of("date", "$$this.fail_time")})
    lost = _marked("$$losses", {"lost": True, "time": _if_of("date", "$$this.ping_expire_time")})
    return {
        "$let": {
            "vars": {"fails": fails, "losses": losses},
            "in": {"$cond": [{"$eq": ["$$fails", []]}, lost, failed]},
        }
    }


def _if_array(list_: str, condition: rules.Expression) -> rules.Expression:
    return {"$cond": [{"$isArray": [list_]}, {"$filter": {"input": list_, "cond": condition}}, []]}


def _marked(list_: str, fields: Document) -> rules.Expression:
    """Return the list with these fields of each of its elements, and which of them is the last."""
    last = {"$subtract": [{"$size": list_}, 1]}
    return {
        "$map": {
            "input": {"$range": [0, {"$size": list_}]},
            "as": "place",
            "in": {
                "$let": {
                    "vars": {"this": {"$arrayElemAt": [list_, "$$place"]}},
                    "in": {**fields, "newest": {"$eq": ["$$place", last]}},
                }
            },
        }
    }


def _if_of(type_: str, field: str) -> rules.Expression:
    """Return the field, or null if it has another type, as in a foreign document."""
    return {"$cond": [{"$eq": [{"$type": field}, type_]}, field, None]}


def _first_line() -> rules.Expression:
    reason = {"$ifNull": [_if_of("string", "$$this.fail_reason"), ""]}
    return {"$substrCP": [{"$arrayElemAt": [{"$split": [reason, "\n"]}, 0]}, 0, _LINE_CHARS]}


def telling(rows: Iterable[Document]) -> list[dict[str, Any]]:
    """Return the rows of tasks with this as their newest trouble: one that was followed by another failure says nothing now.

    Without rows that consist of foreign documents: what has no key is no task.
    """
    return [row for row in rows if row["tasks"] and row["key"] is not None]
