"""Partitions: how workers on one backlog keep out of each other's way.

Every task sits in one of 64 lanes by the hash of its `_id`. For each lane, the live workers have an order of preference
that all of them compute alike (rendezvous hashing, with as many lanes for each), so that nobody has to be asked. The first
in that order claims at once, the next a moment later; the rest leave the task to their scans. No promise hangs on it:
whoever is mistaken about who lives, loses a race or waits a moment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

from taskmesh.store.publication import LANES, lane_of

_TAKE_TURNS = 4
"""So many workers each do all that any of them could do; of more, each does it as much less often."""
_MOST_SELDOM = 10.0
_HEARD_BY = 2
"""So many of those that listen hear of what is new in a lane: whose it is, and its backup."""


class Partitions:
    """This worker's place in every lane."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._workers: frozenset[str] = frozenset()
        self._listeners: frozenset[str] = frozenset()
        self._place = [0] * LANES
        self._place_to_hear = [0] * LANES
        self.own: list[int] | None = None
        """The lanes in which this worker comes first; None: all of them, since it is alone."""

    def set_workers(self, worker_ids: Collection[str], listening: Collection[str]) -> bool:
        """Learn who lives and does the same work, and who of them listens; True if anything changed."""
        workers, listeners = frozenset(worker_ids) | {self._worker_id}, frozenset(listening)
        if (workers, listeners) == (self._workers, self._listeners):
            return False
        self._workers, self._listeners = workers, listeners
        self._place = _places(self._worker_id, workers)
        self._place_to_hear = _places(self._worker_id, workers & listeners | {self._worker_id})
        self.own = [lane for lane in range(LANES) if self._place[lane] == 0] if len(workers) > 1 else None
        return True

    @property
    def alone(self) -> bool:
        """Whether nobody else does this work."""
        return self.own is None

    def in_turn(self, every_s: float) -> float:
        """Return how often this worker is to do what one of those that do the same work has to do `every_s` seconds, or sooner.

        So what the fleet asks of the database for its own sake does not grow with it.
        """
        return every_s * min(max(1.0, len(self._workers) / _TAKE_TURNS), _MOST_SELDOM)

    @property
    def heard(self) -> frozenset[int] | None:
        """The lanes in which this worker should hear of what is new; None: in all, since few listen."""
        if len(self._listeners | {self._worker_id}) <= _HEARD_BY + 1:
            return None
        return frozenset(lane for lane, place in enumerate(self._place_to_hear) if place < _HEARD_BY)

    def place(self, lane: object) -> int:
        """Return how many workers come before this one in the lane."""
        return self._place[lane] if isinstance(lane, int) and 0 <= lane < LANES else 0

    def place_of(self, id_: str) -> int:
        """Return how many workers come before this one in the lane of a task."""
        return self._place[lane_of(id_)]

    def place_to_hear(self, lane: object) -> int:
        """Return how many workers that listen come before this one in the lane: these hear of what is new there."""
        return self._place_to_hear[lane] if isinstance(lane, int) and 0 <= lane < LANES else 0

    def place_to_hear_of(self, id_: str) -> int:
        """Return how many workers that listen come before this one in the lane of a task."""
        return self._place_to_hear[lane_of(id_)]


def _places(worker_id: str, workers: Collection[str]) -> list[int]:
    """Return, for each lane, how many of the workers come before this one: the one whose lane it is, and whoever weighs more."""
    weights = {worker: _weights(worker) for worker in workers}
    mine = weights[worker_id]
    first = _first_in_each_lane(weights)
    return [
        0
        if first[lane] == worker_id
        else sum(weight[lane] > mine[lane] or worker == first[lane] for worker, weight in weights.items())
        for lane in range(LANES)
    ]


def _first_in_each_lane(weights: Mapping[str, Sequence[bytes]]) -> list[str]:
    """Return whose each lane is: the heaviest there of those that do not have their share yet.

    So no worker has two lanes more than another: of sixteen, one would have eight and one would have none by weight alone, and
    who is done with its own takes from others' lanes, where claims meet.
    """
    share, left = divmod(LANES, len(weights))
    first: list[str] = []
    held = dict.fromkeys(weights, 0)
    for lane in range(LANES):
        most = share if lane < LANES - left else share + 1
        worker = max((w for w in weights if held[w] < most), key=lambda w: (weights[w][lane], w))
        held[worker] += 1
        first.append(worker)
    return first


@lru_cache(maxsize=10_000)
def _weights(worker_id: str) -> tuple[bytes, ...]:
    """Return how much a worker weighs in each lane."""
    return tuple(blake2b(f"{worker_id}\0{lane}".encode(), digest_size=8).digest() for lane in range(LANES))
