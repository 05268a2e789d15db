"""Stopping a consumer: no more claims; a grace period for what runs; then cancel the rest, and give its tasks back uncharged.

Leases are renewed to the end. If the process dies meanwhile, they run out, and other workers take over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

import anyio

from taskmesh.consumer.claimer import Claimer
from taskmesh.consumer.life import Life
from taskmesh.consumer.run.context import fields_of
from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.run.executions import Executions
from taskmesh.consumer.run.finisher import Finisher
from taskmesh.consumer.run.stop_reasons import Stop

logger = logging.getLogger("taskmesh.consumer")

_HANDLERS_END_WITHIN_S = 5.0
_RELEASE_DEADLINE_S = 10.0
_CHECK_EVERY_S = 0.5


class Stopping:
    """The end of one consumer's work."""

    def __init__(self, life: Life, claimer: Claimer, executions: Executions, finisher: Finisher) -> None:
        self._life = life
        self._claimer = claimer
        self._executions = executions
        self._finisher = finisher

    async def wind_down(self, grace_ms: int) -> None:
        """Wait for claims that are under way and for what runs, then cancel and release the rest."""
        answered_by = time.monotonic() + _RELEASE_DEADLINE_S
        if not await _in_time(self._claimer.drain(), lambda: answered_by):
            logger.warning("some claims got no reply: tasks they may have won are taken over when their leases run out")
        for execution in list(self._executions.values()):
            if execution.loop is not None and execution.loop.is_singleton:  # it would not end: another worker goes on
                execution.stop(Stop.WORKER_STOPS)
        await self._wait_for_executions(grace_ms)
        self._stop_all()
        await self._wait_for_handlers()
        began = time.monotonic()
        if not await _in_time(self._all_recorded(), lambda: self._recordable_until(began)):
            logger.error("the database is unavailable: outcomes are lost, and their tasks will run again")

    def _stop_all(self) -> None:
        for execution in list(self._executions.values()):
            execution.stop(Stop.WORKER_STOPS)

    async def _wait_for_executions(self, grace_ms: int) -> None:
        """Wait until nothing runs, or the grace period is over. A later, shorter period counts from when it was requested."""
        life, freed = self._life, self._executions.freed
        deadline = time.monotonic() + grace_ms / 1000
        while self._executions:
            life.stop_asked_again.clear()  # before the grace period is read, so that a change since the stop began is not lost
            deadline = min(deadline, time.monotonic() + life.grace_ms / 1000)
            if time.monotonic() >= deadline:
                return
            waits = {asyncio.ensure_future(freed.wait()), asyncio.ensure_future(life.stop_asked_again.wait())}
            freed.clear()
            await asyncio.wait(waits, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def _wait_for_handlers(self) -> None:
        """Wait for cancelled handlers, and for what follows them, but not for ever.

        A handler that goes on is left behind, and fenced; the hook `after` is cut short, so that the outcome is recorded.
        """
        deadline = time.monotonic() + _HANDLERS_END_WITHIN_S
        while (left := _at_work(self._executions.values())) and time.monotonic() < deadline:
            await asyncio.wait(left, timeout=min(_CHECK_EVERY_S, deadline - time.monotonic()))
            self._stop_all()  # one whose transaction was about to commit could not be stopped before
        for execution in list(self._executions.values()):
            if execution.ended:
                execution.cut_hook_short()
            else:
                logger.error(
                    "the handler of task %s ignores its cancellation: giving the task back",
                    execution.id,
                    extra=fields_of(execution),
                )
                self._finisher.release(execution.id, execution.running_id)

    async def _all_recorded(self) -> None:
        """Wait until every decided outcome is recorded, or lost."""
        while left := _at_work(execution for execution in self._executions.values() if execution.ended):
            await asyncio.wait(left)
        await self._finisher.drain()

    def _recordable_until(self, began: float) -> float:
        """Return until when outcomes can be recorded: as long as their leases last; less, if the worker has to stop at once."""
        leases = [execution.lease_until for execution in self._executions.values()] if self._life.grace_ms else []
        return max([began + _RELEASE_DEADLINE_S, *leases])


def _at_work(executions: Iterable[Execution]) -> list[asyncio.Task[None]]:
    """Return the asyncio tasks that still have to hand an outcome to the finisher, or record it themselves.

    A task that is done goes on with its done callback, in this turn of the loop.
    """
    tasks = (execution.pipeline for execution in executions if not execution.recorded_or_lost)
    return [task for task in tasks if task is not None]


async def _in_time(ending: Awaitable[None], deadline: Callable[[], float]) -> bool:
    """Wait for this up to a deadline (monotonic), which may change. False if it was not done by then, and is given up."""
    task = asyncio.ensure_future(ending)
    while not task.done() and time.monotonic() < deadline():
        await asyncio.wait([task], timeout=_CHECK_EVERY_S)
    if task.done():
        task.result()
        return True
    task.cancel()
    return False


async def unless_it_takes_too_long(ending: Awaitable[None], within_s: float = _RELEASE_DEADLINE_S) -> None:
    """Await this even while we are being cancelled, in an asyncio task of its own, up to a deadline."""
    task = asyncio.ensure_future(ending)
    with anyio.CancelScope(shield=True):
        await asyncio.wait([task], timeout=within_s)
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        logger.error("unexpected error while stopping", exc_info=error)
