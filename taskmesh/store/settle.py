"""Settle: record what became true by time alone, for tasks that nobody can claim any more.

That is EXPIRED, and FAIL after the last allowed lease ran out. Any worker may run this pass at any time; it costs one look into
a nearly empty index when there is nothing to do.
"""

from __future__ import annotations

import asyncio
import random

from pymongo.errors import OperationFailure, WriteConcernError

from taskmesh.store import rules
from taskmesh.store.claim import counted_losses
from taskmesh.store.malformed import WELL_FORMED
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import is_over_deadline, is_unconfirmed
from taskmesh.store.pipeline.event_stamp import stamp
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.pipeline.restart import reopened_if_requested
from taskmesh.store.store import Store

SETTLE_DEADLINE_MS = 300
"""Short: the scan that comes after it waits for it."""
_PARTS = 8
_MOST_IN_PARTS = 1_000


def due(store: Store) -> Document:
    """Return the filter for tasks that time alone has finished."""
    return {"settle_time": {"$exists": True}, "$expr": {"$lte": ["$settle_time", store.now]}}


async def settle(store: Store, deadline_ms: int = SETTLE_DEADLINE_MS) -> int:
    """Give every task whose `settle_time` has come its final status. Return how many. Safe to repeat and to race.

    A document that somebody's open transaction holds is left for later, and does not hold up the others for longer than twice
    `deadline_ms`.
    """
    query = {**due(store), **WELL_FORMED}
    try:
        return await _settle(store, query, deadline_ms)
    except OperationFailure as error:
        if not is_over_deadline(error):
            raise
    cursor = store.driver.collection(store.tasks).find(query, {"_id": 1}, limit=_MOST_IN_PARTS)
    ids = [task["_id"] for task in await cursor.to_list(None)]
    random.shuffle(ids)  # so that not always the same ones are behind the locked one
    parts = [ids[i::_PARTS] for i in range(min(_PARTS, len(ids)))]
    return sum(await asyncio.gather(*(_settle_part(store, query, part, deadline_ms) for part in parts)))


async def _settle_part(store: Store, query: Document, ids: list[str], deadline_ms: int) -> int:
    try:
        return await _settle(store, {"_id": {"$in": ids}, **query}, deadline_ms)
    except OperationFailure as error:
        if not is_over_deadline(error):
            raise
        return 0  # that we know of


async def _settle(store: Store, query: Document, deadline_ms: int) -> int:
    now = store.now
    # Entries whose lease ran out leave the list, and are counted.
    kept = {"$filter": {"input": rules.ENTRIES, "cond": {"$not": [rules.is_lost(now)]}}}
    state = {
        "$mergeObjects": [
            "$task_state",
            {"$cond": [{"$eq": ["$$lost", []]}, {}, counted_losses()]},
            {"worker_states": kept},
        ]
    }
    lost = {
        "$map": {"input": {"$filter": {"input": rules.ENTRIES, "cond": rules.is_lost(now)}}, "in": "$$this.worker_id"}
    }
    pipeline = [
        # The entries without the lost ones, and a stamp that tells whose they were.
        {"$set": {"task_state": rules.with_facts(now, state), "event": stamp("settled", now, lost=lost)}},
        # If it was published to run again meanwhile, it restarts instead of ending.
        reopened_if_requested(now),
        # The status that time alone has brought about, and no `settle_time` any more.
        *prepared(rules.derivation, now),
    ]
    try:
        return int((await store.update(query, pipeline, deadline_ms))["nModified"])
    except WriteConcernError as error:
        if not is_unconfirmed(error):
            raise
        return int((error.details or {}).get("nModified", 0))  # what a failover rolls back is settled again
