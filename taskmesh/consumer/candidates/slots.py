"""Slots: room in limited queues that this worker has booked. A slot is used for one task after another, then given back.

So a limit costs little while work waits: a worker that ends a task has the slot for the next one in hand, and asks nobody. Now
and then the worker writes down what its slots are used for (`store/queues/limits.py`), and is told whether another lacks some
of its share. Slots that it does not use it gives back, since other workers may wait for the room. If the worker dies, its slots
expire. If it only lost track of one (an outcome or a claim was not answered), it forgets the slot, and a worker that finds no
live entry for it frees it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime

from pymongo.errors import PyMongoError

from taskmesh.consumer.settings import Settings
from taskmesh.store import Store
from taskmesh.store.clock import ServerClock
from taskmesh.store.queues import limits as store_limits
from taskmesh.store.queues.limits import Wish

logger = logging.getLogger("taskmesh.limits")

Place = tuple[str, str | None]
"""What is limited: a queue, or one group of it."""

_IDLE_S = 0.03
"""How long a slot is kept for the next task if none waits here."""
_PROMISED_S = 1.0
"""How long it is kept if one waits, which is claimed after those that are being claimed now."""
_TOLD_EVERY_S = 1.0
"""How long a slot is used before its worker writes down for which task. Much less than a slot is valid for."""
_WANTED_FOR_S = 1.0
"""How long what another worker lacks of its share is left to it, after it has asked last."""
_GOOD_FOR_S = 0.3
"""Nothing is claimed on a slot that is not valid for this much longer: the claim would come too late."""


@dataclass(slots=True, eq=False)
class Slot:
    """The right to run one task at a time in a place."""

    token: str
    place: Place
    group: str | None
    good_until: datetime
    told: str
    """The task that it is used for, as written down."""
    told_at: float
    task: str | None
    """The task that it is used for now."""
    age: int
    """The age of its queue when it was booked: see `Slots.outdate`."""
    idle_since: float = 0.0


class Slots:
    """The slots that one consumer holds."""

    def __init__(self, store: Store, settings: Settings, clock: ServerClock) -> None:
        self._store = store
        self._worker_id = settings.worker_id
        self._clock = clock
        self._held: dict[str, Slot] = {}
        self._held_of: Counter[Place] = Counter()
        self._by_task: dict[str, Slot] = {}
        self._idle: dict[Place, list[Slot]] = {}
        """The unused slots by place, where there are any: groups come and go."""
        self._turns: dict[str, asyncio.Lock] = {}
        self._ages: Counter[str] = Counter()
        self._wanted_until: dict[str, float] = {}
        """The queues of which another worker lacked some of its share when this one was told last, and how long that holds."""
        self._in_doubt: dict[str, dict[str, float]] = {}
        """By queue, the tokens of slots that nobody uses and that may be booked, since a write had no reply, and since when."""
        self.changed = asyncio.Event()

    def turn(self, queue: str) -> asyncio.Lock:
        """Return the lock of whoever writes to the document of a queue's slots.

        Each worker has one writer at a time: a booking computes for long, and would conflict again and again with short writes
        that come one after the other.
        """
        return self._turns.setdefault(queue, asyncio.Lock())

    def age(self, queue: str) -> int:
        """Return how often the limits of a queue have changed here: what is booked now is of that age."""
        return self._ages[queue]

    def outdate(self, queue: str) -> None:
        """Note that the limits of a queue have changed: slots that were booked under the old ones are used for no other task."""
        self._ages[queue] += 1

    def count(self, queue: str, group: str | None) -> int:
        """Return how many of a queue, or of a group of it, are held."""
        if group is not None:
            return self._held_of[queue, group]
        return sum(count for place, count in self._held_of.items() if place[0] == queue)

    def any_idle(self, queue: str, group: str | None) -> bool:
        """Whether one of a queue, or of a group of it, is held and not used."""
        return (queue, group) in self._idle if group is not None else any(place[0] == queue for place in self._idle)

    def booked(self, place: Place, wish: Wish, token: str, good_until: datetime, age: int) -> None:
        """Take over a slot that was booked for a task. `age`: that of its queue before it was asked for."""
        self.unused(wish.id)  # two claims of one task need no more than one slot
        slot = Slot(token, place, wish.group, good_until, wish.id, time.monotonic(), wish.id, age)
        self._held[token] = slot
        self._held_of[place] += 1
        self._by_task[wish.id] = slot
        self.changed.set()

    def use(self, place: Place, wish: Wish) -> Slot | None:
        """Use a slot of this place that is held already for this task; None if there is none."""
        if wish.id in self._by_task:  # a claim of the same task is under way
            return None
        slot = self._last_good(place)
        if slot is None:
            return None
        idle = self._idle[place]
        idle.remove(slot)
        if not idle:
            del self._idle[place]
        slot.task, slot.group = wish.id, wish.group
        self._by_task[wish.id] = slot
        return slot

    def _last_good(self, place: Place) -> Slot | None:
        """Return the slot of this place that was freed last and is good for a while.

        One that is not, since it was used for long or is outdated, is not dropped: as long as it is not given back, others
        count it.
        """
        for slot in reversed(self._idle.get(place, ())):
            lasts = self._clock.monotonic(slot.good_until) - time.monotonic() > _GOOD_FOR_S
            if lasts and slot.age == self._ages[place[0]]:
                return slot
            slot.idle_since = 0.0  # it goes back with the next write
        return None

    def unused(self, id_: str) -> Place | None:
        """Free the slot of a task that does not run here, or no longer does. Return the place of the slot."""
        slot = self.taken_from(id_)
        if slot is None:
            return None
        self.free(slot)
        return slot.place

    def taken_from(self, id_: str) -> Slot | None:
        """Take a task's slot from it. Nobody uses the slot until it is freed with `free`."""
        slot = self._by_task.pop(id_, None)
        if slot is not None:
            slot.task = None
        return slot

    def free(self, slot: Slot) -> None:
        """Keep a slot that was taken from its task for the next one."""
        slot.idle_since = time.monotonic()
        self._idle.setdefault(slot.place, []).append(slot)
        self.changed.set()

    def promise(self, place: Place) -> bool:
        """Keep the most recently freed slot of this place for a task that waits here. False if none is valid."""
        slot = self._last_good(place)
        if slot is None:
            return False
        slot.idle_since = time.monotonic() + _PROMISED_S
        return True

    def give_back(self, place: Place) -> None:
        """Keep the unused slots of this place no longer."""
        for slot in self._idle.get(place, ()):
            slot.idle_since = 0.0
        self.changed.set()

    def was_wanted(self, queue: str) -> bool:
        """Whether another worker lacked some of its share of a queue when this one was told last: long ago, if tasks last."""
        return queue in self._wanted_until

    def is_wanted(self, queue: str) -> bool:
        """Whether another worker lacks some of its share of a queue now."""
        return self._wanted_until.get(queue, 0.0) > time.monotonic()

    def _told_of(self, queue: str, wanted_at: datetime | None) -> None:
        until = 0.0 if wanted_at is None else self._clock.monotonic(wanted_at) + _WANTED_FOR_S
        if until > time.monotonic():
            self._wanted_until[queue] = until
        else:
            self._wanted_until.pop(queue, None)

    def has_idle(self, place: Place) -> bool:
        """Whether one of exactly this place is held and not used."""
        return place in self._idle

    def forget(self, id_: str) -> Place | None:
        """Forget a task's slot: whether the task runs is unknown. Workers find out by its lease. Return the place of the slot."""
        slot = self._by_task.pop(id_, None)
        if slot is None:
            return None
        self._drop(slot.token)
        return slot.place

    def doubt(self, queue: str, tokens: Collection[str]) -> None:
        """Note slots that nobody uses and that may be booked. They are given back with the next write."""
        self._in_doubt.setdefault(queue, {}).update(dict.fromkeys(tokens, time.monotonic()))

    def _drop(self, token: str) -> bool:
        """Stop holding a slot. Return whether it was held."""
        slot = self._held.pop(token, None)
        if slot is None:
            return False
        self._held_of[slot.place] -= 1
        if not self._held_of[slot.place]:
            del self._held_of[slot.place]
        return True

    def take_idle(self, queue: str, before: float) -> tuple[list[str], set[Place]]:
        """Return the tokens of slots that have been unused since then, to be given back, and their places.

        With those in doubt, unless workers that check the slots have freed them by now.
        """
        checked = time.monotonic() - store_limits.FREED_AFTER_MS / 1000
        in_doubt = [token for token, since in self._in_doubt.pop(queue, {}).items() if since > checked]
        idle = []
        for place in [place for place in self._idle if place[0] == queue]:
            slots = self._idle.pop(place)
            idle += [slot for slot in slots if slot.idle_since <= before]
            if later := [slot for slot in slots if slot.idle_since > before]:
                self._idle[place] = later
        return [*in_doubt, *(slot.token for slot in idle if self._drop(slot.token))], {slot.place for slot in idle}

    def to_tell(self, queue: str, now: float) -> dict[str, Wish]:
        """Return, by token, what slots are used for that has not been written down."""
        return {
            slot.token: Wish(slot.task, slot.group)
            for slot in self._by_task.values()
            if slot.place[0] == queue and slot.task != slot.told and slot.task and now - slot.told_at > _TOLD_EVERY_S
        }

    def told(self, said: Mapping[str, Wish], held: Collection[str], good_until: datetime | None) -> None:
        """Note what has been written down. Slots that are no longer there have expired: they are not used again."""
        now = time.monotonic()
        for token, wish in said.items():
            slot = self._held.get(token)
            if slot is None:
                continue
            if token in held and good_until is not None:
                slot.told, slot.told_at, slot.good_until = wish.id, now, good_until
            else:
                self._drop(token)
                if slot.task is not None:
                    self._by_task.pop(slot.task, None)

    # --- maintaining them ---

    @property
    def _queues(self) -> set[str]:
        return {queue for queue, _ in self._held_of} | self._in_doubt.keys()

    async def keep(self) -> tuple[set[Place], float | None]:
        """Give back slots that have been unused for a moment, and write down what the others are used for.

        Return the places of the slots that were given back, and when to look again.
        """
        places: set[Place] = set()
        for queue in self._queues:
            async with self.turn(queue):
                now = time.monotonic()
                free, given_back = self.take_idle(queue, now - _IDLE_S)
                said = self.to_tell(queue, now)
                if free or said:
                    try:
                        kept = await store_limits.keep(self._store, queue, self._worker_id, free=free, renew=said)
                    except PyMongoError as error:  # all of that is written later
                        logger.debug("the slots of queue %s could not be kept (%s)", queue, type(error).__name__)
                        self.doubt(queue, free)
                        return places | given_back, _TOLD_EVERY_S
                    self.told(said, kept.held, kept.until)
                    self._told_of(queue, kept.wanted_at)
            places |= given_back
        if self._idle:
            return places, _IDLE_S
        return places, _TOLD_EVERY_S / 2 if self._by_task else None

    async def close(self) -> None:
        """Give back unused slots at the end. Other workers find out about what is left."""
        for queue in self._queues:
            free, _ = self.take_idle(queue, math.inf)
            if free:
                try:
                    await store_limits.keep(self._store, queue, self._worker_id, free=free)
                except PyMongoError as error:
                    logger.debug("slots of queue %s could not be given back (%s)", queue, type(error).__name__)
