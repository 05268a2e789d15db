"""Inserted tasks: accepts what other languages insert, so that it is found and claimed like any task (`store/acceptance.py`).

The change stream announces an insert at once. The worker that comes first in the task's lane accepts it, and so does any other
that still finds it a second later. A periodic look finds what the stream did not announce; it comes every second where nobody
listens.
"""

from __future__ import annotations

import asyncio
import logging
import time

from pymongo.errors import PyMongoError

from taskmesh.client.acceptance import Acceptance
from taskmesh.consumer.candidates.partitions import Partitions
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.timing import until, varied

logger = logging.getLogger("taskmesh.consumer")

_LEFT_FOR_S = 1.0
_LOOK_EVERY_S = 15.0
_PAGE = 1_000
_TOGETHER = 100


class InsertedTasks:
    """Accepts inserted tasks, for one worker."""

    def __init__(self, acceptance: Acceptance, settings: Settings, partitions: Partitions) -> None:
        self._acceptance = acceptance
        self._worker_id = settings.worker_id
        self._look_every_s = _LOOK_EVERY_S if settings.listen else _LEFT_FOR_S
        self._partitions = partitions
        self._heard: set[str] = set()
        self._left: set[str] = set()
        """Tasks that are left to the workers that come first, until the next look."""
        self._next_look = 0.0
        self._wake = asyncio.Event()
        self._wake.set()  # the first look is at once

    def heard_of(self, id_: object, name: object) -> None:
        """Take in a task that the stream has announced."""
        if not isinstance(id_, str) or not id_.startswith(f"{name}:"):
            logger.warning("the document %.200r is no task: its _id must be name:key; left alone", id_)
        elif self._partitions.place_in_fleet(id_, heard=True) == 0:
            self._heard.add(id_)
            self._wake.set()
        else:
            self._leave({id_})

    def _leave(self, ids: set[str]) -> None:
        """Leave these to other workers, and look in a second whether they have been accepted."""
        self._left |= ids
        self._next_look = min(self._next_look, time.monotonic() + varied(_LEFT_FOR_S, 0.1))
        self._wake.set()  # whoever waits longer

    async def any_left(self) -> bool:
        """Whether a majority has something that nobody has accepted yet. If so, it is looked at at once."""
        if not await self._acceptance.waiting(1):
            return False
        self.look_soon()
        return True

    def look_soon(self) -> None:
        """Look at once: there may be something that was not announced."""
        self._next_look = 0.0
        self._wake.set()

    async def run(self) -> None:
        """Accept for ever."""
        while True:
            await until(self._wake, max(0.0, self._next_look - time.monotonic()))
            self._wake.clear()
            try:
                while await self.run_once():
                    pass
            except PyMongoError as error:
                self._next_look = time.monotonic() + varied(_LEFT_FOR_S, 0.1)
                logger.debug("could not accept what others inserted (%s): trying again", type(error).__name__)

    async def run_once(self) -> int:
        """Accept what was announced and, if it is time for a look, what that finds. Return how many."""
        heard, self._heard = self._heard, set()
        now = time.monotonic()
        if now >= self._next_look:
            found = set(await self._acceptance.waiting(_PAGE))
            mine = {id_ for id_ in found if id_ in self._left or self._partitions.place_in_fleet(id_) == 0}
            heard |= mine
            self._left = set()
            if len(found) < _PAGE or not mine:
                self._next_look = now + varied(self._look_every_s, 0.1)
                if others := found - mine:
                    self._leave(others)
        ids = sorted(heard)
        return sum(
            [
                await self._acceptance.accept(ids[start : start + _TOGETHER], self._worker_id)
                for start in range(0, len(ids), _TOGETHER)
            ]
        )
