"""Turns: which group of a queue goes next. Round robin, whatever waits in each; within a group, by rank.

A group that joins takes its turn behind those that wait already, so at most one task of each of them goes first. A higher
priority goes before all turns.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar


class Ranked(Protocol):
    """What waits in a line."""

    id: str
    group: str | None

    @property
    def rank(self) -> Any:
        """Its place among others of its group: a tuple that begins with the priority. The smallest goes first."""


T = TypeVar("T", bound=Ranked)


class Turn(NamedTuple):
    """What a candidate used when it was taken. If it comes back unused, nothing has changed."""

    before: float
    """The turn that its group had had before."""
    rank: Any
    """The place of the queue."""


class _Line(Generic[T]):
    """The due candidates of one group."""

    __slots__ = ("entry", "group", "heap", "turn")

    def __init__(self, group: str, turn: float) -> None:
        self.group = group
        self.heap: list[tuple[Any, int, T]] = []
        self.turn = turn
        """When it had its last turn or, if it had none, when it joined."""
        self.entry: tuple[Any, float, int, _Line[T]] | None = None
        """Its place in the order of turns."""


class Turns(Generic[T]):
    """The due candidates of one queue whose tasks have groups.

    `held`, in all methods: the candidates that still count, by `_id`; others have been taken or forgotten.
    """

    LOW = 2
    """When a group that has more tasks than are held here has only this many left, more are wanted."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._order: list[tuple[Any, float, int, _Line[T]]] = []
        self._ranks: list[Any] = []
        """The ranks of all that waits, the best first: the places that the queue has among other queues, whichever group uses
        them."""
        self._turn = 0
        self._sequence = 0
        self._count = 0
        self.more: set[str] = set()
        """Groups of which there are more tasks than are held here."""
        self.wanted: set[str] = set()
        """Those of them of which more are needed now."""

    def __len__(self) -> int:
        return self._count

    def add(self, candidate: T, unused: Turn | None = None) -> None:
        """Let a candidate wait for the turn of its group. `unused`: what it had when it was taken, if it comes back."""
        group = str(candidate.group)
        line = self._lines.get(group)
        if line is None:
            line = self._lines[group] = _Line(group, self._turn - 0.5)
        goes_back = unused is not None and unused.before < line.turn
        if unused is not None:
            line.turn = min(line.turn, unused.before)
        self._sequence += 1
        heapq.heappush(line.heap, (candidate.rank, self._sequence, candidate))
        heapq.heappush(self._ranks, candidate.rank if unused is None else unused.rank)
        self._count += 1
        if line.entry is None or candidate.rank[0] < line.entry[0] or goes_back:
            self._queue_up(line)

    def has(self, group: str) -> bool:
        """Whether anything of a group waits here."""
        return group in self._lines

    def count_of(self, group: str) -> int:
        """Return how many of a group wait here."""
        return len(line.heap) if (line := self._lines.get(group)) is not None else 0

    def next_turn(self, held: Mapping[str, T]) -> Turn | None:
        """Return what the next to be taken uses. None if nothing waits here."""
        line = self._next(held)
        return None if line is None else Turn(line.turn, self._ranks[0])

    def first(self, held: Mapping[str, T]) -> Any:
        """Return the best rank of all that waits here. None if nothing does."""
        if self._next(held) is not None:
            return self._ranks[0]
        if self._ranks:
            self._ranks.clear()
            self.wanted |= self.more
        return None

    def take(self, held: Mapping[str, T]) -> T | None:
        """Remove and return the best candidate of the group whose turn it is. It uses the best place that the queue has."""
        line = self._next(held)
        if line is None:
            return None
        heapq.heappop(self._order)
        heapq.heappop(self._ranks)
        candidate = heapq.heappop(line.heap)[2]
        self._count -= 1
        self._turn += 1
        line.turn = self._turn
        if line.heap:
            self._queue_up(line)
        else:
            del self._lines[line.group]
        if line.group in self.more and len(line.heap) <= self.LOW:
            self.wanted.add(line.group)
        return candidate

    def _next(self, held: Mapping[str, T]) -> _Line[T] | None:
        """Return the group whose turn it is, and remove what no longer counts."""
        while self._order:
            entry = self._order[0]
            line = entry[3]
            if line.entry is entry:
                while line.heap and held.get(line.heap[0][2].id) is not line.heap[0][2]:
                    heapq.heappop(line.heap)
                    self._count -= 1
                if line.heap and line.heap[0][0][0] == entry[0]:
                    return line
                if line.heap:  # nothing with that priority is left
                    self._queue_up(line)
                else:
                    del self._lines[line.group]
            heapq.heappop(self._order)
        return None

    def _queue_up(self, line: _Line[T]) -> None:
        self._sequence += 1
        line.entry = (line.heap[0][0][0], line.turn, self._sequence, line)
        heapq.heappush(self._order, line.entry)

    def by_place(self, held: Mapping[str, T]) -> Iterator[tuple[int, Any, T]]:
        """Yield all that waits here, each with the number of tasks of its group before it, and its rank."""
        for line in self._lines.values():
            waiting = sorted(entry for entry in line.heap if held.get(entry[2].id) is entry[2])
            for place, (rank, _, candidate) in enumerate(waiting):
                yield place, rank, candidate
