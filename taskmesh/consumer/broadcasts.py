"""Broadcasts: a task for all workers that were live when it was published must not wait for workers that are gone.

A broadcast names its workers and requires a SUCCESS from each. Every worker that knows its handler removes those that are gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.client.definition import TaskDefinition
from taskmesh.consumer.candidates.partitions import Partitions
from taskmesh.consumer.timing import varied
from taskmesh.model.worker import read_workers
from taskmesh.store import Store, broadcasts, registry

logger = logging.getLogger("taskmesh.broadcasts")

_LOOK_EVERY_S = 1.0


class Broadcasts:
    """Looks after the unfinished broadcasts whose names this worker knows."""

    def __init__(
        self, store: Store, definitions: Mapping[str, TaskDefinition[Any, Any]], partitions: Partitions
    ) -> None:
        self._store = store
        self._partitions = partitions
        self._places = [(name, each.queues) for name, each in definitions.items() if each.broadcast]

    async def run(self) -> None:
        """Look for ever."""
        while self._places:
            await asyncio.sleep(varied(self._partitions.in_turn(_LOOK_EVERY_S), 0.3))
            try:
                await self.run_once()
            except PyMongoError as error:
                logger.debug("could not look after the broadcasts (%s): trying again", type(error).__name__)

    async def run_once(self) -> int:
        """Remove workers that are gone. Return the number of tasks that were changed."""
        waiting = [
            each for name, queues in self._places for each in await broadcasts.unfinished(self._store, name, queues)
        ]
        if not waiting:
            return 0
        # The workers are read after the tasks, so that every live worker that a task names is seen.
        workers = read_workers(await registry.workers(self._store))
        live = [worker.worker_id for worker in workers if worker.state == "running"]
        changed = [each for each in waiting if not set(each.named) <= {*live, *each.done}]
        for each in changed:
            gone = ", ".join(sorted(set(each.named) - {*live, *each.done}))
            logger.info("task %s no longer waits for worker %s, which is gone", each.id, gone)
            await broadcasts.keep(self._store, each.id, live)
        return len(changed)
