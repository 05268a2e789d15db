"""Definitions: what workers say of their tasks, for publishers without the code. It outlives the worker that wrote it.

One document for each name: `queue`, `option` and, as a text, the JSON `schema` of the params (its fields begin with `$`). Written
when a worker starts, and only what differs; of two versions that of the newest start stands.
"""

from __future__ import annotations

from collections.abc import Mapping

from taskmesh.store.driver import Document
from taskmesh.store.store import Store


async def register(store: Store, definitions: Mapping[str, Document]) -> list[str]:
    """Write what is not registered so already, and return these names. Safe to repeat."""
    known = {document.pop("_id"): document for document in await _read(store, list(definitions))}
    changed = [name for name, document in definitions.items() if known.get(name) != document]
    if changed:
        updates = [
            {
                "q": {"_id": name},
                "u": [{"$replaceWith": {"$literal": {"_id": name, **definitions[name]}}}],
                "upsert": True,
            }
            for name in changed
        ]
        await store.driver.command(
            {"update": store.definitions, "updates": updates, "ordered": False, "writeConcern": {"w": "majority"}}
        )
    return changed


async def read(store: Store, name: str) -> Document | None:
    """Return what is registered of the tasks of this name."""
    found = await _read(store, [name])
    return found[0] if found else None


async def _read(store: Store, names: list[str]) -> list[Document]:
    cursor = store.driver.collection(store.definitions).find({"_id": {"$in": names}})
    return await cursor.to_list(None)  # type: ignore[no-any-return]  # both drivers leave it untyped
