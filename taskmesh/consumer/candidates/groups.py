"""Groups behind a backlog: finds tasks of groups that a scan does not reach, so that each group has its turn.

A scan reads in the order of claiming. If there is more than one page of work, a single group may fill all of it. Then this part
looks group by group: once a second at which groups have due tasks, and for the next tasks of a group whenever few of its
candidates are left, many groups in one command. While a queue is full, what is found waits for the turn of its group. Queues
whose tasks have no group are never looked at.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from datetime import timedelta

from pymongo.errors import PyMongoError

from taskmesh.consumer.candidates.backup_claims import BackupClaims
from taskmesh.consumer.candidates.claim_filter import ClaimFilter
from taskmesh.consumer.candidates.claim_queue import ClaimQueue
from taskmesh.consumer.candidates.limits import Limits
from taskmesh.consumer.candidates.partitions import Partitions
from taskmesh.consumer.candidates.queues import LOOK_AHEAD_MS
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.timing import until
from taskmesh.store import Store
from taskmesh.store.clock import ServerClock
from taskmesh.store.find import Claimable, fitting
from taskmesh.store.queues.first_of import Look, first_of
from taskmesh.store.queues.groups import groups_due, queues_with_groups

logger = logging.getLogger("taskmesh.groups")

_LOOK_EVERY_S = 0.1, 1.0
"""The shortest and the longest pause between two looks at which groups there are. The longer a look takes, the longer the
pause."""
_SHARE_OF_TIME = 30
_GROUPS_AT_ONCE = 50
_TASKS_AT_ONCE = 1_000
_LEAST, _MOST = 4, 200
"""How many tasks of a group are read at a time."""
_ANY_GROUPS_EVERY_S = 2.0
_NOTHING_FOUND_S = 1.0
"""How long a group is skipped after a look that found nothing new: all its tasks are held here, or left to other workers."""
_ASK_AGAIN_S = 0.2


class Groups:
    """The groups of the queues in which one consumer has a backlog."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        clock: ServerClock,
        candidates: ClaimQueue,
        partitions: Partitions,
        limits: Limits,
        claim_filter: ClaimFilter,
        backup_claims: BackupClaims,
    ) -> None:
        self._store = store
        self._me = settings.claimant
        self._names = settings.names
        self._clock = clock
        self._candidates = candidates
        self._partitions = partitions
        self._limits = limits
        self._claim_filter = claim_filter
        self._backup_claims = backup_claims
        self._backlogs: dict[str, str] = {}
        """Queues that have groups and more tasks than a scan reads, with the group after which to continue."""
        self._next_look = 0.0
        self._next_probe = 0.0
        self._to_probe: set[str] = set()
        """Queues with more tasks than were read, of which it is unknown whether they have groups."""
        self._left_alone: dict[tuple[str, str], float] = {}

    @property
    def any(self) -> bool:
        """Whether any queue is looked at group by group."""
        return bool(self._backlogs)

    async def note(self, queues: Collection[str], *, full: bool) -> None:
        """Note whether everything that is due in these queues has been seen."""
        if not full:
            self._to_probe.difference_update(queues)
            for queue in queues:
                self._backlogs.pop(queue, None)
                self._candidates.more_of(queue, (), more=False)
            return
        self._to_probe.update(queues)
        now = time.monotonic()
        if now < self._next_probe:
            return
        self._next_probe = now + _ANY_GROUPS_EVERY_S
        probed, self._to_probe = self._to_probe, set()
        found = await queues_with_groups(self._store, probed)
        if new := found - self._backlogs.keys():
            self._backlogs |= dict.fromkeys(new, "")
            self._next_look = 0.0
            self._candidates.groups_wanted.set()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            self._candidates.groups_wanted.clear()
            try:
                pause = await self.run_once()
            except PyMongoError as error:
                logger.debug("groups could not be looked at (%s): trying again", type(error).__name__)
                pause = _LOOK_EVERY_S[1]
            await until(self._candidates.groups_wanted, pause)

    async def run_once(self) -> float | None:
        """Look once: at which groups there are, if it is time for that, and for the next tasks of groups that have few left."""
        now = time.monotonic()
        if not self._backlogs or not self._names:
            return None
        self._left_alone = {place: over for place, over in self._left_alone.items() if over > now}
        due_by = self._clock.now() + timedelta(milliseconds=LOOK_AHEAD_MS)
        if now >= self._next_look:
            for queue, behind in list(self._backlogs.items()):
                groups, self._backlogs[queue] = await groups_due(self._store, queue, self._names, due_by, behind)
                looked_at = [group for group in groups if (queue, group) not in self._left_alone]
                self._candidates.more_of(queue, looked_at, more=True)
            took = time.monotonic() - now
            least, most = _LOOK_EVERY_S
            self._next_look = time.monotonic() + min(max(least, _SHARE_OF_TIME * took), most)
        narrowed_by = await self._claim_filter.current()
        if narrowed_by is None:
            return _ASK_AGAIN_S
        for queue, wanted in self._candidates.wanted_groups().items():
            groups = [
                group for group in wanted if self._limits.wants(queue, group) and (queue, group) not in self._left_alone
            ]
            for start in range(0, len(groups), _GROUPS_AT_ONCE):
                await self._look_at(queue, groups[start : start + _GROUPS_AT_ONCE], narrowed_by)
        return max(0.0, self._next_look - time.monotonic())

    async def _look_at(self, queue: str, groups: list[str], narrowed_by: Mapping[str, object]) -> None:
        count = max(_LEAST, min(_MOST, _TASKS_AT_ONCE // len(groups)))
        due_by = self._clock.now() + timedelta(milliseconds=LOOK_AHEAD_MS)
        found: dict[str, tuple[list[Claimable], bool]] = {}
        for names, _, lanes in self._partitions.shares(self._names, [queue]):
            looks = [Look(queue, group, names, lanes, count) for group in groups]
            for group, page in zip(groups, await first_of(self._store, self._me, looks, due_by), strict=True):
                others, more_of_others = found.get(group, ([], False))
                found[group] = (others + page.rows, more_of_others or page.full)
        for group, (rows, more) in found.items():
            self._candidates.more_of(queue, [group], more=more)
            # (If the queue has no room now, they are parked, and have their turn.)
            if not self._backup_claims.offer_found(await fitting(self._store, rows, narrowed_by), has_room=True):
                self._left_alone[queue, group] = time.monotonic() + _NOTHING_FOUND_S
        self._candidates.ready.set()
