"""The queues as one consumer sees them: which are paused now, and where something is due."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, KeysView, Sequence
from datetime import datetime

from taskmesh.consumer.candidates.claim_queue import ClaimQueue
from taskmesh.consumer.candidates.failure_counts import FailureCounts
from taskmesh.consumer.candidates.limits import Limits
from taskmesh.consumer.candidates.partitions import Partitions
from taskmesh.consumer.settings import Settings
from taskmesh.store import Store, registry
from taskmesh.store.find import UNFINISHED, places_due, places_in_use, queues_in_use, values_of

LOOK_AHEAD_MS = 1_500
"""How far scans look ahead. Longer than their interval, so that whatever becomes due in between is known in time."""
ASK_AT_LEAST_EVERY_S = 4.0
"""A worker that does not listen scans at least this often, and looks ahead accordingly."""
ASKERS_LOOK_AHEAD_MS = int(1_200 * ASK_AT_LEAST_EVERY_S)
_PROBE_EVERY_S = 0.8
"""How often all queues are looked at together while there is a backlog."""
_QUEUES_EVERY_S = 5.0
_REMEMBERED_S = 60.0
"""How long a queue or name is looked at after something was last seen there."""
_IN_USE_EVERY_S = 1.0, 5.0
"""The shortest and the longest pause between two questions what is in use. The longer they take, the longer the pause."""
_SHARE_OF_TIME = 30
_MANY_NAMES = 8
"""Of fewer names, each is looked at without that question."""
_MAX_COMBINATIONS = 150
"""The most names × queues in one query. Above about 200 the server sorts in memory instead of merging index ranges."""
_MANY_COMBINATIONS = 10 * _MAX_COMBINATIONS
"""Of more, it pays to ask which names are in which queues."""


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
        self._due: set[tuple[str, str]] | None = set()
        """Queue and name where something is due. None: too much is due to tell, so it may be anywhere."""
        self._running_due: set[tuple[str, str]] | None = set()
        """The same of running tasks alone: leases that run out, and room for more workers."""
        self._in_use: dict[tuple[str, str], float] | None = None
        """When there were last unfinished tasks of each queue and name. None: unknown, so there may be some of any."""
        self._in_use_at = self._next_in_use = 0.0
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
    def known(self) -> KeysView[str]:
        """Queues in which there was something recently."""
        return self._known.keys()

    def heard_of(self, queue: str, name: str) -> None:
        """Note a queue and name that an event has shown."""
        now = time.monotonic()
        if not self._fixed:
            self._know(queue, now)
        if self._due is not None:
            self._due.add((queue, name))
        elif self._in_use is not None:
            self._in_use[queue, name] = now

    async def look_for_due(self, now: float, until: datetime, *, leases: bool) -> None:
        """Look where something is due by then.

        Other queues and names are not scanned, and so cost nothing, however many they are. Each would cost more than it seems:
        to see that nothing is there, the server passes over whatever was removed from the index lately, up to the next task.

        `leases`: look also at running tasks.
        """
        if leases:
            self._running_due = await self._places_due(until, "RUNNING")
        if self._due is not None or now >= self._next_probe:
            self._next_probe = now + self._partitions.in_turn(_PROBE_EVERY_S)
            self._due = await self._places_due(until, "INIT")
            if self._due is None and not self._fixed and now >= self._next_look_at_all:
                self._next_look_at_all = now + self._partitions.in_turn(_QUEUES_EVERY_S)
                self._know_all(await queues_in_use(self._store), now)
        if self._due is not None and leases:
            self._due = None if self._running_due is None else self._due | self._running_due
        if self._due is None or self._running_due is None:
            await self._look_what_is_in_use()

    async def _places_due(self, until: datetime, status: str) -> set[tuple[str, str]] | None:
        due, all_of_them = await places_due(self._store, self._names, until, status=status)
        due = self._mine(due)
        now = time.monotonic()
        self._know_all({queue for queue, _ in due}, now)
        if all_of_them:
            return due
        if self._in_use is not None:
            self._in_use |= dict.fromkeys(due, now)
        return None

    async def _look_what_is_in_use(self) -> None:
        """Look where there are unfinished tasks at all."""
        began = time.monotonic()
        if began < self._next_in_use or len(self._names) < _MANY_NAMES:
            return
        found: set[tuple[str, str]] | None = None
        if (names := await values_of(self._store, "name", {"status": {"$in": list(UNFINISHED)}})) is not None:
            if len(names) * len(self._known) <= _MANY_COMBINATIONS:
                found = {(queue, name) for queue in self._known for name in names}
            else:
                found = {place for status in UNFINISHED for place in await places_in_use(self._store, status)}
        now = self._in_use_at = time.monotonic()
        least, most = _IN_USE_EVERY_S
        self._next_in_use = now + min(max(least, _SHARE_OF_TIME * (now - began)), most)
        if found is None:
            self._in_use = None
        else:
            lately = {place: at for place, at in (self._in_use or {}).items() if at > now - _REMEMBERED_S}
            self._in_use = lately | dict.fromkeys(self._mine(found), now)

    def _mine(self, places: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        names = frozenset(self._names)
        return {place for place in places if place[1] in names and not (self._fixed and place[0] not in self._known)}

    def worth_a_look(
        self, *, running: bool = False, lately: bool = False
    ) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
        """Yield names and queues where something may be due, no more at a time than one query may look at.

        `running`: only of running tasks. `lately`: if it is unknown where, also where there was something a while ago. Then the
        parts rarely change, and who reads through one of them can go on.
        """
        due = self._running_due if running else self._due
        if due is None and self._in_use is not None:
            due = {place for place, at in self._in_use.items() if lately or at >= self._in_use_at}
        if due is not None:
            yield from _packed(due)
            return
        for queues in _parts_of(list(self._known), _MAX_COMBINATIONS):
            for names in _parts_of(self._names, max(1, _MAX_COMBINATIONS // len(queues))):
                yield names, queues

    def _know_all(self, queues: Collection[str], now: float) -> None:
        for queue in sorted(queues):
            self._know(queue, now)

    def _know(self, queue: str, now: float) -> None:
        """Note that there is something in a queue, and forget the queues in which there has been nothing for long."""
        is_new = queue not in self._known
        self._known[queue] = now
        if is_new and not self._fixed:
            old = now - _REMEMBERED_S
            self._known = {name: seen for name, seen in self._known.items() if seen > old or name in self._usual}


def _packed(places: Collection[tuple[str, str]]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield names and queues whose combinations contain these places, in few parts."""
    names: set[str] = set()
    queues: set[str] = set()
    for queue, name in sorted(places):
        if names and (len(names) + (name not in names)) * (len(queues) + (queue not in queues)) > _MAX_COMBINATIONS:
            yield sorted(names), sorted(queues)
            names, queues = set(), set()
        names.add(name)
        queues.add(queue)
    if names:
        yield sorted(names), sorted(queues)


def _parts_of(values: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
