"""Calls of one moment go to the database as one: what several callers ask, or want done, for some tasks each."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, TypeVar

from taskmesh.store.mongodb.server_errors import own_copy

V = TypeVar("V")
_MANY = 100
"""A call for so many tasks goes by itself: little is saved by others in it, which would wait for it."""
_MOST = 1_000


class Grouped(ABC, Generic[V]):
    """Calls of one kind. Create it in the event loop in which it is used.

    While a call is under way the next collect, so an answer is never older than its question.
    """

    separate = False
    """Whether what two ask for is read for each, since they may change what they get."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Collection[str], asyncio.Future[Mapping[str, V]]]] = deque()
        self._calling: asyncio.Task[None] | None = None

    @abstractmethod
    async def call(self, ids: Sequence[str]) -> Mapping[str, V]:
        """Do it for these tasks, and return what is found of them."""

    async def of(self, ids: Collection[str], count: int | None = None) -> Mapping[str, V]:
        """Do it for these tasks. Return what is found of them; perhaps of others as well. Raises the database's error.

        `count`: how many tasks are to be read, if not as many as there are `ids`.
        """
        if (len(ids) if count is None else count) > _MANY:
            return await self.call(list(ids))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Mapping[str, V]] = loop.create_future()
        self._waiting.append((ids, answer))
        if self._calling is None:
            self._calling = loop.create_task(self._call_all(), name=f"taskmesh {type(self).__name__}")
        return await answer

    async def _call_all(self) -> None:
        try:
            while self._waiting:
                ids: set[str] = set()
                answers: list[asyncio.Future[Mapping[str, V]]] = []
                while self._waiting and len(ids) < _MOST:
                    if self.separate and not ids.isdisjoint(self._waiting[0][0]):
                        break
                    wanted, answer = self._waiting.popleft()
                    ids.update(wanted)
                    answers.append(answer)
                await self._call(sorted(ids), answers)
        finally:
            self._calling = None

    async def _call(self, ids: Sequence[str], answers: Sequence[asyncio.Future[Mapping[str, V]]]) -> None:
        found: Mapping[str, V] | Exception
        try:
            found = await self.call(ids)
        except Exception as error:  # noqa: BLE001 — whatever it is, those who asked hear of it
            found = error
        for answer in answers:
            if answer.done():  # whoever waited for it was cancelled
                continue
            if isinstance(found, Exception):
                answer.set_exception(own_copy(found))
            else:
                answer.set_result(found)
