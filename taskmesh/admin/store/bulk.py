"""Bulk: retry, cancel and delete by a filter, in batches; nothing that does not match the filter is ever changed.

Each batch uses the whole filter again in its update, so that a task that changed since it was found is left alone.
"""

from __future__ import annotations

from typing import Literal

from taskmesh.admin.filters import TaskFilter
from taskmesh.admin.store import undo
from taskmesh.admin.store.index_choice import conditions, status_fits
from taskmesh.store import control, rules
from taskmesh.store.finish import cancel_pipeline
from taskmesh.store.malformed import STRANGE, WELL_FORMED
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.relations import dependencies
from taskmesh.store.store import Store

Action = Literal["retry", "cancel", "delete"]
_ROUNDS = 10
_CONCERNS_NOBODY: Document = {
    "task_state.worker_states.state": {"$ne": "RUNNING"},
    "task_state.leaving": {"$exists": False},
    "task_state.dependents": {"$exists": False},
    "task_state.ask_time": {"$exists": False},
    "$or": [{"task_state.line": {"$exists": False}}, {"status": {"$nin": ["INIT", "RUNNING"]}}],
}
"""No handler is at work, the task has no dependents, and nothing is behind it in a sequence: it can be removed silently."""


async def act(
    store: Store, action: Action, which: TaskFilter, batch: list[str], *, undo_id: str | None = None, undo_ms: int = 0
) -> int:
    """Change those of a batch that still match. Return how many were changed. Running ones are not retried.

    `undo_id`: copy them first, under this action. Those that change between the copy and the action are copied again; one that
    changes all the time is left alone in the end.
    """
    query = _query(store, action, which, batch)
    if undo_id is None:
        return await _change(store, action, query, batch, {})
    done = 0
    left = query if action == "delete" else {"$and": [query, {"bulk_id": {"$ne": undo_id}}]}
    for round_ in range(_ROUNDS):
        states = await undo.keep(store, undo_id, left, undo_ms)
        if not states:
            break
        as_copied = {"$and": [left, {"_id": {"$in": list(states)}}, {"$expr": undo.as_copied(states)}]}
        done += await _change(store, action, as_copied, batch, {"bulk_id": undo_id})
        if round_ == 0:  # looking again is for those that changed, not for what is published under their keys meanwhile
            left = {"$and": [left, {"publish_id": {"$in": list(undo.publications_of(states))}}]}
    return done


def _query(store: Store, action: Action, which: TaskFilter, batch: list[str]) -> Document:
    now = store.now
    status = rules.status_on_reading(now)
    fits: list[rules.Expression] = [status_fits(which, status)]
    if action == "retry":
        fits.append({"$ne": [status, "RUNNING"]})
    elif action == "cancel":
        fits.append({"$in": [status, ["INIT", "RUNNING"]]})
    # A document that is no task of ours would make the rule's expressions fail, and the whole batch with it.
    ours = [] if action == "delete" else [WELL_FORMED]
    return {"$and": [{"_id": {"$in": batch}}, conditions(which, now), *ours, {"$expr": {"$and": fits}}]}


async def _change(store: Store, action: Action, query: Document, batch: list[str], mark: Document) -> int:
    """Change the matching tasks of a batch. `mark`: fields that say by which action."""
    now = store.now
    # By this mark an action recognises what it has done already.
    marking: list[Document] = [{"$set": mark}] if mark else []
    if action == "delete":
        tasks = store.driver.collection(store.tasks)
        removable = {"$or": [_CONCERNS_NOBODY, STRANGE]}
        removed = await tasks.delete_many({"$and": [query, removable]})
        # This announces it to running executions, which keep their places, and to the task's dependents.
        reply = await store.update({"$and": [query, WELL_FORMED]}, [*marking, *control.deletion_pipeline(now)])
        await dependencies.tell(store, batch)
        await tasks.delete_many({"_id": {"$in": batch}, **control.DELETED_AND_EMPTY})
        return int(removed.deleted_count) + int(reply["n"])
    pipeline = control.retry_pipeline(now) if action == "retry" else cancel_pipeline(now)
    count = int((await store.update(query, [*marking, *pipeline]))["n"])
    await dependencies.tell(store, batch)
    return count
