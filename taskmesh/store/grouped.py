"""Calls of one moment go to the database as one: what several callers ask, or want done, for some keys each (ids, mostly)."""

from __future__ import annotations

import asyncio
import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from taskmesh.store.mongodb.server_errors import own_copy
from taskmesh.store.store import Store

_MANY = 100
"""A call for so many tasks goes by itself: little is saved by others in it, which would wait for it."""
_MOST = 1_000
_HOLDS_UP_S = 0.1
"""If a call takes longer, perhaps since somebody's transaction holds a task, the next goes beside it."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Grouped(ABC, Generic[K, V]):
    """Calls of one kind. Create it in the event loop in which it is used.

    While a call is under way the next collect, so an answer is never older than its question. A call that takes long holds up
    no others.
    """

    copied = False
    """Whether of what two ask for each gets a copy, since they may change it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[tuple[Collection[K], asyncio.Future[Mapping[K, V]]]] = deque()
        self._calling: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def call(self, keys: Sequence[K], /) -> Mapping[K, V]:
        """Do it for these, each of which occurs once, and return what is found of them."""

    async def of(self, keys: Collection[K], count: int | None = None) -> Mapping[K, V]:
        """Do it for these. Return what is found of them; perhaps of others as well. Raises the database's error.

        `count`: how many tasks are to be read, if not as many as there are `keys`.
        """
        if (len(keys) if count is None else count) > _MANY:
            return await self.call(list(keys))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Mapping[K, V]] = loop.create_future()
        self._waiting.append((keys, answer))
        if self._calling is None:
            self._calling = loop.create_task(self._call_all(), name=f"taskmesh {type(self).__name__} in turn")
        return await answer

    async def _call_all(self) -> None:
        try:
            while self._waiting:
                call = asyncio.get_running_loop().create_task(self._call_next(), name=f"taskmesh {type(self).__name__}")
                self._under_way.add(call)
                call.add_done_callback(self._under_way.discard)
                await asyncio.wait([call], timeout=_HOLDS_UP_S)
        finally:
            self._calling = None

    async def _call_next(self) -> None:
        together: list[tuple[Collection[K], asyncio.Future[Mapping[K, V]]]] = []
        keys: dict[K, None] = {}
        while self._waiting and len(keys) < _MOST:
            asked, answer = self._waiting.popleft()
            if not answer.done():  # otherwise its caller was cancelled: nobody wants it any more
                keys.update(dict.fromkeys(asked))
                together.append((asked, answer))
        try:
            found = await self.call(list(keys))
        except Exception as error:  # noqa: BLE001 — whatever it is, those who asked hear of it
            for _, answer in together:
                if not answer.done():  # (whoever waited for it was cancelled)
                    answer.set_exception(own_copy(error))
        else:
            self._answer(together, found)

    def _answer(
        self, together: Sequence[tuple[Collection[K], asyncio.Future[Mapping[K, V]]]], found: Mapping[K, V]
    ) -> None:
        given = set[K]()
        for keys, answer in together:
            if answer.done():
                continue
            own = {key: copy.deepcopy(found[key]) for key in given.intersection(keys) if key in found}
            answer.set_result({**found, **own} if own else found)
            if self.copied:
                given.update(keys)
