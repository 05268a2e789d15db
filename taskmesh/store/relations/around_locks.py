"""Updates of many tasks that are not held up by the few which somebody's open transaction holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from pymongo.errors import OperationFailure

from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import is_over_deadline
from taskmesh.store.store import Store

DEADLINE_MS = 2_000
_PART_DEADLINE_MS = 300
_PARTS = 8


async def update_around_locks(
    store: Store, ids: Sequence[str], query: Document, pipeline: Sequence[Document]
) -> int | None:
    """Update those of these tasks that match `query`. Return how many did.

    None: somebody's open transaction held one of them, so that a sweep has to do it again. Many of the others are updated then.
    Raises other errors of the database.
    """
    if not ids:
        return 0
    count = await _update(store, ids, query, pipeline, DEADLINE_MS)
    if count is None:
        shuffled = random.sample(list(ids), len(ids))
        parts = [shuffled[i::_PARTS] for i in range(min(_PARTS, len(shuffled)))]
        counts = await asyncio.gather(*(_update(store, part, query, pipeline, _PART_DEADLINE_MS) for part in parts))
        # What the first attempt had written before it met the lock may match no more: the sum says nothing.
        count = None if None in counts else 0
    return count


async def _update(
    store: Store, ids: Sequence[str], query: Document, pipeline: Sequence[Document], deadline_ms: int
) -> int | None:
    try:
        reply = await store.update({"_id": {"$in": list(ids)}, **query}, pipeline, deadline_ms, hint="_id_")
    except OperationFailure as error:
        if not is_over_deadline(error):
            raise
        return None
    return int(reply["n"])
