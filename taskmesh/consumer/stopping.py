"""How a consumer stops: no more claims; a grace for what runs; then cancel the rest, and give its tasks back unharmed.

Leases are renewed to the end. If the process dies meanwhile, they run out, and others take over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

import anyio

from taskmesh.consumer.execution import Execution, Stop
from taskmesh.consumer.logs import fields_of
from taskmesh.consumer.parts import Parts

logger = logging.getLogger("taskmesh.consumer")

DEFAULT_GRACE_MS = 30_000
_HANDLERS_END_WITHIN_S = 5.0
_RELEASE_DEADLINE_S = 10.0
_CHECK_EVERY_S = 0.5


class StopWish:
    """Whether a consumer is to stop, and how soon. May be said again: a shorter grace hastens a stop that has begun."""

    def __init__(self) -> None:
        self.grace_ms = DEFAULT_GRACE_MS
        self.said = asyncio.Event()
        self.said_again = asyncio.Event()

    def say(self, grace_ms: int) -> None:
        """Wish it; the shortest grace counts."""
        self.grace_ms = min(self.grace_ms, grace_ms) if self.said.is_set() else grace_ms
        self.said.set()
        self.said_again.set()


async def unless_stopped(wish: StopWish, beginning: Awaitable[None]) -> bool:
    """Do this, unless a stop is wished meanwhile: then it is cut off. Whether it was done."""
    task = asyncio.ensure_future(beginning)
    wished = asyncio.ensure_future(wish.said.wait())
    try:
        await asyncio.wait((task, wished), return_when=asyncio.FIRST_COMPLETED)
    finally:
        wished.cancel()
        task.cancel()
    if task.done():
        task.result()
        return True
    await asyncio.wait((task,), timeout=_CHECK_EVERY_S)
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("stopped before it had begun: %s", error)
    return False


async def wind_down(parts: Parts, wish: StopWish, grace_ms: int) -> None:
    """Claim no more, wait for what runs, then cancel and release the rest."""
    parts.close_claims()
    parts.registration.show_soon()
    answered_by = time.monotonic() + _RELEASE_DEADLINE_S
    if not await _in_time(parts.claimer.drain(), lambda: answered_by):
        logger.warning("claims were not answered: what they may have won is taken over when its leases are over")
    await _wait_for_executions(parts, wish, grace_ms)
    for execution in parts.executions:
        parts.executor.stop(execution, Stop.WORKER_STOPS)
    await _wait_for_handlers(parts)
    began = time.monotonic()
    if not await _in_time(_all_recorded(parts), lambda: _recordable_until(parts, wish, began)):
        logger.error("the database is away: outcomes are given up unrecorded, and their tasks will run again")


async def _wait_for_executions(parts: Parts, wish: StopWish, grace_ms: int) -> None:
    """Wait until nothing runs, or the grace is over; a later, shorter grace counts from then."""
    deadline = time.monotonic() + grace_ms / 1000
    while parts.executions:
        wish.said_again.clear()  # before the grace is read: so what was said since the stop began is not lost
        deadline = min(deadline, time.monotonic() + wish.grace_ms / 1000)
        if time.monotonic() >= deadline:
            return
        waits = {asyncio.ensure_future(parts.freed.wait()), asyncio.ensure_future(wish.said_again.wait())}
        parts.freed.clear()
        await asyncio.wait(waits, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


async def _wait_for_handlers(parts: Parts) -> None:
    """Wait for cancelled handlers, and for what follows them, but not for ever.

    A handler that goes on is left behind, and fenced; the hook `after` is cut short, so that the outcome is recorded.
    """
    deadline = time.monotonic() + _HANDLERS_END_WITHIN_S
    while (left := _at_work(parts.executions)) and time.monotonic() < deadline:
        await asyncio.wait(left, timeout=min(_CHECK_EVERY_S, deadline - time.monotonic()))
        for execution in parts.executions:  # one whose transaction was about to commit could not be stopped before
            parts.executor.stop(execution, Stop.WORKER_STOPS)
    for execution in parts.executions:
        if execution.ended:
            parts.executor.cut_hook_short(execution)
        else:
            logger.error(
                "task %s ignores its cancellation: giving its task back", execution.id, extra=fields_of(execution)
            )
            parts.release(execution.id, execution.running_id)


async def _all_recorded(parts: Parts) -> None:
    """Wait until every outcome that is decided is recorded, or lost."""
    while left := _at_work(execution for execution in parts.executions if execution.ended):
        await asyncio.wait(left)
    await parts.finisher.drain()


def _at_work(executions: Iterable[Execution]) -> list[asyncio.Task[None]]:
    """Whatever of these is still to hand its outcome to the finisher, or records it itself.

    One that is done goes on with its done callback, in this turn of the loop.
    """
    tasks = (execution.pipeline for execution in executions if not execution.recorded_or_lost)
    return [task for task in tasks if task is not None]


def _recordable_until(parts: Parts, wish: StopWish, began: float) -> float:
    """Until when outcomes can be recorded: as long as their leases last; if we are to stop at once, not that long."""
    leases = [execution.lease_until for execution in parts.executions] if wish.grace_ms else []
    return max([began + _RELEASE_DEADLINE_S, *leases])


async def _in_time(ending: Awaitable[None], deadline: Callable[[], float]) -> bool:
    """Wait for this up to a deadline (monotonic), which may change; False if it was not done by then, and is given up."""
    task = asyncio.ensure_future(ending)
    while not task.done() and time.monotonic() < deadline():
        await asyncio.wait([task], timeout=_CHECK_EVERY_S)
    if task.done():
        task.result()
        return True
    task.cancel()
    return False


async def unless_it_takes_too_long(ending: Awaitable[None]) -> None:
    """Do this even while we are being cancelled, in a task of its own, up to a deadline."""
    task = asyncio.ensure_future(ending)
    with anyio.CancelScope(shield=True):
        await asyncio.wait([task], timeout=_RELEASE_DEADLINE_S)
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        logger.error("stopping met an error", exc_info=error)
