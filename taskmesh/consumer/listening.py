"""How many workers listen. A change stream costs the server something at each write, whoever makes it, and each worker has one.

As long as all streams together cost little, every worker listens. Beyond that the workers that have been there longest listen,
and take what comes; the others ask instead: they scan, and look each second at what they run. No promise hangs on it: a hint is
a hint, the scan is the truth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence

from taskmesh.consumer.settings import Settings
from taskmesh.model.worker import WorkerInfo
from taskmesh.store.registry import HEARTBEAT_MS

AFFORDABLE_CORES = 0.15
"""What all streams together may take of the server."""
LEAST = 2
"""So many of the workers that do the same work listen, whatever it costs."""
_WRITES_OF_A_TASK = 3
"""It is published, claimed and finished."""
_WAKE_S = 1e-4
_WAKES_PER_S = 500
"""A stream that is behind is read at most so often, however much is written."""
_ENTRY_S = 5e-6
"""What the server takes to wake a stream that waits, and to compare one write with what it asks for (docs/decisions/0021)."""
_ASKS_AT_LEAST_S = 30.0
"""Whoever has closed its stream opens none for so long: each that is opened costs a query and a scan."""


class Listening:
    """Whether one worker listens, as it and all others can tell from the registry."""

    def __init__(self, settings: Settings) -> None:
        self._worker_id = settings.worker_id
        self.may = settings.listen
        """Whether its user lets it."""
        self.wanted = settings.listen
        """Whether it should have a stream open now."""
        self._asks_until = 0.0

    def learn(self, fleet: Sequence[WorkerInfo], peers: Collection[str]) -> None:
        """Decide anew, now that this is the fleet, and these of it do the same work as this worker."""
        if not self.may:
            return
        affordable, rank = affordable_to(fleet, peers), self._rank(fleet, peers)
        # Nobody opens and closes with each change of the load: whoever listens goes on until there are twice as many as should,
        # and whoever asks, asks for a while, unless too few are left that listen.
        if self.wanted and rank >= max(LEAST, 2 * affordable):
            self.wanted = False
            self._asks_until = time.monotonic() + _ASKS_AT_LEAST_S
        elif not self.wanted and (rank < LEAST or (rank < affordable and time.monotonic() >= self._asks_until)):
            self.wanted = True

    def _rank(self, fleet: Sequence[WorkerInfo], peers: Collection[str]) -> int:
        """How many of those that do the same work come before this one: that listen and, of these, were there first."""
        others = [w for w in fleet if w.worker_id in peers and w.may_listen and w.worker_id != self._worker_id]
        me = next((w for w in fleet if w.worker_id == self._worker_id), None)
        if me is None:
            return 0
        return sum(_order(other) < _order(me) for other in others)


def _order(worker: WorkerInfo) -> tuple[bool, float, str]:
    return not worker.listens, worker.start_time.timestamp() if worker.start_time else 0.0, worker.worker_id


def affordable_to(fleet: Sequence[WorkerInfo], peers: Collection[str]) -> float:
    """Return how many of these workers of the fleet can listen, as far as the server's work goes."""
    live = [worker for worker in fleet if worker.live]
    writes_per_s = len(live) * 1000 / HEARTBEAT_MS + _WRITES_OF_A_TASK * sum(w.finished_per_s for w in live)
    each = _WAKE_S * min(writes_per_s, _WAKES_PER_S) + _ENTRY_S * writes_per_s
    streams = sum(worker.may_listen for worker in live)
    mine = sum(worker.may_listen for worker in live if worker.worker_id in peers)
    return AFFORDABLE_CORES / each * mine / streams if each and streams else math.inf
