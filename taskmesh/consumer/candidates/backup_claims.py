"""Backup claims: whether this worker tries a task that a scan has found at once, or lets another worker go first.

A backup looks a moment later, and tries the task only if nobody has claimed it and this worker has room for it. Many tasks are
looked at in one query, so being second in a lane costs the server next to nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import deque
from collections.abc import Iterable

from pymongo.errors import PyMongoError

from taskmesh.consumer.candidates.claim_queue import Candidate, ClaimQueue
from taskmesh.consumer.candidates.limits import Limits
from taskmesh.consumer.candidates.partitions import AFTER_S, Partitions, wait_s
from taskmesh.consumer.candidates.queues import ASKERS_LOOK_AHEAD_MS
from taskmesh.consumer.run.executions import Executions
from taskmesh.consumer.timing import until
from taskmesh.model.worker import Claimant
from taskmesh.store import Store
from taskmesh.store.clock import ServerClock
from taskmesh.store.find import Claimable, look_up
from taskmesh.store.rules import NEVER

logger = logging.getLogger("taskmesh.backup_claims")

_TOGETHER_S = (0.02, 0.2)
"""How long a look waits for more to look at: where the last one found a neglected task, and at most. Where others take all that
is theirs, each look in vain doubles it."""
_LIMIT = 10_000
_PAGE = 200
"""How many tasks are looked at together, even if there is room for fewer: most have been claimed by then."""
_FAR_S = 1.25 * ASKERS_LOOK_AHEAD_MS / 1000
"""A task that is due later than this is not a candidate yet. Scans look less far ahead."""


class BackupClaims:
    """The tasks that one worker watches as a backup for others."""

    def __init__(
        self,
        store: Store,
        me: Claimant,
        clock: ServerClock,
        candidates: ClaimQueue,
        executions: Executions,
        limits: Limits,
        partitions: Partitions,
    ) -> None:
        self._store = store
        self._me = me
        self._clock = clock
        self._candidates = candidates
        self._executions = executions
        self._limits = limits
        self._partitions = partitions
        self._due: list[tuple[float, str, bool]] = []
        self._for_room: deque[str] = deque()
        """Tasks that have been due for a while, to be looked at when this worker has room for them."""
        self._together_s = _TOGETHER_S[0]
        self._wake = asyncio.Event()

    def offer_found(
        self, rows: Iterable[Claimable], *, place: int | None = None, overdue: bool = False, has_room: bool = False
    ) -> int:
        """Take in what a scan has found, as `offer` does. Return how many new candidates there are.

        Tasks that ran and came back since are left out: their events tell how they are now, and a row may be from before they
        failed.
        """
        came_back = self._candidates.came_back_meanwhile
        return sum(
            self.offer(row, place=place, overdue=overdue, has_room=has_room) for row in rows if not came_back(row.id)
        )

    def offer(self, row: Claimable, *, place: int | None = None, overdue: bool = False, has_room: bool = False) -> bool:
        """Take in a task that a scan has found. Return True if it is a new candidate.

        `place`: how many workers go before this one; by default what the task's lane says. `overdue`: the task's lease has run
        out; then it is looked at whether this worker has room or not. `has_room`: it was looked for since there may be room
        for it.
        """
        candidates = self._candidates
        if row.claim_time == NEVER or row.id in self._executions:
            return False
        if candidates.is_aside(row.id) or candidates.taken_meanwhile(row.id):
            return False
        if not has_room and self._limits.is_full(row.queue, row.group):
            return False
        now = time.monotonic()
        moment = row.next_claim_time if row.claim_time is None else max(row.claim_time, row.next_claim_time)
        since = self._clock.monotonic(moment)
        if since > now + _FAR_S:
            return False  # in my own retry delay: not a candidate, but one of those that stand in front
        if place is None:
            place = 0 if row.named else self._partitions.place(row.id, row.queue, row.needs, row.wanted)
        if place:
            self.add(row.id, max(since, now), place, overdue=overdue)
            return False
        return candidates.offer(
            Candidate(
                row.id,
                row.queue,
                due=max(since, now),
                since=since,
                number=row.number,
                priority=row.priority,
                fail_cnt=row.fail_cnt,
                group=row.group,
                timed=since > now,
            )
        )

    def add(self, id_: str, due: float, place: int, *, overdue: bool = False) -> None:
        """Look at the task after it has been due for a while. If there are too many, the next scan has to find it."""
        if len(self._due) + len(self._for_room) < _LIMIT:
            watched = (due + wait_s(place), id_, overdue)
            heapq.heappush(self._due, watched)
            if self._due[0] is watched:
                self._wake.set()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            self._wake.clear()
            await until(self._wake, await self.run_once())

    async def run_once(self) -> float | None:
        """Look at everything that is due and may be taken, in one query. Return how long to wait for the next."""
        now = time.monotonic()
        overdue: set[str] = set()
        looks = bool(self._due) and self._due[0][0] + self._together_s <= now
        while looks and self._due and self._due[0][0] <= now:
            _, id_, is_overdue = heapq.heappop(self._due)
            if is_overdue:
                overdue.add(id_)
            else:
                self._for_room.append(id_)
        room = self._room(now)
        others = [self._for_room.popleft() for _ in range(min(_PAGE, len(self._for_room)))] if room > 0 else []
        if overdue or others:
            await self._look(others, overdue, room)
        if self._for_room:
            return AFTER_S if self._room(time.monotonic()) <= 0 else 0.0
        return max(0.0, self._due[0][0] + self._together_s - time.monotonic()) if self._due else None

    def _room(self, now: float) -> int:
        """How many more tasks could start here, beside those that are claimed or about to be.

        A worker without free slots leaves a task to the worker that comes first in its lane, even if that one is busy: two
        workers that take from one lane lose half of their claims to each other, and the work is done no sooner.
        """
        candidates = self._candidates
        if candidates.more:  # of its own, which a scan is about to bring
            return 0
        return self._executions.free_slots - len(candidates.being_claimed) - candidates.ready_count(now)

    async def _look(self, others: list[str], overdue: set[str], room: int) -> None:
        try:
            rows = await look_up(self._store, self._me, sorted({*others, *overdue}))
        except PyMongoError as error:
            left = len(others) + len(overdue)
            logger.debug("could not look at %d tasks (%s): the scan will find them", left, type(error).__name__)
            return
        neglected, later = 0, []
        # From the end of the line: the worker that comes first in the lane takes from its head.
        for row in sorted(rows, key=lambda row: row.number, reverse=True):
            if row.id not in overdue and room <= 0:
                later.append(row.id)
            elif self.offer(row, place=0):  # nobody else has it
                self._candidates.ready.set()
                room -= 1
                neglected += 1
        self._for_room.extendleft(later)
        at_first_s, at_most_s = _TOGETHER_S
        self._together_s = at_first_s if neglected else min(2 * self._together_s, at_most_s)
