"""Parked candidates: those that wait for room in one place, a limited queue or one group of it.

Whatever has no room comes back here from the claim queue, perhaps many times. So that this changes nothing in the order, each
candidate keeps the place that it was taken from: groups take turns over all that starts, not over all that was tried.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

from taskmesh.consumer.candidates.claim_queue import Candidate, Rank
from taskmesh.consumer.candidates.turns import Turns

_AT_MOST = 2_000


class Parked(Iterator[Candidate]):
    """Candidates that wait for room in one place. Iterating takes the next out."""

    def __init__(self, *, in_turn: bool) -> None:
        """`in_turn`: whether groups take turns here."""
        self._in_turn = in_turn
        self._held: dict[str, Candidate] = {}
        self._heap: list[tuple[Rank, int, Candidate]] = []
        self._turns: Turns[Candidate] = Turns()
        """Those of groups."""
        self._sequence = 0
        self.last_look = time.monotonic()
        """When it was last looked up what else waits in the place."""

    def __len__(self) -> int:
        return len(self._held)

    def __next__(self) -> Candidate:
        first, heap = self._turns.first(self._held), self._heap
        while heap and self._held.get(heap[0][2].id) is not heap[0][2]:
            heapq.heappop(heap)
        if first is not None and (not heap or first < heap[0][0]):
            turn = self._turns.next_turn(self._held)
            candidate = self._turns.take(self._held)
        elif heap:
            turn, candidate = None, heapq.heappop(heap)[2]
        else:
            raise StopIteration
        assert candidate is not None
        del self._held[candidate.id]
        return replace(candidate, due=time.monotonic(), timed=False, turn=turn)

    def add(self, candidate: Candidate) -> list[Candidate]:
        """Park a candidate. Return those that are dropped for it, which would be the last to go."""
        known = self._held.get(candidate.id)
        if known is not None and known.stands_with(candidate) and known.rank == candidate.rank:
            return []
        self._held[candidate.id] = candidate
        if self._in_turn and candidate.group is not None:
            self._turns.add(candidate, candidate.turn)
        else:
            self._sequence += 1
            heapq.heappush(self._heap, (candidate.rank, self._sequence, candidate))
        return self._drop_last() if len(self._held) > _AT_MOST * 5 // 4 else []

    @property
    def has_groups(self) -> bool:
        """Whether any of them waits for the turn of its group."""
        return len(self._turns) > 0

    def count_of(self, group: str) -> int:
        """Return how many candidates of a group are parked here."""
        return self._turns.count_of(group)

    def _drop_last(self) -> list[Candidate]:
        kept = list(itertools.islice(self, _AT_MOST))
        dropped = list(self._held.values())
        self._held.clear()
        self._heap.clear()
        self._turns.first({})  # so that it forgets them
        for candidate in kept:
            self.add(candidate)
        return dropped
