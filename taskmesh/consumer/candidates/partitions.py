"""Partitions: how workers on one backlog keep out of each other's way.

The hash of its `_id` puts every task in one of 64 lanes. For each lane the live workers have an order of preference that all of
them compute alike (rendezvous hashing, with equal numbers of lanes), so that nobody has to be asked. The first worker in that
order claims at once, the next a moment later; the rest leave the task to their scans. Only workers that can run the task count:
where workers differ, tasks that only some can run are divided among these. No guarantee depends on it: a worker that is wrong
about who is live loses a race, or waits a moment.
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
"""Up to so many workers each do all housekeeping that any of them could do; of more, each does it correspondingly less often."""
_MOST_SELDOM = 10.0
AFTER_S = 0.05
"""How much later than the worker before it a worker looks at what both could do, so that they do not race."""
LAST_PLACE_TO_WAIT = 5
"""So many workers wait for their turn, one after the other. Those behind them wait no longer than the last of these."""
MOST_SHARES = 32
"""At most so many different shares are looked at one by one. Beyond that, work is divided as if all workers could run all of
it, and what remains is found late."""
_MOST_KINDS = 10_000
_MOST_SETS = 1_000
_HEARD_BY = 2
"""So many of the workers that listen are told of new tasks in a lane: the first in its order, and its backup."""


def wait_s(place: int) -> float:
    """Return how long after its time a worker looks at something that so many workers come before it for."""
    return AFTER_S * min(place, LAST_PLACE_TO_WAIT)


class Partitions:
    """This worker's place in every lane."""

    def __init__(self, settings: Settings) -> None:
        self._worker_id = settings.worker_id
        self._names = frozenset(settings.names)
        self._queues = None if settings.queues is None else frozenset(settings.queues)
        self._others: Sequence[WorkerInfo] = ()
        self._known: dict[str, Any] = {}
        self._alike = True
        """Whether all others can run whatever this worker runs, apart from what single tasks need."""
        self._able: dict[tuple[str, str, tuple[str, ...]], frozenset[str]] = {}
        """Which workers can run the tasks of a name, in a queue, with certain needs. Filled on demand."""
        self._among: dict[frozenset[str], Sequence[int]] = {}
        """This worker's place in each lane among these workers."""
        self._hearing: dict[frozenset[str], Sequence[int]] = {}
        """This worker's place among those of them that listen."""
        self.everybody = frozenset([self._worker_id])
        """The live workers that do some of the same work, this one among them."""
        self._listeners = self.everybody
        self._full = frozenset[str]()
        """The others that had no free slot when they last said how they are."""

    def set_workers(self, peers: Iterable[WorkerInfo]) -> bool:
        """Learn which workers are live and share some of this worker's work. Return whether anything changed."""
        others = [worker for worker in peers if worker.worker_id != self._worker_id]
        self._full = frozenset(worker.worker_id for worker in others if worker.running >= worker.concurrency)
        known = {worker.worker_id: (worker.listens, worker.names, worker.queues, worker.labels) for worker in others}
        if known == self._known:
            return False
        self._known, self._others = known, others
        self._alike = all(worker.runs_all(self._names, self._queues) for worker in others)
        self._able.clear()
        self._among.clear()
        self._hearing.clear()
        self.everybody = frozenset([self._worker_id, *known])
        self._listeners = frozenset([self._worker_id, *(worker.worker_id for worker in others if worker.listens)])
        return True

    @property
    def alone(self) -> bool:
        """Whether no other worker does any of this work."""
        return not self._others

    @property
    def others_are_full(self) -> bool:
        """Whether some other worker has no free slot: what lies in its lanes waits for the scan of another."""
        return bool(self._full)

    @property
    def others_cnt(self) -> int:
        """How many other workers do some of this work."""
        return len(self._others)

    def in_turn(self, every_s: float) -> float:
        """Return how often this worker has to do what one of the workers sharing its work has to do every `every_s` seconds.

        So the load that a fleet puts on the database for its own sake does not grow with the fleet.
        """
        return every_s * min(max(1.0, len(self.everybody) / _TAKE_TURNS), _MOST_SELDOM)

    @property
    def heard(self) -> frozenset[int] | None:
        """The lanes whose new tasks should be announced to this worker. None: all, since few workers listen, or they differ."""
        if len(self._listeners) <= _HEARD_BY + 1 or not self._alike:
            return None
        return frozenset(lane for lane, place in enumerate(self._places(self._listeners)) if place < _HEARD_BY)

    def place(self, id_: str, queue: str, needs: Sequence[str] = (), wanted: int = 1) -> int:
        """Return how many workers that can run a task come before this one in its lane.

        `wanted`: how many it is for. So many come first, and get in nobody's way.
        """
        return max(0, self._places(self._able_to(id_, queue, needs))[lane_of(id_)] - (wanted - 1))

    def place_among_free(self, id_: str, queue: str, needs: Sequence[str] = (), wanted: int = 1) -> int:
        """Return how many workers with free slots come before this one, as `place` does."""
        places = self._places(self._able_to(id_, queue, needs) - self._full)
        return max(0, places[lane_of(id_)] - (wanted - 1))

    def place_to_hear(self, id_: str, queue: str, needs: Sequence[str] = (), wanted: int = 1) -> int:
        """Return how many listening workers that can run a task come before this one in its lane, as `place` does."""
        able = self._able_to(id_, queue, needs)
        if (places := self._hearing.get(able)) is None:
            places = self._hearing[able] = self._places(able & self._listeners)
        return max(0, places[lane_of(id_)] - (wanted - 1))

    def place_of_any(self, id_: str) -> int:
        """Return how many listening workers come before this one for a task that any of them may run: 0 if they differ."""
        return self.place_to_hear(id_, "") if self._alike else 0

    def place_in_fleet(self, id_: str, *, heard: bool = False) -> int:
        """Return how many workers come before this one for what any worker can do: accept an inserted task, publish a tick.

        `heard`: count only those that listen.
        """
        return self._places(self._listeners if heard else self.everybody)[lane_of(id_)]

    def shares(
        self, names: Sequence[str], queues: Sequence[str]
    ) -> Iterator[tuple[Sequence[str], Sequence[str], list[int] | None]]:
        """Yield, for all these names and queues, the lanes that belong to this worker.

        None: all lanes, since nobody else can run those.
        """
        if self._alike:
            yield names, queues, self._own_among(self.everybody)
            return
        alike: dict[tuple[tuple[frozenset[str], tuple[str, ...]], ...], list[str]] = {}
        for queue in queues:
            by_able: dict[frozenset[str], list[str]] = {}
            for name in names:
                by_able.setdefault(self._able_to(f"{name}:", queue, ()), []).append(name)
            alike.setdefault(tuple((able, tuple(some)) for able, some in by_able.items()), []).append(queue)
        if sum(map(len, alike)) > MOST_SHARES:
            yield names, queues, self._own_among(self.everybody)
            return
        for split, some_queues in alike.items():
            for able, some_names in split:
                yield some_names, some_queues, self._own_among(able)

    def _own_among(self, able: frozenset[str]) -> list[int] | None:
        return None if len(able) == 1 else [lane for lane, place in enumerate(self._places(able)) if place == 0]

    def _able_to(self, id_: str, queue: str, needs: Sequence[str]) -> frozenset[str]:
        """Return which workers can run a task, this one included."""
        if self._alike and not needs:
            return self.everybody
        kind = (id_.partition(":")[0], queue, tuple(needs))
        if (able := self._able.get(kind)) is None:
            if len(self._able) >= _MOST_KINDS:
                self._able.clear()
            others = (w.worker_id for w in self._others if w.runs(kind[0], queue) and w.claimant.has(needs))
            able = self._able[kind] = frozenset([self._worker_id, *others])
        return able

    def _places(self, workers: frozenset[str]) -> Sequence[int]:
        if (places := self._among.get(workers)) is None:
            if len(self._among) >= _MOST_SETS:
                self._among.clear()
            places = self._among[workers] = _places(self._worker_id, workers)
        return places


def _places(worker_id: str, workers: Collection[str]) -> list[int]:
    """Return, for each lane, how many workers come before this one: the owner of the lane, and those with a greater weight."""
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
    """Return the owner of each lane: the worker with the greatest weight there that does not have its share yet.

    So no worker owns two lanes more than another. By weight alone, of sixteen workers one would own eight lanes and one none,
    and workers that are done with their own would take from others' lanes, where claims collide.
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
    """Return a worker's weight in each lane."""
    return tuple(blake2b(f"{worker_id}\0{lane}".encode(), digest_size=8).digest() for lane in range(LANES))
