"""Calls of the driver that no cancellation cuts short: the cancelled caller returns at once, and the call ends by itself.

PyMongo's async client cannot be cancelled safely at every point. Up to Python 3.11, where `asyncio.wait_for` runs what it waits
for as a task of its own, the lock around its connections may stay locked for ever, so that every later call of the client
hangs; and a cancellation that meets the last byte of a message is lost, so that a handler that was told to stop goes on. On
every Python, a connection that is cut off while it is being opened leaves its socket to the garbage collector, and one that is
cut off in use is closed.

So each of our calls runs in a task that nobody cancels: one of its own, or the caller's, if nobody cancels that. PyMongo itself
is not changed: it is not ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, Generic, TypeVar

import anyio
from pymongo.errors import PyMongoError

from taskmesh.store.mongodb.first_step import FirstSteps

T = TypeVar("T")

CLOSE_DEADLINE_S = 5.0
"""How long closing may take. A connection whose other end is frozen would wait for ever."""


class UnderWay(Generic[T]):
    """A call that runs in a task of its own.

    Unlike `shield`, this lets us decide what becomes of an error that nobody waits for any more. And the task itself delivers
    the answer: waiting for its end would take one more turn of the loop.
    """

    def __init__(self, call: Awaitable[T]) -> None:
        loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[T] = loop.create_future()
        self.running = FirstSteps(loop).begun(self._answer(call), "taskmesh call")

    async def _answer(self, call: Awaitable[T]) -> T | None:
        try:
            result = await call
        except (Exception, asyncio.CancelledError) as error:
            if self.answer.done():  # nobody waits for it any more
                raise
            if isinstance(error, asyncio.CancelledError):
                self.answer.cancel()
            else:
                self.answer.set_exception(error)
            return None
        if self.answer.done():
            return result
        self.answer.set_result(result)
        return None


class UncutCalls:
    """The calls of one client."""

    def __init__(self) -> None:
        self._left_alone: set[asyncio.Future[Any]] = set()
        """Calls that go on although their caller was cancelled."""
        self._unwanted: set[asyncio.Future[Any]] = set()
        """Those of them that read from something that has been closed since."""

    async def run(self, call: Awaitable[T], session: Any = None) -> T:
        """Await a call of the driver. If we are cancelled meanwhile, it goes on alone, and what it opens is closed.

        `session`: the session of the call. A session supports one call at a time: if a transaction is aborted while one of its
        calls is still under way, it may restart with that call, or the call writes outside of it. So we return only when the
        call has ended.
        """
        if self.is_alone():
            return await call
        return await self.ended_call(UnderWay(call), session)

    async def ended_call(self, under_way: UnderWay[T], session: Any = None) -> T:
        """Await a call that is under way; see `run`."""
        answer, running = under_way.answer, under_way.running
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.cancelled():
                self._leave(running)
            else:  # it had ended just before
                self._ended_alone(answer)
            if session is not None:
                await _ended_though_cancelled(running)
            raise

    def go_on_alone(self, work: Coroutine[Any, Any, T], name: str = "taskmesh call") -> asyncio.Task[T]:
        """Start, at once, what nobody cancels, and return its task. Calls made in it need no task of their own."""
        return FirstSteps(asyncio.get_running_loop()).begun(self._alone(work), name)

    async def _alone(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._leave(task)
        return await work

    def is_alone(self) -> bool:
        """Whether the caller runs in a task that nobody cancels."""
        return asyncio.current_task() in self._left_alone

    def close_after(self, read: asyncio.Future[Any], opened: Any) -> None:
        """Close a cursor or a stream after a read of it that goes on alone has ended: it supports one call at a time."""
        self._unwanted.add(read)
        self.go_on_alone(_closed(opened, after=read))

    async def ended(self, within_s: float) -> None:
        """Wait, for so long at most, until no call goes on alone; then cut off what is left.

        Reads from what has been closed are cut off at once: a stream may only be waiting for something to come.
        """
        for read in tuple(self._unwanted):
            read.cancel()
        give_up = time.monotonic() + within_s
        while self._left_alone and (left := give_up - time.monotonic()) > 0:
            await asyncio.wait(tuple(self._left_alone), timeout=left)
        for call in tuple(self._left_alone):
            call.cancel()

    def _leave(self, running: asyncio.Future[Any]) -> None:
        self._left_alone.add(running)
        running.add_done_callback(self._ended_alone)

    def _ended_alone(self, call: asyncio.Future[Any]) -> None:
        self._left_alone.discard(call)
        self._unwanted.discard(call)
        if call.cancelled() or call.exception() is not None:  # asked for, or asyncio reports that nobody retrieved it
            return
        if hasattr(call.result(), "close"):  # a cursor or a stream, which the server would keep open for minutes
            self.go_on_alone(_closed(call.result()))


class Uncut:
    """A collection, cursor or change stream whose calls, and those of what they return, go through `UncutCalls`."""

    def __init__(self, calls: UncutCalls, wrapped: Any, session: Any = None) -> None:
        """`session`: for a cursor, the session in which it reads."""
        self._calls = calls
        self.wrapped = wrapped
        self._session = session
        self._running: asyncio.Task[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.wrapped, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            session = options.get("session", self._session)
            result = found(*arguments, **options)
            if inspect.isawaitable(result):
                return self._run(result, session)
            return Uncut(self._calls, result, session)

        return call

    async def close(self) -> None:
        """Close it without waiting. If a read of it goes on alone, it is closed when that has ended."""
        if self._running is None or self._running.done():
            await self._calls.run(self.wrapped.close())
        else:
            self._calls.close_after(self._running, self.wrapped)

    async def _run(self, call: Awaitable[Any], session: Any) -> Any:
        if self._calls.is_alone():
            result = await call
            return Uncut(self._calls, result, session) if hasattr(result, "close") else result
        under_way = UnderWay(call)
        self._running = under_way.running
        result = await self._calls.ended_call(under_way, session)
        return Uncut(self._calls, result, session) if hasattr(result, "close") else result


async def _closed(opened: Any, after: asyncio.Future[Any] | None = None) -> None:
    if after is not None:
        await asyncio.wait((after,))
    await _done(opened.close())


async def _done(call: Awaitable[Any]) -> None:
    with contextlib.suppress(PyMongoError):  # the server closes it in time
        await call


async def _ended_though_cancelled(call: asyncio.Future[Any]) -> None:
    """Wait for a call, however often we are cancelled. A call that takes too long is cut off: its connection is closed."""
    give_up = time.monotonic() + CLOSE_DEADLINE_S
    with anyio.CancelScope(shield=True):  # it would cancel us at every turn of the loop
        while not call.done() and (left := give_up - time.monotonic()) > 0:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((call,), timeout=left)
    call.cancel()


async def ended_in_time(ending: Awaitable[object], deadline_s: float) -> bool:
    """Wait for this up to a deadline, then leave it alone. Return whether it has ended. Raises what it raises."""
    task = asyncio.ensure_future(ending)
    await asyncio.wait([task], timeout=deadline_s)
    if task.done() and not task.cancelled():
        task.result()
    return task.done()
