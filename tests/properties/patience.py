"""A store for tests of what is right: on a busy machine a write may take its time, and only a difference fails them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from taskmesh.store import Store
from taskmesh.store.mongodb.driver import Document

PATIENCE_MS = 60_000


class PatientStore(Store):
    """Gives every write more time than the engine would."""

    def update_command(
        self,
        query: Document,
        pipeline: Sequence[Mapping[str, Any]],
        deadline_ms: int = 0,
        let: Document | None = None,
        hint: str | None = None,
    ) -> Document:
        return super().update_command(query, pipeline, max(deadline_ms, PATIENCE_MS), let, hint)

    async def modify(
        self, changes: Sequence[tuple[Document, Document]], deadline_ms: int = 0, session: Any = None
    ) -> int:
        return await super().modify(changes, max(deadline_ms, PATIENCE_MS), session)

    async def insert(
        self, documents: Sequence[Mapping[str, Any]], size: int, deadline_ms: int = 0, *, alone: bool = False
    ) -> Mapping[str, Any]:
        return await super().insert(documents, size, max(deadline_ms, PATIENCE_MS), alone=alone)
