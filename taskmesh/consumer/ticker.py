"""The ticker: publishes the tasks of periodic schedules. Every worker has one.

For each schedule the workers have an order, as for each task. The first wakes for its tick and does the work, the next few look a
moment later, and the others leave it to the looks that they take at all. Whoever dies in between leaves the schedule as it was,
with the tick perhaps published already, and the next worker goes on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import datetime, timedelta
from zlib import crc32

from pymongo.errors import PyMongoError

from taskmesh.client.schedules import Schedules
from taskmesh.consumer.candidates.partitions import LAST_PLACE_TO_WAIT, Partitions, wait_s
from taskmesh.consumer.timing import varied
from taskmesh.model.errors import TaskMeshError
from taskmesh.model.schedule import Attendance, key_of, ticks_to_publish
from taskmesh.model.task import task_id
from taskmesh.store import Store
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.publication import Publication
from taskmesh.store.triggers import schedules

logger = logging.getLogger("taskmesh.ticker")

_LOOK_EVERY_S = 1.0
_LOOK_AT_LEAST_EVERY_S = schedules.OUTAGE_MS / 1000 * 2 / 3
"""Also in a large fleet, once there are schedules: if all others die, the time until this worker looks must not be an outage."""
_WHEN_OTHERS_ARE_AT_IT_S = 0.02
_AT_ONCE = 32
"""How many schedules a worker looks after at the same time: a tick waits for a majority of the replica set twice."""


class Ticker:
    """Looks after the schedules, on one worker."""

    def __init__(self, store: Store, periodic: Schedules, partitions: Partitions) -> None:
        self._store = store
        self._periodic = periodic
        self._partitions = partitions
        self._told: set[str] = set()
        """The schedules that this worker cannot look after, as its log tells."""
        self.published = 0

    async def run(self) -> None:
        """Look after the schedules for ever."""
        while True:
            try:
                pause = await self.run_once()
            except PyMongoError as error:
                logger.debug("could not look after the schedules (%s): trying again", type(error).__name__)
                pause = _LOOK_EVERY_S
            await asyncio.sleep(pause)

    async def run_once(self) -> float:
        """Publish what is due. Return how many seconds to wait before the next look."""
        waiting = await schedules.due(self._store)
        look_every_s = self._partitions.in_turn(_LOOK_EVERY_S)
        if not waiting:
            return varied(look_every_s, 0.1)
        attendance = await schedules.attend(self._store)
        due: list[Document] = []
        pauses = [varied(min(look_every_s, _LOOK_AT_LEAST_EVERY_S), 0.1)]
        for schedule in waiting:
            place = self._partitions.place_in_fleet(schedule["_id"])
            left_s = (schedule["next_time"] - attendance.now).total_seconds() + wait_s(place)
            if left_s <= 0:
                due.append(schedule)
            elif place <= LAST_PLACE_TO_WAIT:
                pauses.append(left_s + 0.001)
        due.sort(
            key=lambda schedule: schedule["_id"] in self._told
        )  # what is left to other workers holds up nothing here
        # Some of those that wait longest, so that workers that look at the same moment are seldom at the same schedule.
        first = due[: 4 * _AT_ONCE]
        some = random.sample(first, min(len(first), _AT_ONCE))
        ended = await asyncio.gather(*(self._look_after(each, attendance) for each in some), return_exceptions=True)
        for pause in ended:
            if isinstance(pause, BaseException):
                raise pause
            pauses.append(pause)
        return min(pauses)

    async def _look_after(self, schedule: Document, attendance: Attendance) -> float:
        """Publish the ticks of one schedule. Return when to look at it again."""
        id_ = schedule["_id"]
        try:
            ticks, next_time = ticks_to_publish(schedule, attendance)
            made = [await self._task_of(schedule, tick) for tick in ticks]
        except TaskMeshError as error:  # cronsim is missing here, or the settings are of another release
            if id_ not in self._told:
                self._told.add(id_)
                logger.warning("schedule %r is left to other workers: %s", id_, error)
            return _LOOK_EVERY_S
        kept = made
        if schedule["overlap"] == "skip":
            kept = [] if await self._before_is_unfinished(schedule) else made[:1]
        notes = [
            {"time": tick, "key": publication.key, "kind": "published" if place < len(kept) else "overlapped"}
            for place, (tick, publication) in enumerate(zip(ticks, made, strict=True))
        ]
        created, moved = await schedules.publish_ticks(self._store, schedule, kept, notes, next_time)
        self.published += created
        if created:
            logger.info("schedule %s ticked: published %d, up to %s", id_, created, kept[-1].key)
        if not moved:
            return varied(_WHEN_OTHERS_ARE_AT_IT_S, 0.5)
        if len(kept) < len(made):
            logger.info("schedule %s ticked while the task before was not finished: left out", id_)
        return 0.0

    async def _task_of(self, schedule: Document, tick: datetime) -> Publication:
        key = key_of(schedule["_id"], tick)
        jitter = schedule.get("jitter_ms") or 0
        # The same whichever worker publishes it, so that it does not depend on which comes first.
        start = tick + timedelta(milliseconds=crc32(key.encode()) % (jitter + 1)) if jitter else None
        return await self._periodic.publication_of_tick(schedule, key, start)

    async def _before_is_unfinished(self, schedule: Document) -> bool:
        last = schedule.get("last_key")
        return last is not None and await schedules.is_unfinished(self._store, task_id(schedule["name"], last))
