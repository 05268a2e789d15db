"""Tasks for room: looks for tasks where there is room under a limit, or will be, beside those that wait at this worker.

While a queue has no room, scans skip it, so there may be nothing here to use the room for when there is some again, or something
that this worker has not heard of goes first. Where few tasks may run at once, whoever holds a slot takes tasks from the lanes of
all workers: without a slot, those cannot start them. Otherwise the slot would be given back, and found by another worker only
after a while. Whoever asks first for the starts of a rate does the same. Many places are looked at in one command.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.consumer.candidates.backup_claims import BackupClaims
from taskmesh.consumer.candidates.claim_filter import ClaimFilter
from taskmesh.consumer.candidates.claim_queue import ClaimQueue
from taskmesh.consumer.candidates.groups import Groups
from taskmesh.consumer.candidates.limits import Limits
from taskmesh.consumer.candidates.partitions import Partitions
from taskmesh.consumer.candidates.queues import Queues
from taskmesh.consumer.candidates.slots import Place
from taskmesh.consumer.life import Life
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.timing import until
from taskmesh.store import Store
from taskmesh.store.clock import ServerClock
from taskmesh.store.find import Claimable, ScanRange, Sort, fitting, scan
from taskmesh.store.queues.first_of import Look, first_of

logger = logging.getLogger("taskmesh.limits")

_APART_S = 0.02
"""The pause between two looks: what is wanted meanwhile goes together."""
_LEFT_TO_OTHERS = timedelta(seconds=0.5)
"""How long the tasks in the lanes of other workers are left to them, while there are any in those of this one."""
_MOST_LEFT = 2
"""How many of those that they have left for longer are taken at a time."""
_OTHERS_APART_S = 0.3
"""How far apart looks at the rarer kinds of tasks are. Where many queues are limited, some queue has room all the time."""
_OTHER_SORTS: tuple[Sort, ...] = ("named", "labelled", "shared")
_PAGE_OF_OTHERS = 200
_PLACES_AT_ONCE = 50
_TASKS_AT_ONCE = 1_000
_LEAST, _MOST = 10, 200
"""How many tasks of a place are read at a time."""


class TasksForRoom:
    """Feeds one consumer's claim queue from limited queues that have room again."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        clock: ServerClock,
        candidates: ClaimQueue,
        partitions: Partitions,
        queues: Queues,
        limits: Limits,
        groups: Groups,
        claim_filter: ClaimFilter,
        life: Life,
        backup_claims: BackupClaims,
    ) -> None:
        self._store = store
        self._me = settings.claimant
        self._clock = clock
        self._candidates = candidates
        self._partitions = partitions
        self._queues = queues
        self._limits = limits
        self._groups = groups
        self._claim_filter = claim_filter
        self._life = life
        self._backup_claims = backup_claims
        self._others_of: set[str] = set()
        """The queues in which to look at the rarer kinds of tasks as well."""
        self._others_at = 0.0

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await until(self._limits.tasks_wanted, self._next_look_at_others())
            try:
                await self.run_once()
            except PyMongoError as error:  # what is wanted now will be wanted again
                logger.debug("tasks for room could not be looked for (%s)", type(error).__name__)
            await asyncio.sleep(_APART_S)

    def _next_look_at_others(self) -> float | None:
        return max(0.0, self._others_at - time.monotonic()) if self._others_of else None

    async def run_once(self) -> None:
        """Look once in each place where tasks are wanted."""
        places = sorted(self._limits.take_wanted(), key=str)
        self._others_of.update(queue for queue, group in places if self._limits.was_skipped((queue, group)))
        others_too = bool(self._others_of) and time.monotonic() >= self._others_at
        if others_too:
            self._others_at = time.monotonic() + _OTHERS_APART_S
        narrowed_by = await self._claim_filter.current() if self._life.claims else None
        if narrowed_by is None:  # nothing is claimed for now
            for place in places:
                self._limits.looked_at(place, in_all_lanes=True, brought=False, more=False)
            return
        for start in range(0, len(places), _PLACES_AT_ONCE):
            await self._look_at(places[start : start + _PLACES_AT_ONCE], narrowed_by)
        if others_too:
            queues, self._others_of = self._others_of, set()
            await self._look_at_others(queues, narrowed_by)

    async def _look_at(self, places: Sequence[Place], narrowed_by: Mapping[str, Any]) -> None:
        """Look at waiting tasks."""
        in_all_lanes = {place for place in places if self._limits.takes_all(place)}
        looks = list(self._looks(places, in_all_lanes))
        pages = await first_of(self._store, self._me, looks, self._clock.now()) if looks else []
        found: dict[Place, list[Claimable]] = {place: [] for place in places}
        more: set[Place] = set()
        for look, page in zip(looks, pages, strict=True):
            found[look.queue, look.group] += await fitting(self._store, page.rows, narrowed_by)
            if page.full:
                more.add((look.queue, look.group))
        # Nothing is awaited from here on, so that the best goes first.
        for place, rows in found.items():
            takes_all = self._limits.takes_all(place)
            is_next = self._limits.starts_next(place) is not None
            offered = self._ours_first(rows) if takes_all and not is_next else rows
            brought = self._backup_claims.offer_found(offered, place=0 if takes_all else None, has_room=True)
            self._limits.looked_at(
                place,
                in_all_lanes=place in in_all_lanes,
                brought=brought > 0,
                more=place in more or len(offered) < len(rows),
            )
        self._candidates.ready.set()
        behind = {queue for queue, group in more if group is None}
        await self._groups.note({queue for queue, group in places if group is None} - behind, full=False)
        if behind:
            await self._groups.note(behind, full=True)

    def _ours_first(self, rows: list[Claimable]) -> list[Claimable]:
        """Return those in this worker's lanes, and few of those that others have left for a while; if there are none, all.

        Others that have room here, too, look at the same tasks: if all began with the oldest, most claims would be lost.
        """
        ours: list[Claimable] = []
        left: list[Claimable] = []
        overdue = self._clock.now() - _LEFT_TO_OTHERS
        for row in rows:
            if not self._partitions.place(row.id, row.queue, row.needs, row.wanted):
                ours.append(row)
            elif row.next_claim_time < overdue and len(left) < _MOST_LEFT:
                left.append(row)
        return ours + left or rows

    async def _look_at_others(self, queues: Collection[str], narrowed_by: Mapping[str, Any]) -> None:
        """Look at tasks that name workers or need labels, and at running ones with room for more workers."""
        for names, some in self._where(queues):
            what = ScanRange(names, some, None, self._clock.now())
            for sort in _OTHER_SORTS:
                page = await scan(self._store, self._me, what, _PAGE_OF_OTHERS, sort)
                rows = await fitting(self._store, page.rows, narrowed_by)
                if self._backup_claims.offer_found(rows, has_room=True):
                    self._candidates.ready.set()

    def _where(self, queues: Collection[str]) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
        """Yield names and those of these queues where something of these names may be due."""
        for names, known in self._queues.worth_a_look():
            if some := [queue for queue in known if queue in queues and queue not in self._queues.paused]:
                yield names, some

    def _looks(self, places: Sequence[Place], in_all_lanes: Collection[Place]) -> Iterator[Look]:
        """Yield where to look: in this worker's lanes, or in all."""
        most = max(_LEAST, min(_MOST, _TASKS_AT_ONCE // len(places)))
        for names, queues in self._where({queue for queue, _ in places}):
            for place in [place for place in places if place[0] in queues]:
                count = min(most, self._limits.starts_next(place) or most)
                if place in in_all_lanes:
                    yield Look(*place, names, None, count)
                else:
                    for some_names, _, lanes in self._partitions.shares(names, [place[0]]):
                        yield Look(*place, some_names, lanes, count)
