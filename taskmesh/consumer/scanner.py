"""The scanner: looks for claimable tasks in the database. The stream brings hints; this is the truth.

It scans at the start, after every gap in the stream, whenever the claim queue runs low while there is more, and slowly for
ever as a safety net: that finds what no event announced, leases that ran out, and delayed tasks that are about to start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.consumer.backup_claims import BackupClaims
from taskmesh.consumer.claim_queue import Candidate, ClaimQueue
from taskmesh.consumer.claimer import Narrow
from taskmesh.consumer.limits import Limits
from taskmesh.consumer.partitions import Partitions
from taskmesh.consumer.timing import until, varied
from taskmesh.store import Store
from taskmesh.store.clock import ServerClock
from taskmesh.store.find import (
    Claimable,
    ScanRange,
    claimable_from,
    fitting,
    open_scan,
    queues_due,
    queues_in_use,
    scan,
    scan_leases,
)
from taskmesh.store.publish import lane_of
from taskmesh.store.rules import NEVER
from taskmesh.store.settle import settle

logger = logging.getLogger("taskmesh.scanner")

SCAN_EVERY_S = 1.0
LOOK_AHEAD_MS = 1_500
"""More than the interval, so that whatever comes due in between is known in time."""
_SETTLE_EVERY_S = 2.0
_PROBE_EVERY_S = 0.8
"""How often all queues are asked for together while there is a backlog."""
_QUEUES_EVERY_S = 5.0
_QUEUE_REMEMBERED_S = 60.0
_MAX_COMBINATIONS = 150
"""Of names × queues in one query; above about 200 the server sorts in memory instead of merging index ranges."""
_PAGE_OF_REFUSED = 500
_FAR_S = 2 * LOOK_AHEAD_MS / 1000
_PAGE_BESIDE = 200
_PATIENCE_S = 0.2
_PATIENCE_OF_THE_BUSY_S = 2.0
_LAST_PLACE_TO_WAIT = 5


class Scanner:
    """Feeds one consumer's claim queue."""

    def __init__(
        self,
        store: Store,
        worker_id: str,
        queue: ClaimQueue,
        lanes: Partitions,
        clock: ServerClock,
        *,
        names: Sequence[str],
        queues: Sequence[str] | None,
        usual_queues: Iterable[str],
        closed_queues: Callable[[], frozenset[str]],
        limits: Limits,
        narrow: Narrow,
        wanted: Callable[[], int],
        skip: Callable[[str], bool],
        being_claimed: Callable[[], Iterable[str]],
        found: Callable[[], None],
        want_hints: Callable[[bool], Awaitable[None]],
        second_look: BackupClaims,
        page: int,
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._queue = queue
        self._lanes = lanes
        self._clock = clock
        self._names = names
        self._fixed_queues = queues
        # Where tasks of ours are published unless somebody says otherwise: scanned from the start, though still empty.
        self._usual_queues = frozenset(usual_queues)
        self._known_queues: dict[str, float] = dict.fromkeys(
            sorted(self._usual_queues) if queues is None else queues, time.monotonic()
        )
        """When each was last seen to have something in it."""
        self._due: set[str] | None = set()
        """The queues in which something is due; None: in too many places to tell, so it may be in any."""
        self._closed_queues = closed_queues
        self._limits = limits
        self._narrow = narrow
        self._narrowed_by: Mapping[str, Any] = {}
        """What the hook `on_claim` says at this pass: what does not match it would be refused, like what only others may have."""
        self._wanted = wanted
        self._skip = skip
        self._being_claimed = being_claimed
        self._found = found
        self._want_hints = want_hints
        self._second_look = second_look
        self._page = page
        self._wake = asyncio.Event()
        self._refill = False
        self._more = True
        """Whether the last scan left something unread."""
        self._refused: dict[int, Any] = {}
        """By number of the range, a cursor over what lies behind tasks that are not for me; read on a little at each pass."""
        self._read_to_the_end: set[int] = set()
        """In which of them that has been done once."""
        self._next_settle = 0.0
        self._next_probe = 0.0
        self._next_queues = 0.0
        self._next_leases = 0.0
        self._next_help = 0.0
        self._again_soon = False
        self._heads: dict[tuple[int, str], float] = {}
        """What stood at the head of each lane when all were looked at last, and since when."""
        self._told_outage = False
        self.scans = 0
        self.open = True

    def order_scan(self) -> None:
        """Scan soon: after a gap, or at the start."""
        self._more = True
        self._refill = True
        self._wake.set()

    def want_scan(self) -> None:
        """Look again at the next pass: hints were left out."""
        self._more = True

    def want_more(self) -> None:
        """Scan soon if the last scan left something unread."""
        if self.more and not self._refill:
            self._refill = True
            self._wake.set()

    @property
    def more(self) -> bool:
        """Whether there is more work than the claim queue has been told of."""
        return self._more or self._queue.overflowed

    async def run(self) -> None:
        """Scan for ever."""
        while True:
            self._wake.clear()
            self._refill = False
            try:
                await self.run_once()
                self._told_outage = False
            except PyMongoError as error:
                if not self._told_outage:
                    logger.warning("a scan failed (%s: %.200s): trying again", type(error).__name__, error)
                    self._told_outage = True
                self._more = True
                await asyncio.sleep(0.2)
            await until(self._wake, _PATIENCE_S if self._again_soon else varied(SCAN_EVERY_S, 0.1))

    async def run_once(self) -> int:
        """Make one pass; return how many new candidates it brought."""
        now = time.monotonic()
        if now >= self._next_settle:
            self._next_settle = now + varied(_SETTLE_EVERY_S, 0.2)
            await settle(self._store)
        if not self.open or not self._names:
            return 0
        self._narrowed_by = await self._narrow() or {}  # None: nothing is claimed for now, whatever is found
        self._queue.begin_scan(self._being_claimed())
        await self._learn_what_is_due(now)
        brought = 0
        self._more = False
        for number, what in self._ranges(self._lanes.own):
            brought += await self._scan(number, what)
        brought += await self._look_at_leases(now) + await self._help_others(now)
        if self._limits.full_groups:
            beside = await self._fitting(await self._limits.scan_groups())
            if offered := sum(map(self._offer, beside)):
                brought += offered
                self._more = True
        self.scans += 1
        if brought:
            self._found()
        if self._more and len(self._queue) >= self._page:
            await self._want_hints(False)
        elif not self._more:
            # The stream is open for hints again before the next scan, so that nothing falls in between.
            await self._want_hints(True)
        return brought

    async def _learn_what_is_due(self, now: float) -> None:
        """Ask in which queues something is due: the others are not looked at, so they cost nothing, however many they are."""
        if self._due is None and now < self._next_probe:
            return
        self._next_probe = now + _PROBE_EVERY_S
        due, all_of_them = await queues_due(self._store, self._names, LOOK_AHEAD_MS)
        if self._fixed_queues is not None:
            due &= self._known_queues.keys()
        elif not all_of_them and now >= self._next_queues:
            self._next_queues = now + _QUEUES_EVERY_S
            due |= set(await queues_in_use(self._store))
        for queue in sorted(due):
            self._know(queue, now)
        self._due = due if all_of_them else None

    def learn_queue(self, queue: str) -> None:
        """Note a queue that an event has shown."""
        if self._fixed_queues is None:
            self._know(queue, time.monotonic())
            if self._due is not None:
                self._due.add(queue)

    def _know(self, queue: str, now: float) -> None:
        """Note that there is something in a queue, and forget those in which there has been nothing for long."""
        is_new = queue not in self._known_queues
        self._known_queues[queue] = now
        if is_new and self._fixed_queues is None:
            old = now - _QUEUE_REMEMBERED_S
            self._known_queues = {
                name: seen for name, seen in self._known_queues.items() if seen > old or name in self._usual_queues
            }

    def _ranges(self, lanes: Sequence[int] | None) -> Iterator[tuple[int, ScanRange]]:
        """Yield what to look at, each by a number that stays the same while the queues do."""
        closed = self._closed_queues() | self._limits.full_queues
        number = 0
        for queues in _parts_of(list(self._known_queues), _MAX_COMBINATIONS):
            looked_at = [queue for queue in queues if queue not in closed]
            names_at_once = max(1, _MAX_COMBINATIONS // len(queues))
            for names in _parts_of(self._names, names_at_once):
                number += 1
                if looked_at if self._due is None else self._due.intersection(looked_at):
                    yield number, ScanRange(names, looked_at, lanes, LOOK_AHEAD_MS)

    @property
    def known_queues(self) -> Collection[str]:
        """The queues in which there was something of late."""
        return self._known_queues.keys()

    async def _scan(self, number: int, what: ScanRange) -> int:
        rows = await scan(self._store, self._worker_id, what, self._page)
        named = (
            await scan(self._store, self._worker_id, what, self._page, pinned=True)
            if what.lanes == self._lanes.own
            else []
        )
        brought = sum(self._offer(row) for row in await self._fitting([*named, *rows]))
        if len(rows) == self._page or len(named) == self._page:
            self._more = True
            if not brought and not self._queue.ready_count(time.monotonic()):
                brought += await self._read_behind_refused(number, what)
        return brought

    async def _fitting(self, rows: list[Claimable]) -> list[Claimable]:
        """Those that the hook `on_claim` allows now."""
        return await fitting(self._store, rows, self._narrowed_by) if self._narrowed_by else rows

    async def _look_at_leases(self, now: float) -> int:
        """Once a second, find the leases that run out, in all lanes: they stand behind no backlog."""
        if now < self._next_leases:
            return 0
        self._next_leases = now + 0.8 * SCAN_EVERY_S
        brought = 0
        for _, what in self._ranges(None):
            leases = await scan_leases(self._store, self._worker_id, what, _PAGE_BESIDE)
            brought += sum(self._offer(row, overdue=True) for row in await self._fitting(leases))
        return brought

    async def _help_others(self, now: float) -> int:
        """Take tasks from others' lanes that are neglected: those whose head does not move.

        A worker with free slots waits a moment for each that comes before it in the lane, so that they do not race; one with work
        enough looks once a second, and takes only from lanes that a dead or busy worker has left for a while.
        """
        self._again_soon = False
        if self._lanes.own is None:
            return 0
        free = self._wanted() - self._queue.ready_count(now)
        if free <= 0 and now < self._next_help:
            return 0
        self._next_help = now + 0.8 * SCAN_EVERY_S
        limit = max(_PAGE_BESIDE, min(2 * free, self._page))
        found = [row for _, what in self._ranges(None) for row in await scan(self._store, self._worker_id, what, limit)]
        rows = [row for row in await self._fitting(found) if self._clock.monotonic(row.next_claim_time) <= now]
        heads: dict[int, str] = {}
        for row in rows:
            heads.setdefault(lane_of(row.id), row.id)
        self._heads = {(lane, id_): self._heads.get((lane, id_), now) for lane, id_ in heads.items()}
        patience = _PATIENCE_S if free > 0 else _PATIENCE_OF_THE_BUSY_S
        neglected = {
            lane
            for (lane, _), since in self._heads.items()
            if now - since >= patience * min(self._lanes.place(lane), _LAST_PLACE_TO_WAIT)
        }
        self._again_soon = free > 0 and len(neglected) < len(heads)
        brought = 0
        for row in rows:
            if lane_of(row.id) in neglected and brought < max(free, 1):
                brought += self._offer(row, place=0)
        return brought

    async def _read_behind_refused(self, number: int, what: ScanRange) -> int:
        """A whole page that I may not have stands in front: read on behind it; to the end at first, then a page at each pass."""
        self._more = False  # the next page comes with the next pass, not at once
        brought = 0
        if number not in self._refused:
            self._refused[number] = await open_scan(self._store, self._worker_id, what)
        while not brought:
            rows: list[Any] = await self._refused[number].to_list(_PAGE_OF_REFUSED)
            brought = sum(map(self._offer, await self._fitting([claimable_from(row) for row in rows])))
            if len(rows) < _PAGE_OF_REFUSED:
                await self._refused.pop(number).close()
                self._read_to_the_end.add(number)
            if number in self._read_to_the_end:
                break
        return brought

    def still_there(self, row: Claimable, overdue: bool) -> None:
        """Take what a second look has found: nobody else has."""
        if self._offer(row, place=0, overdue=overdue):
            self._found()

    def _offer(self, row: Claimable, *, place: int | None = None, overdue: bool = False) -> bool:
        if row.claim_time == NEVER or self._skip(row.id) or self._queue.taken_meanwhile(row.id):
            return False
        if self._limits.is_full(row.queue, row.group):
            return False
        now = time.monotonic()
        moment = row.next_claim_time if row.claim_time is None else max(row.claim_time, row.next_claim_time)
        since = self._clock.monotonic(moment)
        if since > now + _FAR_S:
            return False  # in my own retry delay: not a candidate, but one of those that stand in front
        if place is None:
            place = 0 if row.named else self._lanes.place_of(row.id)
        if place:
            self._second_look.add(row.id, max(since, now), min(place, _LAST_PLACE_TO_WAIT), overdue=overdue)
            return False
        return self._queue.offer(
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


def _parts_of(values: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
