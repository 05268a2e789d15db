"""Unserved tasks: tasks that no live worker runs are left alone, which is logged once.

Otherwise tasks whose name only newer code knows, or in a queue that nobody serves, would wait in silence.
"""

from __future__ import annotations

import asyncio
import logging

from pymongo.errors import PyMongoError

from taskmesh.consumer.registration import Registration
from taskmesh.consumer.timing import varied
from taskmesh.model.worker import able_workers
from taskmesh.store import Store
from taskmesh.store.find import places_in_use

logger = logging.getLogger("taskmesh.consumer")

_FIRST_LOOK_S = 3.0
"""Later than a heartbeat, so that workers that start together have met."""
_LOOK_EVERY_S = 60.0


class Unserved:
    """Looks for unserved tasks, for one consumer."""

    def __init__(self, store: Store, registration: Registration) -> None:
        self._store = store
        self._registration = registration
        self._told: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Look for ever."""
        pause_s = _FIRST_LOOK_S
        while True:
            await asyncio.sleep(varied(pause_s, 0.2))
            pause_s = _LOOK_EVERY_S
            try:
                await self.run_once()
            except PyMongoError as error:
                logger.debug("could not look for tasks that nobody runs: %s", type(error).__name__)

    async def run_once(self) -> None:
        """Log every name and queue of waiting tasks that no live worker runs, each once."""
        for queue, name in await places_in_use(self._store):
            if (queue, name) in self._told or able_workers(self._registration.fleet, name, queue):
                continue
            self._told.add((queue, name))
            logger.warning("no live worker runs tasks named %r from queue %r: they stay unclaimed", name, queue)
