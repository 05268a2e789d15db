"""Completion: the names and keys that start in a certain way, for people who type. By the index on `_id`, a few steps each."""

from __future__ import annotations

from taskmesh.store.mongodb.driver import Document
from taskmesh.store.store import Store

_LAST = "\U0010ffff"


async def names(store: Store, prefix: str = "", at_most: int = 100) -> list[str]:
    """Return the names of the tasks that are kept, whatever their status: stepping from one to the next, a key for each."""
    found: list[str] = []
    query: Document = {"$gte": prefix, "$lt": prefix + _LAST}
    while len(found) < at_most and (ids := await _ids(store, query, 1)):
        name = ids[0].partition(":")[0]
        found.append(name)
        query["$gte"] = f"{name};"  # the character after the colon
    return found


async def keys(store: Store, name: str, prefix: str = "", at_most: int = 50) -> list[str]:
    """Return the first keys of a name."""
    start = f"{name}:{prefix}"
    ids = await _ids(store, {"$gte": start, "$lt": start + _LAST}, at_most)
    return [id_.partition(":")[2] for id_ in ids]


async def _ids(store: Store, query: Document, at_most: int) -> list[str]:
    cursor = store.driver.collection(store.tasks).find({"_id": query}, {"_id": 1}).sort("_id", 1).limit(at_most)
    return [document["_id"] for document in await cursor.to_list(None)]
