"""Undo: what a bulk action is about to change is copied aside by the server, and can be put back for a while.

Exact, whoever writes meanwhile: a task is changed only while it is as its copy says (but for progress and logs), and put
back only if nothing has happened to it since. An execution that ran is not put back: its worker has let go of it.

| action | put back, if |
| --- | --- |
| retry | nobody has claimed it since |
| cancel | it is still CANCELLED |
| delete | its key is still free |
"""

from __future__ import annotations

from typing import Any

from bson import ObjectId

from taskmesh.store import rules
from taskmesh.store.malformed import WELL_FORMED
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.numbers import NUMBERS_PER_MS
from taskmesh.store.pipeline.by_id import own_value
from taskmesh.store.pipeline.event_stamp import stamp, starting_with
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.store import Store

_STATE = [
    "$publish_id",
    "$change_ids",
    "$task_option",
    *(f"$task_state.{field}" for field in ("start_time", "expire_time", "cancel_time", "resume_time", "wanted")),
    *(f"$task_state.{field}" for field in ("steps_bytes", "signals_bytes", "suspended_until")),
    *(f"{rules.ENTRIES}.{field}" for field in ("running_id", "state", "retry_time")),
]
"""What has to be as it was copied: all that a publish, a claim, an outcome or another action changes."""


async def actions(store: Store, limit: int) -> list[Document]:
    """Return the newest bulk actions, each with whether it can be undone still."""
    stages: list[Document] = [
        # What was done to many tasks (the audit has single things too), the newest.
        {"$match": {"matched": {"$exists": True}}},
        {"$sort": {"time": -1}},
        {"$limit": limit},
        # Whether there is time left, and nobody has undone it.
        {
            "$set": {
                "undoable": {"$and": [{"$gt": ["$undo_until", store.now]}, {"$not": [{"$gt": ["$undone_time", None]}]}]}
            }
        },
    ]
    return await store.driver.rows(store.actions, stages)


async def action(store: Store, id_: str) -> Document | None:
    """Return one action, with whether its copies are kept still."""
    stages: list[Document] = [
        # The action.
        {"$match": {"_id": id_}},
        # Whether its copies are still there, by the server's clock.
        {"$set": {"kept": {"$gt": ["$undo_until", store.now]}}},
    ]
    found = await store.driver.rows(store.actions, stages)
    return found[0] if found else None


async def keep(store: Store, id_: str, which: Document, undo_ms: int) -> dict[str, list[Any]]:
    """Copy these tasks aside for an action, and return by `_id` in which state they were copied."""
    round_ = ObjectId()
    stages: list[Document] = [
        # The tasks as they stand.
        {"$match": which},
        # A copy of each under the action's id, with what has to stay as it is until the action comes.
        {
            "$project": {
                "_id": {"$concat": [id_, "/", "$_id"]},
                "of": {"$literal": id_},
                "round": {"$literal": round_},
                "delete_time": {"$add": [store.now, undo_ms]},
                "state": _STATE,
                "task": "$$ROOT",
            }
        },
        # Again, if a task changed before the action came: its newest copy counts.
        {"$merge": {"into": store.undo, "on": "_id", "whenMatched": "replace", "whenNotMatched": "insert"}},
    ]
    await store.driver.rows(store.tasks, stages)
    copies = store.driver.collection(store.undo).find({"of": id_, "round": round_}, {"task._id": 1, "state": 1})
    return {copy["task"]["_id"]: copy["state"] for copy in await copies.to_list(None)}


def publications_of(states: dict[str, list[Any]]) -> set[Any]:
    """The `publish_id`s of the tasks that were copied."""
    return {state[0] for state in states.values()}


def as_copied(states: dict[str, list[Any]]) -> rules.Expression:
    """The condition that a task is as its copy says."""
    return {"$eq": [_STATE, own_value(list(states), list(states.values()))]}


async def put_back(store: Store, id_: str, action: str, batch: int = 500) -> tuple[int, int]:
    """Undo an action; return how many tasks were put back, and how many left as they are, since something has happened to them.

    Safe to repeat: what was put back is known by its mark.
    """
    undone = f"{id_} undone"
    now = store.now
    entries = {"$filter": {"input": rules.ENTRIES, "cond": {"$ne": ["$$this.state", "RUNNING"]}}}
    untouched = {"$eq": ["$status", "CANCELLED"]} if action == "cancel" else _says("retried")
    unchanged = {"$eq": [{"$ifNull": ["$change_ids", []]}, {"$ifNull": ["$$new.change_ids", []]}]}
    ours: rules.Expression = {"$and": [{"$eq": ["$bulk_id", id_]}, unchanged, untouched]}
    if action == "delete":
        ours = {"$gt": ["$task_state.deleted_time", None]}  # what is left of it, for the sake of a handler at work
    # Whose handler is on its way out keeps its place.
    state = {"$mergeObjects": ["$$new.task_state", {"leaving": rules.sent_away(now)}]}
    back = {"$mergeObjects": ["$$new", {"task_state": state}]}
    merge: Document = {
        "into": store.tasks,
        "on": "_id",
        "whenMatched": [
            # The copy in place of the task, if nothing has happened to it since; else the task as it is.
            {"$replaceWith": {"$cond": [ours, back, "$$ROOT"]}},
            # Status and times follow where it was put back.
            *rules.derivation(now, where={"$eq": ["$bulk_id", {"$literal": undone}]}),
        ],
        "whenNotMatched": "insert" if action == "delete" else "discard",
    }
    # What is no task can have been deleted, too. The rule cannot judge it: it comes back as it was, with the mark.
    as_it_was: Document = {"into": store.tasks, "on": "_id", "whenMatched": "keepExisting", "whenNotMatched": "insert"}
    strangers: list[Document] = [
        # Of these copies those that are no tasks, in their old place.
        {"$replaceWith": "$task"},
        # (Tasks come back by the rule, below.)
        {"$match": {"$nor": [WELL_FORMED]}},
        # With the mark by which they are known.
        {"$set": {"bulk_id": {"$literal": undone}}},
        # Where nobody has put anything since.
        {"$merge": as_it_was},
    ]
    has_line = {"$gt": [rules.LINE, None]}
    place = {"$multiply": [{"$toLong": now}, NUMBERS_PER_MS]}
    copies = store.driver.collection(store.undo)
    restored = seen = 0
    last = f"{id_}/"
    while True:
        cursor = copies.find({"of": id_, "_id": {"$gt": last}}, {"_id": 1}).sort("_id", 1).limit(batch)
        ids = [copy["_id"] for copy in await cursor.to_list(None)]
        if not ids:
            return restored, seen - restored
        # One batch of the copies.
        these: Document = {"$match": {"_id": {"$in": ids}}}
        stages: list[Document] = [
            these,
            # Each as the task that it was.
            {"$replaceWith": "$task"},
            # What the rule can judge.
            {"$match": WELL_FORMED},
            # Without the executions that ran: their workers have let go. With the mark by which they are known.
            {
                "$set": {
                    "task_state": {
                        "worker_states": entries,
                        "leaving": "$$REMOVE",
                        "place": {"$cond": [has_line, place, "$$REMOVE"]},
                    },
                    # One with a sequence key has left its line meanwhile, whatever it was: if it waits, it joins it again.
                    "status": {"$cond": [has_line, "DELETED", {"$ifNull": ["$status", "$$REMOVE"]}]},
                    "event": stamp("restored", now),
                    "bulk_id": {"$literal": undone},
                }
            },
            # Status and the like as they follow from that.
            *prepared(rules.derivation, now),
            # In place of what stands there, if nothing has happened to it since.
            {"$merge": merge},
        ]
        await store.driver.rows(store.undo, stages)
        if action == "delete":
            await store.driver.rows(store.undo, [these, *strangers])
        tasks = {"_id": {"$in": [copy.removeprefix(f"{id_}/") for copy in ids]}, "bulk_id": undone}
        restored += await store.driver.collection(store.tasks).count_documents(tasks)
        seen += len(ids)
        last = ids[-1]


async def forget(store: Store, id_: str) -> None:
    """Write down that an action was undone, and drop its copies."""
    # When, by the server's clock: from then on it is not offered for undoing.
    await store.driver.collection(store.actions).update_one({"_id": id_}, [{"$set": {"undone_time": store.now}}])
    await store.driver.collection(store.undo).delete_many({"of": id_})


def _says(kind: str) -> rules.Expression:
    return {"$regexMatch": {"input": {"$ifNull": ["$event", ""]}, "regex": starting_with([kind])["$regex"]}}
