"""Starts: the children that one execution starts. Those of one moment go out together, in one transaction with their records."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from taskmesh.consumer.durable.transactions import Transactions
from taskmesh.consumer.run.recording import Recorder
from taskmesh.model.errors import TaskFailed, TaskMeshError, TaskNotFound
from taskmesh.store.mongodb.server_errors import own_copy
from taskmesh.store.publication import Publication

MAX_STARTS = 1_000
"""The most children of one transaction."""
_MAX_BYTES = 8_000_000


class Starts:
    """What one execution is about to start. Belongs to the event loop."""

    def __init__(self, transactions: Transactions, parent: str, journal: Recorder) -> None:
        self._transactions = transactions
        self._parent = parent
        self._journal = journal
        self._waiting: dict[str, tuple[Publication, asyncio.Future[None]]] = {}
        """By the children's `_id`s."""
        self._sending: asyncio.Task[None] | None = None

    async def add(self, publications: Sequence[Publication]) -> None:
        """Start these children, in sets with what else is started at the moment. Raise the first error."""
        loop = asyncio.get_running_loop()
        answers = []
        for publication in publications:
            if (same := self._waiting.get(publication.id)) is not None:
                answers.append(same[1])
                continue
            answer: asyncio.Future[None] = loop.create_future()
            answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
            self._waiting[publication.id] = publication, answer
            answers.append(answer)
        if answers and self._sending is None:
            sending = self._send_all()
            self._sending = loop.create_task(sending, name=f"starts of task {self._parent}")
        if answers:
            await asyncio.wait(answers)
        for answer in answers:
            answer.result()

    async def _send_all(self) -> None:
        """Start what is waiting, one set at a time: while a set is under way the next collects."""
        try:
            while self._waiting:
                batch: list[tuple[Publication, asyncio.Future[None]]] = []
                size = 0
                for waiting in self._waiting.values():
                    size += waiting[0].size
                    if batch and (len(batch) == MAX_STARTS or size > _MAX_BYTES):
                        break
                    batch.append(waiting)
                await self._send(batch)
                for publication, _ in batch:
                    del self._waiting[publication.id]
        finally:
            self._sending = None

    async def _send(self, batch: Sequence[tuple[Publication, asyncio.Future[None]]]) -> None:
        """Start a set, and answer each caller. What the database refuses is separated from the rest."""
        refused: Mapping[str, Exception] = {}
        try:
            refused = await self._transactions.start_children(self._journal, [publication for publication, _ in batch])
        except Exception as error:  # noqa: BLE001 — whatever it is, the handler hears of it
            of_all = isinstance(error, (TaskMeshError, TaskFailed)) and not isinstance(error, TaskNotFound)
            if len(batch) > 1 and not of_all:
                half = len(batch) // 2
                await self._send(batch[:half])
                await self._send(batch[half:])
                return
            refused = {publication.id: own_copy(error) for publication, _ in batch}
        for publication, answer in batch:
            if answer.done():  # whoever waited for it was cancelled
                continue
            if (why := refused.get(publication.id)) is not None:
                answer.set_exception(why)
            else:
                answer.set_result(None)
