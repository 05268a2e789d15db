"""Children: tasks that a handler has started, and waits for. A child names its parent; what has come of it, it keeps itself.

That a child exists and that its parent has recorded it are one transaction. It is kept until the parent is finished. Of a parent
that ends in any other way than SUCCESS, the unfinished children are cancelled, but for those that were started `detached`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from taskmesh.store import rules
from taskmesh.store.driver import CODEC, Document
from taskmesh.store.finish import cancel_pipeline
from taskmesh.store.store import Store

_SET = 1_000
_UNFINISHED = ["INIT", "RUNNING"]
_DEADLINE_MS = 2_000


async def parent_of(store: Store, id_: str, session: Any) -> tuple[bool, str | None]:
    """Return whether there is a task under this `_id`, and whose child it is; inside a transaction."""
    fields = {"parent": "$task_state.parent", "forgotten": rules.is_forgotten(store.now)}
    cursor = store.driver.collection(store.tasks).find({"_id": id_}, fields, session=session)
    found = await cursor.to_list(1)
    if not found or found[0]["forgotten"]:
        return False, None
    return True, found[0].get("parent")


async def unfinished(store: Store, ids: Sequence[str]) -> int:
    """Count which of these are not finished yet, as a majority has it."""
    left = 0
    for part in _parts(ids):
        query = {"_id": {"$in": list(part)}, "status": {"$in": _UNFINISHED}}
        left += len(await store.find(query, {"_id": 1}, majority=True))
    return left


async def ends(store: Store, ids: Sequence[str]) -> dict[str, Document]:
    """Return what came of each that is there: its `status`, its first `value`, and the `reasons` of its failures."""
    success = {"$filter": {"input": rules.ENTRIES, "cond": {"$eq": ["$$this.state", "SUCCESS"]}}}
    fails = {"$filter": {"input": rules.ENTRIES, "cond": {"$eq": ["$$this.state", "FAIL"]}}}
    fields: Document = {
        "status": 1,
        "value": {"$first": {"$map": {"input": success, "in": "$$this.returns"}}},
        "reasons": {"$map": {"input": fails, "in": {"$ifNull": ["$$this.fail_reason", ""]}}},
    }
    found: dict[str, Document] = {}
    for part in _parts(ids):
        rows = await store.find({"_id": {"$in": list(part)}}, fields, majority=True, codec=CODEC)
        found |= {row["_id"]: row for row in rows}
    return found


async def link(store: Store, ids: Sequence[str], parent_id: str, linking: Sequence[Document]) -> None:
    """Let these children name their parent as one that waits for them (`dependencies.linking_pipeline`)."""
    for part in _parts(ids):
        query = {
            "_id": {"$in": list(part)},
            "task_state.parent": parent_id,
            "task_state.dependents": {"$ne": parent_id},
        }
        await store.update(query, linking, _DEADLINE_MS)


async def cancel(store: Store, parents: Sequence[str]) -> list[str]:
    """Cancel the unfinished children of these tasks, but for detached ones; return which. Safe to repeat."""
    query = {
        "task_state.parent": {"$in": list(parents)},
        "task_state.detached": {"$exists": False},
        "status": {"$in": _UNFINISHED},
    }
    ids = [row["_id"] for row in await store.find(query, {"_id": 1})]
    for part in _parts(ids):
        await store.update({"_id": {"$in": list(part)}, **query}, cancel_pipeline(store.now), _DEADLINE_MS)
    return ids


def _parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), _SET):
        yield ids[start : start + _SET]
