"""Lifespan: what a worker process opens before it claims its first task, and closes when its handlers have ended.

The consumers of a mesh in one process share one opening: the first to come opens it, the last to go closes it. It is entered
and left in one asyncio task of its own, as cancel scopes and task groups require. If the process dies, nothing closes it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, TypeVar

from taskmesh.client.annotations import signature_of
from taskmesh.model.errors import InvalidOption, TaskMeshError

logger = logging.getLogger("taskmesh.consumer")

T = TypeVar("T")

CLOSES_WITHIN_S = 10.0
"""How long closing may take. After that the worker ends without it."""


class Lifespan(Generic[T]):
    """What `@mesh.lifespan` returns: access to what the workers of this process have opened."""

    def __init__(self, fn: Callable[[], AsyncIterator[T]] | Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self.name = _name_of(fn)
        self._enter: Callable[[], Any] = asynccontextmanager(fn) if inspect.isasyncgenfunction(fn) else fn
        self._opening: Opening | None = None
        """The latest opening."""

    @property
    def state(self) -> T:
        """What the function has yielded: the same object for all handlers and hooks of this process.

        Raises `TaskMeshError` where no worker runs: in a process that only publishes, or in the child process of a handler.
        """
        if self._opening is None or not self._opening.is_open:
            raise TaskMeshError(
                f"the lifespan {self.name!r} is not open: it is opened by the workers of a process, before they claim, and "
                "not in the child processes of handlers with run='process'"
            )
        state: T = self._opening.state
        return state

    def __call__(self) -> AbstractAsyncContextManager[T]:
        """Return a block with an opening of its own, for a web application or a test. `state` stays that of the workers."""
        entered: AbstractAsyncContextManager[T] = self._enter()
        return entered

    def join(self) -> Opening:
        """Open it, unless another consumer of this process has. Whoever joins has to leave. Call it in the event loop."""
        if self._opening is None or self._opening.is_over:
            self._opening = Opening(self.name, self._enter, self._opening)
        self._opening.workers += 1
        return self._opening


class Opening:
    """One opening of a lifespan."""

    def __init__(self, name: str, enter: Callable[[], Any], before: Opening | None) -> None:
        self.workers = 0
        """How many consumers have joined and not left."""
        self.is_open = False
        self.state: Any = None
        self._name = name
        self._ready = asyncio.Event()
        self._over = asyncio.Event()
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._hold(enter, before), name=f"taskmesh lifespan {name}")

    @property
    def is_over(self) -> bool:
        """Whether it can no longer be joined."""
        return self._over.is_set() or self._task.done() or self._loop is not asyncio.get_running_loop()

    async def _hold(self, enter: Callable[[], Any], before: Opening | None) -> None:
        """Enter it, wait until the last worker has left, and leave it."""
        try:
            if before is not None and before._loop is self._loop:  # noqa: SLF001 — of this class
                await asyncio.wait([before._task])  # noqa: SLF001 — of this class
            entered = enter()
            if not isinstance(entered, AbstractAsyncContextManager):
                raise TypeError(f"it must return an async context manager, got {type(entered).__name__}")  # noqa: TRY301
            async with entered as self.state:
                self.is_open = True
                self._ready.set()
                await self._over.wait()
        except (Exception, asyncio.CancelledError) as error:
            self._error = error
            if not self.is_open and not isinstance(error, asyncio.CancelledError):
                logger.exception("the lifespan %r could not be opened", self._name)
        finally:
            self.is_open = False
            self._ready.set()

    async def opened(self) -> None:
        """Wait until it is open. Raises `TaskMeshError` with the reason if it could not be opened."""
        await self._ready.wait()
        if not self.is_open:
            raise TaskMeshError(
                f"the lifespan {self._name!r} could not be opened, so the worker does not start: {_told(self._error)}"
            ) from self._error

    async def ended(self) -> Exception:
        """Wait until it ends though workers need it, as when a task group in it fails. Return the error that ends the workers."""
        await asyncio.wait([self._task])
        error = TaskMeshError(f"the lifespan {self._name!r} has ended while the worker ran: {_told(self._error)}")
        error.__cause__ = self._error
        return error

    async def leave(self) -> None:
        """Leave it. The last to leave closes it; errors are logged."""
        self.workers -= 1
        if self.workers:
            return
        asked = self.is_open
        self._over.set()
        if not asked:  # it did not get that far
            self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSES_WITHIN_S)
        if not self._task.done():
            logger.error("the lifespan %r was not closed within %g s: going on without", self._name, CLOSES_WITHIN_S)
            self._task.cancel()
        elif asked and self._error is not None:
            logger.error(
                "the lifespan %r could not be closed: %s", self._name, _told(self._error), exc_info=self._error
            )


def checked_lifespan(fn: Any) -> None:
    """Raise `InvalidOption` for what cannot be a lifespan."""
    told = "lifespan must be given an async generator function, or one that returns an async context manager"
    if not callable(fn):
        raise InvalidOption(f"{told}, got {fn!r}")
    name = _name_of(fn)
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise InvalidOption(f"{told}; {name!r} is neither: write `async def {name}(): …; yield …`")
    try:
        signature_of(fn).bind()
    except TypeError as error:
        raise InvalidOption(f"the lifespan {name!r} is called without arguments: {error}") from None
    except ValueError:  # a class in native code that does not say what it takes
        return


def _name_of(fn: Any) -> str:
    return str(getattr(fn, "__name__", fn))


def _told(error: BaseException | None) -> str:
    return "it ended" if error is None else f"{type(error).__name__}: {error}"
