"""Inserts of one moment go to the database as one command (group commit), each with an answer of its own.

An insert that comes while nothing is under way goes at the end of this turn of the loop; while commands are under way the next
inserts collect, then go together. A command that takes long, probably for a locked key, holds up no others: they go beside it.
What the server refuses as a whole is divided until it concerns a single insert.

Nothing is repeated here: a caller that gets an error publishes again, and is recognised by its `publish_id`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pymongo.errors import InvalidOperation, OperationFailure

from taskmesh.store.mongodb.driver import TOGETHER_DEADLINE_MS, Driver
from taskmesh.store.mongodb.server_errors import is_passing, own_copy

_MAX_BATCH = 1_000
_MAX_BATCH_BYTES = 8_000_000
_LARGE = 100
"""So many documents of one caller are a command by themselves: others would gain nothing."""
_MAX_IN_FLIGHT = 2
_HOLDS_UP_S = 0.1
"""How long a command counts as in flight. If it takes longer, the next goes beside it."""
_PARTS = 8


@dataclass(slots=True, eq=False)
class _Insert:
    """What one caller wants to insert."""

    documents: Sequence[Mapping[str, Any]]
    size: int
    deadline_ms: int
    answer: asyncio.Future[Mapping[str, Any]]

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def succeed(self, reply: Mapping[str, Any]) -> None:
        if not self.answer.done():
            self.answer.set_result(reply)


class Inserts:
    """The inserts into one collection, on their way to the database."""

    def __init__(self, driver: Driver, collection: str) -> None:
        self._driver = driver
        self._collection = collection
        self._waiting: deque[_Insert] = deque()
        self._in_flight: dict[object, asyncio.TimerHandle] = {}
        self._send_planned = False

    async def insert(
        self, documents: Sequence[Mapping[str, Any]], size: int, deadline_ms: int, *, alone: bool = False
    ) -> Mapping[str, Any]:
        """Insert documents of about `size` bytes. Return the server's reply as if no other inserts had been in the command.

        It may have `writeErrors` (their `index` counts in `documents`) and a `writeConcernError`; any other error is raised.
        `alone`: in a command of their own, beside all others. If a caller is cancelled, others' inserts are not affected; its
        own may have been made.
        """
        each = _Insert(documents, size, deadline_ms, asyncio.get_running_loop().create_future())
        if alone or len(documents) >= _LARGE:
            self._driver.calls.go_on_alone(self._insert([each]))
        else:
            self._waiting.append(each)
            if not self._send_planned and len(self._in_flight) < _MAX_IN_FLIGHT:
                # At the end of this turn of the loop, so that what starts together is inserted together.
                self._send_planned = True
                asyncio.get_running_loop().call_soon(self._send)
        return await each.answer

    def _send(self) -> None:
        self._send_planned = False
        while len(self._in_flight) < _MAX_IN_FLIGHT and (batch := self._next_batch()):
            self._driver.calls.go_on_alone(self._insert_in_turn(batch))

    def _next_batch(self) -> list[_Insert]:
        batch: list[_Insert] = []
        count = size = 0
        while self._waiting:
            each = self._waiting[0]
            count, size = count + len(each.documents), size + each.size
            if batch and (count > _MAX_BATCH or size > _MAX_BATCH_BYTES):
                break
            self._waiting.popleft()
            if each.answer.done():  # its caller was cancelled: nobody wants it any more
                count, size = count - len(each.documents), size - each.size
            else:
                batch.append(each)
        return batch

    async def _insert_in_turn(self, batch: list[_Insert]) -> None:
        """Insert, and let the next go when that is done, or takes long."""
        turn = object()
        self._in_flight[turn] = asyncio.get_running_loop().call_later(_HOLDS_UP_S, self._turn_over, turn)
        try:
            await self._insert(batch)
        finally:
            self._turn_over(turn)

    def _turn_over(self, turn: object) -> None:
        if (timer := self._in_flight.pop(turn, None)) is not None:
            timer.cancel()
            self._send()

    async def _insert(self, batch: list[_Insert]) -> None:
        """Insert a set, until each of it is answered."""
        try:
            reply = await self._reply(batch)
        except Exception as error:  # noqa: BLE001 — also what cannot be encoded: it is its publisher's to hear
            if len(batch) > 1 and not is_passing(error):
                await asyncio.gather(*(self._insert(batch[i::_PARTS]) for i in range(min(_PARTS, len(batch)))))
                return
            for each in batch:
                each.fail(own_copy(error))
        except BaseException:  # the connection is closed, or the loop ends
            for each in batch:
                each.fail(InvalidOperation("the mesh was closed while this was published"))
            raise
        else:
            _answer(batch, reply)

    async def _reply(self, batch: list[_Insert]) -> Mapping[str, Any]:
        """Insert, and return the server's reply.

        This is a command of our own, since the driver's inserts have no deadline: one of a key that is in somebody's open
        transaction waits for its end (measured: 84 s). The driver does not repeat it after a network error.
        """
        documents = [document for each in batch for document in each.documents]
        deadline_ms = min(each.deadline_ms for each in batch)
        if len(batch) > 1:
            deadline_ms = min(deadline_ms, TOGETHER_DEADLINE_MS + len(documents))
        command = {
            "insert": self._collection,
            "documents": documents,
            "ordered": False,
            "writeConcern": {"w": "majority"},
            "maxTimeMS": deadline_ms,
        }
        try:
            return await self._driver.command(command)
        except OperationFailure as error:
            reply = error.details
            # A command that was refused as a whole may mention a majority, too, for which it has not waited.
            if reply is not None and reply.get("ok") and reply.keys() & {"writeErrors", "writeConcernError"}:
                return reply
            raise


def _answer(batch: Sequence[_Insert], reply: Mapping[str, Any]) -> None:
    """Tell each what the reply says about its own documents."""
    failed = reply.get("writeErrors")
    if not failed:
        for each in batch:
            each.succeed(reply)
        return
    ends = accumulate(len(each.documents) for each in batch)
    for each, end in zip(batch, ends, strict=True):
        start = end - len(each.documents)
        own = [{**error, "index": error["index"] - start} for error in failed if start <= error["index"] < end]
        each.succeed({**reply, "writeErrors": own})
