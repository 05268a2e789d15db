"""Failure counts: how executions end, reported for queues that pause automatically after failures.

`store/queues/failure_pauses.py` counts and decides. Reports go out once a second, one for each queue; queues without that
setting cost nothing. If the process dies, what was not reported is not counted, with no other consequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from pymongo.errors import PyMongoError

from taskmesh.consumer.candidates.limits import Limits
from taskmesh.consumer.run.execution import Execution
from taskmesh.store import Store
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.queues import failure_pauses
from taskmesh.store.queues.failure_pauses import Ended

logger = logging.getLogger("taskmesh.failures")

_EVERY_S = 1.0
_KEPT = 1_000
"""More than are ever evaluated."""


class FailureCounts:
    """What one consumer has to report."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits
        self._failing: dict[str, bool] = {}
        """The queues that have the setting, and whether they are paused for their failures."""
        self._ended: dict[str, list[Ended]] = {}
        self._something = asyncio.Event()

    def learn(self, settings: Mapping[str, Document]) -> None:
        """Learn which queues have the setting."""
        asked = {queue: document for queue, document in settings.items() if document.get("failure_pause")}
        now = {queue: document.get("failing") is not None for queue, document in asked.items()}
        for queue, failing in now.items():
            if failing != self._failing.get(queue):  # it counts from zero
                self._ended.pop(queue, None)
            if failing and not self._failing.get(queue):
                paused = asked[queue]["failing"]
                text = "queue %s is paused: %d of its last %d executions failed"
                logger.warning(text, queue, paused["failed"], paused["of"])
            elif self._failing.get(queue) and not failing:
                logger.info("queue %s is open again", queue)
        self._failing = now

    def note(self, execution: Execution, *, failed: bool) -> None:
        """Note how an execution ended, as recorded."""
        canary = execution.id in self._limits.canaries
        self._limits.canaries.discard(execution.id)
        if execution.queue in self._failing and execution.loop is None:
            ended = self._ended.setdefault(execution.queue, [])
            ended.append(Ended(failed, canary))
            if len(ended) > _KEPT:
                del ended[0]
            self._something.set()

    async def run(self) -> None:
        """Report for ever."""
        while True:
            await self._something.wait()
            await self.run_once()
            await asyncio.sleep(_EVERY_S)

    async def run_once(self) -> None:
        """Report what has been noted.

        What cannot be written now goes out with the next report; without an answer it may count twice.
        """
        self._something.clear()
        for queue in list(self._ended):
            ended = self._ended.pop(queue)
            try:
                known = self._failing.get(queue, False)
                await failure_pauses.count(self._store, queue, ended, known_failing=known)
            except PyMongoError as error:
                logger.debug("the ends in queue %s were not counted (%s): trying again", queue, type(error).__name__)
                self._ended[queue] = [*ended, *self._ended.get(queue, ())][-_KEPT:]
                self._something.set()
