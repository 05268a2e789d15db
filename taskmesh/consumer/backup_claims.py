"""The second look: what somebody else should claim is looked at a moment later, and tried only if it is still there.

Many tasks are looked at in one query, so whoever comes second in a lane costs the server next to nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Callable

from pymongo.errors import PyMongoError

from taskmesh.consumer.timing import until
from taskmesh.store import Store
from taskmesh.store.find import Claimable, look_up

logger = logging.getLogger("taskmesh.second_look")

AFTER_S = 0.05
"""How long after its time a task is looked at, for each worker that comes before this one."""
_TOGETHER_S = 0.02
_LIMIT = 10_000


class BackupClaims:
    """The tasks that one worker keeps an eye on for others."""

    def __init__(self, store: Store, worker_id: str, still_there: Callable[[Claimable, bool], None]) -> None:
        self._store = store
        self._worker_id = worker_id
        self._still_there = still_there
        self._due: list[tuple[float, str, bool]] = []
        self._wake = asyncio.Event()

    def add(self, id_: str, due: float, place: int, *, overdue: bool = False) -> None:
        """Look at the task when it has been due for a while. With too many at once, the scan has to find them.

        `overdue`: it goes before what waits here, since somebody had started it.
        """
        if len(self._due) < _LIMIT:
            heapq.heappush(self._due, (due + place * AFTER_S, id_, overdue))
            self._wake.set()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            self._wake.clear()
            pause = self._due[0][0] + _TOGETHER_S - time.monotonic() if self._due else None
            if pause is not None and pause <= 0:
                await self.run_once()
            else:
                await until(self._wake, pause)

    async def run_once(self) -> None:
        """Look at all that is due, in one query."""
        now = time.monotonic()
        overdue: dict[str, bool] = {}
        while self._due and self._due[0][0] <= now:
            _, id_, is_overdue = heapq.heappop(self._due)
            overdue[id_] = is_overdue
        try:
            for row in await look_up(self._store, self._worker_id, sorted(overdue)):
                self._still_there(row, overdue[row.id])
        except PyMongoError as error:
            logger.debug("no second look at %d tasks (%s): the scan will find them", len(overdue), type(error).__name__)
