"""What becomes of a task that a scan has found: this worker tries it, or lets another go first and is its backup.

A backup looks a moment later, and tries the task only if it is still there. Many are looked at in one query, so whoever comes
second in a lane costs the server next to nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time

from pymongo.errors import PyMongoError

from taskmesh.consumer.claim_queue import Candidate, ClaimQueue
from taskmesh.consumer.executions import Executions
from taskmesh.consumer.limits import Limits
from taskmesh.consumer.partitions import Partitions
from taskmesh.consumer.queues import LOOK_AHEAD_MS
from taskmesh.consumer.timing import until
from taskmesh.store import Store
from taskmesh.store.clock import ServerClock
from taskmesh.store.find import Claimable, look_up
from taskmesh.store.rules import NEVER

logger = logging.getLogger("taskmesh.backup_claims")

AFTER_S = 0.05
"""How long after its time a task is looked at, for each worker that comes before this one."""
LAST_PLACE_TO_WAIT = 5
_TOGETHER_S = 0.02
_LIMIT = 10_000
_FAR_S = 2 * LOOK_AHEAD_MS / 1000


class BackupClaims:
    """The tasks that one worker keeps an eye on for others."""

    def __init__(
        self,
        store: Store,
        worker_id: str,
        clock: ServerClock,
        candidates: ClaimQueue,
        executions: Executions,
        limits: Limits,
        partitions: Partitions,
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._clock = clock
        self._candidates = candidates
        self._executions = executions
        self._limits = limits
        self._partitions = partitions
        self._due: list[tuple[float, str, bool]] = []
        self._wake = asyncio.Event()

    def offer(self, row: Claimable, *, place: int | None = None, overdue: bool = False) -> bool:
        """Take in a task that was found; True if it is a new candidate.

        `place`: how many go before this worker, if not those that the task's lane says. `overdue`: it goes before what
        waits here, since somebody had started it.
        """
        candidates = self._candidates
        if row.claim_time == NEVER or row.id in self._executions:
            return False
        if candidates.is_aside(row.id) or candidates.taken_meanwhile(row.id):
            return False
        if self._limits.is_full(row.queue, row.group):
            return False
        now = time.monotonic()
        moment = row.next_claim_time if row.claim_time is None else max(row.claim_time, row.next_claim_time)
        since = self._clock.monotonic(moment)
        if since > now + _FAR_S:
            return False  # in my own retry delay: not a candidate, but one of those that stand in front
        if place is None:
            place = 0 if row.named else self._partitions.place_of(row.id)
        if place:
            self.add(row.id, max(since, now), min(place, LAST_PLACE_TO_WAIT), overdue=overdue)
            return False
        return candidates.offer(
            Candidate(
                row.id,
                row.queue,
                due=max(since, now),
                since=0.0 if overdue else since,
                priority=row.priority,
                named=row.named,
                fail_cnt=row.fail_cnt,
                group=row.group,
                timed=since > now,
            )
        )

    def add(self, id_: str, due: float, place: int, *, overdue: bool = False) -> None:
        """Look at the task when it has been due for a while. With too many at once, the scan has to find them."""
        if len(self._due) < _LIMIT:
            heapq.heappush(self._due, (due + place * AFTER_S, id_, overdue))
            self._wake.set()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            self._wake.clear()
            await until(self._wake, await self.run_once())

    async def run_once(self) -> float | None:
        """Look at all that is due, in one query, if anything is; return how long to wait for the next."""
        pause = self._pause()
        if pause is not None and pause <= 0:
            await self._look()
            pause = self._pause()
        return pause

    def _pause(self) -> float | None:
        return self._due[0][0] + _TOGETHER_S - time.monotonic() if self._due else None

    async def _look(self) -> None:
        now = time.monotonic()
        overdue: dict[str, bool] = {}
        while self._due and self._due[0][0] <= now:
            _, id_, is_overdue = heapq.heappop(self._due)
            overdue[id_] = is_overdue
        try:
            for row in await look_up(self._store, self._worker_id, sorted(overdue)):
                if self.offer(row, place=0, overdue=overdue[row.id]):  # nobody else has it
                    self._candidates.ready.set()
        except PyMongoError as error:
            logger.debug("no look at %d tasks (%s): the scan will find them", len(overdue), type(error).__name__)
