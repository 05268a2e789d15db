"""Partitions: how workers on one backlog keep out of each other's way.

Every task sits in one of 64 lanes by the hash of its `_id`. For each lane, the live workers have an order of preference
that all of them compute alike (rendezvous hashing, with as many lanes for each), so that nobody has to be asked. The first
in that order claims at once, the next a moment later; the rest leave the task to their scans. Only those count that can run the
task at all: where workers differ, tasks that a few can run are divided among these. No promise hangs on it: whoever is mistaken
about who lives, loses a race or waits a moment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from taskmesh.consumer.settings import Settings
from taskmesh.model.worker import WorkerInfo
from taskmesh.store.publication import LANES, lane_of

_TAKE_TURNS = 4
"""So many workers each do all that any of them could do; of more, each does it as much less often."""
_MOST_SELDOM = 10.0
MOST_SHARES = 32
"""Each is asked for by itself. Where there are more, they are divided as if all could run all, and what is left is found late."""
_MOST_KINDS = 10_000
_HEARD_BY = 2
"""So many of those that listen hear of what is new in a lane: whose it is, and its backup."""


class Partitions:
    """This worker's place in every lane."""

    def __init__(self, settings: Settings) -> None:
        self._worker_id = settings.worker_id
        self._names = frozenset(settings.names)
        self._queues = None if settings.queues is None else frozenset(settings.queues)
        self._others: Sequence[WorkerInfo] = ()
        self._known: dict[str, Any] = {}
        self._alike = True
        """Whether all others can run whatever this worker runs, but for what tasks need of them."""
        self._able: dict[tuple[str, str, tuple[str, ...]], frozenset[str]] = {}
        """Who can run the tasks of this name, from this queue, with these needs: as they come up."""
        self._among: dict[frozenset[str], Sequence[int]] = {}
        """This worker's place in each lane among these."""
        self._hearing: dict[frozenset[str], Sequence[int]] = {}
        """And its place among those of them that listen."""
        self._everybody = self._listeners = frozenset([self._worker_id])

    def set_workers(self, peers: Iterable[WorkerInfo]) -> bool:
        """Learn who lives and does some of the same work; True if anything changed."""
        others = [worker for worker in peers if worker.worker_id != self._worker_id]
        known = {worker.worker_id: (worker.listens, worker.names, worker.queues, worker.labels) for worker in others}
        if known == self._known:
            return False
        self._known, self._others = known, others
        self._alike = all(worker.runs_all(self._names, self._queues) for worker in others)
        self._able.clear()
        self._among.clear()
        self._hearing.clear()
        self._everybody = frozenset([self._worker_id, *known])
        self._listeners = frozenset([self._worker_id, *(worker.worker_id for worker in others if worker.listens)])
        return True

    @property
    def alone(self) -> bool:
        """Whether nobody else does any of this work."""
        return not self._others

    def in_turn(self, every_s: float) -> float:
        """Return how often this worker is to do what one of those that do the same work has to do `every_s` seconds, or sooner.

        So what the fleet asks of the database for its own sake does not grow with it.
        """
        return every_s * min(max(1.0, len(self._everybody) / _TAKE_TURNS), _MOST_SELDOM)

    @property
    def heard(self) -> frozenset[int] | None:
        """The lanes in which this worker should hear of what is new; None: in all, since few listen, or they differ."""
        if len(self._listeners) <= _HEARD_BY + 1 or not self._alike:
            return None
        return frozenset(lane for lane, place in enumerate(self._places(self._listeners)) if place < _HEARD_BY)

    def place(self, id_: str, queue: str, needs: Sequence[str] = ()) -> int:
        """Return how many workers that can run a task come before this one in its lane."""
        return self._places(self._able_to(id_, queue, needs))[lane_of(id_)]

    def place_to_hear(self, id_: str, queue: str, needs: Sequence[str] = ()) -> int:
        """Return how many workers that listen, and can run a task, come before this one in its lane: these hear of it."""
        able = self._able_to(id_, queue, needs)
        if (places := self._hearing.get(able)) is None:
            places = self._hearing[able] = self._places(able & self._listeners)
        return places[lane_of(id_)]

    def place_to_accept(self, id_: str, *, heard: bool) -> int:
        """Return how many workers come before this one in the lane of what is no task yet: anybody can accept it.

        `heard`: of those that listen.
        """
        return self._places(self._listeners if heard else self._everybody)[lane_of(id_)]

    def shares(
        self, names: Sequence[str], queues: Sequence[str]
    ) -> Iterator[tuple[Sequence[str], Sequence[str], list[int] | None]]:
        """Yield, for all these names and queues, the lanes that are this worker's; None: all, since nobody else can run those."""
        if self._alike:
            yield names, queues, self._own_among(self._everybody)
            return
        alike: dict[tuple[tuple[frozenset[str], tuple[str, ...]], ...], list[str]] = {}
        for queue in queues:
            by_able: dict[frozenset[str], list[str]] = {}
            for name in names:
                by_able.setdefault(self._able_to(f"{name}:", queue, ()), []).append(name)
            alike.setdefault(tuple((able, tuple(some)) for able, some in by_able.items()), []).append(queue)
        if sum(map(len, alike)) > MOST_SHARES:
            yield names, queues, self._own_among(self._everybody)
            return
        for split, some_queues in alike.items():
            for able, some_names in split:
                yield some_names, some_queues, self._own_among(able)

    def _own_among(self, able: frozenset[str]) -> list[int] | None:
        return None if len(able) == 1 else [lane for lane, place in enumerate(self._places(able)) if place == 0]

    def _able_to(self, id_: str, queue: str, needs: Sequence[str]) -> frozenset[str]:
        """Return who can run a task, this worker among them."""
        if self._alike and not needs:
            return self._everybody
        kind = (id_.partition(":")[0], queue, tuple(needs))
        if (able := self._able.get(kind)) is None:
            if len(self._able) >= _MOST_KINDS:
                self._able.clear()
            others = (w.worker_id for w in self._others if w.runs(kind[0], queue) and w.claimant.has(needs))
            able = self._able[kind] = frozenset([self._worker_id, *others])
        return able

    def _places(self, workers: frozenset[str]) -> Sequence[int]:
        if (places := self._among.get(workers)) is None:
            places = self._among[workers] = _places(self._worker_id, workers)
        return places


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
