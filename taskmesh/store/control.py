"""Control: cancel, retry, delete and re-tune one task, at any moment of its life.

| | INIT | RUNNING | SUCCESS, FAIL, EXPIRED | CANCELLED |
| --- | --- | --- | --- | --- |
| cancel | CANCELLED | CANCELLED, the execution is stopped | unchanged | unchanged |
| retry | due at once | refused: `TaskRunning` | INIT, entries and counts dropped | INIT, entries and counts dropped |
| delete | gone | gone, the execution is stopped | gone | gone |
| set_option | changed | changed; a worker no longer named stops | changed (retention counts) | changed |
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bson import ObjectId
from pymongo.errors import OperationFailure

from taskmesh.model.errors import TaskNotFound
from taskmesh.store import rules
from taskmesh.store.finish import cancel_pipeline
from taskmesh.store.malformed import STRANGE
from taskmesh.store.mongodb.driver import CODEC, Document
from taskmesh.store.mongodb.server_errors import is_over_deadline, is_passing, patiently
from taskmesh.store.pipeline import repeated
from taskmesh.store.pipeline.by_id import in_parts
from taskmesh.store.pipeline.event_stamp import stamp
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.pipeline.restart import first_params_if, fresh_state, restarted_state
from taskmesh.store.relations import children, dependencies
from taskmesh.store.store import Store


async def cancel(store: Store, id_: str) -> Document | None:
    """Cancel an unfinished task. Return it as it was written; None if there is none. Raises as `_change` does."""
    now = store.now
    unfinished = rules.with_facts(now, {"$in": [rules.status(now), ["INIT", "RUNNING"]]})
    cancelled = await _change(store, id_, unfinished, cancel_pipeline(now))
    await dependencies.tell(store, [id_] if cancelled else [])
    return cancelled


async def _read(store: Store, id_: str) -> Document | None:
    """Return the fields by which a change recognises this task, and itself if it is sent again. None: there is no such task."""
    found = await patiently(lambda: store.find({"_id": id_}, repeated.FIELDS))
    return found[0] if found else None


async def _change(store: Store, id_: str, condition: rules.Expression, pipeline: list[Document]) -> Document | None:
    """Change the task with this `_id`. None if there is none, or it does not meet the condition.

    Returns the task as it was written, before anybody else can have changed it: a worker may claim it at once.

    Tries again while the database is unreliable. A change is made only once, whatever became of the task since, and never to
    another task. Raises `TaskNotFound` if the task was deleted before it was changed, whatever has its key now.
    """
    task = await _read(store, id_)
    if task is None:
        return None
    change_id = ObjectId()
    query = {**repeated.unchanged_by(task, change_id), "$expr": condition}
    # The change's own id is stored in the task: a repetition recognises that the change was made.
    stages = [*pipeline, {"$set": {"change_ids": repeated.with_change(change_id)}}]

    async def change() -> Document | None:
        changed = await store.update_one(query, stages)
        if changed is not None:
            return changed
        found = await store.find(repeated.same(task), {}, codec=CODEC)
        if not found:
            name, _, key = id_.partition(":")
            raise TaskNotFound(
                f"the task {name!r} {key!r} was deleted meanwhile: look at what stands under its key now"
            )
        return found[0] if repeated.is_changed_by(found[0], change_id) else None

    return await patiently(change)


async def retry(store: Store, id_: str, *, fresh: bool = False) -> Document | None:
    """Make a finished task INIT again, or a waiting one due at once. Return it as it was written.

    None if it is running or there is none. Its records stay, except for errors, and it stays in its stage. `fresh`: it starts
    in its first stage, as if nobody had tried. Raises as `_change` does.
    """
    now = store.now
    not_running = rules.with_facts(now, {"$ne": [rules.status(now), "RUNNING"]})
    kept = {"$not": [rules.is_forgotten(now)]}
    pipeline = retry_pipeline(now, fresh=fresh)
    retried = await _change(store, id_, {"$and": [kept, not_running]}, pipeline)
    await dependencies.tell(store, [id_] if retried else [])
    return retried


def retry_pipeline(now: rules.Expression, *, fresh: bool = False) -> list[Document]:
    """Make a task that is not running INIT again, or due at once if it is INIT and not suspended."""
    recorded = {} if fresh else values_kept()
    waiting: rules.Expression = rules.with_facts(now, {"$eq": [rules.status(now), "INIT"]})
    # A waiting task keeps its entries and counts; only its delay is removed.
    due = {
        "$mergeObjects": [
            "$task_state",
            {"start_time": None, "worker_states": _without_delay(now), **recorded},
        ]
    }
    if fresh:
        waiting = False
    # An expiry that has passed would end the retried task at once, so it is removed. One in the future stays.
    expire_time = {
        "$cond": [
            {"$lte": [{"$ifNull": ["$task_state.expire_time", rules.NEVER]}, now]},
            None,
            "$task_state.expire_time",
        ]
    }
    # A finished task starts its life again: no entries, no counts; it need not repeat what it has recorded.
    times = {"start_time": None, "expire_time": expire_time}
    restarted = restarted_state(now, times) if fresh else fresh_state(now, {**times, **recorded})
    return [
        # One of the two, and a stamp that wakes the workers.
        {
            "$set": {
                "task_state": {"$cond": [waiting, due, restarted]},
                "event": stamp("retried", now),
                **({"params": first_params_if(True)} if fresh else {}),
            }
        },
        # The delays of `Retry` and `Snooze` are removed: merging objects cannot do that.
        {"$unset": "task_state.resume_time"},
        # Its dependencies are linked again, and checked: one may have been deleted and published again.
        {"$set": {"task_state.ask_time": {"$cond": [_waits, now, {"$ifNull": [rules.ASK_TIME, "$$REMOVE"]}]}}},
        # Status and times follow.
        *prepared(rules.derivation, now),
    ]


async def restore_children(store: Store, ids: Sequence[str], parent: str) -> None:
    """Retry those of these children that were cancelled with this parent, which goes on by now. Safe to repeat."""
    cancelled = {"task_state.parent": parent, children.CANCELLED_WITH_PARENT: True, "status": "CANCELLED"}
    for part in in_parts(ids):
        await store.update({"_id": {"$in": part}, **cancelled}, retry_pipeline(store.now))
    await dependencies.tell(store, ids)
    [found] = await store.find({"_id": parent}, {"status": 1}) or [{"status": "DELETED"}]
    if found["status"] not in ("INIT", "RUNNING"):  # cancelled again meanwhile, when these could not be found yet
        await children.cancel(store, [parent])


_waits: rules.Expression = {
    "$and": [{"$in": ["$task_state.waits_for", ["fail", "wait"]]}, {"$gt": ["$task_state.after", None]}]
}


def values_kept() -> Document:
    """Return the fields of `task_state` with what executions have recorded, except for errors, and with signals."""
    kept = {"$filter": {"input": rules.STEPS, "cond": {"$not": [{"$gt": ["$$this.error", None]}]}}}
    recorded = {"steps": kept, "steps_bytes": {"$sum": {"$map": {"input": kept, "in": "$$this.size"}}}}
    fields: Document = {name: {"$cond": [rules.BEGUN, value, "$$REMOVE"]} for name, value in recorded.items()}
    return fields | {name: {"$ifNull": [f"$task_state.{name}", "$$REMOVE"]} for name in ("signals", "signals_bytes")}


def _without_delay(now: rules.Expression) -> rules.Expression:
    """Return the entries, with the delays after failures removed."""
    over = {"$mergeObjects": ["$$this", {"retry_time": now}]}
    return {"$map": {"input": rules.ENTRIES, "in": {"$cond": [{"$eq": ["$$this.state", "FAIL"]}, over, "$$this"]}}}


def deletion_pipeline(now: rules.Expression) -> list[Document]:
    """Make a task invisible to readers and free its key. Only the places of handlers at work are kept."""
    state = {"deleted_time": now, "worker_states": {"$literal": []}, "leaving": rules.sent_away(now)}
    return [
        # The mark that makes every reader skip it, and the stamp that reaches workers and waiters.
        {"$set": {"task_state": state, "event": stamp("deleted", now)}},
        # Users' data is removed now, even if the document has to stay for a handler's place.
        {"$unset": ["params", "trace", "task_state.steps", "task_state.signals"]},
        # Status and times follow: DELETED, and removed by the TTL monitor when the last place is free.
        *prepared(rules.derivation, now),
    ]


NOT_DELETED: Document = {"task_state.deleted_time": None}
DELETED_AND_EMPTY: Document = {
    "task_state.deleted_time": {"$exists": True},
    "task_state.leaving": {"$exists": False},
    "task_state.ask_time": {"$exists": False},
}
"""The document contains nothing that anybody needs: no handler's place, and no news for dependents."""


_removing: set[asyncio.Future[bool]] = set()
"""Deletions under way; the loop itself holds only weak references."""


async def delete(store: Store, id_: str) -> bool:
    """Remove the task with this `_id`, but none that is published after it. False if there is none.

    A change stream shows only the `_id` of a deletion, so a message is left in the task first, which makes it invisible. Then
    the document is removed, at once or, if a handler is at work, when that has ended or its lease has. Tries again while the
    database is unreliable, and continues if the caller is cancelled: a handler that deletes its own task is cancelled as soon
    as the message has reached it.
    """
    removing = asyncio.ensure_future(_delete(store, id_))
    _removing.add(removing)
    removing.add_done_callback(_removing.discard)
    return await asyncio.shield(removing)


async def _delete(store: Store, id_: str) -> bool:
    task = await _read(store, id_)
    if task is None:
        return False
    await patiently(lambda: _remove(store, repeated.same(task)))
    return True


async def _remove(store: Store, which: Document) -> None:
    tasks = store.driver.collection(store.tasks)
    try:
        await store.update({**which, **NOT_DELETED}, deletion_pipeline(store.now))
    except OperationFailure as error:
        # Nothing can be computed of a foreign document, and nobody works on it: it is removed as it is.
        if (
            is_passing(error)
            or is_over_deadline(error)
            or not (await tasks.delete_one({**which, **STRANGE})).deleted_count
        ):
            raise
    await dependencies.tell(store, [which["_id"]])
    await tasks.delete_one({**which, **DELETED_AND_EMPTY})


async def set_option(store: Store, id_: str, changes: Document, expected: Document) -> Document | None:
    """Change these fields of the option. Return the task as it was written.

    None if the option is no longer as `expected`, or there is no task. Raises as `_change` does.
    """
    # A field that is not stored has its default, as the reader assumed.
    stored = {name: {"$ifNull": [f"$task_option.{name}", {"$literal": value}]} for name, value in expected.items()}
    same: list[Document] = [{"$eq": [stored[name], {"$literal": value}]} for name, value in expected.items()]
    mark = dependencies.mark_of_option(changes, store.now)
    # If its retention may begin now.
    marked: list[Document] = [{"$set": {"task_state": mark}}] if mark else []
    # The new option, and a stamp that wakes the workers: the change may have opened a gate.
    stages = [*option_stages(changes, store.now), {"$set": {"event": stamp("option_changed", store.now)}}]
    pipeline = [*marked, *stages, *prepared(rules.derivation, store.now)]
    standing = {"$not": [rules.is_forgotten(store.now)]}
    changed = await _change(store, id_, {"$and": [standing, *same]}, pipeline)
    await dependencies.tell(store, [id_] if changed and mark else [])
    return changed


def option_stages(changes: Document, now: rules.Expression, *, literally: bool = True) -> list[Document]:
    """Set these fields of the option; the derived fields have to follow. Not `literally`: set them to expressions of ours.

    A live entry whose worker is no longer allowed is removed at once (released: nothing is counted), but keeps its place until
    its handler has ended.
    """
    allowed = {
        "$or": [
            {"$not": [rules.is_live(now)]},
            {"$eq": ["$task_option.specific_worker_ids", []]},
            {"$in": ["$$this.worker_id", "$task_option.specific_worker_ids"]},
            {"$in": [{"$ifNull": ["$$this.parent", None]}, "$task_option.specific_worker_ids"]},
        ]
    }
    stages: list[Document] = [
        # Only these fields; the others stay. Users' values are literals.
        {
            "$set": {
                "task_option": {n: {"$literal": value} if literally else value for n, value in changes.items()},
            }
        },
    ]
    if "specific_worker_ids" in changes:
        entries = {"$filter": {"input": rules.ENTRIES, "cond": allowed}}
        leaving = rules.sent_away(now, {"$not": [allowed]})
        # A worker that is no longer allowed loses its entry, and keeps its place until its handler has ended.
        stages.append({"$set": {"task_state": {"worker_states": entries, "leaving": leaving}}})
    return stages
