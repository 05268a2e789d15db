"""Upkeep: what somebody has to do once time has passed. One look tells what of it there is to do, which mostly is nothing.

Any worker may do any part of it at any time. What exactly is due, each part finds for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from taskmesh.store import flows, settle
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.relations import dependencies, sequences
from taskmesh.store.store import Store


class Upkeep(StrEnum):
    """What may be due."""

    SETTLE = "settle"
    """Tasks are finished by time alone: `store.settle`."""
    MARKS = "marks"
    """Finished tasks whose dependents have not been told: `store.relations.dependencies`."""
    FLOWS = "flows"
    """Flows that nobody has opened, or that may be empty: `store.flows`."""
    SEQUENCES = "sequences"
    """Lines whose head has been that for long: `store.relations.sequences`."""


async def due(store: Store) -> frozenset[Upkeep]:
    """Return what is due now, in one command."""
    (_, first), *others = _looks(store)
    stages = [
        # The first look. Each brings one document at most, which names the part.
        *first,
        # The other looks, each into an index that is nearly empty.
        *({"$unionWith": {"coll": collection, "pipeline": look}} for collection, look in others),
    ]
    return frozenset(Upkeep(row["due"]) for row in await store.driver.rows(store.tasks, stages))


def _looks(store: Store) -> Iterator[tuple[str, list[Document]]]:
    for part, collection, query in (
        (Upkeep.SETTLE, store.tasks, settle.due(store)),
        (Upkeep.MARKS, store.tasks, dependencies.due(store, dependencies.MARKS_FOUND_AFTER_MS)),
        (Upkeep.FLOWS, store.flows, flows.unopened(store)),
        (Upkeep.FLOWS, store.flows, flows.unchecked(store)),
        (Upkeep.SEQUENCES, store.sequences, sequences.unchecked(store)),
    ):
        # One that is due tells as much as all of them.
        yield collection, [{"$match": query}, {"$limit": 1}, {"$project": {"_id": 0, "due": part.value}}]
