"""Limits on this worker's side: book room before claiming, park candidates without room, and go on as soon as there is some.

Only the claimer asks, and only about queues that have limits. What limits guarantee, and how, is described in
`store/queues/limits.py`; which room this worker holds already, in `slots`. If the process dies after booking, the booking
expires; after the claim, other workers notice that its lease has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.consumer.candidates.claim_queue import Candidate, ClaimQueue
from taskmesh.consumer.candidates.parked import Parked
from taskmesh.consumer.candidates.partitions import Partitions
from taskmesh.consumer.candidates.slots import Place, Slot, Slots
from taskmesh.consumer.candidates.turns import Turns
from taskmesh.consumer.run.executions import Executions
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.timing import random_up_to, until, varied
from taskmesh.model.queue import QueueLimits
from taskmesh.store import Store
from taskmesh.store.clock import ServerClock
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import patiently
from taskmesh.store.queues import limits as store_limits
from taskmesh.store.queues.limits import NO_LIMIT, Booking, Wish

logger = logging.getLogger("taskmesh.limits")

_LARGEST_WISH = 200
_ASK_AGAIN_S = 0.1
"""How long to wait for room that other workers have to make: so long in a small fleet, longer if more workers wait for it.
Room made here is used at once."""
_ASKING_SHARE = 0.25
"""Where many places have no room, a worker asks for about this part of the time at most, or a fleet would do nothing else."""
_SCANS_APART_S = 0.3
"""How far apart scans are that look for tasks for room. Where many groups are limited, some group has room all the time."""
_LOOKS_APART_S, _EACH_LOOK_S = 1.0, 0.02
"""How far apart looks are at what waits in one queue beside what is known here, and how much of that for each queue."""
_LOOK_WITHIN_S = 1.0
"""How long a place stays shut for a look at what waits there. If that takes longer, another is wanted."""
_LOOK_AHEAD_S = 0.03
"""How long before a place opens the worker that asks first looks for what goes first there."""
_WHILE_SHUT_S = 30.0
_WHILE_ALL_OURS_S = 5.0
"""How long to wait if this worker itself occupies all the room: it notices by itself when there is some again."""
_TRIED_AT_ONCE = 64
"""How many candidates are tried when a place may have room. If it has room for all of them, more follow."""
_TOGETHER_S = 0.05
"""What else in a queue would be asked about within this time is asked about at once, in the same booking."""
_OTHERS_APART_S = 0.02
"""How far apart, on average, workers ask that had no share of a rate. All at once they would only hold up one another."""
_FEW_EACH = 2
"""Where no more tasks than this may run for each worker, whoever has room in hand takes tasks of any lane."""
_LACKED_FOR_S = 3.0
"""For how long a worker has less than its share, and asks in vain, before the others leave it that. In a trickle everybody has
now more, now less, and room that changes hands is not used meanwhile."""
_ASKS_OFTEN_S = 0.7
"""How long after asking in vain a worker asks again, if the others are to leave it its share. Less than they leave it for."""
_AFTER_A_START_S = 0.002
"""How long after a start has left its window to ask for its room: clocks differ by a bit."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Candidates that may be claimed now, and the filter that their claim has to carry."""

    candidates: list[Candidate]
    claim_filter: Document
    counted: tuple[str, str] | None = None
    """The queue and the token of the booking that counts their starts, if they are counted."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """Candidates, by what has to be done before they are claimed."""

    unlimited: list[Candidate]
    """Not subject to any limit."""
    admitted: Admission
    """There is a free slot in hand for them."""
    to_ask: dict[str, list[Candidate]]
    """By queue: room has to be booked for them."""


@dataclass(slots=True)
class _Shut:
    """A place that has no room."""

    timer: asyncio.TimerHandle
    """Asks again."""
    rate_used_up: bool
    """Whether that is because of a rate: then the end of an execution makes no room."""
    unconfirmed: bool
    """Whether the earliest start in its window is not confirmed yet, so that it is unknown when that start leaves."""
    for_look: bool
    """Whether it has room, and stays shut only until it is known what waits there."""


@dataclass(slots=True)
class _Lacking:
    """That this worker has less than its share of a queue's slots, and asks in vain (times are monotonic)."""

    since: float
    asked: float


class Limits:
    """The limited queues, as one consumer sees them."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        clock: ServerClock,
        candidates: ClaimQueue,
        executions: Executions,
        slots: Slots,
        partitions: Partitions,
    ) -> None:
        self._store = store
        self._partitions = partitions
        self._worker_id = settings.worker_id
        self._me = settings.claimant
        self._names = settings.names
        self._clock = clock
        self._candidates = candidates
        self._executions = executions
        self._slots = slots
        self.queues: Mapping[str, Document] = {}
        """The queues that have limits."""
        self._read: dict[str, QueueLimits] = {}
        """The same, of the queues that were asked about since one changed."""
        self.paused_groups: frozenset[Place] = frozenset()
        """Groups that are paused for everybody, while the rest of their queue is open."""
        self._unchecked: set[str] = set()
        self.canaries: set[str] = set()
        """Tasks that were let through while their queue is paused for its failures."""
        self._lacking: dict[str, _Lacking] = {}
        self._shut: dict[Place, _Shut] = {}
        self._asks_first: dict[Place, bool] = {}
        """Where this worker had a share of the rate when it asked last, so that it asks first when there is room again.

        The value: whether it has looked up since then what goes first. Of what was parked before, others may have taken some.
        """
        self._parked: dict[Place, Parked] = {}
        self._asking_takes_s = 0.0
        """How long the latest bookings took, on average."""
        self.tasks_wanted = asyncio.Event()
        """Set when there is room somewhere for which no candidate waits here: see `TasksForRoom`."""
        self._wanted: set[Place] = set()
        self._next_scan = 0.0
        self._scan_timer: asyncio.TimerHandle | None = None
        self._turned_away: set[Place] = set()
        """Those of the shut places that a scan has skipped meanwhile, or for which a candidate was found and not parked: a scan
        has to look there again."""

    def learn(self, settings: Mapping[str, Document]) -> None:
        """Learn which queues have limits now, and which groups are paused."""
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
        self._read.clear()
        self._unchecked |= changed & limited.keys()
        for queue in changed:
            self._slots.outdate(queue)
        for place in [place for place in self._shut if place[0] in changed]:
            self._reopen(place)

    def skip_full(self) -> frozenset[str]:
        """Return the queues that have no room now, which a scan skips. It has to look there when they have room again."""
        full = frozenset(queue for queue, group in self._shut if group is None)
        self._turned_away.update((queue, None) for queue in full)
        return full

    @property
    def shut_queues(self) -> frozenset[str]:
        """Queues from which nothing starts until somebody changes their limits."""
        return frozenset(
            queue for queue, limits in self.queues.items() if QueueLimits.from_document(limits).starts_nothing
        )

    @property
    def shut_groups(self) -> list[Document]:
        """Filters that match the tasks of groups from which nothing starts until somebody changes their limits."""
        shut = self._paused_tasks
        for queue, limits in self.queues.items():
            own = {entry["g"]: entry["n"] for entry in limits.get("groups") or []}
            if none := [group for group, running in own.items() if running == 0]:
                shut.append({"queue": queue, "group": {"$in": none}})
            if limits.get("group_rate") == 0:
                shut.append({"queue": queue, "group": {"$type": "string"}})
            elif limits.get("group_running") == 0:
                shut.append({"queue": queue, "group": {"$type": "string", "$nin": list(own)}})
        return shut

    @property
    def _paused_tasks(self) -> list[Document]:
        by_queue: dict[str, list[str]] = {}
        for queue, group in sorted(self.paused_groups, key=str):
            by_queue.setdefault(queue, []).append(str(group))
        return [{"queue": queue, "group": {"$in": groups}} for queue, groups in by_queue.items()]

    def without_paused(self, narrowed_by: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the filter that a claim has to carry: this one, without the tasks of paused groups."""
        if not self.paused_groups:
            return narrowed_by
        nothing_paused = {"$nor": self._paused_tasks}
        return {"$and": [dict(narrowed_by), nothing_paused]} if narrowed_by else nothing_paused

    def is_full(self, queue: str, group: str | None) -> bool:
        """Whether there is no room for such a task now, or its group is paused."""
        for place in ((queue, group), (queue, None)) if self._shut else ():
            if place in self._shut:
                self._turned_away.add(place)
                return True
        return self.is_paused(queue, group)

    def wants(self, queue: str, group: str) -> bool:
        """Whether more candidates of this group are of use: they have room, or few of them wait for the room of their queue."""
        if (queue, None) not in self._shut or (queue, group) in self._shut or self.is_paused(queue, group):
            return not self.is_full(queue, group)
        parked = self._parked.get((queue, None))
        return parked is None or parked.count_of(group) <= Turns.LOW

    def take_wanted(self) -> set[Place]:
        """Return where there is room for which no candidate waits here. The caller is about to look for some."""
        wanted, self._wanted = self._wanted, set()
        self.tasks_wanted.clear()
        return wanted

    def takes_all(self, place: Place) -> bool:
        """Whether this worker takes tasks of any lane there: others have no room for these."""
        return self._holds_scarce(place) or self._takes_any(place)

    def starts_next(self, place: Place) -> int | None:
        """Return how many tasks this worker will want to start when a place opens. None: it is not the one that asks first.

        That is one more than it may, so that it is told when to ask again.
        """
        if not self._takes_any(place):
            return None
        return min(self._most_starts(place), max(1, self._executions.free_slots)) + 1

    def _holds_scarce(self, place: Place) -> bool:
        return self._slots.has_idle(place) and self._is_scarce(place)

    def _takes_any(self, place: Place) -> bool:
        """Whether this worker asks first for the starts of a rate, and may get all of them.

        Not where groups take turns: what goes first there is not found by one look.
        """
        if place not in self._asks_first or self._partitions.alone or self._takes_a_scan(place):
            return False
        parked = self._parked.get(place)
        return self._most_starts(place) <= _LARGEST_WISH and not (parked is not None and parked.has_groups)

    def _most_starts(self, place: Place) -> int:
        """Return how many tasks may start in a window."""
        limits = self._limits_of(place[0])
        most = limits.rate if place[1] is None else limits.group_rate
        return NO_LIMIT if most is None else most

    def was_skipped(self, place: Place) -> bool:
        """Whether tasks may wait in a place that were never offered here, since a scan has skipped it."""
        return place in self._turned_away

    def looked_at(self, place: Place, *, in_all_lanes: bool, brought: bool, more: bool) -> None:
        """Note that what waits in a place was looked at. What was found has been offered. `more`: there is more."""
        (self._turned_away.add if more else self._turned_away.discard)(place)
        if not self._holds_scarce(place):
            if (shut := self._shut.get(place)) is None or shut.for_look:
                self._open(place)
        elif brought or self._parked.get(place):
            pass  # it stays shut for others than these
        elif in_all_lanes:
            self._slots.give_back(place)
            self._open(place)
        else:  # the slot came into hand meanwhile
            self._want_tasks(place)

    def is_paused(self, queue: str, group: str | None) -> bool:
        """Whether the group is paused for everybody."""
        return bool(self.paused_groups) and (queue, group) in self.paused_groups

    # --- claiming ---

    def sorted_out(self, candidates: list[Candidate]) -> Sorted:
        """Sort candidates: those with room in hand, and those for which to ask. Park those without room."""
        unlimited: list[Candidate] = []
        in_hand: dict[str, list[Candidate]] = {}
        good_until: list[datetime] = []
        to_ask: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            queue = candidate.queue
            limits = self.queues.get(queue)
            if limits is None:
                unlimited.append(candidate)
            elif (slot := self._slot_in_hand(candidate, limits, asking=queue in to_ask)) is not None:
                in_hand.setdefault(queue, []).append(candidate)
                good_until.append(slot.good_until)
            elif self._parks(candidate):
                continue
            elif len(to_ask.get(queue, ())) >= _LARGEST_WISH:
                self._candidates.offer(candidate)
            else:
                to_ask.setdefault(queue, []).append(candidate)
        admitted = self._admission(in_hand, min(good_until)) if in_hand else Admission([], {})
        return Sorted(unlimited, admitted, to_ask)

    def _parks(self, candidate: Candidate) -> bool:
        """Park a candidate if its queue or group has no room. Return whether it was parked."""
        for place in ((candidate.queue, None), (candidate.queue, candidate.group)):
            if place in self._shut:
                self._park(place, candidate)
                return True
        return False

    def _slot_in_hand(self, candidate: Candidate, limits: Document, *, asking: bool) -> Slot | None:
        """Return one of our free slots for the candidate, unless it would take the room from candidates before it."""
        if _counts_starts(limits) or (asking and limits.get("running") is not None):
            return None
        return self._slots.use(_place(candidate, limits), Wish(candidate.id, candidate.group))

    async def admit(self, queue: str, candidates: list[Candidate]) -> Admission:
        """Book what there is room for, and park the rest. Sets ask one after the other, so that the first in order asks first."""
        async with self._slots.turn(queue):
            # The set before may have learnt that there is no room.
            to_ask = [candidate for candidate in candidates if not self._parks(candidate)]
            to_ask = self._within_share(queue, to_ask)
            return await self._admit(queue, to_ask) if to_ask else Admission([], {})

    def _within_share(self, queue: str, candidates: list[Candidate]) -> list[Candidate]:
        """Return as many as this worker may ask for, and park the rest, which others go before that lack some of their share."""
        allowed = max(0, self._left_of_share(queue)) if self._slots.is_wanted(queue) else NO_LIMIT
        if allowed >= len(candidates):
            return candidates
        self._shut_for((queue, None), varied(_ASK_AGAIN_S, 0.3))
        for candidate in candidates[allowed:]:
            self._park((queue, None), candidate)
        return candidates[:allowed]

    async def _admit(self, queue: str, candidates: list[Candidate]) -> Admission:
        if queue in self._unchecked:
            # What was claimed before we knew of the limit has no slot yet.
            self._unchecked.discard(queue)
            await store_limits.check(self._store, queue)
        wishes = {candidate.id: Wish(candidate.id, candidate.group) for candidate in candidates}
        age = self._slots.age(queue)
        booking = await self._book(queue, wishes)
        if booking is not None and booking.check and await store_limits.check(self._store, queue) and not booking.ids:
            booking = await self._book(queue, wishes) or booking
        if booking is None:
            return Admission(candidates, {"queue": queue})
        if booking.canary:
            self.canaries.update(booking.ids)
        limits = self.queues.get(queue, {})
        admitted = [candidate for candidate in candidates if candidate.id in booking.ids]
        for candidate in admitted:
            if (token := booking.slots.get(candidate.id)) is not None:
                self._slots.booked(_place(candidate, limits), wishes[candidate.id], token, booking.until, age)
        refused = [candidate for candidate in candidates if candidate.id not in booking.ids]
        if refused or booking.next_start is not None:
            self._put_aside(queue, booking, admitted, refused)
        else:  # there may be room for more
            self._lacking.pop(queue, None)
            for place in {(queue, None), *((queue, candidate.group) for candidate in admitted)}:
                if not self._offer_parked(place, len(admitted)) and place in self._turned_away:
                    self._reopen(place)
        counted = (queue, booking.token) if _counts_starts(limits) else None
        return self._admission({queue: admitted}, booking.until, counted)

    def _admission(
        self, by_queue: Mapping[str, list[Candidate]], until: datetime, counted: tuple[str, str] | None = None
    ) -> Admission:
        """Let these be claimed on what is booked, each where it stood when room was requested: it may have been moved since."""
        candidates = [candidate for candidates in by_queue.values() for candidate in candidates]
        if not candidates:
            return Admission([], {})
        booked = {queue: [Wish(each.id, each.group) for each in some] for queue, some in by_queue.items()}
        by_group = [queue for queue in booked if _limits_groups(self.queues.get(queue, {}))]
        return Admission(candidates, store_limits.booked_until(self._store, until, booked, by_group), counted)

    async def _book(self, queue: str, wishes: Mapping[str, Wish]) -> Booking | None:
        """Ask for room, and give back slots that are in hand and unused."""
        now = time.monotonic()
        said = self._slots.to_tell(queue, now)
        free, places = self._slots.take_idle(queue, now)
        token = store_limits.new_token()
        try:
            booking = await store_limits.book(
                self._store,
                queue,
                self._worker_id,
                list(wishes.values()),
                token=token,
                free=free,
                renew=said,
                due=self._due(queue),
            )
        except PyMongoError:
            await self._not_booked(queue, token, wishes.values())
            self._slots.doubt(queue, free)
            self._slots.changed.set()
            raise
        finally:
            self._reopen_all(places)
        self._asking_takes_s += 0.1 * (time.monotonic() - now - self._asking_takes_s)
        if booking is not None:
            self._slots.told(said, booking.held, booking.until)
        return booking

    async def _not_booked(self, queue: str, token: str, wishes: Collection[Wish]) -> None:
        """Note that nothing is claimed on a booking that was not answered. If it is there, it would be counted for long."""
        self._slots.doubt(queue, store_limits.slots_of(token, len(wishes)))
        if _counts_starts(self.queues.get(queue, {})):
            with contextlib.suppress(PyMongoError):  # then it is written off in time
                await store_limits.confirm(self._store, queue, token, wishes)

    async def claimed(self, admission: Admission, won: Collection[str], *, answered: bool) -> None:
        """Note what a claim has won. If it was not answered, it may have won more, or may yet."""
        # What runs here though this claim has not won it, another claim has won, on the same slot.
        left = [each for each in admission.candidates if each.id not in won and each.id not in self._executions]
        not_won = left if answered else []
        self.canaries.difference_update(candidate.id for candidate in left)
        has_room = {self._slots.unused(each.id) or (each.queue, each.group) for each in not_won}
        self._reopen_all({place for each in left if (place := self._slots.forget(each.id)) is not None})
        if answered and admission.counted is not None:
            unused = [Wish(candidate.id, candidate.group) for candidate in not_won]
            sent = time.monotonic()
            queue, token = admission.counted
            await patiently(lambda: store_limits.confirm(self._store, queue, token, unused))
            self._counted(queue, admission.candidates, sent)
        for place in has_room:  # by now; the start that was counted for it is given back, too
            for each in {place, (place[0], None)}:
                if (shut := self._shut.get(each)) is not None:
                    shut.rate_used_up = False
                if self._parked.get(each) and (self._takes_any(each) or (each == place and self._is_scarce(place))):
                    self._forget(each)
            self._use_room(place)

    def given_back(self, id_: str) -> Slot | None:
        """Note that a claim has won a task that does not start. Return its slot, which is free as soon as that is recorded."""
        self.canaries.discard(id_)
        return self.slot_in_doubt(id_)

    def ended(self, id_: str) -> None:
        """Note that an execution is certainly over: the room that it occupied is used at once."""
        if (place := self._slots.unused(id_)) is not None:
            self._use_room(place)

    def slot_in_doubt(self, id_: str) -> Slot | None:
        """Return the slot of an execution whose entry is in doubt. Nobody uses the slot until that is known."""
        return self._slots.taken_from(id_)

    def free(self, slot: Slot | None, _: bool = True) -> None:
        """Note that no entry occupies this slot any more: its end is recorded, or nothing is left of it."""
        if slot is not None:
            self._slots.free(slot)
            self._use_room(slot.place)

    # --- waiting for room ---

    async def run(self) -> None:
        """Maintain what is booked, for ever."""
        while True:
            self._slots.changed.clear()
            await until(self._slots.changed, await self.run_once())

    async def run_once(self) -> float | None:
        """Give back unused slots, for which other workers may be waiting. Return when to look again."""
        given_back, pause = await self._slots.keep()
        self._reopen_all(given_back)
        return pause

    def _reopen_all(self, places: Iterable[Place]) -> None:
        """Try again where slots are no longer held: what waits for them here has to ask again."""
        for place in {place for queue, group in places for place in ((queue, group), (queue, None))}:
            self._reopen_if_not_by_rate(place)

    def _reopen_if_not_by_rate(self, place: Place) -> None:
        if (shut := self._shut.get(place)) is not None and not shut.rate_used_up:
            self._reopen(place)

    def _put_aside(self, queue: str, booking: Booking, admitted: list[Candidate], refused: list[Candidate]) -> None:
        """Shut the place that had no room, for as long as asking again makes no sense."""
        had_some = {candidate.group for candidate in admitted}
        if booking.next_start is not None:
            self._shut_until((queue, None), booking.next_start, had_some=bool(admitted))
        elif all(candidate.group in booking.full_groups for candidate in refused):
            for group, next_start in booking.full_groups.items():
                if next_start is None:
                    self._shut_for((queue, group), self._pause(queue, group))
                else:
                    self._shut_until((queue, group), next_start, had_some=group in had_some)
        else:
            self._shut_for((queue, None), self._pause(queue))
        for candidate in refused:
            group_is_shut = (queue, candidate.group) in self._shut
            self._park((queue, candidate.group if group_is_shut else None), candidate)

    def _shut_until(self, place: Place, next_start: datetime, *, had_some: bool) -> None:
        """Wait for room under a rate limit: never longer than its window, whatever our clock says.

        `had_some`: this worker has just had a share, and asks first (once more if that was too early). The others follow, one by
        one, if it does not.
        """
        pause, window = self._clock.monotonic(next_start) - time.monotonic(), self._window(place)
        looked = self._asks_first.pop(place, None)
        if had_some:
            self._asks_first[place] = bool(looked)
        behind = 0.0 if had_some or looked is not None else random_up_to(_OTHERS_APART_S * self._partitions.others_cnt)
        # A start is counted from the end of its booking, until it is confirmed.
        self._shut_for(
            place,
            min(max(pause, 0.0) + _AFTER_A_START_S, window) + behind,
            rate_used_up=True,
            unconfirmed=pause > window,
        )

    def _counted(self, queue: str, started: list[Candidate], since: float) -> None:
        """Note that these starts count `since` then (monotonic), for as long as the window lasts."""
        for place in {(queue, group) for group in (None, *(each.group for each in started))}:
            if (shut := self._shut.get(place)) is not None and shut.unconfirmed:
                pause = since + self._window(place) + _AFTER_A_START_S - time.monotonic()
                self._shut_for(place, pause, rate_used_up=True)

    def _window(self, place: Place) -> float:
        """Return how long a start in a place counts against its rate, in seconds."""
        queue, group = place
        window = self.queues.get(queue, {}).get("per_ms" if group is None else "group_per_ms")
        return float(window or 1000) / 1000

    def _pause(self, queue: str, group: str | None = None) -> float:
        """Return how long to wait for room.

        If nothing may run there, there is none until somebody changes that, which is announced.
        """
        limits = self._limits_of(queue)
        most = limits.most_running(group)
        if 0 in (most, limits.rate if group is None else limits.group_rate):
            return varied(_WHILE_SHUT_S, 0.3)
        if self._slots.any_idle(queue, group):  # it has become free since we asked
            return 0.0
        all_ours = most is not None and self._slots.count(queue, group) >= most
        # Each queue is asked about by itself, and about so many candidates at a time.
        together = len(self._shut) * self._tried_at_once((queue, group)) / _LARGEST_WISH
        bookings = min(len(self._shut), len(self.queues) + together)
        ask_again = self._partitions.in_turn(max(_ASK_AGAIN_S, bookings * self._asking_takes_s / _ASKING_SHARE))
        return varied(_WHILE_ALL_OURS_S if all_ours else min(ask_again, _WHILE_ALL_OURS_S), 0.3)

    def _limits_of(self, queue: str) -> QueueLimits:
        if (limits := self._read.get(queue)) is None:
            limits = self._read[queue] = QueueLimits.from_document(self.queues.get(queue, {}))
        return limits

    def _shut_for(
        self,
        place: Place,
        pause: float,
        *,
        rate_used_up: bool = False,
        unconfirmed: bool = False,
        for_look: bool = False,
    ) -> None:
        if (earlier := self._shut.pop(place, None)) is not None:
            earlier.timer.cancel()
        call_later = asyncio.get_running_loop().call_later
        if rate_used_up and not unconfirmed and self._takes_any(place):
            opens = time.monotonic() + pause
            timer = call_later(max(0.0, pause - _LOOK_AHEAD_S), self._look_ahead, place, opens)
        else:
            timer = call_later(pause, self._try_again, place)
        self._shut[place] = _Shut(timer, rate_used_up, unconfirmed, for_look)

    def _look_ahead(self, place: Place, opens: float) -> None:
        """Look for what goes first in a place that is about to open."""
        pause = max(0.0, opens - time.monotonic())
        self._shut[place].timer = asyncio.get_running_loop().call_later(pause, self._try_again, place)
        looked = self._asks_first.get(place)
        if looked is None or self._executions.free_slots <= 0:
            return
        if not looked:
            self._asks_first[place] = True
            self._forget(place)
        self._want_tasks(place)

    def _forget(self, place: Place) -> None:
        """Forget what waits in a place, since others have most likely taken it. It has to be looked up again."""
        for candidate in self._parked.pop(place, ()):
            self._candidates.not_claimed(candidate.id)
        self._turned_away.add(place)

    def _park(self, place: Place, candidate: Candidate) -> None:
        if (parked := self._parked.get(place)) is None:
            parked = self._parked[place] = Parked(in_turn=place[1] is None)
        for dropped in parked.add(candidate):
            self._candidates.not_claimed(dropped.id)
            self._turned_away.add(place)

    def _try_again(self, place: Place) -> None:
        """Reopen a place whose time has come, and those of its queue whose time is about to."""
        soon = asyncio.get_running_loop().time() + _TOGETHER_S
        others = [
            each
            for each, shut in self._shut.items()
            if each[0] == place[0]
            and each != place
            and not (shut.rate_used_up or shut.for_look)
            and shut.timer.when() <= soon
        ]
        for each in (place, *others):
            self._reopen(each)

    def _reopen(self, place: Place) -> None:
        """Try again. The best of those that wait goes first. If none waits here, look for others."""
        skipped = place in self._turned_away
        if skipped and not self._parked.get(place) and not self._takes_a_scan(place):
            self._shut_for(place, _LOOK_WITHIN_S, for_look=True)  # so that no newer one goes first
            self._want_tasks(place)
        elif not self._open(place) and skipped:
            self._turned_away.discard(place)
            self._order_scan()
        self._candidates.ready.set()

    def _open(self, place: Place) -> bool:
        """Have the best of those that wait in a place tried. False if none waits here."""
        if (shut := self._shut.pop(place, None)) is not None:
            shut.timer.cancel()
        return self._offer_parked(place, self._tried_at_once(place))

    def _tried_at_once(self, place: Place) -> int:
        """Return how many of those that wait in a place are tried when it may have room."""
        most = self._limits_of(place[0]).most_running(place[1])
        return _TRIED_AT_ONCE if most is None else min(max(most, 1), _TRIED_AT_ONCE)

    def _offer_parked(self, place: Place, count: int) -> bool:
        """Have the best of those that wait in a place tried, at most so many. False if none waits here."""
        if parked := self._parked.get(place):
            for candidate in itertools.islice(parked, count):
                self._candidates.offer(candidate)
            self._candidates.ready.set()
            self._look_for_others(place, parked)
            return True
        self._parked.pop(place, None)
        self._asks_first.pop(place, None)
        return False

    def _look_for_others(self, place: Place, parked: Parked) -> None:
        """Now and then, look whether anything goes before what is parked in a queue that is passed over by scans.

        In a group, all that this worker has not heard of is of the same group, and new.
        """
        now = time.monotonic()
        rest_s = max(_LOOKS_APART_S, len(self._parked) * _EACH_LOOK_S)
        if place in self._turned_away and place[1] is None and now - parked.last_look > rest_s:
            parked.last_look = now
            self._want_tasks(place)

    def _takes_a_scan(self, place: Place) -> bool:
        """Whether the tasks that have room there stand behind others that have none: those of groups, in a queue."""
        queue, group = place
        return group is None and _limits_groups(self.queues.get(queue, {}))

    def _want_tasks(self, place: Place) -> None:
        self._wanted.add(place)
        self.tasks_wanted.set()

    def _order_scan(self) -> None:
        """Order a scan, or have one ordered in a moment."""
        now = time.monotonic()
        if now >= self._next_scan:
            self._scan()
        elif self._scan_timer is None:
            self._scan_timer = asyncio.get_running_loop().call_later(self._next_scan - now, self._scan)

    def _scan(self) -> None:
        self._scan_timer = None
        self._next_scan = time.monotonic() + _SCANS_APART_S
        self._candidates.order_scan()

    def _use_room(self, place: Place) -> None:
        """Try the best of those that wait for the room that has just become free."""
        parked = self._parked.get(place)
        if self._slots.has_idle(place) and self._slots.was_wanted(place[0]) and self._left_of_share(place[0]) < 0:
            self._slots.give_back(place)
        elif parked and self._promise(place):
            # The slot is in hand. If the place is shut, it stays so for the others.
            self._offer_parked(place, 1)
        elif not (parked or self._candidates.has_of(*place)) and self._is_scarce(place) and self._promise(place):
            self._want_tasks(place)
        else:
            self._go_on((place, (place[0], None)))

    def _go_on(self, places: Collection[Place]) -> None:
        """Reopen the first of these places that is shut, unless its rate is used up. If none is, try one more that waits."""
        if (shut := next((place for place in places if place in self._shut), None)) is not None:
            self._reopen_if_not_by_rate(shut)
        elif (open_ := next((place for place in places if self._parked.get(place)), None)) is not None:
            self._offer_parked(open_, 1)

    def _is_scarce(self, place: Place) -> bool:
        """Whether so few tasks may run in a place that the tasks of one worker often wait while another has room in hand."""
        most, others = self._limits_of(place[0]).most_running(place[1]), self._partitions.others_cnt
        return most is not None and others > 0 and most <= _FEW_EACH * (others + 1)

    def _left_of_share(self, queue: str) -> int:
        """Return how many more slots are this worker's share, if all workers want some; negative if it has more."""
        most = self._limits_of(queue).running
        if most is None:
            return NO_LIMIT
        return max(1, most // (self._partitions.others_cnt + 1)) - self._slots.count(queue, None)

    def _due(self, queue: str) -> int:
        """Return how many slots this worker lacks of its share, if it has asked for some in vain for a while, and will go on."""
        now, lacks = time.monotonic(), self._left_of_share(queue)
        if lacks <= 0:
            self._lacking.pop(queue, None)
            return 0
        lacking = self._lacking.setdefault(queue, _Lacking(now, now))
        if now - lacking.asked > _ASKS_OFTEN_S:  # it had nothing to ask for meanwhile, or asks in too many places
            lacking.since = now
        lacking.asked = now
        return lacks if now - lacking.since > _LACKED_FOR_S else 0

    def _promise(self, place: Place) -> bool:
        """Keep an unused slot of this place for the next task. False if there is none, or starts are counted."""
        return not _counts_starts(self.queues.get(place[0], {})) and self._slots.promise(place)

    def close(self) -> None:
        """Stop waiting."""
        for shut in self._shut.values():
            shut.timer.cancel()
        if self._scan_timer is not None:
            self._scan_timer.cancel()
        self._shut.clear()
        self._parked.clear()
        self._turned_away.clear()


def _counts_starts(limits: Document) -> bool:
    return limits.get("rate") is not None or limits.get("group_rate") is not None


def _limits_groups(limits: Document) -> bool:
    return limits.get("group_rate") is not None or _limits_running_of_groups(limits)


def _limits_running_of_groups(limits: Document) -> bool:
    return limits.get("group_running") is not None or bool(limits.get("groups"))


def _place(candidate: Candidate, limits: Document) -> Place:
    """Return where the candidate needs room: in its group, if groups are limited; otherwise in its queue."""
    return candidate.queue, candidate.group if _limits_running_of_groups(limits) else None
