"""Many random documents in a collection, each with its oracle."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

from taskmesh.store import Store, schema
from tests.chaos.reading import ms
from tests.properties.documents import Documents
from tests.properties.oracle import Document, Oracle
from tests.properties.world import BEGIN, shown

SEED = os.environ.get("SEED", "taskmesh")
_COUNT = 2_000


@dataclass(frozen=True)
class Shelf:
    """Documents in the collection, as they were left at `BEGIN`, and an oracle for each."""

    store: Store
    oracles: dict[str, Oracle]

    @property
    def now(self) -> datetime:
        now: datetime = self.store.now
        return now

    def later(self, milliseconds: int) -> None:
        self.store.now = BEGIN + ms(milliseconds)

    async def documents(self) -> dict[str, Document]:
        return {document["_id"]: document for document in await self.store.find({}, {})}


@asynccontextmanager
async def a_shelf(uri: str, database: str) -> AsyncIterator[Shelf]:
    """Draw the documents, and store them."""
    store = Store(uri, database, now=BEGIN)
    try:
        await schema.create_indexes(store)
        documents = list(Documents(SEED, BEGIN).draw(_COUNT))
        await store.driver.collection(store.tasks).insert_many(
            [{name: value for name, value in document.items() if value is not None} for document in documents]
        )
        yield Shelf(store, {document["_id"]: Oracle(document) for document in documents})
    finally:
        await store.close()


def differing(expected: Mapping[str, object], actual: Mapping[str, object]) -> list[str]:
    """The first few differences, in words."""
    assert expected.keys() == actual.keys()
    return [
        f"{id_}: {shown(actual[id_])}, by the oracle {shown(expected[id_])}"
        for id_ in expected
        if expected[id_] != actual[id_]
    ][:5]
