"""The claim queue: which tasks this worker should try to claim, and when. A heap, bounded whatever the backlog.

It holds hints, not truth: an entry may be claimed by somebody else meanwhile, and then the claim just wins nothing. Here those
who find tasks meet the one who claims them: the claimer waits for `ready`, the scanner for `scan_wanted`.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from taskmesh.consumer.settings import Settings
from taskmesh.consumer.turns import Turns
from taskmesh.store.find import Claimable

_ASIDE_AT_MOST = 10_000
_BEHIND_AT_MOST = 1_000
NOTHING = (-(2**63), 0, 0)
"""A rank before all others."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A task to try."""

    id: str
    queue: str
    due: float
    """When to try, on the monotonic clock."""
    since: float
    """Since when it waits, on the same clock."""
    number: int
    """Its place in the order of publication."""
    priority: int = 0
    fail_cnt: int = 0
    group: str | None = None
    timed: bool = False
    """Whether it waited for a time. Then a refusal just after may mean that our clock is a little fast."""
    heard: float = field(default_factory=time.monotonic)
    """Since when this worker knows of it, on the same clock."""

    def stands_with(self, other: Candidate) -> bool:
        """Whether both are of one queue, group and priority: a task may have been moved since it was found."""
        return (self.queue, self.group, self.priority) == (other.queue, other.group, other.priority)

    @property
    def rank(self) -> Rank:
        """The order of claiming."""
        return rank_of(self)


Rank = tuple[int, int, int]
"""By which candidates are put in order: the lesser goes first."""


def rank_of(task: Candidate | Claimable, fail_cnt: int | None = None) -> Rank:
    """Return a task's rank: by priority, then fewer failures (or as if it had `fail_cnt`), then as published."""
    return (-task.priority, task.fail_cnt if fail_cnt is None else fail_cnt, task.number)


_Ranked = tuple[Rank, int, Candidate]
_Timed = tuple[float, int, Candidate]


class ClaimQueue:
    """Candidates, each at most once: those that are due by rank, those to come by time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.ready = asyncio.Event()
        """Set when the claimer should look: candidates came, a slot is free, or it may claim again."""
        self.scan_wanted = asyncio.Event()
        """Set when the scanner should look at once."""
        self.unread = True
        """Whether there is claimable work that was never offered here: the last scan did not read all, or hints were left out."""
        self.being_claimed: set[str] = set()
        """What a claim is under way for."""
        self.tried_in_vain = 0
        """How many claims won nothing: others were there before."""
        self._aside: dict[str, tuple[float, float]] = {}
        """Until when each task is set aside, and how long that is: the next time it is longer. The oldest are forgotten."""
        self._held: dict[str, Candidate] = {}
        self._ready: list[_Ranked] = []
        self._later: list[_Timed] = []
        self._sequence = 0
        self._turns: dict[str, Turns[Candidate]] = {}
        """What is due in the queues whose tasks have groups."""
        self.groups_wanted = asyncio.Event()
        """Set when more of some group is needed than is held here."""
        self._taken: set[str] = set()
        self._came_back: set[str] = set()
        self.overflowed = False
        """Whether something was dropped since the last scan began: there is more work than is held here."""
        self._known_to: Rank | None = NOTHING
        """How far all that is due is known here; None: to the end."""
        self._behind: dict[str, Candidate] = {}
        """What comes after that: it waits for a scan, so that it overtakes nothing that was never offered here."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, id_: str) -> bool:
        return id_ in self._held

    def knows(self, id_: str, now: float) -> bool:
        """Whether a task is about to be tried, or was taken since the last scan began."""
        held = self._held.get(id_)
        return (held is not None and held.due <= now) or id_ in self._behind or id_ in self._taken

    def ready_count(self, now: float) -> int:
        """Return how many candidates are due."""
        self._ripen(now)
        return len(self._ready) + sum(map(len, self._turns.values()))

    def offer(self, candidate: Candidate) -> bool:
        """Take a candidate in; True if it is new, or due earlier than the one held of the same task."""
        # (Groups take turns: what goes before what there, `is_behind` tells.)
        if self._known_to is not None and candidate.group is None and candidate.rank > self._known_to:
            if len(self._behind) < _BEHIND_AT_MOST:
                self._behind[candidate.id] = candidate
            held = self._held.get(candidate.id)
            if held is not None and held.priority > candidate.priority:  # it was found before that was lowered
                del self._held[candidate.id]
            self.overflowed = True
            self.want_more()
            return False
        self._behind.pop(candidate.id, None)
        held = self._held.get(candidate.id)
        if held is not None and held.stands_with(candidate) and held.due <= candidate.due:
            return False
        self._held[candidate.id] = candidate
        self._sequence += 1
        heapq.heappush(self._later, (candidate.due, self._sequence, candidate))
        limit = queue_limit(self._settings.concurrency)
        if len(self._held) > limit * 5 // 4:
            self._drop_worst(limit)
        return True

    def take(self, count: int, now: float) -> list[Candidate]:
        """Remove and return up to `count` due candidates, the best first."""
        self._ripen(now)
        taken: list[Candidate] = []
        while len(taken) < count and (candidate := self._next()) is not None:
            if self._held.get(candidate.id) is candidate:
                del self._held[candidate.id]
                self._taken.add(candidate.id)
                taken.append(candidate)
        return taken

    def _next(self) -> Candidate | None:
        """Remove and return what goes next: the best in rank; where that has a group, of the group whose turn it is."""
        if not self._turns:
            return heapq.heappop(self._ready)[2] if self._ready else None
        best = self._ready[0][0] if self._ready else None
        in_turn: Turns[Candidate] | None = None
        for turns in self._turns.values():
            rank = turns.first(self._held)
            if rank is not None and (best is None or rank < best):
                best, in_turn = rank, turns
        if in_turn is not None:
            candidate = in_turn.take(self._held)
            if in_turn.wanted:
                self.groups_wanted.set()
            return candidate
        return heapq.heappop(self._ready)[2] if self._ready else None

    def more_of(self, queue: str, groups: Collection[str], *, more: bool) -> None:
        """Note of which groups there is more than is held here, or none; no groups: all of the queue."""
        if more:
            turns = self._turns.setdefault(queue, Turns())
            turns.more.update(groups)
            turns.wanted.update(group for group in groups if not turns.has(group))
        elif (known := self._turns.get(queue)) is not None:
            known.more.difference_update(groups or set(known.more))
            known.wanted.difference_update(groups or set(known.wanted))

    def wanted_groups(self) -> dict[str, set[str]]:
        """Return, by queue, the groups of which more is wanted: whoever asks is about to look for it."""
        wanted = {queue: turns.wanted for queue, turns in self._turns.items() if turns.wanted}
        for queue in wanted:
            self._turns[queue].wanted = set()
        return wanted

    def is_behind(self, queue: str, group: str | None) -> bool:
        """Whether there is more of this group than is held here, so that what comes last must not go first."""
        turns = self._turns.get(queue)
        return turns is not None and group in turns.more

    def take_loops(self, now: float) -> list[Candidate]:
        """Remove and return the due candidates that need no slot."""
        held = [self._held[id_] for id_ in self._settings.loop_ids if id_ in self._held]
        due = [candidate for candidate in held if candidate.due <= now]
        for candidate in due:
            del self._held[candidate.id]
            self._taken.add(candidate.id)
        return due

    def next_loop_due(self) -> float | None:
        """Return when the next candidate is due that needs no slot, or None if there is none."""
        return min((self._held[id_].due for id_ in self._settings.loop_ids if id_ in self._held), default=None)

    def next_due(self, now: float) -> float | None:
        """Return when the next candidate is due (now, if one is), or None if there is none."""
        self._ripen(now)
        if self._ready or any(self._turns.values()):
            return now
        return self._later[0][0] if self._later else None

    def discard(self, id_: str) -> None:
        """Forget a task."""
        self._held.pop(id_, None)
        self._behind.pop(id_, None)

    def discard_queues(self, closed: Any) -> None:
        """Forget what is in queues from which nothing may be claimed; a scan finds it again."""
        for candidate in [c for c in (*self._held.values(), *self._behind.values()) if c.queue in closed]:
            self.discard(candidate.id)

    # --- tasks that cannot be claimed for now ---

    def set_aside(self, candidate: Candidate, first_s: float, longest_s: float) -> float:
        """Try a task again a little later, and later each time; return how much later."""
        _, last = self._aside.pop(candidate.id, (0.0, 0.0))
        pause = max(first_s, min(2 * last, longest_s))
        over = time.monotonic() + pause
        self._aside[candidate.id] = over, pause
        if len(self._aside) > _ASIDE_AT_MOST:
            del self._aside[next(iter(self._aside))]
        self.offer(replace(candidate, due=over, timed=False))
        return pause

    def is_aside(self, id_: str) -> bool:
        """Whether a task is not to be tried for now."""
        over, _ = self._aside.get(id_, (0.0, 0.0))
        return over > time.monotonic()

    def was_aside(self, id_: str) -> bool:
        """Whether a task has been set aside since it was claimed last."""
        return id_ in self._aside

    def forgive(self, id_: str) -> None:
        """Forget that a task was set aside: it could be claimed."""
        self._aside.pop(id_, None)

    # --- scans ---

    @property
    def more(self) -> bool:
        """Whether there is more work than is held here."""
        return self.unread or self.overflowed

    def order_scan(self) -> None:
        """Have everything looked at soon: after a gap, or at the start."""
        self.missed()
        self.scan_wanted.set()

    def missed(self) -> None:
        """Note that there may be tasks that were never offered here: nothing new goes before a scan has looked."""
        self.unread = True
        self._known_to = NOTHING

    def know_to(self, rank: Rank | None) -> None:
        """Note how far a scan has seen all that is due; None: to the end."""
        self._known_to = rank
        behind, self._behind = self._behind, {}
        if sum(map(self.offer, behind.values())):
            self.ready.set()

    def want_more(self) -> None:
        """Have a scan bring more soon, if few candidates are left and there is more."""
        if self.more and self.runs_low():
            self.scan_wanted.set()

    def runs_low(self) -> bool:
        """Return whether few of the candidates that are left are due."""
        return self.ready_count(time.monotonic()) < max(1, self._settings.concurrency // 2)

    def begin_scan(self) -> int:
        """Note that a scan looks at everything from now on; what is taken meanwhile it may still see as claimable.

        Return how many were taken since the last began.
        """
        taken = len(self._taken)
        self.overflowed = False
        self._taken = set(self.being_claimed)
        self._came_back = set()
        return taken

    def taken_meanwhile(self, id_: str) -> bool:
        """Whether a candidate was taken since the scan began, or was being claimed then: what was seen before is old."""
        return id_ in self._taken

    def came_back(self, id_: str) -> None:
        """Note that a task that was taken is claimable again: what is seen of it from now on is not old."""
        if id_ in self._taken:
            self._taken.remove(id_)
            self._came_back.add(id_)

    def came_back_meanwhile(self, id_: str) -> bool:
        """Whether a task was taken and came back since the scan began: the scan may have seen it before it had failed."""
        return id_ in self._came_back

    def _ripen(self, now: float) -> None:
        """Move what has become due to the ready heap, and clear what was forgotten from the heads of both."""
        held, later, ready = self._held, self._later, self._ready
        while later and (later[0][0] <= now or held.get(later[0][2].id) is not later[0][2]):
            _, sequence, candidate = heapq.heappop(later)
            if held.get(candidate.id) is candidate:
                if candidate.group is None:
                    heapq.heappush(ready, (candidate.rank, sequence, candidate))
                else:
                    self._turns.setdefault(candidate.queue, Turns()).add(candidate)
        for queue, turns in list(self._turns.items()):
            if turns.first(held) is None and not turns.more:
                del self._turns[queue]
            elif turns.wanted:
                self.groups_wanted.set()
        while ready and held.get(ready[0][2].id) is not ready[0][2]:
            heapq.heappop(ready)

    def _drop_worst(self, limit: int) -> None:
        """Keep the best: what is due by rank, then what comes first. Nothing behind what is dropped is known here any more."""
        grouped = self._drop_most_of_groups(limit // 2)
        limit -= len(grouped)
        ready = sorted(entry for entry in self._ready if self._held.get(entry[2].id) is entry[2])
        self._ready = ready[:limit]
        if len(ready) > limit:
            self._known_to = ready[limit - 1][0]
        later = sorted(entry for entry in self._later if self._held.get(entry[2].id) is entry[2])
        self._later = later[: limit - len(self._ready)]
        self._held = {entry[2].id: entry[2] for entry in (*self._ready, *self._later)}
        self._held |= {candidate.id: candidate for candidate in grouped}
        self.overflowed = True

    def _drop_most_of_groups(self, limit: int) -> list[Candidate]:
        """Keep so many of those that have a group: of each what comes first, so that none is forgotten for another's backlog."""
        kept: list[Candidate] = []
        for queue, turns in self._turns.items():
            waiting = sorted(turns.by_place(self._held), key=lambda each: each[:2])
            best = [candidate for _, _, candidate in waiting[: limit // len(self._turns)]]
            fewer: Turns[Candidate] = Turns()
            fewer.more = turns.more | {str(candidate.group) for _, _, candidate in waiting[len(best) :]}
            fewer.wanted = turns.wanted
            for candidate in sorted(best, key=lambda each: each.rank):
                fewer.add(candidate)
            self._turns[queue] = fewer
            kept += best
        return kept


def queue_limit(concurrency: int) -> int:
    """Return how many candidates are kept at most: enough to be busy until the next scan, however large the backlog."""
    return max(5_000, 10 * concurrency)
