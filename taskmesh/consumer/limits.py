"""Limits on this worker's side: book before claiming, put aside what has no room, and go on as soon as there is some.

Asked by the claimer, and only about queues that have limits: the others never come here. What promises hold, and how, is
said in `store/limits.py`. If the process dies after booking, the booking is written off; after the claim, others find
out that its lease has ended.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from taskmesh.consumer.claim_queue import Candidate, ClaimQueue
from taskmesh.consumer.executions import Executions
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.timing import varied
from taskmesh.model.queue import QueueLimits
from taskmesh.store import Store
from taskmesh.store import limits as store_limits
from taskmesh.store.clock import ServerClock
from taskmesh.store.driver import Document
from taskmesh.store.find import Claimable
from taskmesh.store.limits import Booking, Wish, scan_groups

logger = logging.getLogger("taskmesh.limits")

_LARGEST_WISH = 200
_ASK_AGAIN_S = 0.1
"""How long to wait for room that others have to make. Room made here is used at once."""
_WHILE_SHUT_S = 30.0
_PARKED_AT_MOST = 2_000
_TRIED_AT_ONCE = 64
_GROUPS_PER_SCAN = 24

Place = tuple[str, str | None]
"""Where room is lacking: a queue, or one group of it."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Candidates that may be claimed now, and the filter that their claim has to carry."""

    queue: str
    candidates: list[Candidate]
    booking: Booking | None
    claim_filter: Document


class Limits:
    """The limited queues, as one consumer sees them."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        clock: ServerClock,
        candidates: ClaimQueue,
        executions: Executions,
    ) -> None:
        self._store = store
        self._worker_id = settings.worker_id
        self._me = settings.claimant
        self._names = settings.names
        self._clock = clock
        self._candidates = candidates
        self._executions = executions
        self.queues: Mapping[str, Document] = {}
        """The queues that have limits."""
        self.paused_groups: frozenset[Place] = frozenset()
        """Groups that are paused for everybody, while the rest of their queue is open."""
        self._asking: set[str] = set()
        self._unchecked: set[str] = set()
        self._shut: dict[Place, asyncio.TimerHandle] = {}
        self._parked: dict[Place, list[tuple[Any, int, Candidate]]] = {}
        self._sequence = 0
        self._slots: dict[str, dict[str, str]] = {}
        """By queue and task: the tokens of the slots in which something of ours runs, or did until a moment ago."""
        self._behind: dict[str, str | None] = {}
        self._freed = False

    def learn(self, settings: Mapping[str, Document]) -> None:
        """Take over which queues have limits now, and which groups are paused."""
        paused = frozenset(
            (queue, pause["g"]) for queue, document in settings.items() for pause in document.get("paused_groups") or ()
        )
        reopened, self.paused_groups = self.paused_groups - paused, paused
        if reopened:
            self._candidates.order_scan()
        limited = {queue: document["limits"] for queue, document in settings.items() if document.get("limits")}
        if limited == self.queues:
            return
        changed = {queue for queue in limited.keys() | self.queues if limited.get(queue) != self.queues.get(queue)}
        self.queues = limited
        self._unchecked |= changed & limited.keys()
        for place in [place for place in self._shut if place[0] in changed]:
            self._reopen(place)

    @property
    def full_queues(self) -> frozenset[str]:
        """Queues that have no room now: it makes no sense to look for tasks there."""
        return frozenset(queue for queue, group in self._shut if group is None)

    @property
    def shut_queues(self) -> frozenset[str]:
        """Queues from which nothing starts until somebody changes their limits."""
        return frozenset(queue for queue, limits in self.queues.items() if limits.get("running") == 0)

    @property
    def shut_groups(self) -> list[Document]:
        """Filters on the tasks of the groups from which nothing starts until somebody changes their limits."""
        shut = self._paused_tasks
        for queue, limits in self.queues.items():
            own = {entry["g"]: entry["n"] for entry in limits.get("groups") or []}
            if none := [group for group, running in own.items() if running == 0]:
                shut.append({"queue": queue, "group": {"$in": none}})
            if limits.get("group_running") == 0:
                shut.append({"queue": queue, "group": {"$type": "string", "$nin": list(own)}})
        return shut

    @property
    def _paused_tasks(self) -> list[Document]:
        by_queue: dict[str, list[str]] = {}
        for queue, group in sorted(self.paused_groups, key=str):
            by_queue.setdefault(queue, []).append(str(group))
        return [{"queue": queue, "group": {"$in": groups}} for queue, groups in by_queue.items()]

    def without_paused(self, narrowed_by: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the filter that a claim has to carry: this one, and nothing of a paused group."""
        if not self.paused_groups:
            return narrowed_by
        nothing_paused = {"$nor": self._paused_tasks}
        return {"$and": [dict(narrowed_by), nothing_paused]} if narrowed_by else nothing_paused

    @property
    def full_groups(self) -> list[Place]:
        """Groups that have no room now, or are paused."""
        return [*(place for place in self._shut if place[1] is not None), *self.paused_groups]

    def is_full(self, queue: str, group: str | None) -> bool:
        """Whether there is no room for such a task now, or its group is paused."""
        if self._shut and ((queue, group) in self._shut or (queue, None) in self._shut):
            return True
        return self.is_paused(queue, group)

    def is_paused(self, queue: str, group: str | None) -> bool:
        """Whether nobody claims of this group."""
        return bool(self.paused_groups) and (queue, group) in self.paused_groups

    # --- claiming ---

    def sorted_out(self, candidates: list[Candidate]) -> tuple[list[Candidate], dict[str, list[Candidate]]]:
        """Return those that no limit concerns, and by queue those to ask for now. The others are put aside."""
        unlimited: list[Candidate] = []
        by_queue: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            queue = candidate.queue
            if queue not in self.queues:
                unlimited.append(candidate)
            elif queue in self._asking or (queue, None) in self._shut:
                self._park((queue, None), candidate)
            elif (queue, candidate.group) in self._shut:
                self._park((queue, candidate.group), candidate)
            elif len(by_queue.get(queue, ())) >= _LARGEST_WISH:
                self._candidates.offer(candidate)
            else:
                by_queue.setdefault(queue, []).append(candidate)
        self._asking |= by_queue.keys()
        return unlimited, by_queue

    async def admit(self, queue: str, candidates: list[Candidate]) -> Admission:
        """Book what there is room for, and put the rest aside. `done` has to follow."""
        if queue in self._unchecked:
            # What was claimed before we knew of the limit has no slot yet.
            self._unchecked.discard(queue)
            await store_limits.check(self._store, queue)
        wishes = [Wish(candidate.id, candidate.group) for candidate in candidates]
        booking = await store_limits.book(self._store, queue, self._worker_id, wishes, await self._unused(queue))
        if booking is not None and booking.check and await store_limits.check(self._store, queue):
            rest = [wish for wish in wishes if wish.id not in booking.ids]
            more = await store_limits.book(self._store, queue, self._worker_id, rest) if not booking.ids else None
            booking = more or booking
        if booking is None:
            return Admission(queue, candidates, None, {})
        admitted = [candidate for candidate in candidates if candidate.id in booking.ids]
        self._put_aside(queue, booking, [candidate for candidate in candidates if candidate.id not in booking.ids])
        return Admission(queue, admitted, booking, store_limits.booked_until(self._store, booking))

    async def claimed(self, admission: Admission) -> None:
        """Confirm a booking, as its claim was answered: what does not run here now was not won."""
        booking = admission.booking
        if booking is None:
            return
        idle = {candidate.id for candidate in admission.candidates if candidate.id not in self._executions}
        unused = idle - await store_limits.live_here(self._store, self._worker_id, idle) if idle else idle
        slots = self._slots.setdefault(admission.queue, {})
        slots.update((id_, booking.token) for id_ in booking.ids - unused)
        not_won = [Wish(c.id, c.group) for c in admission.candidates if c.id in unused]
        await store_limits.confirm(self._store, admission.queue, booking.token, not_won)

    def done(self, queue: str) -> None:
        """The claims of this queue are through: the next may be asked for."""
        self._asking.discard(queue)
        if (queue, None) not in self._shut:
            self._reopen((queue, None))

    async def _unused(self, queue: str) -> list[tuple[str, str]]:
        """Return the slots of ours in which nothing runs any more."""
        slots = self._slots.get(queue, {})
        ended = {id_: token for id_, token in slots.items() if id_ not in self._executions}
        if not ended:
            return []
        live = await store_limits.live_here(self._store, self._worker_id, ended)
        unused = [(token, id_) for id_, token in ended.items() if id_ not in live]
        for _, id_ in unused:
            del slots[id_]
        return unused

    # --- waiting for room ---

    def _put_aside(self, queue: str, booking: Booking, refused: list[Candidate]) -> None:
        """Shut the place that had no room, for as long as it makes no sense to ask again."""
        if not refused:
            return
        if booking.next_start is not None:
            self._shut_for((queue, None), self._until(booking.next_start, queue, "per_ms"))
        elif all(candidate.group in booking.full_groups for candidate in refused):
            for group, next_start in booking.full_groups.items():
                pause = (
                    self._pause(queue, group) if next_start is None else self._until(next_start, queue, "group_per_ms")
                )
                self._shut_for((queue, group), pause)
        else:
            self._shut_for((queue, None), self._pause(queue))
        for candidate in refused:
            group_is_shut = (queue, candidate.group) in self._shut
            self._park((queue, candidate.group if group_is_shut else None), candidate)

    def _until(self, next_start: datetime, queue: str, window: str) -> float:
        """How long to wait for room under a rate: never longer than its window, whatever our clock."""
        per = float(self.queues.get(queue, {}).get(window) or 1000) / 1000
        return min(max(self._clock.monotonic(next_start) - time.monotonic(), 0.0) + 0.002, per)

    def _pause(self, queue: str, group: str | None = None) -> float:
        """How long to wait for room. Where none may run, there is none before somebody changes that, of which we are told."""
        limits = QueueLimits.from_document(self.queues.get(queue, {}))
        most = limits.running if group is None else limits.of_group(group)
        return varied(_WHILE_SHUT_S if most == 0 else _ASK_AGAIN_S, 0.3)

    def _shut_for(self, place: Place, pause: float) -> None:
        earlier = self._shut.pop(place, None)
        if earlier is not None:
            earlier.cancel()
        self._shut[place] = asyncio.get_running_loop().call_later(pause, self._reopen, place)

    def _park(self, place: Place, candidate: Candidate) -> None:
        parked = self._parked.setdefault(place, [])
        if len(parked) < _PARKED_AT_MOST:  # what is forgotten here, a scan finds again
            self._sequence += 1
            heapq.heappush(parked, (candidate.rank, self._sequence, candidate))

    def _reopen(self, place: Place) -> None:
        """Try again, the best of those that wait first."""
        timer = self._shut.pop(place, None)
        if timer is not None:
            timer.cancel()
        parked = self._parked.get(place, [])
        now = time.monotonic()
        for _ in range(min(_TRIED_AT_ONCE, len(parked))):
            self._candidates.offer(replace(heapq.heappop(parked)[2], due=now, timed=False))
        if not parked:
            self._parked.pop(place, None)
            if timer is not None:
                self._candidates.order_scan()
        self._candidates.ready.set()

    def slot_freed(self) -> None:
        """Something ended here: if it had a slot, there is room again where it ran."""
        if self._slots and not self._freed:
            self._freed = True
            asyncio.get_running_loop().call_soon(self._use_freed)

    def _use_freed(self) -> None:
        self._freed = False
        for queue, slots in self._slots.items():
            shut = [place for place in self._shut if place[0] == queue]
            if shut and not all(id_ in self._executions for id_ in slots):
                for place in shut:
                    self._reopen(place)

    def close(self) -> None:
        """Wait for nothing any more."""
        for timer in self._shut.values():
            timer.cancel()
        self._shut.clear()
        self._parked.clear()

    # --- finding work behind full groups ---

    async def scan_groups(self) -> list[Claimable]:
        """Look for tasks of groups that have room, where the ordinary scan sees only those of full ones."""
        found: list[Claimable] = []
        for queue in {queue for queue, _ in self.full_groups}:
            full = [group for shut, group in self.full_groups if shut == queue and group is not None]
            rows, self._behind[queue] = await scan_groups(
                self._store,
                self._me,
                queue,
                self._names,
                full,
                self._behind.get(queue),
                groups=_GROUPS_PER_SCAN,
            )
            found += rows
        return found
