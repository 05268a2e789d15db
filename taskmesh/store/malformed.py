"""Malformed documents: documents in the collection that are no tasks of ours, or tasks that somebody has damaged by hand.

A single one would make an expression of the rule fail, and with it the whole scan or pass. `WELL_FORMED` tells them apart, but
costs the server as much as the rule itself. So passes that touch few documents always use it; others read without it, and again
with it if that fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pymongo.errors import OperationFailure

from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import is_over_deadline, is_passing
from taskmesh.store.pipeline.by_id import in_parts
from taskmesh.store.store import Store

logger = logging.getLogger("taskmesh.store")

T = TypeVar("T")


class Strange(Exception):
    """What was read is no task of ours."""


_GUARDED_S = 60.0
_NAMED = 5


async def past_strangers(store: Store, query: Document, read: Callable[[Document], Awaitable[T]]) -> T:
    """Read with `query`. If a document makes that fail, read only well-formed ones, for a minute from then on."""
    if time.monotonic() >= store.guarded_until:
        try:
            return await read(query)
        except (OperationFailure, Strange) as error:
            if is_passing(error) or is_over_deadline(error):
                raise
            store.guarded_until = time.monotonic() + _GUARDED_S
            await _name(store, query, error)
    return await read({"$and": [query, WELL_FORMED]})


def note_refusal(store: Store, error: OperationFailure) -> None:
    """Leave out malformed documents for a minute, if they may be why a claim failed: scans of keys evaluate no document."""
    if not (is_passing(error) or is_over_deadline(error)):
        store.guarded_until = time.monotonic() + _GUARDED_S


async def _name(store: Store, query: Document, error: Exception) -> None:
    """Log which documents are in the way."""
    tasks = store.driver.collection(store.tasks)
    cursor = tasks.find({"$and": [query, STRANGE]}, {"_id": 1}, limit=_NAMED)
    ids = [document["_id"] for document in await cursor.to_list(_NAMED)]
    logger.warning("skipping documents that are not taskmesh tasks: %s (%.200s)", ids, error)


async def strangers(store: Store, ids: Sequence[str]) -> list[Document]:
    """Return those of these documents that are not well-formed."""
    found: list[Document] = []
    for part in in_parts(ids):
        found += await store.find({"_id": {"$in": part}, **STRANGE}, {})
    return found


def _number(least: float, most: float, *, optional: bool = False) -> Document:
    numeric: Document = {"bsonType": ["int", "long", "double"], "minimum": least, "maximum": most}
    return {"anyOf": [numeric, {"bsonType": "null"}]} if optional else numeric


_TEXT: Document = {"bsonType": "string"}
_TIME: Document = {"bsonType": ["date", "null"]}
_COUNT = _number(0, 2**53)
_MS = _number(0, 2**53)

_ENTRY: Document = {
    "bsonType": "object",
    "required": ["running_id", "worker_id", "state"],
    "properties": {
        "running_id": _TEXT,
        "worker_id": _TEXT,
        "state": {"enum": ["RUNNING", "SUCCESS", "FAIL"]},
        "ping_expire_time": _TIME,
        "fail_time": _TIME,
        "retry_time": _TIME,
        "retry_jitter": _number(-1, 1, optional=True),
    },
}

WELL_FORMED: Document = {
    "$jsonSchema": {
        "required": ["_id", "name", "key", "queue", "task_option", "task_state"],
        "properties": {
            "_id": _TEXT,
            "name": _TEXT,
            "key": _TEXT,
            "queue": _TEXT,
            "next_claim_time": {"bsonType": "date"},
            "group": {"bsonType": ["string", "null"]},
            "settle_time": _TIME,
            "finish_time": _TIME,
            "task_option": {
                "bsonType": "object",
                "required": [
                    "priority",
                    "concurrent_worker_cnt",
                    "specific_worker_ids",
                    "worker_timeout_ms",
                    "max_unexpected_retries",
                    "unexpected_retry_delay_ms",
                    "unexpected_retry_delay_scope",
                    "unexpected_retry_backoff",
                    "unexpected_retry_jitter",
                    "max_timeouts",
                ],
                "properties": {
                    "priority": _number(-(2**31), 2**31),
                    "concurrent_worker_cnt": _number(0, 2**31),
                    "specific_worker_ids": {"bsonType": "array", "items": _TEXT},
                    "worker_timeout_ms": _MS,
                    "max_unexpected_retries": _COUNT,
                    "unexpected_retry_delay_ms": _number(0, 2**40),
                    "unexpected_retry_delay_scope": _TEXT,
                    "unexpected_retry_backoff": _number(1, 1_000),
                    "unexpected_retry_jitter": _number(0, 1),
                    "max_timeouts": _COUNT,
                    "retain_success_ms": _number(0, 2**40, optional=True),
                    "retain_failed_ms": _number(0, 2**40, optional=True),
                    "on_fail": {"bsonType": ["string", "null"]},
                },
            },
            "task_state": {
                "bsonType": "object",
                "required": ["create_time", "timeout_cnt", "worker_states"],
                "properties": {
                    "create_time": {"bsonType": "date"},
                    "start_time": _TIME,
                    "expire_time": _TIME,
                    "cancel_time": _TIME,
                    "deleted_time": _TIME,
                    "resume_time": _TIME,
                    "suspended_until": _TIME,
                    "timeout_cnt": _COUNT,
                    "lost_cnt": _number(0, 2**53, optional=True),
                    "dropped_fail_cnt": _number(0, 2**53, optional=True),
                    "conflict_cnt": _number(0, 2**53, optional=True),
                    "home": {"bsonType": ["string", "null"]},
                    "wanted": _number(0, 2**53, optional=True),
                    "losses": {"bsonType": ["array", "null"]},
                    "leaving": {"bsonType": ["array", "null"]},
                    "steps": {"bsonType": ["array", "null"]},
                    "signals": {"bsonType": ["array", "null"]},
                    "worker_states": {"bsonType": "array", "items": _ENTRY},
                },
            },
        },
    }
}
STRANGE: Document = {"$nor": [WELL_FORMED]}
"""Matches documents that are not well-formed."""
