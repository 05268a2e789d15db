"""Queues that pause automatically when too many of their executions fail: counted and decided in their documents in `limits`.

Setting there: `failure_pause`. Beside it `recent`, how the newest executions ended; and, while the queue is paused, `failing`:
since when, and when the next canary may start. Each worker adds once a second what has ended on it; the share is evaluated in
the same update, so that the queue is paused once. A canary is the one start that `limits.book` lets through each `canary_ms`,
on whatever worker; when one SUCCEEDs, the update that counts it opens the queue. If a worker dies with its canary, the next one
starts in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import ReturnDocument

from taskmesh.store.mongodb.driver import Document, find_and_update
from taskmesh.store.queues import limits
from taskmesh.store.store import Store


@dataclass(frozen=True, slots=True)
class Ended:
    """How an execution ended."""

    failed: bool
    canary: bool
    """Whether it was let through while the queue was paused for its failures."""


async def set_failure_pause(store: Store, queue: str, settings: Document | None) -> None:
    """Set when a queue pauses: `share` of the newest `of_last` executions failed; a canary each `canary_ms`. None: never."""
    if settings is None:
        # The setting, and what was counted and decided under it.
        stages: list[Document] = [{"$unset": ["failure_pause", "recent", "failing"]}]
    else:
        # What has been counted stays, as far as it is needed.
        stages = [{"$set": {"failure_pause": {"$literal": settings}}}]
    await limits.change(store, queue, stages)


async def reopen(store: Store, queue: str) -> None:
    """Open a queue that is paused for its failures, and count from zero."""
    if await store.driver.collection(store.limits).find_one({"_id": queue, "failing": {"$exists": True}}, {"_id": 1}):
        # The pause, and what led to it.
        await limits.change(store, queue, [{"$unset": ["failing", "recent"]}])


async def count(store: Store, queue: str, ended: Sequence[Ended], *, known_failing: bool) -> bool | None:
    """Count how executions have ended.

    Return whether the queue is paused for its failures; None: it does not have the setting here.

    `known_failing`: what the caller knew. A caller that gets another answer tells all workers.
    """
    settings = "$failure_pause"
    news = {"$literal": [int(each.failed) for each in ended]}
    newest = {
        "$slice": [{"$concatArrays": [limits.stored_list("recent"), news]}, {"$multiply": [-1, f"{settings}.of_last"]}]
    }
    is_failing = {"$gt": ["$failing", None]}
    too_many = {
        "$and": [
            {"$not": [is_failing]},
            {"$gte": [{"$size": "$_newest"}, f"{settings}.of_last"]},
            {"$gte": [{"$sum": "$_newest"}, {"$multiply": [f"{settings}.share", f"{settings}.of_last"]}]},
        ]
    }
    begins = {
        "since": store.now,
        "failed": {"$sum": "$_newest"},
        "of": f"{settings}.of_last",
        "next": {"$add": [store.now, f"{settings}.canary_ms"]},
    }
    recovers = {"$and": [is_failing, any(each.canary and not each.failed for each in ended)]}
    stages: list[Document] = [
        # What has ended since, behind what was known, and no more of it than is evaluated.
        {"$set": {"_newest": newest}},
        # Whether that is too much, or a canary has succeeded.
        {"$set": {"_change": {"$cond": [too_many, "fails", {"$cond": [recovers, "recovers", None]}]}}},
        # Paused from now on, or open again, counting from zero; else as it was.
        {
            "$set": {
                "failing": {
                    "$switch": {
                        "branches": [
                            {"case": {"$eq": ["$_change", "fails"]}, "then": begins},
                            {"case": {"$eq": ["$_change", "recovers"]}, "then": "$$REMOVE"},
                        ],
                        "default": {"$ifNull": ["$failing", "$$REMOVE"]},
                    }
                },
                "recent": {"$cond": [{"$or": [{"$ne": ["$_change", None]}, is_failing]}, [], "$_newest"]},
            }
        },
        # The helper field is not stored.
        {"$unset": ["_newest", "_change"]},
    ]
    document: dict[str, Any] | None = await find_and_update(
        store.driver.collection(store.limits),
        {"_id": queue, "failure_pause": {"$exists": True}},
        stages,
        {"failing": 1},
        return_document=ReturnDocument.AFTER,
    )
    if document is None:
        return None
    failing = document.get("failing") is not None
    if failing != known_failing:
        await limits.change(store, queue, [])
    return failing
