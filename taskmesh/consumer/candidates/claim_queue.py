"""The claim queue: which tasks this worker should try to claim, and when. A heap, bounded however large the backlog is.

It holds hints, not truth: another worker may have claimed an entry meanwhile, and then the claim wins nothing. The parts that
find tasks and the part that claims them meet here: the claimer waits for `ready`, the scanner for `scan_wanted`.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from taskmesh.consumer.candidates.turns import Turn, Turns
from taskmesh.consumer.settings import Settings
from taskmesh.store.find import Claimable

_ASIDE_AT_MOST = 10_000
_BEHIND_AT_MOST = 1_000
_REST = 4
"""A scan that brought little is not repeated for want of candidates until so many times as it took have passed."""
NOTHING = (-(2**63), 0, 0)
"""A rank before all others."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A task to try."""

    id: str
    queue: str
    due: float
    """When to try it, on the monotonic clock."""
    since: float
    """When it became claimable, on the monotonic clock."""
    number: int
    """Its place in the order of publication."""
    priority: int = 0
    fail_cnt: int = 0
    group: str | None = None
    timed: bool = False
    """Whether it had to wait for a time. Then a refusal shortly after that time may mean that our clock is a little fast."""
    turn: Turn | None = None
    """What it uses, if it has waited for room before, where groups take turns."""
    heard: float = field(default_factory=time.monotonic)
    """When this worker learnt of it, on the monotonic clock."""

    def stands_with(self, other: Candidate) -> bool:
        """Whether both are in one queue and group and have one priority. A task may have been moved since it was found."""
        return (self.queue, self.group, self.priority) == (other.queue, other.group, other.priority)

    @property
    def rank(self) -> Rank:
        """The order of claiming."""
        return rank_of(self)


Rank = tuple[int, int, int]
"""The sort key of candidates: the smallest goes first."""


def rank_of(task: Candidate | Claimable, fail_cnt: int | None = None) -> Rank:
    """Return a task's rank: by priority, then by number of failures (or `fail_cnt`, if given), then by order of publication."""
    return (-task.priority, task.fail_cnt if fail_cnt is None else fail_cnt, task.number)


_Ranked = tuple[Rank, int, Candidate]
_Timed = tuple[float, int, Candidate]


class ClaimQueue:
    """Candidates, each at most once: those that are due are ordered by rank, the others by time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.ready = asyncio.Event()
        """Set when the claimer should look: there are new candidates, a slot is free, or it may claim again."""
        self.scan_wanted = asyncio.Event()
        """Set when the scanner should look at once."""
        self.unread = True
        """Whether there is claimable work that was never offered here: the last scan did not read everything, or hints were
        dropped."""
        self.being_claimed: set[str] = set()
        """Tasks for which a claim is under way."""
        self.tried_in_vain = 0
        """How many claims won nothing, since other workers were faster."""
        self._aside: dict[str, tuple[float, float]] = {}
        """Until when each task is set aside, and for how long: the next time it is longer. The oldest entries are forgotten."""
        self._held: dict[str, Candidate] = {}
        self._ready: list[_Ranked] = []
        self._later: list[_Timed] = []
        self._sequence = 0
        self._turns: dict[str, Turns[Candidate]] = {}
        """The due candidates of queues whose tasks have groups."""
        self.groups_wanted = asyncio.Event()
        """Set when more candidates of a group are needed than are held here."""
        self._taken: set[str] = set()
        self._came_back: set[str] = set()
        self.overflowed = False
        """Whether a candidate was dropped since the last scan began: there is more work than is held here."""
        self._next_for_more = 0.0
        """When a scan for want of candidates pays again (monotonic)."""
        self._known_to: Rank | None = NOTHING
        """The rank up to which every due task is known here. None: all are known."""
        self._forgot = True
        """Whether any of those were dropped or missed since the last scan began, so that only one from the start finds them."""
        self._behind: dict[str, Candidate] = {}
        """Candidates beyond that rank. They wait for a scan, so that they do not overtake tasks that were never offered here."""

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
        """Take in a candidate. Return True if it is new, or due earlier than the one that is held for the same task."""
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
        return self._hold(candidate)

    def _hold(self, candidate: Candidate) -> bool:
        """Take in a candidate, whatever was not read."""
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
                self._note_taken(candidate)
                taken.append(candidate)
        return taken

    def _note_taken(self, candidate: Candidate) -> None:
        """Remove what is known of a candidate that is about to be tried."""
        del self._held[candidate.id]
        self._behind.pop(candidate.id, None)  # it may have been found again, behind what was not read
        self._taken.add(candidate.id)

    def _next(self) -> Candidate | None:
        """Remove and return the next candidate: the best by rank or, if that has a group, one of the group whose turn it is."""
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
        """Note for which groups there are more tasks than are held here, or no more. No groups: for the whole queue."""
        if more:
            turns = self._turns.setdefault(queue, Turns())
            turns.more.update(groups)
            turns.wanted.update(group for group in groups if not turns.has(group))
        elif (known := self._turns.get(queue)) is not None:
            known.more.difference_update(groups or set(known.more))
            known.wanted.difference_update(groups or set(known.wanted))

    def wanted_groups(self) -> dict[str, set[str]]:
        """Return the groups of which more is wanted, by queue. The caller is about to look for more."""
        wanted = {queue: turns.wanted for queue, turns in self._turns.items() if turns.wanted}
        for queue in wanted:
            self._turns[queue].wanted = set()
        return wanted

    def is_behind(self, queue: str, group: str | None) -> bool:
        """Whether there are more tasks of this group than are held here, so that a new one must not go first."""
        turns = self._turns.get(queue)
        return turns is not None and group in turns.more

    def has_of(self, queue: str, group: str | None) -> bool:
        """Whether candidates of this group are held whose turn has not come yet."""
        turns = self._turns.get(queue)
        return group is not None and turns is not None and turns.has(group)

    def take_loops(self, now: float) -> list[Candidate]:
        """Remove and return the due candidates that need no slot."""
        held = [self._held[id_] for id_ in self._settings.loop_ids if id_ in self._held]
        due = [candidate for candidate in held if candidate.due <= now]
        for candidate in due:
            self._note_taken(candidate)
        return due

    def next_loop_due(self) -> float | None:
        """Return when the next candidate that needs no slot is due, or None if there is none."""
        return min((self._held[id_].due for id_ in self._settings.loop_ids if id_ in self._held), default=None)

    def next_due(self, now: float) -> float | None:
        """Return when the next candidate is due (now, if one is due already), or None if there is none."""
        self._ripen(now)
        if self._ready or any(self._turns.values()):
            return now
        return self._later[0][0] if self._later else None

    def discard(self, id_: str) -> None:
        """Forget a task."""
        self._held.pop(id_, None)
        self._behind.pop(id_, None)

    def discard_queues(self, closed: Any) -> None:
        """Forget the candidates of queues from which nothing may be claimed. A scan finds them again."""
        for candidate in [c for c in (*self._held.values(), *self._behind.values()) if c.queue in closed]:
            self.discard(candidate.id)

    # --- tasks that cannot be claimed for now ---

    def set_aside(self, candidate: Candidate, first_s: float, longest_s: float) -> float:
        """Try a task again later, and later each time. Return the delay."""
        _, last = self._aside.pop(candidate.id, (0.0, 0.0))
        pause = max(first_s, min(2 * last, longest_s))
        over = time.monotonic() + pause
        self._aside[candidate.id] = over, pause
        if len(self._aside) > _ASIDE_AT_MOST:
            del self._aside[next(iter(self._aside))]
        self.offer(replace(candidate, due=over, timed=False))
        return pause

    def is_aside(self, id_: str) -> bool:
        """Whether a task must not be tried for now."""
        over, _ = self._aside.get(id_, (0.0, 0.0))
        return over > time.monotonic()

    def was_aside(self, id_: str) -> bool:
        """Whether a task has been set aside since its last successful claim."""
        return id_ in self._aside

    def no_longer_aside(self, id_: str) -> None:
        """Forget that a task was set aside, since it could be claimed."""
        self._aside.pop(id_, None)

    # --- scans ---

    @property
    def more(self) -> bool:
        """Whether there is more work than is held here."""
        return self.unread or self.overflowed

    def order_scan(self) -> None:
        """Have everything scanned soon: after a gap in the stream, or at the start."""
        self.missed()
        self.scan_wanted.set()

    def missed(self) -> None:
        """Note that there may be tasks that were never offered here: no newer task goes first until a scan has looked."""
        self.unread = True
        self._known_to = NOTHING
        self._forgot = True

    def know_to(self, rank: Rank | None) -> None:
        """Note the rank up to which a scan has seen every due task. None: it has seen all."""
        self._known_to = rank
        behind, self._behind = self._behind, {}
        if sum(map(self.offer, behind.values())):
            self.ready.set()

    def let_failed_go(self) -> int:
        """Let tasks go that have failed and that a scan has read. Return how many.

        What was not read may have failed less often, and would go before them. But that may stand behind any number of them.
        """
        known_to = self._known_to
        if known_to is None:
            return 0
        read = [each for each in self._behind.values() if each.fail_cnt and rank_of(each, fail_cnt=0) <= known_to]
        return sum(map(self._hold, read))

    @property
    def may_read_on(self) -> bool:
        """Whether a scan may continue where the last one ended: all that stands before is known here, or was taken."""
        return self._known_to is not None and self._known_to != NOTHING and not self._forgot

    @property
    def unread_priority(self) -> int | None:
        """The highest priority of the tasks that the last scan did not read. None: it has read all, or is still to come."""
        return None if self._known_to is None or self._known_to == NOTHING else -self._known_to[0]

    def want_more(self) -> None:
        """Request a scan if few candidates are left and there is more work."""
        if self.more and self.runs_low() and time.monotonic() >= self._next_for_more:
            self.scan_wanted.set()

    def runs_low(self) -> bool:
        """Return whether few of the remaining candidates are due."""
        return self.ready_count(time.monotonic()) < self._low

    def scanned(self, brought: int, took_s: float) -> None:
        """Note how many candidates a scan has brought. Few: most of what it passed over has no room, or was taken by others."""
        low = self.runs_low()
        self._next_for_more = time.monotonic() + (_REST * took_s if low and brought < self._low else 0.0)
        if not low and not self._forgot:
            self.scan_wanted.clear()  # that was before these came

    @property
    def _low(self) -> int:
        return max(1, self._settings.concurrency // 2)

    def begin_scan(self) -> int:
        """Note that a scan begins. What is taken from now on may still look claimable to it.

        Return how many candidates were taken since the last scan began.
        """
        taken = len(self._taken)
        self.overflowed = self._forgot = False
        self._taken = set(self.being_claimed)
        self._came_back = set()
        return taken

    def taken_meanwhile(self, id_: str) -> bool:
        """Whether a candidate was taken since the scan began, or was being claimed then: what the scan saw of it is outdated."""
        return id_ in self._taken

    def not_claimed(self, id_: str) -> None:
        """Note that a candidate was taken, not claimed, and is no longer held: what is seen of it from now on is up to date."""
        self._taken.discard(id_)

    def came_back(self, id_: str) -> None:
        """Note that a task that was taken is claimable again: what is seen of it from now on is up to date."""
        if id_ in self._taken:
            self._taken.remove(id_)
            self._came_back.add(id_)

    def came_back_meanwhile(self, id_: str) -> bool:
        """Whether a task was taken and came back since the scan began: the scan may have seen it as it was before it failed."""
        return id_ in self._came_back

    def _ripen(self, now: float) -> None:
        """Move what has become due to the ready heap, and remove forgotten entries from the heads of both heaps."""
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
        """Keep the best: due candidates by rank, then the earliest of the others.

        What is worse than a dropped one counts as unknown.
        """
        self._ripen(time.monotonic())
        grouped = self._drop_most_of_groups(limit // 2)
        limit -= len(grouped)
        ready = sorted(entry for entry in self._ready if self._held.get(entry[2].id) is entry[2])
        self._ready = ready[:limit]
        if len(ready) > limit:
            self._known_to = ready[limit - 1][0]
            self._forgot = True
        later = sorted(entry for entry in self._later if self._held.get(entry[2].id) is entry[2])
        self._later = later[: limit - len(self._ready)]
        self._held = {entry[2].id: entry[2] for entry in (*self._ready, *self._later)}
        self._held |= {candidate.id: candidate for candidate in grouped}
        self.overflowed = True

    def _drop_most_of_groups(self, limit: int) -> list[Candidate]:
        """Keep the first `limit` candidates of groups, from each in turn: no group's backlog pushes another group out."""
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
    """Return how many candidates are kept at most: enough until the next scan, however large the backlog is."""
    return max(5_000, 10 * concurrency)
