"""The claim queue: which tasks this worker should try to claim, and when. A heap, bounded whatever the backlog.

It holds hints, not truth: an entry may be claimed by somebody else meanwhile, and then the claim just wins nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any


@dataclass(order=True, slots=True)
class Candidate:
    """A task to try. Ordered as tasks are to be claimed: priority, those that name this worker, fewer failures, time."""

    rank: tuple[int, bool, int, float] = field(init=False)
    id: str = field(compare=False)
    queue: str = field(compare=False)
    due: float = field(compare=False)
    """When to try, on the monotonic clock."""
    priority: int = field(compare=False, default=0)
    named: bool = field(compare=False, default=False)
    fail_cnt: int = field(compare=False, default=0)
    group: str | None = field(compare=False, default=None)
    timed: bool = field(compare=False, default=False)
    """Whether it waited for a time. Then a refusal just after may mean that our clock is a little fast."""

    def __post_init__(self) -> None:
        self.rank = (-self.priority, not self.named, self.fail_cnt, self.due)


class ClaimQueue:
    """Candidates, each at most once: those that are due by rank, those to come by time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[str, Candidate] = {}
        self._ready: list[Candidate] = []
        self._later: list[tuple[float, int, Candidate]] = []
        self._sequence = 0
        self.overflowed = False
        """Whether something was dropped since `refilled()`: there is more work than is held here."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, id_: str) -> bool:
        return id_ in self._held

    def set_limit(self, limit: int) -> None:
        """Hold more or fewer from now on."""
        self._limit = limit

    @property
    def full(self) -> bool:
        """Whether the next candidate costs another its place."""
        return len(self._held) >= self._limit

    def ready_count(self, now: float) -> int:
        """Return how many candidates are due."""
        self._ripen(now)
        return len(self._ready)

    def offer(self, candidate: Candidate) -> bool:
        """Take a candidate in; True if it is new, or due earlier than the one held of the same task."""
        held = self._held.get(candidate.id)
        if held is not None and held.due <= candidate.due and held.priority >= candidate.priority:
            return False
        self._held[candidate.id] = candidate
        self._sequence += 1
        heapq.heappush(self._later, (candidate.due, self._sequence, candidate))
        if len(self._held) > self._limit * 5 // 4:
            self._drop_worst()
        return True

    def take(self, count: int, now: float) -> list[Candidate]:
        """Remove and return up to `count` due candidates, the best first."""
        self._ripen(now)
        taken: list[Candidate] = []
        while self._ready and len(taken) < count:
            candidate = heapq.heappop(self._ready)
            if self._held.get(candidate.id) is candidate:
                del self._held[candidate.id]
                taken.append(candidate)
        return taken

    def next_due(self, now: float) -> float | None:
        """Return when the next candidate is due (now, if one is), or None if there is none."""
        self._ripen(now)
        if self._ready:
            return now
        return self._later[0][0] if self._later else None

    def discard(self, id_: str) -> None:
        """Forget a task."""
        self._held.pop(id_, None)

    def discard_queues(self, closed: Any) -> None:
        """Forget what is in queues from which nothing may be claimed; a scan finds it again."""
        for candidate in [c for c in self._held.values() if c.queue in closed]:
            del self._held[candidate.id]

    def refilled(self) -> None:
        """Note that a scan has just looked at everything."""
        self.overflowed = False

    def _ripen(self, now: float) -> None:
        """Move what has become due to the ready heap, and clear what was forgotten from the heads of both."""
        while self._later and (
            self._later[0][0] <= now or self._held.get(self._later[0][2].id) is not self._later[0][2]
        ):
            candidate = heapq.heappop(self._later)[2]
            if self._held.get(candidate.id) is candidate:
                heapq.heappush(self._ready, candidate)
        while self._ready and self._held.get(self._ready[0].id) is not self._ready[0]:
            heapq.heappop(self._ready)

    def _drop_worst(self) -> None:
        """Keep the best: what is due by rank, then what comes first."""
        ready = sorted(c for c in self._ready if self._held.get(c.id) is c)
        later = sorted((entry for entry in self._later if self._held.get(entry[2].id) is entry[2]), key=lambda e: e[:2])
        self._ready = ready[: self._limit]
        self._later = later[: self._limit - len(self._ready)]
        self._held = {c.id: c for c in self._ready} | {entry[2].id: entry[2] for entry in self._later}
        self.overflowed = True
