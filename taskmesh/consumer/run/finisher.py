"""The finisher: records outcomes, and the records that executions write on their way, many at once (group commit).

While writes are in flight the next outcomes collect, then go together; an idle consumer sends at once. An outcome leaves the
finisher in one of two ways: recorded, or lost because its lease was lost. Until then it is written again and again.

If the process dies before the write, the lease runs out and the task runs again; after the write, the task is finished.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.consumer.write_times import WriteTimes
from taskmesh.store import Store, steps
from taskmesh.store.apart import put
from taskmesh.store.finish import Kind, Outcome, finish, whether_recorded
from taskmesh.store.mongodb.server_errors import is_about_the_document, is_about_us, is_over_deadline, is_passing

logger = logging.getLogger("taskmesh.finisher")

_MAX_BATCH = 1_000
_MAX_BATCH_BYTES = 6_000_000
_MAX_IN_FLIGHT = 2
_FIRST_DEADLINE_MS = 1_000
"""Short, since one locked document holds up the whole set. Then the set is split."""
_LATER_DEADLINE_MS = 5_000
_LONGEST_PAUSE_S = 1.0
_LONGEST_REFUSED_PAUSE_S = 10.0
_REFUSED_FOR_S = 300.0
"""How long an unknown error is treated as temporary. After that the document is blamed, and the execution FAILs."""
_MAX_REASON_CHARS = 1_000

Item = tuple[Outcome, Callable[[bool], None]]


def _ignore(_: bool) -> None: ...


class Finisher:
    """The outcomes of one consumer, on their way to the database."""

    def __init__(self, store: Store, worker_id: str, write_times: WriteTimes) -> None:
        self._store = store
        self._write_times = write_times
        self._worker_id = worker_id
        self._waiting: dict[Kind, deque[Item]] = {}
        self._in_flight: set[asyncio.Task[None]] = set()
        self._beside: set[asyncio.Task[None]] = set()
        """Writes of single outcomes that were held up. They continue on their own, so that they hold up nothing else."""
        self._told_outage = False
        self._send_planned = False
        self._last_step = ""
        """The task whose step was recorded last."""

    def release(self, id_: str, running_id: str, done: Callable[[bool], None] = _ignore) -> None:
        """Give a claimed task back, uncharged."""
        self.add(Outcome(id_, running_id, "released"), done)

    def add(self, outcome: Outcome, done: Callable[[bool], None] = _ignore) -> None:
        """Record an outcome. `done` is called with whether it was recorded; if not, its lease was lost before."""
        self._waiting.setdefault(outcome.kind, deque()).append((outcome, done))
        if not self._send_planned and len(self._in_flight) < _MAX_IN_FLIGHT:
            # At the end of this turn of the loop, so that outcomes of one moment are written together.
            self._send_planned = True
            asyncio.get_running_loop().call_soon(self._send)

    async def record_step(self, outcome: Outcome) -> bool:
        """Record a step of an execution that goes on. Return whether it was recorded; if not, its lease was lost before.

        If the record before was of the same task and nothing is on its way, the step is written at once: waiting for others
        would only cost turns of the event loop.
        """
        again, self._last_step = self._last_step == outcome.id, outcome.id
        if again and not self._waiting and all(sending.done() for sending in self._in_flight):
            try:
                if await steps.record(self._store, self._worker_id, [outcome], deadline_ms=self._first_deadline_ms()):
                    return True
            except Exception:  # below, it is written again, which shows what is wrong
                logger.debug("recording a step of %s at once failed", outcome.id, exc_info=True)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.add(outcome, partial(_tell, answer))
        return await answer

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is in flight."""
        return not self._in_flight and not self._beside and not self._waiting

    async def drain(self) -> None:
        """Wait until everything that has been added so far is recorded or lost."""
        while not self.idle:
            self._send()
            if under_way := self._in_flight | self._beside:
                await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)

    def _send(self) -> None:
        self._send_planned = False
        while self._waiting and len(self._in_flight) < _MAX_IN_FLIGHT:
            kind, waiting = next(iter(self._waiting.items()))
            batch = _next_batch(waiting)
            del self._waiting[kind]
            if waiting:  # behind the others, so that nothing waits for as long as there is more of this kind
                self._waiting[kind] = waiting
            self._launch(self._record(batch), self._in_flight)

    def _launch(self, recording: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        sending = self._store.driver.calls.go_on_alone(recording, "taskmesh finish")
        tasks.add(sending)
        sending.add_done_callback(self._sent)

    def _sent(self, sending: asyncio.Task[None]) -> None:
        self._in_flight.discard(sending)
        self._beside.discard(sending)
        if not sending.cancelled() and (error := sending.exception()) is not None:
            logger.error("unexpected error while recording outcomes", exc_info=error)
        self._send()

    async def _record(self, batch: Sequence[Item], *, beside: bool = False) -> None:
        """Write a batch, if necessary again and again, until each outcome is recorded or lost.

        `beside`: a single one, as above.
        """
        pause = 0.05
        began = time.monotonic()
        todo = list(batch)
        while todo:
            split = False
            deadline_ms = _LATER_DEADLINE_MS if beside else self._first_deadline_ms()
            sent = time.monotonic()
            try:
                outcomes = [outcome for outcome, _ in todo]
                await put(self._store, [value for outcome in outcomes for value in outcome.apart])
                write = steps.record if outcomes[0].kind == "stepped" else finish
                if await write(self._store, self._worker_id, outcomes, deadline_ms=deadline_ms) == len(todo):
                    self._write_times.met(time.monotonic() - sent)
                    self._tell(todo, recorded=True)
                    return
            except Exception as error:  # also an outcome that cannot be encoded
                refused = not is_over_deadline(error)
                if not refused and not beside:
                    self._write_times.missed(deadline_ms)
                if is_passing(error) or is_about_us(error):
                    self._tell_outage(error)
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, _LONGEST_PAUSE_S)
                elif len(todo) > 1:
                    split = True
                elif refused and (is_about_the_document(error) or time.monotonic() - began > _REFUSED_FOR_S):
                    if todo[0][0].kind not in ("succeeded", "moved"):
                        logger.exception("the outcome of %s cannot be recorded", todo[0][0].id)
                        self._tell(todo, recorded=False)
                        return
                    todo = [_failed_instead(*todo[0], error)]
                    began = time.monotonic()
                elif not beside:
                    self._launch(self._record(todo, beside=True), self._beside)
                    return
                elif refused:
                    logger.warning("recording the outcome of %s was refused: %.200s", todo[0][0].id, error)
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, _LONGEST_REFUSED_PAUSE_S)
            todo = await self._still_to_do(todo)
            if split and len(todo) > 1:
                parts = [todo[i::8] for i in range(min(8, len(todo)))]
                await asyncio.gather(*(self._record(part) for part in parts))
                return

    def _first_deadline_ms(self) -> int:
        return self._write_times.deadline_ms(_FIRST_DEADLINE_MS, _LATER_DEADLINE_MS)

    async def _still_to_do(self, todo: list[Item]) -> list[Item]:
        """Ask what became of outcomes whose write did not affect all of them. Return those that are still held."""
        try:
            ask = steps.whether_recorded if todo[0][0].kind == "stepped" else whether_recorded
            answers = await ask(self._store, [outcome for outcome, _ in todo])
        except PyMongoError:
            return todo
        self._told_outage = False
        self._tell([item for item in todo if answers[item[0]] == "recorded"], recorded=True)
        self._tell([item for item in todo if answers[item[0]] == "lost"], recorded=False)
        return [item for item in todo if answers[item[0]] == "held"]

    def _tell(self, items: list[Item], *, recorded: bool) -> None:
        for _, done in items:
            done(recorded)

    def _tell_outage(self, error: Exception) -> None:
        if not self._told_outage:
            logger.warning(
                "recording outcomes failed (%s: %.200s): retrying until it succeeds", type(error).__name__, error
            )
            self._told_outage = True


def _tell(answer: asyncio.Future[bool], recorded: bool) -> None:
    if not answer.done():  # else whoever waited for it was cancelled
        answer.set_result(recorded)


def _failed_instead(outcome: Outcome, done: Callable[[bool], None], error: Exception) -> Item:
    """FAIL the execution instead: its result fits by itself, but not together with the rest of the document."""
    reason = f"the handler's result cannot be stored with the task: {error}"[:_MAX_REASON_CHARS]
    logger.error("task %s failed: %s", outcome.id, reason, extra={"running_id": outcome.running_id})
    entry = {"fail_reason": reason, "retry_jitter": 0.0}
    return Outcome(outcome.id, outcome.running_id, "failed", entry), done


def _next_batch(waiting: deque[Item]) -> list[Item]:
    batch: list[Item] = []
    size = 0
    while waiting and len(batch) < _MAX_BATCH and (not batch or size + waiting[0][0].size <= _MAX_BATCH_BYTES):
        size += waiting[0][0].size
        batch.append(waiting.popleft())
    return batch
