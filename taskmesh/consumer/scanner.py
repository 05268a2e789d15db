"""The scanner: looks for claimable tasks in the database. The stream brings hints; what the scanner finds is reliable.

It scans at the start, after every gap in the stream, and once a second as a safety net: that finds what no event announced,
leases that ran out, and delayed tasks that are about to start. Of a backlog it reads a page; when the claim queue runs low, it
reads the next one, and as long as that goes on, workers of a large fleet take turns with the safety net. Meanwhile it looks for
tasks that are more urgent than all of that.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.consumer.candidates.backup_claims import BackupClaims
from taskmesh.consumer.candidates.claim_filter import ClaimFilter
from taskmesh.consumer.candidates.claim_queue import NOTHING, ClaimQueue, Rank, rank_of
from taskmesh.consumer.candidates.groups import Groups
from taskmesh.consumer.candidates.limits import Limits
from taskmesh.consumer.candidates.listening import Listening
from taskmesh.consumer.candidates.open_pages import OpenPages
from taskmesh.consumer.candidates.partitions import LAST_PLACE_TO_WAIT, Partitions
from taskmesh.consumer.candidates.queues import ASK_AT_LEAST_EVERY_S, ASKERS_LOOK_AHEAD_MS, LOOK_AHEAD_MS, Queues
from taskmesh.consumer.listener import Listener
from taskmesh.consumer.run.dependents import Dependents
from taskmesh.consumer.run.executions import Executions
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.timing import until, varied
from taskmesh.consumer.write_times import WriteTimes
from taskmesh.store import Store, apart, upkeep
from taskmesh.store.clock import ServerClock
from taskmesh.store.find import (
    Claimable,
    OpenScan,
    Page,
    ScanRange,
    Sort,
    close_scans,
    fitting,
    open_scan,
    scan,
    scan_leases,
)
from taskmesh.store.payloads import references
from taskmesh.store.publication import lane_of
from taskmesh.store.settle import SETTLE_DEADLINE_MS, settle
from taskmesh.store.upkeep import Upkeep

logger = logging.getLogger("taskmesh.scanner")

SCAN_EVERY_S = 1.0
_READ_ON_AT_MOST_S = 4.0
"""How long a worker that reads on may leave what else a scan finds to others. Tasks in its own lanes that stand before what it
has read wait for it."""
_ASK_AGAIN_S = 0.1
"""How soon a worker that does not listen scans again after it has found something. Each scan that finds nothing doubles the
pause."""
_SETTLE_EVERY_S = 2.0
_MOST_SETTLE_DEADLINE_MS = 3_000
_PAYLOADS_EVERY_S = 60.0
"""How often to look for separately stored values whose task is gone."""
_FOR_ANYBODY: tuple[Sort, ...] = ("waiting", "shared")
_SORTS: tuple[Sort, ...] = ("named", "labelled", *_FOR_ANYBODY)
_FOR_OTHERS_TOO: tuple[Sort, ...] = (*_FOR_ANYBODY, "labelled")
_WAITING: tuple[Sort, ...] = ("named", "labelled", "waiting")
_URGENT_EVERY_S = 0.1
"""How often to look for tasks that go before all of a backlog."""
_PAGE_OF_URGENT = 50
_HELP_EVERY_S = 0.25
"""How often a worker with free slots scans while others have none, and so cannot take the new tasks that only they hear of."""
_USUAL_PAGE = 1_000
_PASSES_AHEAD = 2.5
"""A page holds what is taken during so many passes. If there are many workers, each passes over all tasks to find its own."""
_RATE_OVER_S = 0.25
"""Anything taken in less time is a single burst, from which no rate can be derived."""
_PAGE_OF_REFUSED = 400
_PAGE_BESIDE = 200
_READ_BEHIND_S = 0.4
"""How long a pass reads behind tasks that this worker may not have, until it has reached the end once."""
_OVERLAP = timedelta(seconds=2)
"""How late a task that is due may become visible: clocks differ, and publishing takes time."""
_MOST_OPEN = 100
"""How many scans behind refused tasks are kept."""
_Place = tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...] | None, Sort]
"""Names, queues, lanes and sort: what a scan looks at."""
_Lane = tuple[int, bool]
"""A lane, and whether of the tasks that need labels: their workers are others."""
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
        self._most = self._page = max(_USUAL_PAGE, min(5_000, 4 * settings.concurrency))
        """The largest page, and the size of the next one."""
        self._enough = min(self._most, max(_PAGE_BESIDE, 4 * settings.concurrency))
        """The smallest page."""
        self._taken = 0
        self._taken_since = -math.inf
        """How many candidates were taken since this moment (monotonic)."""
        self._taken_per_s = 0.0
        self._clock = clock
        self._candidates = candidates
        self._executions = executions
        self._partitions = partitions
        self._queues = queues
        self._limits = limits
        self._claim_filter = claim_filter
        self._narrowed_by: Mapping[str, Any] = {}
        """The filter of the hook `on_claim` in this pass. Tasks that do not match it would be refused, like tasks for other
        workers."""
        self._backup_claims = backup_claims
        self._listening = listening
        self._listener = listener
        self._write_times = write_times
        self._dependents = dependents
        self._groups = groups
        self._behind: dict[_Place, tuple[datetime, OpenScan]] = {}
        """Scans behind tasks that this worker may not have, and when each was opened, by the server's clock."""
        self._read_to: dict[_Place, datetime] = {}
        """Where all that lies behind such tasks was read to the end once: the time up to which due tasks are known."""
        self._open_pages = OpenPages()
        self._heads_refused: set[_Place] = set()
        """Where the last page was full, and contained nothing for this worker."""
        self._next_upkeep = self._next_settle = self._next_payloads = 0.0
        self._next_leases = 0.0
        self._next_help = 0.0
        self._again_soon = False
        self._pause_s = SCAN_EVERY_S
        self._heads: dict[tuple[_Lane, str], float] = {}
        """The head of each lane when all lanes were last looked at, and since when it has been the head."""
        self._left_to_me: set[_Lane] = set()
        """The neglected lanes from which the last look took something."""
        self._tried_in_vain = 0
        """How many claims had won nothing by then."""
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
            reads_on_s = self._open_pages.left_s if self._candidates.may_read_on else 0.0
            await self._rest(_PATIENCE_S if self._again_soon else varied(reads_on_s or self._pause_s, 0.1))

    async def _rest(self, pause_s: float) -> None:
        """Wait for the next pass.

        Meanwhile look for tasks that go before a backlog of which only a part was read: nothing else announces them.
        """
        over = time.monotonic() + pause_s
        looks = True
        while (left_s := over - time.monotonic()) > 0:
            every_s = self._partitions.in_turn(_URGENT_EVERY_S) if looks else left_s
            if await until(self._candidates.scan_wanted, min(every_s, left_s)) or left_s <= every_s:
                return
            try:
                looks = await self._look_for_urgent()
            except PyMongoError as error:
                logger.debug("could not look for urgent tasks (%s): the scan will find them", type(error).__name__)

    async def _look_for_urgent(self) -> bool:
        """Offer tasks of a higher priority than any that is unread. Return whether to look again before the next pass.

        A worker that finds none in its own lanes takes one from another's that has not been claimed for a moment: its owner may
        be busy for long.
        """
        above = self._candidates.unread_priority
        if above is None or not self.open:
            return False
        found: list[Claimable] = []
        full = False
        for what in self._ranges(own=False):
            for sort in _WAITING:
                page = await scan(self._store, self._me, replace(what, above=above), _PAGE_OF_URGENT, sort)
                found += page.rows
                full |= page.full
        rows = await self._fitting(found)
        brought = self._backup_claims.offer_found([row for row in rows if self._is_mine(row)])
        if not brought:
            now = time.monotonic()
            patience = {row.id: _URGENT_EVERY_S * min(self._place(row), LAST_PLACE_TO_WAIT) for row in rows}
            left = (row for row in rows if now - self._clock.monotonic(row.next_claim_time) >= patience[row.id])
            brought = any(self._backup_claims.offer_found([row], place=0) for row in left)
        if brought:
            self._candidates.ready.set()
            if full:  # there may be more of them
                self._candidates.order_scan()
        return bool(brought) or not full

    def _pause_after(self, brought: int) -> float:
        """Return how long to wait for the next pass, unless something requests it earlier."""
        if self._listening.wanted:
            has_room = self._executions.free_slots > self._candidates.ready_count(time.monotonic())
            helps = has_room and self._partitions.others_are_full
            return min(SCAN_EVERY_S, self._partitions.in_turn(_HELP_EVERY_S)) if helps else SCAN_EVERY_S
        if brought:
            return _ASK_AGAIN_S
        return min(2 * self._pause_s, self._partitions.in_turn(SCAN_EVERY_S), ASK_AT_LEAST_EVERY_S)

    async def run_once(self) -> int:
        """Make one pass. Return how many new candidates it brought."""
        now = time.monotonic()
        await self._do_upkeep(now)
        if not self.open or not self._names:
            self._candidates.know_to(None)  # a worker that does not look goes by hints alone
            return 0
        self._narrowed_by = (
            await self._claim_filter.current() or {}
        )  # None: nothing is claimed for now, whatever is found
        reads_on = self._open_pages.left_s > 0 and self._candidates.may_read_on
        self._count_taken(self._candidates.begin_scan(), now)
        brought = (await self._read_on() if reads_on else 0) or await self._scan_from_start(now)
        self.scans += 1
        self._candidates.scanned(brought, time.monotonic() - now)
        if brought:
            self._candidates.ready.set()
        holds_enough = not self._candidates.runs_low() and not self._groups.any
        if self._listening.does_without(self._taken_per_s if holds_enough else None):
            self._candidates.unread = True
            await self._want_hints(False)
        elif self._candidates.unread and len(self._candidates) >= self._page and not self._groups.any:
            await self._want_hints(False)
        elif not self._candidates.unread:
            # The stream is open for hints again before the next scan, so that nothing is missed in between.
            await self._want_hints(True)
        return brought

    async def _scan_from_start(self, now: float) -> int:
        """Look at everything. Return how many new candidates that brought."""
        leases = now >= self._next_leases
        await self._queues.look_for_due(now, self._horizon, leases=leases)
        self._candidates.unread = False
        brought = await self._scan()
        if leases:
            self._next_leases = now + self._partitions.in_turn(0.8 * SCAN_EVERY_S)
            brought += await self._look_at_leases()
        return brought + await self._help_others(now)

    async def _read_on(self) -> int:
        """Read the next pages of a backlog. Return how many new candidates that brought; 0: to be scanned from the start."""
        pages = [page for page in await self._open_pages.next_pages() if page.rows]
        found = await self._fitting([row for page in pages for row in page.rows])
        if not found:
            return 0
        self._candidates.know_to(min(map(_end_of, pages)))
        return self._backup_claims.offer_found(found)

    def _count_taken(self, taken: int, now: float) -> None:
        """Note how many candidates were taken since the last scan. The size of a page follows from their rate."""
        self._taken += taken
        past_s = now - self._taken_since
        if self._taken:
            self._taken_per_s = self._taken / max(past_s, _RATE_OVER_S)
            self._page = round(min(self._most, max(self._enough, _PASSES_AHEAD * SCAN_EVERY_S * self._taken_per_s)))
        if past_s >= _RATE_OVER_S:
            self._taken, self._taken_since = 0, now

    async def _do_upkeep(self, now: float) -> None:
        """Record what has finished by time alone, and tell dependents. If this fails, the scan goes on without it."""
        try:
            if now >= self._next_upkeep:
                self._next_upkeep = now + self._partitions.in_turn(0.8 * SCAN_EVERY_S)
                due = await upkeep.due(self._store)
                if Upkeep.SETTLE in due and now >= self._next_settle:
                    self._next_settle = now + self._partitions.in_turn(varied(_SETTLE_EVERY_S, 0.2))
                    deadline_ms = self._write_times.deadline_ms(SETTLE_DEADLINE_MS, _MOST_SETTLE_DEADLINE_MS)
                    if await settle(self._store, deadline_ms):
                        # Nobody else tells the dependents of what has finished by time alone.
                        await self._dependents.sweep({Upkeep.MARKS}, at_once=True)
                await self._dependents.sweep(due)
            if now >= self._next_payloads:
                self._next_payloads = now + self._partitions.in_turn(varied(_PAYLOADS_EVERY_S, 0.2))
                await apart.sweep(self._store, references)
            self._told_unsettled = False
        except PyMongoError as error:
            if not self._told_unsettled:
                text = "tasks whose expiry or last lease has passed cannot be finished now (%s: %.200s): trying again"
                logger.warning(text, type(error).__name__, error)
                self._told_unsettled = True

    def _skip_closed(self) -> frozenset[str]:
        """Return the queues from which nothing may be claimed now. A pass skips them."""
        return self._queues.paused | self._limits.skip_full()

    def _ranges(self, *, own: bool, running: bool = False) -> Iterator[ScanRange]:
        """Yield what to look at. `own`: in this worker's lanes. `running`: where running tasks are due."""
        closed = self._skip_closed()
        for names, queues in self._queues.worth_a_look(running=running, lately=bool(self._heads_refused)):
            looked_at = [queue for queue in queues if queue not in closed]
            shares = self._partitions.shares(names, looked_at) if own else [(names, looked_at, None)]
            for some_names, some_queues, lanes in shares:
                if some_queues:
                    yield ScanRange(some_names, some_queues, lanes, self._horizon)

    @property
    def _horizon(self) -> datetime:
        """How far scans look, by the server's clock: beyond the next scan."""
        ahead_ms = LOOK_AHEAD_MS if self._listening.wanted else ASKERS_LOOK_AHEAD_MS
        return self._clock.now() + timedelta(milliseconds=ahead_ms)

    async def _want_hints(self, wanted: bool) -> None:
        """Under a backlog the stream does not announce new work. When the backlog is worked off, a scan closes the gap."""
        if await self._listener.want_hints(wanted) and wanted:
            self._candidates.order_scan()

    async def _scan(self) -> int:
        """Scan what is due in this worker's lanes, or names this worker.

        Of the result, take only what comes before anything unread.
        """
        found: list[Claimable] = []
        full: list[tuple[ScanRange, Sort]] = []
        rests: list[OpenScan] = []
        known_to: Rank | None = None
        began = time.monotonic()
        looked_at, behind = self._queues.known - self._skip_closed(), set[str]()
        for what in self._ranges(own=True):
            for sort in _SORTS:
                # Where the last page contained nothing for this worker, a small page is enough to see whether that has changed.
                refused = _place_of(what, sort) in self._heads_refused
                size = _PAGE_BESIDE if refused else self._page
                to_continue = not refused and not self._groups.any  # groups are read one by one
                page = await scan(self._store, self._me, what, size, sort, to_continue=to_continue)
                # (No lane of the index tells which of the workers with these labels comes first.)
                rows = page.rows if sort != "labelled" else [row for row in page.rows if self._is_mine(row)]
                found += await self._fitting(rows)
                if page.full:
                    behind.update(what.queues)
                    full.append((what, sort))
                    known_to = _end_of(page) if known_to is None else min(known_to, _end_of(page))
                    if page.rest is not None:
                        rests.append(page.rest)
        await self._groups.note(looked_at - behind, full=False)
        if behind:
            await self._groups.note(behind, full=True)
        # Nothing is awaited from here to the last offer, so that no hint comes in between.
        self._candidates.know_to(known_to)
        brought = self._backup_claims.offer_found(found)
        if self._candidates.runs_low():
            brought += self._candidates.let_failed_go()
        if brought:
            self._heads_refused.clear()
        read_on_s = min(self._partitions.in_turn(SCAN_EVERY_S), _READ_ON_AT_MOST_S)
        await self._open_pages.keep(rests, began + read_on_s)
        if len(rests) < len(full):  # what cannot be read on may go before what is behind the others
            await self._open_pages.close()
        if full:
            self._candidates.unread = True
            if not brought and not self._candidates.ready_count(time.monotonic()) and not self._mostly_known(found):
                self._candidates.know_to(None)  # tasks before the next ones may be unavailable to this worker
                self._candidates.unread = False  # what is behind is read in the next pass, not at once
                self._heads_refused.update(_place_of(*each) for each in full)
                for what, sort in full:
                    brought += await self._read_behind_refused(what, sort)
        return brought

    async def _fitting(self, rows: list[Claimable]) -> list[Claimable]:
        """Return the rows that the hook `on_claim` allows now."""
        return await fitting(self._store, rows, self._narrowed_by)

    async def _look_at_leases(self) -> int:
        """Find leases that run out, and running tasks that have room for more workers, in all lanes: no backlog hides them."""
        brought = 0
        for what in self._ranges(own=False, running=True):
            leases = await scan_leases(self._store, self._me, what, _PAGE_BESIDE)
            brought += self._backup_claims.offer_found(await self._fitting(leases), overdue=True)
            shared = await scan(self._store, self._me, what, _PAGE_BESIDE, "shared")
            brought += self._backup_claims.offer_found(await self._fitting(shared.rows))
        return brought

    async def _help_others(self, now: float) -> int:
        """Take tasks from other workers' lanes: those that this worker is among the first to be able to run, and neglected ones.

        A lane is neglected if its head does not move. A worker with free slots waits a moment for each worker that comes before
        it in the lane, so that they do not race; a worker that has enough work looks once a second, and takes only from lanes
        that a dead or busy worker has left alone for a while. A worker that wins everything it takes from a lane goes on
        without waiting again.
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
        full: list[tuple[ScanRange, Sort]] = []
        for what in self._ranges(own=False):
            for sort in _FOR_OTHERS_TOO:
                page = await scan(self._store, self._me, what, limit, sort)
                found += page.rows
                if page.full:
                    full.append((what, sort))
        # (What has no room is neglected by nobody.)
        rows = [
            row
            for row in await self._fitting(found)
            if self._clock.monotonic(row.next_claim_time) <= now and not self._limits.is_full(row.queue, row.group)
        ]
        # By lane alone these belong to workers that have done their part, or that lack the labels (of tasks of older releases,
        # which stand among those for anybody): the index of what waits tells neither needs nor how many workers a task is for.
        brought = self._backup_claims.offer_found(
            [row for row in rows if (row.needs or row.wanted > 1) and self._place(row) == 0]
        )
        self._candidates.unread |= bool(full) and brought > 0
        heads = self._heads_of_lanes(rows, now)
        patience = _PATIENCE_S if free > 0 else _PATIENCE_OF_THE_BUSY_S
        place = self._partitions.place_among_free if free > 0 else self._partitions.place
        neglected = {
            lane
            for lane, row in heads.items()
            if now - self._heads[lane, row.id]
            >= patience * min(place(row.id, row.queue, row.needs, row.wanted), LAST_PLACE_TO_WAIT)
        }
        self._again_soon = free > 0 and len(neglected) < len(heads)
        for row in rows:
            lane = _lane(row)
            if lane in neglected and brought < max(free, 1) and self._backup_claims.offer_found([row], place=0):
                brought += 1
                if self._place(row):
                    self._left_to_me.add(lane)
        self._candidates.unread |= bool(full and self._left_to_me)
        if free > 0 and not brought and not self._again_soon and not self._mostly_known(rows):
            for what, sort in full:  # this worker may have none of them, and they stand before what it may have
                brought += await self._read_behind_refused(what, sort, at_once=True)
        return brought

    def _mostly_known(self, rows: Sequence[Claimable]) -> bool:
        """Whether the rows bring nothing because most of them are about to be claimed here, or are being claimed."""
        now = time.monotonic()
        return 2 * sum(self._candidates.knows(row.id, now) for row in rows) > len(rows)

    def _is_mine(self, row: Claimable) -> bool:
        """Whether a task names this worker, or lies in one of its lanes."""
        return row.named or self._place(row) == 0

    def _place(self, row: Claimable) -> int:
        return self._partitions.place(row.id, row.queue, row.needs, row.wanted)

    def _heads_of_lanes(self, rows: Sequence[Claimable], now: float) -> Mapping[_Lane, Claimable]:
        """Return the head of each lane, and note since when it is that.

        Heads of lanes that were left to this worker count as old.
        """
        heads: dict[_Lane, Claimable] = {}
        for row in rows:
            heads.setdefault(_lane(row), row)
        in_vain = self._candidates.tried_in_vain
        left_to_me = self._left_to_me if in_vain == self._tried_in_vain else ()
        self._heads = {
            (lane, row.id): self._heads.get((lane, row.id), -math.inf if lane in left_to_me else now)
            for lane, row in heads.items()
        }
        self._left_to_me, self._tried_in_vain = set(), in_vain
        return heads

    async def _read_behind_refused(self, what: ScanRange, sort: Sort, *, at_once: bool = False) -> int:
        """Look for tasks behind a whole page that this worker may not have.

        `at_once`: take them without waiting for other workers.

        The first time, read to the end, for a moment in each pass. After that, read what has become due since, wherever it
        stands, which is little; and one page of the rest in each pass, since what was refused may have changed.
        """
        place, now = _place_of(what, sort), self._clock.now()
        brought, read_to = 0, self._read_to.get(place)
        if read_to is not None:
            due_since = await scan(self._store, self._me, replace(what, since=read_to - _OVERLAP), self._page, sort)
            brought = self._backup_claims.offer_found(await self._fitting(due_since.rows), place=0 if at_once else None)
            if not due_since.full:
                self._read_to[place] = now
            elif not brought:
                del self._read_to[place]  # there is more than one page, with nothing in it: read to the end once more
        end = time.monotonic() + _READ_BEHIND_S
        while not brought:
            goes_on = place in self._behind
            if not goes_on:
                await self._forget_old_scans()
                self._behind[place] = now, open_scan(self._store, self._me, what, sort, _PAGE_OF_REFUSED)
            opened, rest = self._behind[place]
            try:
                page = await rest.next_page()
            except PyMongoError as error:
                del self._behind[place]  # the driver would report the end of it next time
                if not goes_on:
                    raise
                # The server has forgotten it, or is gone.
                logger.debug("could not continue a scan (%s): scanning from the start", type(error).__name__)
                continue
            brought = self._backup_claims.offer_found(await self._fitting(page.rows), place=0 if at_once else None)
            if page.rest is None:
                del self._behind[place]
                self._read_to.setdefault(place, opened)
                break
            if place in self._read_to or time.monotonic() >= end:
                break
        return brought

    async def close(self) -> None:
        """Let the server forget what was to be read on."""
        await self._open_pages.close()
        await close_scans(rest for _, rest in self._behind.values())

    async def _forget_old_scans(self) -> None:
        """Close the oldest scans when there are many: which workers are live, and on which queues, has changed since."""
        while len(self._behind) >= _MOST_OPEN:
            _, rest = self._behind.pop(next(iter(self._behind)))
            await close_scans([rest])
        while len(self._read_to) >= _MOST_OPEN:
            del self._read_to[next(iter(self._read_to))]


def _end_of(page: Page) -> Rank:
    """Return up to where a page has every task."""
    # How many failures unread tasks have is unknown: some have none.
    return max((rank_of(row, fail_cnt=0) for row in page.rows), default=NOTHING)


def _lane(row: Claimable) -> _Lane:
    return lane_of(row.id), bool(row.needs)


def _place_of(what: ScanRange, sort: Sort) -> _Place:
    return tuple(what.names), tuple(what.queues), None if what.lanes is None else tuple(what.lanes), sort
