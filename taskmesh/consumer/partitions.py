"""Partitions: how workers on one backlog keep out of each other's way.

Every task sits in one of 64 lanes by the hash of its `_id`. For each lane, the live workers have an order of preference
that all of them compute alike (rendezvous hashing), so that nobody has to be asked. The first in that order claims at
once, the next a moment later; the rest leave the task to their scans. No promise hangs on it: whoever is mistaken
about who lives, loses a race or waits a moment.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

from taskmesh.store.publication import LANES, lane_of


class Partitions:
    """This worker's place in every lane."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._workers: frozenset[str] = frozenset()
        self._place = [0] * LANES
        self.own: list[int] | None = None
        """The lanes in which this worker comes first; None: all of them, since it is alone."""

    def set_workers(self, worker_ids: Collection[str]) -> bool:
        """Learn who lives and does the same work; True if anything changed."""
        workers = frozenset(worker_ids) | {self._worker_id}
        if workers == self._workers:
            return False
        self._workers = workers
        mine = [_weight(self._worker_id, lane) for lane in range(LANES)]
        others = [worker for worker in workers if worker != self._worker_id]
        self._place = [sum(_weight(other, lane) > mine[lane] for other in others) for lane in range(LANES)]
        self.own = [lane for lane in range(LANES) if self._place[lane] == 0] if others else None
        return True

    @property
    def alone(self) -> bool:
        """Whether nobody else does this work."""
        return self.own is None

    def place(self, lane: object) -> int:
        """Return how many workers come before this one in the lane."""
        return self._place[lane] if isinstance(lane, int) and 0 <= lane < LANES else 0

    def place_of(self, id_: str) -> int:
        """Return how many workers come before this one in the lane of a task."""
        return self._place[lane_of(id_)]


def _weight(worker_id: str, lane: int) -> bytes:
    return blake2b(f"{worker_id}\0{lane}".encode(), digest_size=8).digest()
