"""The scanner: looks for claimable tasks in the database. The stream brings hints; this is the truth.

It scans at the start, after every gap in the stream, whenever the claim queue runs low while there is more, and slowly for
ever as a safety net: that finds what no event announced, leases that ran out, and delayed tasks that are about to start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.consumer.backup_claims import LAST_PLACE_TO_WAIT, BackupClaims
from taskmesh.consumer.claim_filter import ClaimFilter
from taskmesh.consumer.claim_queue import NOTHING, ClaimQueue, Rank, rank_of
from taskmesh.consumer.dependents import Dependents
from taskmesh.consumer.executions import Executions
from taskmesh.consumer.groups import Groups
from taskmesh.consumer.limits import Limits
from taskmesh.consumer.listener import Listener
from taskmesh.consumer.listening import Listening
from taskmesh.consumer.partitions import Partitions
from taskmesh.consumer.queues import LOOK_AHEAD_MS, Queues
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.timing import until, varied
from taskmesh.consumer.write_times import WriteTimes
from taskmesh.store import Store, apart
from taskmesh.store.clock import ServerClock
from taskmesh.store.find import (
    Claimable,
    ScanRange,
    Sort,
    fitting,
    judged,
    open_scan,
    scan,
    scan_leases,
)
from taskmesh.store.payloads import references
from taskmesh.store.publication import lane_of
from taskmesh.store.settle import SETTLE_DEADLINE_MS, settle

logger = logging.getLogger("taskmesh.scanner")

SCAN_EVERY_S = 1.0
_ASK_AGAIN_S = 0.1
"""How soon a worker that does not listen looks again when it has found something; each time that it finds nothing, twice as
late as before."""
_ASK_AT_LEAST_EVERY_S = 4.0
_SETTLE_EVERY_S = 2.0
_MOST_SETTLE_DEADLINE_MS = 3_000
_PAYLOADS_EVERY_S = 60.0
"""How often to look whether something that is stored apart has no task any more."""
_MAX_COMBINATIONS = 150
"""Of names × queues in one query; above about 200 the server sorts in memory instead of merging index ranges."""
_FOR_ANYBODY: tuple[Sort, ...] = ("waiting", "shared")
_SORTS: tuple[Sort, ...] = ("named", *_FOR_ANYBODY)
_LEAST_PAGE = 1_000
_PAGE_OF_REFUSED = 400
_PAGE_BESIDE = 200
_PATIENCE_S = 0.2
_PATIENCE_OF_THE_BUSY_S = 2.0


class Scanner:
    """Feeds one consumer's claim queue."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        clock: ServerClock,
        candidates: ClaimQueue,
        executions: Executions,
        partitions: Partitions,
        queues: Queues,
        limits: Limits,
        claim_filter: ClaimFilter,
        backup_claims: BackupClaims,
        listening: Listening,
        listener: Listener,
        *,
        write_times: WriteTimes,
        dependents: Dependents,
        groups: Groups,
    ) -> None:
        self._store = store
        self._me = settings.claimant
        self._names = settings.names
        self._page = max(_LEAST_PAGE, min(5_000, 4 * settings.concurrency))
        self._clock = clock
        self._candidates = candidates
        self._executions = executions
        self._partitions = partitions
        self._queues = queues
        self._limits = limits
        self._claim_filter = claim_filter
        self._narrowed_by: Mapping[str, Any] = {}
        """What the hook `on_claim` says at this pass: what does not match it would be refused, like what only others may have."""
        self._backup_claims = backup_claims
        self._listening = listening
        self._listener = listener
        self._write_times = write_times
        self._dependents = dependents
        self._groups = groups
        self._refused: dict[tuple[int, Sort], Any] = {}
        """By number of the range and sort, a cursor over what lies behind tasks not for me; read on a little at each pass."""
        self._read_to_the_end: set[tuple[int, Sort]] = set()
        """In which of them that has been done once."""
        self._heads_refused: set[tuple[int, Sort]] = set()
        """Where the last page was full, and had nothing for me."""
        self._next_settle = self._next_sweep = self._next_payloads = 0.0
        self._next_leases = 0.0
        self._next_help = 0.0
        self._again_soon = False
        self._pause_s = SCAN_EVERY_S
        self._heads: dict[tuple[int, str], float] = {}
        """What stood at the head of each lane when all were looked at last, and since when."""
        self._told_outage = self._told_unsettled = False
        self.scans = 0
        self.open = True

    async def run(self) -> None:
        """Scan for ever."""
        while True:
            self._candidates.scan_wanted.clear()
            try:
                brought = await self.run_once()
                self._pause_s = self._pause_after(brought)
                self._told_outage = False
            except PyMongoError as error:
                if not self._told_outage:
                    logger.warning("a scan failed (%s: %.200s): trying again", type(error).__name__, error)
                    self._told_outage = True
                self._candidates.unread = True
                await asyncio.sleep(0.2)
            await until(self._candidates.scan_wanted, _PATIENCE_S if self._again_soon else varied(self._pause_s, 0.1))

    def _pause_after(self, brought: int) -> float:
        """Return how long to wait for the next pass, unless something asks for it."""
        if self._listening.wanted:
            return SCAN_EVERY_S
        if brought:
            return _ASK_AGAIN_S
        return min(2 * self._pause_s, self._partitions.in_turn(SCAN_EVERY_S), _ASK_AT_LEAST_EVERY_S)

    async def run_once(self) -> int:
        """Make one pass; return how many new candidates it brought."""
        now = time.monotonic()
        await self._settle_and_sweep(now)
        if not self.open or not self._names:
            self._candidates.know_to(None)  # who does not look goes by what he hears
            return 0
        self._narrowed_by = (
            await self._claim_filter.current() or {}
        )  # None: nothing is claimed for now, whatever is found
        self._candidates.begin_scan()
        leases = now >= self._next_leases
        await self._queues.look_for_due(now, self._horizon, leases=leases)
        self._candidates.unread = False
        brought = await self._scan()
        if leases:
            self._next_leases = now + self._partitions.in_turn(0.8 * SCAN_EVERY_S)
            brought += await self._look_at_leases()
        brought += await self._help_others(now)
        self.scans += 1
        if brought:
            self._candidates.ready.set()
        if self._candidates.unread and len(self._candidates) >= self._page and not self._groups.any:
            await self._want_hints(False)
        elif not self._candidates.unread:
            # The stream is open for hints again before the next scan, so that nothing falls in between.
            await self._want_hints(True)
        return brought

    async def _settle_and_sweep(self, now: float) -> None:
        """Write down what time alone has finished, and ask for those that wait for others. A scan does without, if need be."""
        try:
            if now >= self._next_settle:
                self._next_settle = now + self._partitions.in_turn(varied(_SETTLE_EVERY_S, 0.2))
                deadline_ms = self._write_times.deadline_ms(SETTLE_DEADLINE_MS, _MOST_SETTLE_DEADLINE_MS)
                if await settle(self._store, deadline_ms):
                    # Nobody else tells those that wait for what time alone has finished.
                    await self._dependents.sweep(at_once=True)
            if now >= self._next_sweep:
                self._next_sweep = now + self._partitions.in_turn(0.8 * SCAN_EVERY_S)
                await self._dependents.sweep()
            if now >= self._next_payloads:
                self._next_payloads = now + self._partitions.in_turn(varied(_PAYLOADS_EVERY_S, 0.2))
                await apart.sweep(self._store, references)
            self._told_unsettled = False
        except PyMongoError as error:
            if not self._told_unsettled:
                text = "what time alone has finished cannot be written down (%s: %.200s): trying again"
                logger.warning(text, type(error).__name__, error)
                self._told_unsettled = True

    def _ranges(self, *, own: bool) -> Iterator[tuple[int, ScanRange]]:
        """Yield what to look at, each by a number that stays the same while the queues do. `own`: in this worker's lanes."""
        closed = self._queues.paused | self._limits.full_queues
        number = 0
        for queues in _parts_of(list(self._queues.known), _MAX_COMBINATIONS):
            looked_at = [queue for queue in queues if queue not in closed]
            names_at_once = max(1, _MAX_COMBINATIONS // len(queues))
            for names in _parts_of(self._names, names_at_once):
                shares = self._partitions.shares(names, looked_at) if own else [(names, looked_at, None)]
                for some_names, some_queues, lanes in shares:
                    number += 1
                    if self._queues.is_any_due(some_queues):
                        yield number, ScanRange(some_names, some_queues, lanes, self._horizon)

    @property
    def _horizon(self) -> datetime:
        """How far scans look, by the server's clock."""
        return self._clock.now() + timedelta(milliseconds=LOOK_AHEAD_MS)

    async def _want_hints(self, wanted: bool) -> None:
        """Under a backlog the stream is not asked for new work; when it is worked off, a scan closes the gap."""
        if await self._listener.want_hints(wanted) and wanted:
            self._candidates.order_scan()

    async def _scan(self) -> int:
        """Look at what is due in my lanes, and for me by name; take no more of it than what has nothing unseen before it."""
        found: list[Claimable] = []
        full: list[tuple[int, ScanRange, Sort]] = []
        known_to: Rank | None = None
        looked_at, behind = set[str](), set[str]()
        for number, what in self._ranges(own=True):
            looked_at.update(what.queues)
            for sort in _SORTS:
                # Where nothing of the last page was for me, a few are enough to see whether that has changed.
                size = _PAGE_BESIDE if (number, sort) in self._heads_refused else self._page
                page = await scan(self._store, self._me, what, size, sort)
                found += await self._fitting(page.rows)
                if page.full:
                    behind.update(what.queues)
                    full.append((number, what, sort))
                    # How many failures those have that it did not read, it cannot tell: some have none.
                    last = max((rank_of(row, fail_cnt=0) for row in page.rows), default=NOTHING)
                    known_to = last if known_to is None else min(known_to, last)
        await self._groups.note(looked_at - behind, full=False)
        if behind:
            await self._groups.note(behind, full=True)
        # From here to the last offer nothing is waited for: no hint comes in between.
        self._candidates.know_to(known_to)
        brought = self._offer(found)
        if brought:
            self._heads_refused.clear()
        if full:
            self._candidates.unread = True
            if not brought and not self._candidates.ready_count(time.monotonic()):
                self._candidates.know_to(None)  # whoever stands before what comes now, may not be had
                self._heads_refused.update((number, sort) for number, _, sort in full)
                for number, what, sort in full:
                    if sort in _FOR_ANYBODY:
                        brought += await self._read_behind_refused((number, sort), what)
        return brought

    def _offer(self, rows: Sequence[Claimable], *, place: int | None = None, overdue: bool = False) -> int:
        """Offer what was found; return how many of it are new candidates.

        Not what has run and come back since: its event tells of it as it is now, and the row may be from before it failed.
        """
        offer, came_back = self._backup_claims.offer, self._candidates.came_back_meanwhile
        return sum(offer(row, place=place, overdue=overdue) for row in rows if not came_back(row.id))

    async def _fitting(self, rows: list[Claimable]) -> list[Claimable]:
        """Those that the hook `on_claim` allows now."""
        return await fitting(self._store, rows, self._narrowed_by) if self._narrowed_by else rows

    async def _look_at_leases(self) -> int:
        """Find the leases that run out, and tasks at work that have room, in all lanes: they stand behind no backlog."""
        brought = 0
        for _, what in self._ranges(own=False):
            leases = await scan_leases(self._store, self._me, what, _PAGE_BESIDE)
            brought += self._offer(await self._fitting(leases), overdue=True)
            shared = await scan(self._store, self._me, what, _PAGE_BESIDE, "shared")
            brought += self._offer(await self._fitting(shared.rows))
        return brought

    async def _help_others(self, now: float) -> int:
        """Take tasks from others' lanes: those that need labels that nobody before this worker has, and neglected ones.

        Neglected are lanes whose head does not move. A worker with free slots waits a moment for each that comes before it in the
        lane, so that they do not race; one with work enough looks once a second, and takes only from lanes that a dead or busy
        worker has left for a while.
        """
        self._again_soon = False
        if self._partitions.alone:
            return 0
        free = self._executions.free_slots - self._candidates.ready_count(now)
        if free <= 0 and now < self._next_help:
            return 0
        self._next_help = now + 0.8 * SCAN_EVERY_S
        limit = max(_PAGE_BESIDE, min(2 * free, self._page))
        found: list[Claimable] = []
        full = False
        for _, what in self._ranges(own=False):
            for sort in _FOR_ANYBODY:
                page = await scan(self._store, self._me, what, limit, sort)
                found += page.rows
                full |= page.full
        rows = [row for row in await self._fitting(found) if self._clock.monotonic(row.next_claim_time) <= now]
        # By lanes alone these are others', who lack what they need: no index tells what a task needs.
        brought = self._offer([row for row in rows if row.needs and self._place(row) == 0])
        self._candidates.unread |= full and brought > 0
        heads: dict[int, Claimable] = {}
        for row in rows:
            heads.setdefault(lane_of(row.id), row)
        self._heads = {(lane, row.id): self._heads.get((lane, row.id), now) for lane, row in heads.items()}
        patience = _PATIENCE_S if free > 0 else _PATIENCE_OF_THE_BUSY_S
        neglected = {
            lane
            for lane, row in heads.items()
            if now - self._heads[lane, row.id] >= patience * min(self._place(row), LAST_PLACE_TO_WAIT)
        }
        self._again_soon = free > 0 and len(neglected) < len(heads)
        for row in rows:
            if lane_of(row.id) in neglected and brought < max(free, 1):
                brought += self._offer([row], place=0)
        return brought

    def _place(self, row: Claimable) -> int:
        return self._partitions.place(row.id, row.queue, row.needs)

    async def _read_behind_refused(self, place: tuple[int, Sort], what: ScanRange) -> int:
        """A whole page that I may not have stands in front: read on behind it; to the end at first, then a page at each pass."""
        self._candidates.unread = False  # the next page comes with the next pass, not at once
        brought = 0
        if place not in self._refused:
            self._refused[place] = await open_scan(self._store, self._me, what, place[1])
        while not brought:
            found: list[Any] = await self._refused[place].to_list(_PAGE_OF_REFUSED)
            rows = await judged(self._store, self._me, found)
            brought = self._offer(await self._fitting(rows))
            if len(found) < _PAGE_OF_REFUSED:
                await self._refused.pop(place).close()
                self._read_to_the_end.add(place)
            if place in self._read_to_the_end:
                break
        return brought


def _parts_of(values: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
