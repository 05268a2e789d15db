"""Reads: what executions ask about their children. Those of one moment go out together, as one query."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, TypeVar

from taskmesh.store import Store
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import own_copy
from taskmesh.store.relations import children

V = TypeVar("V")
_MANY = 100
"""So many children of one caller are a query by themselves: little is saved by others in it."""
_MOST = 1_000


class Reads(ABC, Generic[V]):
    """Reads of one kind. Create it in the event loop in which it is used.

    While a query is under way the next reads collect, so an answer is never older than its question.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[tuple[Collection[str], asyncio.Future[Mapping[str, V]]]] = deque()
        self._reading: asyncio.Task[None] | None = None

    @abstractmethod
    async def query(self, ids: Sequence[str]) -> Mapping[str, V]:
        """Return what is found of these tasks."""

    async def of(self, ids: Collection[str], count: int) -> Mapping[str, V]:
        """Return what is found of these tasks; perhaps of others as well. Raises the database's error.

        `count`: how many children that is about.
        """
        if count > _MANY:
            return await self.query(list(ids))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Mapping[str, V]] = loop.create_future()
        self._waiting.append((ids, answer))
        if self._reading is None:
            self._reading = loop.create_task(self._read_all(), name="taskmesh read about children")
        return await answer

    async def _read_all(self) -> None:
        try:
            while self._waiting:
                ids: set[str] = set()
                answers: list[asyncio.Future[Mapping[str, V]]] = []
                # What two ask for is read for each, since handlers may change what they get.
                while self._waiting and len(ids) < _MOST and ids.isdisjoint(self._waiting[0][0]):
                    wanted, answer = self._waiting.popleft()
                    ids.update(wanted)
                    answers.append(answer)
                await self._read(ids, answers)
        finally:
            self._reading = None

    async def _read(self, ids: Collection[str], answers: Sequence[asyncio.Future[Mapping[str, V]]]) -> None:
        found: Mapping[str, V] | Exception
        try:
            found = await self.query(list(ids))
        except Exception as error:  # noqa: BLE001 — whatever it is, those who asked hear of it
            found = error
        for answer in answers:
            if answer.done():  # whoever waited for it was cancelled
                continue
            if isinstance(found, Exception):
                answer.set_exception(own_copy(found))
            else:
                answer.set_result(found)


class Ends(Reads[Document]):
    """How children have ended: see `children.ends`."""

    async def query(self, ids: Sequence[str]) -> Mapping[str, Document]:
        """See `Reads.query`."""
        return await children.ends(self._store, ids)


class Pending(Reads[dict[str, bool]]):
    """Which children of a parent are unfinished: see `children.pending`."""

    async def query(self, ids: Sequence[str]) -> Mapping[str, dict[str, bool]]:
        """See `Reads.query`."""
        return await children.pending(self._store, ids)
