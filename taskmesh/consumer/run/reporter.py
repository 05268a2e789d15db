"""The reporter: writes progress and logs of running executions, only the newest of each, many together and not too often.

A thousand calls per second cost two writes.
"""

from __future__ import annotations

import asyncio
import logging

from pymongo.errors import PyMongoError

from taskmesh.consumer.run.execution import Execution
from taskmesh.store import Store
from taskmesh.store.finish import report

logger = logging.getLogger("taskmesh.reporter")

_EVERY_S = 0.5
_MAX_BATCH = 100  # with the largest logs, a quarter of what a command may hold


class Reporter:
    """Writes the reports of one consumer's executions."""

    def __init__(self, store: Store, worker_id: str) -> None:
        self._store = store
        self._worker_id = worker_id
        self._loop = asyncio.get_running_loop()
        self._dirty: dict[str, Execution] = {}
        self._something = asyncio.Event()
        self._writing = asyncio.Lock()

    def add(self, execution: Execution) -> None:
        """Write what this execution has to report soon. Callable from any thread."""
        if execution.running_id + execution.id not in self._dirty:
            self._dirty[execution.running_id + execution.id] = execution
            self._loop.call_soon_threadsafe(self._something.set)

    async def run(self) -> None:
        """Write for ever."""
        while True:
            await self._something.wait()
            await self.run_once()
            await asyncio.sleep(_EVERY_S)

    async def run_once(self) -> None:
        """Write all new reports."""
        self._something.clear()
        await self.flush()

    async def written(self) -> None:
        """Wait until no report is on its way."""
        async with self._writing:
            pass

    async def flush(self) -> None:
        """Write all new reports. What cannot be written now is left to the next time, or to the outcome."""
        async with self._writing:
            await self._flush()

    async def _flush(self) -> None:
        while self._dirty:
            executions = [self._dirty.pop(key) for key in list(self._dirty)[:_MAX_BATCH]]
            speaking = [execution for execution in executions if not (execution.ended or execution.writes_held_back)]
            told = [(execution, news) for execution in speaking if (news := execution.report()) is not None]
            # One update must not repeat a field that only some have: logs and progress go in one update each.
            for with_logs in (True, False):
                batch = [(execution, news) for execution, news in told if bool(news.entry) == with_logs]
                if not batch:
                    continue
                try:
                    await report(self._store, self._worker_id, [news for _, news in batch])
                except PyMongoError as error:
                    logger.warning("progress of %d tasks could not be written: %s", len(batch), type(error).__name__)
                    for execution, unsaid in told:  # includes what was not tried; writing it twice does no harm
                        execution.report_failed(unsaid)
                    return
