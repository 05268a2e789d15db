"""The queues as one consumer sees them: which are paused now, and in which something is due."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from datetime import datetime

from taskmesh.consumer.candidates.claim_queue import ClaimQueue
from taskmesh.consumer.candidates.failure_counts import FailureCounts
from taskmesh.consumer.candidates.limits import Limits
from taskmesh.consumer.candidates.partitions import Partitions
from taskmesh.consumer.settings import Settings
from taskmesh.store import Store, registry
from taskmesh.store.find import queues_due, queues_in_use

LOOK_AHEAD_MS = 1_500
"""How far scans look ahead. Longer than their interval, so that whatever becomes due in between is known in time."""
ASK_AT_LEAST_EVERY_S = 4.0
"""A worker that does not listen scans at least this often, and looks ahead accordingly."""
ASKERS_LOOK_AHEAD_MS = int(1_200 * ASK_AT_LEAST_EVERY_S)
_PROBE_EVERY_S = 0.8
"""How often all queues are looked at together while there is a backlog."""
_QUEUES_EVERY_S = 5.0
_QUEUE_REMEMBERED_S = 60.0


class Queues:
    """What one consumer knows of queues."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        candidates: ClaimQueue,
        limits: Limits,
        failures: FailureCounts,
        partitions: Partitions,
        usual: Iterable[str],
    ) -> None:
        """`usual`: the queues in which this mesh's tasks are published by default. They are scanned even while empty."""
        self._store = store
        self._names = settings.names
        self._fixed = settings.queues is not None
        self._candidates = candidates
        self._limits = limits
        self._failures = failures
        self._partitions = partitions
        self._usual = frozenset(usual)
        known = sorted(self._usual) if settings.queues is None else settings.queues
        self._known: dict[str, float] = dict.fromkeys(known, time.monotonic())
        """When something was last seen in each queue."""
        self._due: set[str] | None = set()
        """The queues in which something is due. None: in too many to tell, so it may be in any."""
        self._next_probe = 0.0
        self._next_look_at_all = 0.0
        self.paused: frozenset[str] = frozenset()
        """Queues that are paused for everybody: nothing is claimed from them."""

    async def read(self) -> None:
        """Learn which queues are paused or limited now."""
        found = await registry.queues(self._store)
        self._limits.learn(found)
        self._failures.learn(found)
        paused = frozenset(name for name, queue in found.items() if queue.get("paused"))
        if paused != self.paused:
            reopened = self.paused - paused
            self.paused = paused
            self._candidates.discard_queues(paused)
            if reopened:
                self._candidates.order_scan()

    @property
    def known(self) -> Collection[str]:
        """Queues in which there was something recently."""
        return self._known.keys()

    def heard_of(self, queue: str) -> None:
        """Note a queue that an event has shown."""
        if not self._fixed:
            self._know(queue, time.monotonic())
            if self._due is not None:
                self._due.add(queue)

    async def look_for_due(self, now: float, until: datetime, *, leases: bool) -> None:
        """Look in which queues something is due by then.

        The others are not scanned, and so cost nothing, however many they are.

        `leases`: look also at running tasks.
        """
        if self._due is None and now < self._next_probe:
            return
        self._next_probe = now + self._partitions.in_turn(_PROBE_EVERY_S)
        due, all_of_them = await queues_due(self._store, self._names, until, leases=leases)
        if self._fixed:
            due &= self._known.keys()
        elif not all_of_them and now >= self._next_look_at_all:
            self._next_look_at_all = now + self._partitions.in_turn(_QUEUES_EVERY_S)
            due |= set(await queues_in_use(self._store))
        for queue in sorted(due):
            self._know(queue, now)
        self._due = due if all_of_them else None

    def is_any_due(self, queues: Collection[str]) -> bool:
        """Whether something may be due in one of these queues."""
        return bool(queues) if self._due is None else not self._due.isdisjoint(queues)

    def _know(self, queue: str, now: float) -> None:
        """Note that there is something in a queue, and forget the queues in which there has been nothing for long."""
        is_new = queue not in self._known
        self._known[queue] = now
        if is_new and not self._fixed:
            old = now - _QUEUE_REMEMBERED_S
            self._known = {name: seen for name, seen in self._known.items() if seen > old or name in self._usual}
