"""What is recorded together, in one transaction: what several executions write at one moment that concerns other tasks, too.

While one transaction is under way the next items collect, then go as one. So handlers that all publish the same key do not
abort each other's transactions, and their publications of that key are one statement. Different workers may still conflict;
then each waits for a random time.

If the process dies before the commit, nothing of it remains, and the tasks run again when their leases are over. If it dies
after the commit, everything is there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from pymongo.errors import PyMongoError

from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.timing import random_up_to
from taskmesh.model.errors import LeaseLost
from taskmesh.store import Store
from taskmesh.store.apart import put
from taskmesh.store.clock import ServerClock
from taskmesh.store.finish import Outcome, Recorded, finish, whether_recorded
from taskmesh.store.mongodb.server_errors import is_over_deadline, is_passing
from taskmesh.store.publication import Publication
from taskmesh.store.publish import publish_in_session

logger = logging.getLogger("taskmesh.finisher")

_MAX_BATCH = 200
_MAX_BATCH_BYTES = 6_000_000
MAX_PUBLICATIONS = 1_000
"""A set to which no more is added: that many tasks are published or started in it."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0
_PATIENT_TRIES = 3
"""After so many failed tries a set no longer holds up the next: it goes on beside it."""
_UNKNOWN_COMMIT = "UnknownTransactionCommitResult"
_COMMIT_TRIES_S = 30.0
_PAUSE_S = 0.05


@dataclass(eq=False, kw_only=True)
class Waiting(ABC):
    """What one execution wants written, on its way."""

    id: str
    """The execution's task."""
    publications: Sequence[Publication]
    outcome: Outcome | None = None
    """What is written to its own task, once that is known."""
    alone: bool = False
    """Whether it is a set by itself, which neither waits for others nor holds them up."""
    refused: bool = False
    """Whether the server has refused it once by itself."""
    answer: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    @abstractmethod
    def lease_until(self) -> float:
        """Until when (monotonic) the execution's writes count."""

    @property
    def size(self) -> int:
        """About how many bytes it has."""
        own = 0 if self.outcome is None else self.outcome.size
        return own + sum(publication.size for publication in self.publications)

    def publishes(self, id_: str | None) -> bool:
        """Whether it publishes this task."""
        return any(publication.id == id_ for publication in self.publications)

    def end(self, error: BaseException | None = None) -> None:
        """Answer whoever waits for it."""
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(None)
        else:
            self.answer.set_exception(error)


W = TypeVar("W", bound=Waiting)


class Together(ABC, Generic[W]):
    """What one consumer's executions write together, on its way to the database."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[W] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._beside: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def write(self, session: Any, todo: Sequence[W], touching: Callable[[str], object]) -> None:
        """Write a set in an open transaction. Items that are impossible are ended, and the others written.

        Raises `LeaseLost` if an execution is no longer held. `touching` is called with the task that is about to be published.
        """

    @abstractmethod
    async def whether_recorded(self, outcomes: Sequence[Outcome]) -> dict[Outcome, Recorded]:
        """Return what became of outcomes whose transaction was not answered, or did not count for all."""

    async def record(self, waiting: W) -> None:
        """Write it, and what else waits at the moment. Tries again while the database is unreliable.

        Raises `LeaseLost`, or what makes publishing impossible.
        """
        if waiting.alone:
            self._launch([waiting])
        else:
            self._waiting.append(waiting)
            if self._sending is None:
                self._sending = asyncio.get_running_loop().create_task(self._send(), name="taskmesh record together")
        await waiting.answer

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch: list[W] = []
                size = count = 0
                while (
                    self._waiting and len(batch) < _MAX_BATCH and size < _MAX_BATCH_BYTES and count < MAX_PUBLICATIONS
                ):
                    size += self._waiting[0].size
                    count += len(self._waiting[0].publications)
                    batch.append(self._waiting.popleft())
                await self._record(batch, beside=False)
        finally:
            self._sending = None

    async def _record(self, todo: list[W], *, beside: bool) -> None:
        """Record a set until each item is answered, or continues on its own. Every item gets an answer."""
        try:
            await self._try(todo, beside=beside)
        except Exception as error:
            logger.exception("unexpected error while %s executions recorded what they publish or start", len(todo))
            for waiting in todo:
                waiting.end(error)

    async def _try(self, todo: list[W], *, beside: bool) -> None:
        """Write a set, if necessary again and again. `beside`: it no longer holds up what comes next.

        What the server refuses, or what conflicts again and again, is separated from the rest.
        """
        longest = _FIRST_WAIT_S
        tried = 0
        while todo:
            at: list[str] = []
            try:
                await self._write(todo, at)
            except LeaseLost:  # of some of them: `_still_to_do` tells which
                pass
            except Exception as error:  # noqa: BLE001 — what is published may be refused in any way
                if not _passes(error):
                    await self._refused(todo, at[-1] if at else None, error, beside=beside)
                    return
                tried += 1
                await asyncio.sleep(random_up_to(longest))
                longest = min(longest * 2, _LONGEST_WAIT_S)
            else:
                for waiting in todo:
                    waiting.end()
                return
            todo = await self._still_to_do(todo)
            if tried >= _PATIENT_TRIES and todo:
                parts = (
                    [todo] if at and all(w.publishes(at[-1]) for w in todo) else _parts(todo, at[-1] if at else None)
                )
                if len(parts) > 1 or not beside:
                    for part in parts:
                        self._launch(part)
                    return

    def _launch(self, part: list[W]) -> None:
        recording = asyncio.get_running_loop().create_task(self._record(part, beside=True))
        self._beside.add(recording)
        recording.add_done_callback(self._beside.discard)

    async def _write(self, todo: Sequence[W], at: list[str]) -> None:
        async with self._store.driver.session() as session:
            await self._store.driver.start_transaction(session)
            await self.write(session, todo, at.append)
            at.clear()
            await commit(self._store, session, asyncio.sleep)

    async def _refused(self, todo: list[W], at: str | None, error: Exception, *, beside: bool) -> None:
        if len(todo) == 1:
            if todo[0].refused or not isinstance(error, PyMongoError):
                todo[0].end(error)
                return
            # A refusal makes the handler run again, so this is tried once more, with what the database has by then.
            todo[0].refused = True
            await self._record(todo, beside=beside)
            return
        for part in _parts(todo, at):
            await self._record(part, beside=beside)

    async def _still_to_do(self, todo: list[W]) -> list[W]:
        """Ask what became of them. Return those that are still held."""
        outcomes = [waiting.outcome for waiting in todo if waiting.outcome is not None]
        try:
            answers = await self.whether_recorded(outcomes) if outcomes else {}
        except PyMongoError:
            answers = {}
        left: list[W] = []
        for waiting in todo:
            answer = "held" if waiting.outcome is None else answers.get(waiting.outcome, "held")
            if answer == "recorded":
                waiting.end()
            elif answer == "lost" or time.monotonic() > waiting.lease_until:
                waiting.end(lost(waiting.id))
            else:
                left.append(waiting)
        return left


@dataclass(eq=False, kw_only=True)
class Succeeding(Waiting):
    """An execution that ends as SUCCESS."""

    execution: Execution

    @property
    def lease_until(self) -> float:
        """See `Waiting.lease_until`."""
        return self.execution.lease_until


class Successes(Together[Succeeding]):
    """SUCCESSes, each with what its handler published."""

    def __init__(self, store: Store, worker_id: str, clock: ServerClock) -> None:
        super().__init__(store)
        self._worker_id = worker_id
        self._clock = clock

    async def record_success(self, execution: Execution, outcome: Outcome) -> None:
        """Record SUCCESS and what the handler published, as one. Raises as `record` does."""
        publications = list(execution.publications)
        await self.record(Succeeding(id=execution.id, execution=execution, publications=publications, outcome=outcome))

    async def write(self, session: Any, todo: Sequence[Succeeding], touching: Callable[[str], object]) -> None:
        """See `Together.write`."""
        outcomes = [waiting.outcome for waiting in todo if waiting.outcome is not None]
        await put(self._store, [value for outcome in outcomes for value in outcome.apart])
        publications = [publication for waiting in todo for publication in waiting.publications]
        await write(self._store, session, self._worker_id, outcomes, publications, self._clock.now(), touching)

    async def whether_recorded(self, outcomes: Sequence[Outcome]) -> dict[Outcome, Recorded]:
        """See `Together.whether_recorded`."""
        return await whether_recorded(self._store, outcomes)


def _passes(error: Exception) -> bool:
    return isinstance(error, PyMongoError) and (is_passing(error) or is_over_deadline(error))


def _parts(todo: list[W], at: str | None) -> list[list[W]]:
    """Separate those that publish the task at which it failed; if that is unknown, or all of them do, return two halves."""
    with_it = [waiting for waiting in todo if waiting.publishes(at)]
    rest = [waiting for waiting in todo if not waiting.publishes(at)]
    parts = [rest, with_it] if with_it and rest else [todo[::2], todo[1::2]]
    return [part for part in parts if part]


async def write(
    store: Store,
    session: Any,
    worker_id: str,
    outcomes: Sequence[Outcome],
    publications: Sequence[Publication],
    now: datetime,
    touching: Callable[[str], object] = lambda _: None,
) -> None:
    """Write outcomes and publications in a transaction. Raises `LeaseLost` if one of the executions is no longer held.

    `touching` is called with the task that is about to be published.
    """
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
        if await finish(store, worker_id, of_kind, session=session) < len(of_kind):
            raise lost(of_kind[0].id)
    await publish_in_session(store, publications, now, session, touching)


async def commit(store: Store, session: Any, pause: Callable[[float], Awaitable[None]]) -> None:
    """Commit, and again as long as the answer is unknown, which the server allows for. After an error, nothing stays locked."""
    give_up = time.monotonic() + _COMMIT_TRIES_S
    while True:
        try:
            await store.driver.commit(session)
        except PyMongoError as error:
            if not error.has_error_label(_UNKNOWN_COMMIT) or time.monotonic() > give_up:
                await store.driver.kill(session)  # to the driver it has ended, which no longer aborts it
                raise
            await pause(_PAUSE_S)
        else:
            return


def lost(id_: str) -> LeaseLost:
    """Return the error for an execution that has lost its task."""
    name, _, key = id_.partition(":")
    return LeaseLost(f"task {name!r} {key!r}: the lease was lost, so nothing of the transaction remains")
