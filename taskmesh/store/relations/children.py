"""Children: tasks that a handler has started, and waits for. A child names its parent, and keeps its own outcome.

A child is inserted and recorded in its parent in one transaction. It is kept until the parent is finished. If a parent ends in
any other way than SUCCESS, its unfinished children are cancelled, except for those that were started `detached`. They remember
that they were cancelled with their parent: if that is retried, and wants them again, they go on, too
(`control.restore_children`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from taskmesh.store import rules
from taskmesh.store.finish import cancel_pipeline
from taskmesh.store.grouped import Grouped
from taskmesh.store.mongodb.driver import Document, restored
from taskmesh.store.pipeline.by_id import MOST_IDS, in_parts
from taskmesh.store.pipeline.prepared import prepared
from taskmesh.store.store import Store

CANCELLED_WITH_PARENT = "task_state.cancelled_with_parent"
_UNFINISHED = ["INIT", "RUNNING"]
_DEADLINE_MS = 2_000


async def parents_of(store: Store, ids: Sequence[str], session: Any) -> dict[str, str | None]:
    """Return which of these tasks exist, and whose child each is. For use inside a transaction."""
    fields = {"parent": "$task_state.parent", "forgotten": rules.is_forgotten(store.now)}
    cursor = store.driver.collection(store.tasks).find(
        {"_id": {"$in": list(ids)}}, fields, session=session, batch_size=MOST_IDS
    )
    found = await cursor.to_list(None)
    return {task["_id"]: task.get("parent") for task in found if not task["forgotten"]}


async def ends(store: Store, ids: Sequence[str]) -> dict[str, Document]:
    """Return the outcome of each that exists: its `status`, its first `value`, and the `reasons` of its failures.

    `with_parent`: whether it was cancelled with its parent.
    """
    success = {"$filter": {"input": rules.ENTRIES, "cond": {"$eq": ["$$this.state", "SUCCESS"]}}}
    fails = {"$filter": {"input": rules.ENTRIES, "cond": {"$eq": ["$$this.state", "FAIL"]}}}
    fields: Document = {
        "status": 1,
        "value": {"$first": {"$map": {"input": success, "in": "$$this.returns"}}},
        "reasons": {"$map": {"input": fails, "in": {"$ifNull": ["$$this.fail_reason", ""]}}},
        "with_parent": {"$eq": [f"${CANCELLED_WITH_PARENT}", True]},
    }
    found: dict[str, Document] = {}
    for part in in_parts(ids):
        rows = await store.find({"_id": {"$in": part}}, fields, majority=True)
        found |= {row["_id"]: restored(row) for row in rows}
    return found


async def pending(store: Store, parents: Sequence[str]) -> dict[str, dict[str, bool]]:
    """Return the unfinished children of each of these tasks that has any, and whether they name it as a dependent."""
    fields: Document = {
        "parent": "$task_state.parent",
        "named": {"$in": ["$task_state.parent", {"$ifNull": [rules.DEPENDENTS, []]}]},
    }
    query: Document = {"task_state.parent": {"$in": list(parents)}, "task_state.pending": True}
    found: dict[str, dict[str, bool]] = {}
    for row in await store.find(query, fields, majority=True):
        found.setdefault(row["parent"], {})[row["_id"]] = row["named"]
    return found


async def name_parent(
    store: Store, found: Mapping[str, bool], ids: Collection[str], parent_id: str, naming: Sequence[Document]
) -> bool:
    """Let these of the parent's `pending` children, and no others, name it as a dependent. Return whether they did before.

    They name it from the beginning, so mostly there is nothing to write. If they did not, look at them again: one may have
    ended meanwhile. `naming`: see `dependencies.naming`.
    """
    mine: Document = {"task_state.parent": parent_id, "task_state.pending": True}
    for part in in_parts([id_ for id_, named in found.items() if named and id_ not in ids]):
        rest = {"$setDifference": [rules.DEPENDENTS, [{"$literal": parent_id}]]}
        # Its dependents without its parent, which may wait for it later.
        unlinking: list[Document] = [
            {"$set": {"task_state.dependents": rest}},
            *prepared(rules.derivation, store.now),
        ]
        await store.update({"_id": {"$in": part}, **mine}, unlinking, _DEADLINE_MS)
    unnamed = [id_ for id_, named in found.items() if not named and id_ in ids]
    for part in in_parts(unnamed):
        await store.update({"_id": {"$in": part}, **mine}, naming, _DEADLINE_MS)
    return not unnamed


async def cancel(store: Store, parents: Sequence[str]) -> list[str]:
    """Cancel the unfinished children of these tasks, except for detached ones. Return which. Safe to repeat."""
    query = {
        "task_state.parent": {"$in": list(parents)},
        "task_state.detached": {"$exists": False},
        "status": {"$in": _UNFINISHED},
    }
    ids = [row["_id"] for row in await store.find(query, {"_id": 1})]
    # What they were cancelled by, and that they are.
    pipeline = [{"$set": {CANCELLED_WITH_PARENT: True}}, *cancel_pipeline(store.now)]
    for part in in_parts(ids):
        await store.update({"_id": {"$in": part}, **query}, pipeline, _DEADLINE_MS)
    return ids


class Ends(Grouped[str, Document]):
    """`ends`, for the children of several parents at one moment."""

    copied = True

    async def call(self, ids: Sequence[str]) -> Mapping[str, Document]:
        """See `ends`."""
        return await ends(self._store, ids)


class Pending(Grouped[str, Mapping[str, bool]]):
    """`pending`, for several parents at one moment."""

    async def call(self, ids: Sequence[str]) -> Mapping[str, Mapping[str, bool]]:
        """See `pending`."""
        return await pending(self._store, ids)
