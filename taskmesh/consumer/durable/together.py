"""What is recorded together, in one transaction: SUCCESSes, and the tasks that their handlers published.

While one transaction is under way the next outcomes collect, then go as one. So handlers that all publish the same key do not
abort each other's transactions, and their publications of that key are one statement. Different workers may still conflict;
then each waits for a random time.

If the process dies before the commit, nothing of it remains, and the tasks run again when their leases are over. If it dies
after the commit, everything is there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.timing import random_up_to
from taskmesh.model.errors import LeaseLost
from taskmesh.store import Store
from taskmesh.store.apart import put
from taskmesh.store.clock import ServerClock
from taskmesh.store.finish import Outcome, finish, whether_recorded
from taskmesh.store.mongodb.server_errors import is_over_deadline, is_passing
from taskmesh.store.publication import Publication
from taskmesh.store.publish import publish_in_session

logger = logging.getLogger("taskmesh.finisher")

_MAX_BATCH = 200
_MAX_BATCH_BYTES = 6_000_000
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0
_PATIENT_TRIES = 3
"""After so many failed tries a set no longer holds up the next: it goes on beside it."""
_UNKNOWN_COMMIT = "UnknownTransactionCommitResult"
_COMMIT_TRIES_S = 30.0
_PAUSE_S = 0.05


@dataclass(eq=False)
class _Waiting:
    execution: Execution
    outcome: Outcome
    publications: Sequence[Publication]
    answer: asyncio.Future[None]
    refused: bool = False
    """Whether the server has refused it once by itself."""

    @property
    def size(self) -> int:
        return self.outcome.size + sum(publication.size for publication in self.publications)

    def publishes(self, id_: str | None) -> bool:
        return any(publication.id == id_ for publication in self.publications)

    def end(self, error: BaseException | None = None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(None)
        else:
            self.answer.set_exception(error)


class Together:
    """The outcomes of one consumer whose handlers published something, on their way to the database."""

    def __init__(self, store: Store, worker_id: str, clock: ServerClock) -> None:
        self._store = store
        self._worker_id = worker_id
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._beside: set[asyncio.Task[None]] = set()

    async def record(self, execution: Execution, outcome: Outcome) -> None:
        """Record SUCCESS and what the handler published, as one. Tries again while the database is unreliable.

        Raises `LeaseLost`, or what makes publishing impossible.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(execution, outcome, list(execution.publications), loop.create_future())
        self._waiting.append(waiting)
        if self._sending is None:
            self._sending = loop.create_task(self._send(), name="taskmesh record together")
        await waiting.answer

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch: list[_Waiting] = []
                size = 0
                while self._waiting and len(batch) < _MAX_BATCH and (not batch or size < _MAX_BATCH_BYTES):
                    size += self._waiting[0].size
                    batch.append(self._waiting.popleft())
                await self._record(batch, beside=False)
        finally:
            self._sending = None

    async def _record(self, todo: list[_Waiting], *, beside: bool) -> None:
        """Record a set until each item is answered, or continues on its own. Every item gets an answer."""
        try:
            await self._try(todo, beside=beside)
        except Exception as error:
            logger.exception("unexpected error while recording %s outcomes with what they publish", len(todo))
            for waiting in todo:
                waiting.end(error)

    async def _try(self, todo: list[_Waiting], *, beside: bool) -> None:
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

    def _launch(self, part: list[_Waiting]) -> None:
        recording = asyncio.get_running_loop().create_task(self._record(part, beside=True))
        self._beside.add(recording)
        recording.add_done_callback(self._beside.discard)

    async def _write(self, todo: Sequence[_Waiting], at: list[str]) -> None:
        publications = [publication for waiting in todo for publication in waiting.publications]
        await put(self._store, [value for waiting in todo for value in waiting.outcome.apart])
        async with self._store.driver.session() as session:
            await self._store.driver.start_transaction(session)
            outcomes = [waiting.outcome for waiting in todo]
            await write(self._store, session, self._worker_id, outcomes, publications, self._clock.now(), at.append)
            at.clear()
            await commit(self._store, session, asyncio.sleep)

    async def _refused(self, todo: list[_Waiting], at: str | None, error: Exception, *, beside: bool) -> None:
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

    async def _still_to_do(self, todo: list[_Waiting]) -> list[_Waiting]:
        """Ask what became of them. Return those that are still held."""
        try:
            answers = await whether_recorded(self._store, [waiting.outcome for waiting in todo])
        except PyMongoError:
            answers = {}
        left: list[_Waiting] = []
        for waiting in todo:
            answer = answers.get(waiting.outcome, "held")
            if answer == "recorded":
                waiting.end()
            elif answer == "lost" or time.monotonic() > waiting.execution.lease_until:
                waiting.end(lost(waiting.outcome))
            else:
                left.append(waiting)
        return left


def _passes(error: Exception) -> bool:
    return isinstance(error, PyMongoError) and (is_passing(error) or is_over_deadline(error))


def _parts(todo: list[_Waiting], at: str | None) -> list[list[_Waiting]]:
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
            raise lost(of_kind[0])
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


def lost(outcome: Outcome) -> LeaseLost:
    """Return the error for an execution that has lost its task."""
    name, _, key = outcome.id.partition(":")
    return LeaseLost(f"task {name!r} {key!r}: the lease was lost, so nothing of the transaction remains")
