"""The journal as a handler in a thread uses it: each call runs in the event loop, and the thread waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from taskmesh.client.handle import TaskHandle
from taskmesh.consumer.durable.transactions import Transactions
from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.run.recording import Recorder, Started
from taskmesh.store.mongodb.driver import Document

T = TypeVar("T")


def done_in_loop(loop: asyncio.AbstractEventLoop, doing_it: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the event loop and wait for it, in a thread other than the loop's."""
    try:
        running = asyncio.run_coroutine_threadsafe(doing_it, loop)
    except RuntimeError:  # the loop is closed, and nobody will ever run it
        doing_it.close()
        raise
    return running.result()


class InThread:
    """The journal of an execution whose handler runs in a thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transactions: Transactions, execution: Execution) -> None:
        self._loop = loop
        self._transactions = transactions
        self._execution = execution

    def _do(self, doing: Callable[[Recorder], Awaitable[T]]) -> T:
        """Run it in the event loop, and wait."""

        async def do() -> T:
            return await doing(self._execution.journal)

        return done_in_loop(self._loop, do())

    def begin_step(self, name: str, made_by: str, outer: str | None) -> tuple[str, Document | None]:
        """Return the step's id, and what is recorded of it; None if it has to be done now."""
        return self._do(lambda journal: journal.begin_step(name, made_by, outer))

    def end_step(self, id_: str, fields: Document | None) -> Document | None:
        """Record the step, if there is something to record."""
        return self._do(lambda journal: journal.end_step(id_, fields))

    def in_transaction(self, id_: str, fn: Callable[[Any], Document]) -> Document:
        """Run it in a transaction that commits together with its record."""
        journal = self._execution.journal
        return self._transactions.step_in_thread(self._execution, journal, journal.begun(id_), fn)

    def start(
        self, definition: Any, params_by_key: Mapping[str, Mapping[str, Any]], *, detached: bool
    ) -> list[TaskHandle[Any]]:
        """See `BlockingTaskContext.start_many`."""
        return self._do(lambda journal: journal.start(definition, params_by_key, detached=detached))

    def results(self, handles: Sequence[Started], *, return_errors: bool) -> list[Any]:
        """See `BlockingTaskContext.results`."""
        return self._do(lambda journal: journal.results(handles, return_errors=return_errors))

    def sleep(self, name: str, ms: int | None, when: datetime | None, outer: str | None) -> None:
        """See `BlockingTaskContext.sleep`."""
        self._do(lambda journal: journal.sleep(name, ms, when, outer))

    def wait_for(self, event: str, timeout_ms: int | None, outer: str | None) -> Any:
        """See `BlockingTaskContext.wait_for`."""
        return self._do(lambda journal: journal.wait_for(event, timeout_ms, outer))
