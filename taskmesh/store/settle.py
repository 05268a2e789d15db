"""Settle: write down what became true by time alone, though nobody can claim the task any more.

EXPIRED, and FAIL after the last allowed lease ran out. A set-based pass that any worker may run at any time; it costs one
look into a nearly empty index when there is nothing to do.
"""

from __future__ import annotations

from taskmesh import rules
from taskmesh.store.claim import counted_losses
from taskmesh.store.connection import Store
from taskmesh.store.finish import reopened_if_wished
from taskmesh.store.stamp import stamp
from taskmesh.store.strangers import WELL_FORMED


async def settle(store: Store) -> int:
    """Give every task whose `settle_time` has come its final status. Safe to repeat and to race."""
    now = store.now
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
    query = {
        "settle_time": {"$exists": True},
        "$expr": {"$lte": ["$settle_time", now]},
        **WELL_FORMED,
    }
    pipeline = [
        {"$set": {"task_state": rules.with_facts(now, state), "event": stamp("settled", now, lost=lost)}},
        reopened_if_wished(now),
        *rules.derivation(now),
    ]
    reply = await store.update(query, pipeline)
    return int(reply["nModified"])
