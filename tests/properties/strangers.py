"""Documents that others put into the collection: tasks of ours with one part missing, or of a wrong type."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from bson import Int64, ObjectId, Regex

from tests.properties.oracle import Document

GONE: Any = object()
ODD_VALUES: list[Any] = [GONE, None, "text", -1, float("nan"), True, [], [None], {}, {"$gt": 1}, ObjectId(), Regex("x")]
Path = tuple[str | int, ...]


def strangers(now: datetime) -> Iterator[tuple[str, Document]]:
    """Yield each stranger with a word on what is wrong with it. Their keys begin with `stranger`."""
    number = 0
    for base in _bases(now):
        for path in _paths(base):
            for value in ODD_VALUES:
                document = copy.deepcopy(base)
                document["_id"] = f"job:stranger{number:05}"
                document["key"] = f"stranger{number:05}"
                number += 1
                _put(document, path, value)
                yield f"{'.'.join(map(str, path))} = {'(missing)' if value is GONE else value!r}", document


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, part in items:
        if path or step not in ("key", "params"):
            yield (*path, step)
            yield from _paths(part, (*path, step))


def _put(document: Document, path: Path, value: Any) -> None:
    inner: Any = document
    for step in path[:-1]:
        inner = inner[step]
    if value is not GONE:
        inner[path[-1]] = value
    else:
        del inner[path[-1]]
    if path == ("_id",):  # not all values can be an `_id`
        document["_id"] = {"odd": document["key"]} if isinstance(value, (dict, list)) else (document["key"].encode())


def _bases(now: datetime) -> Iterator[Document]:
    """Yield tasks that are due, and such as `settle` and the statistics have to look at."""
    soon, just_now, before = now + timedelta(seconds=2), now - timedelta(seconds=1), now - timedelta(seconds=9)
    option = {
        "priority": 0,
        "concurrent_worker_cnt": 3,
        "specific_worker_ids": [],
        "ping_interval_ms": 1_000,
        "worker_timeout_ms": 3_000,
        "max_unexpected_retries": 3,
        "unexpected_retry_delay_ms": 1_000,
        "unexpected_retry_delay_scope": "task",
        "unexpected_retry_backoff": 2.0,
        "unexpected_retry_jitter": 0.5,
        "max_timeouts": 3,
        "run_timeout_ms": None,
        "retain_success_ms": 1_000,
        "retain_failed_ms": 1_000,
    }
    entries = [
        {"running_id": "r1", "worker_id": "w1", "state": "RUNNING", "start_time": before, "ping_expire_time": soon},
        {"running_id": "r2", "worker_id": "w2", "state": "RUNNING", "start_time": before, "ping_expire_time": just_now},
        {"running_id": "r3", "worker_id": "w3", "state": "SUCCESS", "start_time": before, "success_time": just_now},
        {"running_id": "r4", "worker_id": "w4", "state": "FAIL", "fail_time": before, "retry_jitter": 0.5, "wish": 1},
    ]
    state = {
        "create_time": before,
        "start_time": before,
        "expire_time": None,
        "resume_time": before,
        "timeout_cnt": 0,
        "lost_cnt": 0,
        "losses": [{"running_id": "r0", "worker_id": "w1", "start_time": before, "ping_expire_time": before}],
        "dropped_fail_cnt": Int64(0),
        "wanted": 1,
        "worker_states": entries,
    }
    task = {
        "_id": "job:base",
        "name": "job",
        "key": "base",
        "queue": "default",
        "params": {"n": 1},
        "task_option": option,
        "task_state": state,
        "status": "RUNNING",
        "next_claim_time": just_now,
        "settle_time": just_now,
        "pinned": False,
        "lane": 1,
    }
    yield task
    by_name = {**option, "specific_worker_ids": ["w9", "w4"], "unexpected_retry_delay_scope": "worker"}
    waiting = {**state, "worker_states": entries[2:], "expire_time": just_now}
    yield {
        **task,
        "pinned": True,
        "status": "INIT",
        "task_option": by_name,
        "task_state": {**state, "worker_states": entries[2:]},
    }
    yield {**task, "status": "INIT", "task_state": waiting}
