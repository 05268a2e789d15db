"""What other languages insert: a worker accepts it, so that it can be found and claimed like any task (`store/acceptance.py`).

The stream tells of it at once; a look at each second finds what it did not tell. The worker that comes first in a task's lane
accepts it, and any other one that still finds it a second later.
"""

from __future__ import annotations

import asyncio
import logging
import time

from pymongo.errors import PyMongoError

from taskmesh.client.acceptance import Acceptance
from taskmesh.consumer.partitions import Partitions
from taskmesh.consumer.timing import until, varied

logger = logging.getLogger("taskmesh.consumer")

_LOOK_EVERY_S = 1.0
_PAGE = 1_000
_TOGETHER = 100


class InsertedTasks:
    """Accepts them, for one worker."""

    def __init__(self, acceptance: Acceptance, worker_id: str, partitions: Partitions) -> None:
        self._acceptance = acceptance
        self._worker_id = worker_id
        self._partitions = partitions
        self._heard: set[str] = set()
        self._left: set[str] = set()
        """What the last look left to the workers that come first."""
        self._next_look = 0.0
        self._wake = asyncio.Event()
        self._wake.set()  # the first look is at once

    def heard_of(self, id_: object, name: object) -> None:
        """Take in what the stream has told."""
        if not isinstance(id_, str) or not id_.startswith(f"{name}:"):
            logger.warning("the document %.200r is no task: its _id must be name:key; left alone", id_)
        elif self._partitions.place_of(id_) == 0:
            self._heard.add(id_)
            self._wake.set()

    async def any_left(self) -> bool:
        """Whether a majority has something that nobody has accepted yet; then it is looked at at once."""
        if not await self._acceptance.waiting(1):
            return False
        self._next_look = 0.0
        self._wake.set()
        return True

    async def run(self) -> None:
        """Accept for ever."""
        while True:
            await until(self._wake, varied(_LOOK_EVERY_S, 0.1))
            self._wake.clear()
            try:
                while await self.run_once():
                    pass
            except PyMongoError as error:
                logger.debug("could not accept what others inserted (%s): trying again", type(error).__name__)

    async def run_once(self) -> int:
        """Accept what was heard of and, once a second, what a look finds; return how many."""
        heard, self._heard = self._heard, set()
        now = time.monotonic()
        if now >= self._next_look:
            found = set(await self._acceptance.waiting(_PAGE))
            mine = {id_ for id_ in found if id_ in self._left or self._partitions.place_of(id_) == 0}
            self._left = found - mine
            heard |= mine
            if len(found) < _PAGE:
                self._next_look = now + 0.8 * _LOOK_EVERY_S
        ids = sorted(heard)
        return sum(
            [
                await self._acceptance.accept(ids[start : start + _TOGETHER], self._worker_id)
                for start in range(0, len(ids), _TOGETHER)
            ]
        )
