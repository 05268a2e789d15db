"""Broadcasts: unfinished tasks for each of the workers that they name, and what becomes of them when some of those are gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from taskmesh.store import rules
from taskmesh.store.control import option_stages
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.pipeline.event_stamp import stamp
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.store import Store


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A broadcast that some workers have not run yet."""

    id: str
    named: list[str]
    done: list[str]


async def unfinished(store: Store, name: str, queues: Sequence[str]) -> list[Unfinished]:
    """Return the unfinished broadcasts of this name."""
    query: Document = {
        "status": {"$in": ["INIT", "RUNNING"]},
        "queue": {"$in": list(queues)},
        "name": name,
        "broadcast": True,
        "pinned": True,
        "task_state.worker_states": {"$type": "array"},
    }
    done = {"$filter": {"input": rules.ENTRIES, "cond": {"$eq": ["$$this.state", "SUCCESS"]}}}
    fields = {
        "named": "$task_option.specific_worker_ids",
        "done": {"$map": {"input": done, "in": "$$this.worker_id"}},
    }
    return [Unfinished(each["_id"], each["named"], each["done"]) for each in await store.find(query, fields)]


async def keep(store: Store, id_: str, live: Sequence[str]) -> None:
    """Let a broadcast wait only for workers that are live or have run it. Safe to repeat, and to race.

    If no worker is left and none has run it, it becomes EXPIRED.
    """
    now = store.now
    done = {"$map": {"input": "$$done", "in": "$$this.worker_id"}}
    left = {"$setIntersection": ["$task_option.specific_worker_ids", {"$setUnion": [{"$literal": list(live)}, done]}]}
    nobody = {"$eq": ["$_left", []]}
    pipeline = [
        # The workers that it waits for now: named by it, and live or done with it.
        {"$set": {"_left": rules.with_facts(now, left)}},
        # Where none is left, it expires. What an execution has recorded would prevent that.
        {
            "$set": {
                "task_state.expire_time": {"$cond": [nobody, now, "$task_state.expire_time"]},
                "task_state.steps_bytes": {"$cond": [nobody, "$$REMOVE", "$task_state.steps_bytes"]},
            }
        },
        # Otherwise as if somebody had set the option: live entries of workers that are no longer named are removed.
        *option_stages(
            {
                "specific_worker_ids": {"$cond": [nobody, "$task_option.specific_worker_ids", "$_left"]},
                "concurrent_worker_cnt": {"$max": [1, {"$size": "$_left"}]},
            },
            now,
            literally=False,
        ),
        # A stamp that wakes the workers: the change may have finished it.
        {"$set": {"event": stamp("option_changed", now)}},
        # The helper field is not stored.
        {"$unset": "_left"},
        # Status and times follow.
        *prepared(rules.derivation, now),
    ]
    await store.update({"_id": id_, "broadcast": True, "status": {"$in": ["INIT", "RUNNING"]}}, pipeline)
