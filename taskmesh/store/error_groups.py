"""Error groups: why tasks fail, sorted out by the server. Reads a bounded number of tasks, the same share of each name.

The index on status leads to them; no more is looked at than was asked for, however many tasks there are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pymongo.errors import OperationFailure

from taskmesh import rules
from taskmesh.store.connection import Store
from taskmesh.store.driver import Document
from taskmesh.store.faults import is_over_deadline
from taskmesh.store.find import names_in_use

STATUSES = ("FAIL", "INIT", "RUNNING")
"""Those that failed for good, and those that may have failed and are to be tried again."""
_FEWEST_OF_EACH = 20
_LINE_CHARS = 300
_BATCH = 500
_FRAME = r'File "([^"]+)", line (\d+), in (\S+)'
_OF_A_LIBRARY = r"site-packages|dist-packages|[/\\]lib[/\\]python3|^<frozen"


@dataclass(slots=True)
class Sample:
    """What was found among the tasks that were looked at."""

    rows: list[Document] = field(default_factory=list)
    """`name status line frame lost`, how many `tasks` and `executions`, `first` and `last` time, the `key` of one."""
    looked_at: int = 0
    complete: bool = True
    """Whether these were all that there are."""


async def sample(store: Store, name: str | None, at_most: int, deadline_ms: int) -> Sample:
    """Look at so many tasks, those with the last keys of each name and queue, for as long as the deadline allows."""
    found = Sample()
    until = time.monotonic() + deadline_ms / 1000
    crowds = [
        (status, queue, each)
        for status in STATUSES
        for queue, each in await names_in_use(store, status)
        if name in (None, each)
    ]
    share = max(_FEWEST_OF_EACH, at_most // max(1, len(crowds)))
    for status, queue, each in crowds:
        left_ms = round((until - time.monotonic()) * 1000)
        if left_ms <= 0 or found.looked_at >= at_most:
            found.complete = False
            break
        try:
            rows = await _read(store, {"status": status, "queue": queue, "name": each}, share, left_ms)
        except OperationFailure as error:
            if not is_over_deadline(error):
                raise
            found.complete = False
            break
        looked_at = sum(row["tasks"] for row in rows)
        found.looked_at += looked_at
        found.complete &= looked_at < share
        found.rows += [{"name": each, "status": status, **row["_id"], **row} for row in rows if row["_id"]]
    return found


async def _read(store: Store, crowd: Document, at_most: int, deadline_ms: int) -> list[Document]:
    is_newest = {"$ifNull": ["$troubles.newest", True]}
    backwards = dict.fromkeys((*crowd, "_id"), -1)
    stages: list[Document] = [
        {"$match": crowd},
        {"$sort": backwards},
        {"$limit": at_most},
        {"$project": {"key": 1, "troubles": _troubles()}},
        {"$unwind": {"path": "$troubles", "preserveNullAndEmptyArrays": True}},
        {
            "$group": {
                "_id": {"line": "$troubles.line", "frame": "$troubles.frame", "lost": "$troubles.lost"},
                # A task counts where its newest trouble is; one that has none where there is no trouble.
                "tasks": {"$sum": {"$cond": [is_newest, 1, 0]}},
                "executions": {"$sum": 1},
                "first": {"$min": "$troubles.time"},
                "last": {"$max": "$troubles.time"},
                "key": {"$max": {"$cond": [is_newest, "$key", None]}},
            }
        },
    ]
    cursor = await store.driver.aggregate(
        store.tasks, stages, hint="taskmesh_status", maxTimeMS=deadline_ms, batchSize=_BATCH, allowDiskUse=False
    )
    return await cursor.to_list(None)  # type: ignore[no-any-return]


def _troubles() -> rules.Expression:
    """The failures of a task, or else the executions that were lost: what line, where, when, and whether it is the newest."""
    fails = _if_array(rules.ENTRIES, {"$eq": ["$$this.state", "FAIL"]})
    losses = _if_array("$task_state.losses", True)
    failed = _marked("$$fails", {"line": _first_line(), "frame": _own_frame(), "time": "$$this.fail_time"})
    lost = _marked("$$losses", {"lost": True, "time": "$$this.ping_expire_time"})
    return {
        "$let": {
            "vars": {"fails": fails, "losses": losses},
            "in": {"$cond": [{"$eq": ["$$fails", []]}, lost, failed]},
        }
    }


def _if_array(list_: str, condition: rules.Expression) -> rules.Expression:
    return {"$cond": [{"$isArray": [list_]}, {"$filter": {"input": list_, "cond": condition}}, []]}


def _marked(list_: str, fields: Document) -> rules.Expression:
    """The list with these fields of each of its elements, and which of them is the last."""
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


_REASON: rules.Expression = {"$cond": [{"$eq": [{"$type": "$$this.fail_reason"}, "string"]}, "$$this.fail_reason", ""]}


def _first_line() -> rules.Expression:
    return {"$substrCP": [{"$arrayElemAt": [{"$split": [_REASON, "\n"]}, 0]}, 0, _LINE_CHARS]}


def _own_frame() -> rules.Expression:
    """The innermost frame that is no library's, else the innermost: file, line and function."""
    frames = {"$regexFindAll": {"input": _REASON, "regex": _FRAME}}
    path = {"$arrayElemAt": ["$$frame.captures", 0]}
    is_own = {"$not": [{"$regexMatch": {"input": path, "regex": _OF_A_LIBRARY}}]}
    own = {"$filter": {"input": "$$frames", "as": "frame", "cond": is_own}}
    last = {"$arrayElemAt": [{"$cond": [{"$eq": ["$$own", []]}, "$$frames", "$$own"]}, -1]}
    captures = {"$let": {"vars": {"own": own}, "in": {"$let": {"vars": {"last": last}, "in": "$$last.captures"}}}}
    return {"$let": {"vars": {"frames": frames}, "in": {"$ifNull": [captures, None]}}}


def telling(rows: Iterable[Document]) -> list[dict[str, Any]]:
    """Return the rows of tasks whose newest trouble this is: what another failure came after says nothing now."""
    return [row for row in rows if row["tasks"]]
