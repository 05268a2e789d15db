"""Repeated verbs: a verb whose answer was lost is sent again, but done once, and only to the task that it was meant for.

That is the publication that had the key when the verb was called: one published after it has another `publish_id`. Whether it
was done is recognised by the verb's own `change_id`, which stays in the task while others change it, up to eight times.
"""

from __future__ import annotations

from bson import ObjectId

from taskmesh.store import rules
from taskmesh.store.mongodb.driver import Document

_KEPT_CHANGES = 8

_KNOWN: rules.Expression = {"$ifNull": ["$change_ids", []]}

FIELDS: Document = {"publish_id": 1, "change_ids": 1}
"""The fields of a task that are needed to bind a change to it."""


def same(task: Document) -> Document:
    """Return the query for this task, and for none published later under its key."""
    return {"_id": task["_id"], "publish_id": task.get("publish_id")}


def unchanged_by(task: Document, change_id: ObjectId) -> Document:
    """Return the query for this task as long as this change has not been made."""
    return {**same(task), "change_ids": {"$ne": change_id}}


def is_changed_by(task: Document, change_id: ObjectId) -> bool:
    """Whether the change has been made to the task that was read."""
    return change_id in (task.get("change_ids") or ())


def with_change(change_id: rules.Expression) -> rules.Expression:
    """Return `change_ids` with this one added."""
    return {"$slice": [{"$concatArrays": [_KNOWN, [change_id]]}, -_KEPT_CHANGES]}


def has_change(change_id: rules.Expression) -> rules.Expression:
    """Whether the change has been made."""
    return {"$in": [change_id, _KNOWN]}
