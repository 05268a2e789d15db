"""How many workers listen. A change stream costs the server something at each write, whoever makes it, and each worker has one.

As long as all streams together cost little, every worker listens. Beyond that, the workers that have been there longest listen
and take what comes; the others poll instead: they scan, and look each second at what they run. A worker whose claim queue is
full polls as well, since new work could not be started sooner for being announced. No promise depends on any of this: a hint
may be missed, and a scan finds everything.
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
"""What all streams together may take of the server."""
LEAST = 2
"""So many of the workers that can run the same tasks listen, whatever it costs."""
A_FEW = 8
"""So many workers that can run the same tasks all listen, as long as that is affordable."""
SLOTS_THAT_LISTEN = 64
"""Of more workers, at least so many listen that they have these slots together."""
_WRITES_OF_A_TASK = 3
"""It is published, claimed and finished."""
_WAKE_S = 5e-5
"""What a stream that waits costs the server at a write that is not for it, as most are not: each hears of its own lanes."""
_WAKES_PER_S = 500
"""A stream that is behind is read at most so often, however much is written."""
_ENTRY_S = 5e-6
"""What the server takes to compare one write with what a stream asks for (docs/decisions/0021)."""
_ASKS_AT_LEAST_S = 30.0
"""Whoever has closed its stream opens none for so long: each that is opened costs a query and a scan."""
_OTHERS_KNOW_AFTER_S = 1.1 * HEARTBEAT_MS / 1000
"""By then all that live have read the registry once more (of very large fleets, some)."""


class Listening:
    """Whether one worker listens, as it and all others can tell from the registry."""

    def __init__(self, settings: Settings) -> None:
        self._worker_id = settings.worker_id
        self.may = settings.listen
        """Whether its user lets it."""
        self.wanted = settings.listen
        """Whether it is one of those that listen."""
        self._asks_until = 0.0
        self._hears_until = 0.0
        self._fleet: Sequence[WorkerInfo] = ()
        self._peers: Collection[str] = ()
        self._does_without = False
        self.wake = asyncio.Event()
        """Set when the listener has something to follow up, or to do otherwise than before."""

    @property
    def hears(self) -> bool:
        """Whether it should have a stream open now. Whoever is to ask from now on still hears until the others know."""
        return not self._does_without and (self.wanted or time.monotonic() < self._hears_until)

    def does_without(self, taken_per_s: float | None) -> bool:
        """Decide whether this worker polls while it has more candidates than it can start; return the decision.

        `taken_per_s`: how many it starts per second; its peers are taken to start as many. None: few candidates are left, so it
        needs its stream again.
        """
        if taken_per_s is None:
            self._does_without = False
        else:
            streams = sum(worker.live and worker.may_listen for worker in self._fleet)
            costs = streams * _cost_of_one(self._fleet, self._peers, taken_per_s)
            self._does_without |= streams > 1 and costs > AFFORDABLE_CORES
        return self._does_without

    def learn(self, fleet: Sequence[WorkerInfo], peers: Collection[str]) -> bool:
        """Decide anew, now that this is the fleet, and these of it do some of this worker's work; True if that is new."""
        if not self.may:
            return False
        self._fleet, self._peers = fleet, peers
        me = next((worker for worker in fleet if worker.worker_id == self._worker_id), None)
        if me is not None:
            # To those alone that can run all that this worker can, the listening can be left: others would not hear of the rest.
            peers = {each.worker_id for each in fleet if each.worker_id in peers and each.can_stand_in_for(me)}
        affordable = min(affordable_to(fleet, peers), enough_for(fleet, peers))
        rank = 0 if me is None else _rank(me, fleet, peers)
        now = time.monotonic()
        # Nobody opens and closes with each change of the load: whoever listens goes on until there are twice as many as should,
        # and whoever asks, asks for a while, unless too few are left that listen.
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
    """How many of those that do the same work come before this worker: that listen and, of these, were there first."""
    others = [w for w in fleet if w.worker_id in peers and w.may_listen and w.worker_id != me.worker_id]
    return sum(_order(other) < _order(me) for other in others)


def _order(worker: WorkerInfo) -> tuple[bool, float, str]:
    return not worker.listens, worker.start_time.timestamp() if worker.start_time else 0.0, worker.worker_id


def affordable_to(fleet: Sequence[WorkerInfo], peers: Collection[str]) -> float:
    """Return how many of these workers of the fleet can listen, as far as the server's work goes."""
    live = [worker for worker in fleet if worker.live]
    each = _cost_of_one(live)
    streams = sum(worker.may_listen for worker in live)
    mine = sum(worker.may_listen for worker in live if worker.worker_id in peers)
    return AFFORDABLE_CORES / each * mine / streams if each and streams else math.inf


def enough_for(fleet: Sequence[WorkerInfo], peers: Collection[str]) -> float:
    """Return how many of these workers have to listen so that new work finds a free slot at once.

    Each stream delays all others a little, on the server and where workers share a machine. So of many workers, no more listen
    than have twice the slots that are in use.
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
