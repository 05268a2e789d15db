"""Starts: the children that executions start. Those of one moment go out together, in one transaction with their records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from taskmesh.consumer.durable.together import MAX_PUBLICATIONS, Together, Waiting, lost
from taskmesh.consumer.run.recording import Recorder
from taskmesh.model.errors import InvalidKey, TaskFailed, TaskMeshError, TaskNotFound
from taskmesh.store import Store, steps
from taskmesh.store.clock import ServerClock
from taskmesh.store.finish import Outcome, Recorded
from taskmesh.store.mongodb.server_errors import own_copy
from taskmesh.store.publication import Publication
from taskmesh.store.publish import publish_in_session
from taskmesh.store.relations import children

_MAX_BYTES = 8_000_000
_MANY = 100
"""So many children of one parent are a transaction of their own: little is saved by others in it, which would wait for them."""


class Starts:
    """What one execution is about to start. Belongs to the event loop."""

    def __init__(self, started_together: StartedTogether, parent: str, journal: Recorder) -> None:
        self._started_together = started_together
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
                    if batch and (len(batch) == MAX_PUBLICATIONS or size > _MAX_BYTES):
                        break
                    batch.append(waiting)
                await self._send(batch)
                for publication, _ in batch:
                    del self._waiting[publication.id]
        finally:
            self._sending = None

    async def _send(self, batch: Sequence[tuple[Publication, asyncio.Future[None]]]) -> None:
        """Start a set, and answer each caller. What the database refuses is separated from the rest."""
        starting = Starting(
            id=self._parent,
            journal=self._journal,
            publications=[publication for publication, _ in batch],
            alone=len(batch) > _MANY,
        )
        refused: Mapping[str, Exception]
        try:
            async with self._journal.transaction():
                await self._started_together.record(starting)
            refused = starting.strangers
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


@dataclass(eq=False, kw_only=True)
class Starting(Waiting):
    """Children that one parent starts."""

    journal: Recorder
    strangers: dict[str, InvalidKey] = field(default_factory=dict)
    """Those that cannot be its children, with the reason."""

    @property
    def lease_until(self) -> float:
        """See `Waiting.lease_until`."""
        return self.journal.lease_until

    def end(self, error: BaseException | None = None) -> None:
        """Remember the record, if it was written, and answer whoever waits for it."""
        if error is None and self.outcome is not None and not self.answer.done():
            self.journal.remember(self.outcome)
        super().end(error)


class StartedTogether(Together[Starting]):
    """The children that one consumer's executions start. They are inserted and recorded in their parents, as one."""

    def __init__(self, store: Store, worker_id: str, clock: ServerClock) -> None:
        super().__init__(store)
        self._worker_id = worker_id
        self._clock = clock

    async def write(self, session: Any, todo: Sequence[Starting], touching: Callable[[str], object]) -> None:
        """See `Together.write`."""
        ids = [each.id for starting in todo for each in starting.publications]
        there = await children.parents_of(self._store, ids, session)
        parents = dict(there)
        started: list[Publication] = []
        for starting in todo:
            starting.outcome = None
            starting.strangers = {
                each.id: _stranger(each) for each in starting.publications if _is_stranger(each, parents)
            }
            own = [each for each in starting.publications if each.id not in starting.strangers]
            if not own:
                continue
            try:
                starting.outcome = await starting.journal.started([each.id for each in own])
            except (TaskMeshError, TaskFailed) as error:
                starting.end(error)
                continue
            parents.update((each.id, each.parent) for each in own)
            started += own
        for each in started:
            # They exist and are not recorded: from before their parent started over, so they start over, too.
            if each.id in there:
                each.configuration = replace(each.configuration, run_again=True)
        outcomes = [starting.outcome for starting in todo if starting.outcome is not None]
        if outcomes:
            await publish_in_session(self._store, started, self._clock.now(), session, touching)
            if await steps.record_starts(self._store, self._worker_id, outcomes, session) < len(outcomes):
                raise lost(outcomes[0].id)

    async def whether_recorded(self, outcomes: Sequence[Outcome]) -> dict[Outcome, Recorded]:
        """See `Together.whether_recorded`."""
        return await steps.whether_recorded(self._store, outcomes)


def _is_stranger(child: Publication, parents: Mapping[str, str | None]) -> bool:
    return child.id in parents and parents[child.id] != child.parent


def _stranger(child: Publication) -> InvalidKey:
    return InvalidKey(
        f"task {child.name!r} {child.key!r} is there already and was not started by {child.parent!r}, so it cannot be its child: "
        "start it under another key"
    )
