"""Listening: how many workers read a change stream.

Every stream costs the server something at each write, and each worker has one.

As long as all streams together cost little, every worker listens. Beyond that, the longest-running workers listen, and the
others poll: they scan, and look at their executions once a second. A worker whose claim queue is full polls as well, since
announcing new work would not start it sooner. No guarantee depends on any of this: a hint may be missed, and a scan finds
everything.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection, Sequence

from taskmesh.consumer.settings import Settings
from taskmesh.model.worker import WorkerInfo
from taskmesh.store.registry import HEARTBEAT_MS

logger = logging.getLogger("taskmesh.listener")

AFFORDABLE_CORES = 0.15
"""How much of the server's processor time all streams together may take, in cores."""
LEAST = 2
"""So many of the workers that can run the same tasks always listen."""
A_FEW = 8
"""Up to so many workers that can run the same tasks all listen, as long as that is affordable."""
SLOTS_THAT_LISTEN = 64
"""If there are more workers, as many listen as together have at least this many slots."""
_WRITES_OF_A_TASK = 3
"""Publish, claim, finish."""
_WAKE_S = 5e-5
"""What a waiting stream costs the server at a write that is not for it, as most are not: each covers its own lanes."""
_WAKES_PER_S = 500
"""A stream that is behind is read at most so often per second, however much is written."""
_ENTRY_S = 5e-6
"""What it costs the server to compare one write with a stream's filter (docs/decisions/0021)."""
_ASKS_AT_LEAST_S = 30.0
"""A worker that has closed its stream opens none for so long: opening one costs a query and a scan."""
_OTHERS_KNOW_AFTER_S = 1.1 * HEARTBEAT_MS / 1000
"""By then all live workers have read the registry once more (in very large fleets, some)."""


class Listening:
    """Whether one worker listens, decided so that it and all others can tell from the registry."""

    def __init__(self, settings: Settings) -> None:
        self._worker_id = settings.worker_id
        self.may = settings.listen
        """Whether its user allows it."""
        self.wanted = settings.listen
        """Whether it is one of those that listen."""
        self._asks_until = 0.0
        self._hears_until = 0.0
        self._fleet: Sequence[WorkerInfo] = ()
        self._peers: Collection[str] = ()
        self._does_without = False
        self.wake = asyncio.Event()
        """Set when the listener has something to follow up, or has to change its behaviour."""

    @property
    def hears(self) -> bool:
        """Whether its stream should be open now. A worker that is about to poll keeps listening until the others know."""
        return not self._does_without and (self.wanted or time.monotonic() < self._hears_until)

    def does_without(self, taken_per_s: float | None) -> bool:
        """Decide whether this worker polls while it has more candidates than it can start. Return the decision.

        `taken_per_s`: how many it starts per second; its peers are assumed to start as many. None: few candidates are left, so
        it needs its stream again.
        """
        if taken_per_s is None:
            self._does_without = False
        else:
            streams = sum(worker.live and worker.may_listen for worker in self._fleet)
            costs = streams * _cost_of_one(self._fleet, self._peers, taken_per_s)
            self._does_without |= streams > 1 and costs > AFFORDABLE_CORES
        return self._does_without

    def learn(self, fleet: Sequence[WorkerInfo], peers: Collection[str]) -> bool:
        """Decide again for this fleet. `peers`: those that share some of this worker's work.

        Return whether the decision changed.
        """
        if not self.may:
            return False
        self._fleet, self._peers = fleet, peers
        me = next((worker for worker in fleet if worker.worker_id == self._worker_id), None)
        if me is not None:
            # Listening can be left only to workers that can run all that this worker can: others would miss some hints.
            peers = {each.worker_id for each in fleet if each.worker_id in peers and each.can_stand_in_for(me)}
        affordable = min(affordable_to(fleet, peers), enough_for(fleet, peers))
        rank = 0 if me is None else _rank(me, fleet, peers)
        now = time.monotonic()
        # Small changes of the load must not open and close streams: a worker listens until there are twice as many as needed, and
        # polls for a while, unless too few are left that listen.
        if self.wanted and rank >= max(LEAST, 2 * affordable):
            self.wanted = False
            self._hears_until = now + _OTHERS_KNOW_AFTER_S
            self._asks_until = now + _ASKS_AT_LEAST_S
            logger.info("worker %s polls instead of listening: enough other workers listen", self._worker_id)
            return True
        if not self.wanted and (rank < LEAST or (rank < affordable and now >= self._asks_until)):
            self.wanted = True
            self.wake.set()
            logger.info("worker %s listens again", self._worker_id)
            return True
        return False


def _rank(me: WorkerInfo, fleet: Sequence[WorkerInfo], peers: Collection[str]) -> int:
    """Return how many workers with the same work come before this one: listening ones first, then the longest-running."""
    others = [w for w in fleet if w.worker_id in peers and w.may_listen and w.worker_id != me.worker_id]
    return sum(_order(other) < _order(me) for other in others)


def _order(worker: WorkerInfo) -> tuple[bool, float, str]:
    return not worker.listens, worker.start_time.timestamp() if worker.start_time else 0.0, worker.worker_id


def affordable_to(fleet: Sequence[WorkerInfo], peers: Collection[str]) -> float:
    """Return how many of these workers can listen, as far as the cost to the server is concerned."""
    live = [worker for worker in fleet if worker.live]
    each = _cost_of_one(live)
    streams = sum(worker.may_listen for worker in live)
    mine = sum(worker.may_listen for worker in live if worker.worker_id in peers)
    return AFFORDABLE_CORES / each * mine / streams if each and streams else math.inf


def enough_for(fleet: Sequence[WorkerInfo], peers: Collection[str]) -> float:
    """Return how many of these workers have to listen so that new work finds a free slot at once.

    Each stream delays all others a little, on the server and where workers share a machine. So, if there are many workers, no
    more listen than have twice the slots that are in use.
    """
    able = sorted((w for w in fleet if w.live and w.may_listen and w.worker_id in peers), key=_order)
    if len(able) <= A_FEW:
        return math.inf
    slots, wanted = 0, max(SLOTS_THAT_LISTEN, 2 * sum(worker.running for worker in able))
    for count, worker in enumerate(able, 1):
        slots += worker.concurrency
        if slots >= wanted:
            return count
    return math.inf


def _cost_of_one(fleet: Sequence[WorkerInfo], peers: Collection[str] = (), peers_per_s: float = 0.0) -> float:
    """Return how many cores of the server one stream takes, if each of `peers` finishes at least `peers_per_s` tasks a second."""
    live = [worker for worker in fleet if worker.live]
    tasks_per_s = sum(max(w.finished_per_s, peers_per_s if w.worker_id in peers else 0.0) for w in live)
    writes_per_s = len(live) * 1000 / HEARTBEAT_MS + _WRITES_OF_A_TASK * tasks_per_s
    return _WAKE_S * min(writes_per_s, _WAKES_PER_S) + _ENTRY_S * writes_per_s
