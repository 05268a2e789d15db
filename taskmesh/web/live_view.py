"""The pulse: live updates of the pages. All browsers share one reader of the event stream and one look at the counts.

It beats only while somebody watches; else it reads the counts a few times a minute, for the charts. Browsers are told what
changed at most twice a second, and fetch again what they show.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.admin.stats import Stats
from taskmesh.model.errors import TaskMeshError
from taskmesh.model.event import TaskEvent
from taskmesh.model.jsonable import to_json
from taskmesh.model.queue import QueueInfo
from taskmesh.web.connection import Connection, DatabaseUnavailable
from taskmesh.web.history import History, Sample

logger = logging.getLogger("taskmesh.web.pulse")

_TELL_EVERY_S = 0.5
_LOOK_EVERY_S = 2.0
_ASK_EVERY_S = 1.0
_REST_SHARE = 4
"""The pause after a look at the counts is at least this many times as long as the look took."""
_STALE_SHARE = 5
"""Counts that are older than this many pauses are not shown."""
_UNWATCHED_EVERY_S = 20.0
_UNWATCHED_REST_SHARE = 100
"""While nobody watches, looks at the counts may take one percent of the time."""
_NAMED_AT_MOST = 100
_REMEMBERED = 20_000
_LATENCIES_KEPT = 2_000
_MOST_WATCHERS = 200
_KEEP_ALIVE_S = 15.0
_ANYTHING = 'event: changed\ndata: {"tasks": [], "more": true}\n\n'
"""Anything may have changed."""


class Pulse:
    """Live updates for all who watch."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._watchers: set[asyncio.Queue[str]] = set()
        self._beating: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._stats: Stats | None = None
        self.queues: list[QueueInfo] = []
        """The queues as they were when the counts were taken, with how long their tasks waited and ran."""
        self._looked_at = float("-inf")
        self._look_took = 0.0
        self._looking = asyncio.Lock()
        self._look_behind: asyncio.Task[None] | None = None
        self.history = History()
        self._changed: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._more = False
        self._reading = False
        """Whether the event stream is open: what happens from now on is told."""
        self._published: OrderedDict[tuple[str, str], datetime] = OrderedDict()
        self._claimed: OrderedDict[tuple[str, str], datetime] = OrderedDict()
        self._waits: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self._runs: deque[float] = deque(maxlen=_LATENCIES_KEPT)

    async def stats(self) -> Stats:
        """Return counts that are a moment old: counting millions of tasks takes time.

        The last counts are returned, and a new look starts in the background; only after a long pause is it waited for.
        """
        age = time.monotonic() - self._looked_at
        rest = max(1.0, _REST_SHARE * self._look_took)
        if self._stats is None or age > _STALE_SHARE * rest:
            async with self._looking:
                if self._stats is None or time.monotonic() - self._looked_at > rest:
                    await self._look()
        elif age > rest and (self._look_behind is None or self._look_behind.done()):
            self._look_behind = asyncio.get_running_loop().create_task(self._look_again(rest), name="taskmesh counts")
        assert self._stats is not None
        return self._stats

    async def _look_again(self, rest: float) -> None:
        with contextlib.suppress(
            PyMongoError, DatabaseUnavailable
        ):  # whoever asks when these counts are too old is told why
            async with self._looking:
                if time.monotonic() - self._looked_at > rest:
                    await self._look()

    async def _look(self) -> None:
        mesh = await self._connection.connected()
        began = time.monotonic()
        self.queues = await mesh.queues.all(latencies=True)
        self._stats = await mesh.stats()
        self._looked_at = time.monotonic()
        self._look_took = self._looked_at - began
        counts = self._stats.counts.values()

        def total(status: str) -> int:
            return sum(by_status.get(status, 0) for by_status in counts)

        wait, run = _percentiles(self._waits), _percentiles(self._runs)
        self.history.add(
            Sample(
                time=mesh.clock.now(),
                waiting=total("INIT"),
                running=total("RUNNING"),
                finished_per_s=self._stats.finished_per_s,
                wait_ms=wait and wait[0],
                wait_95_ms=wait and wait[1],
                run_ms=run and run[0],
                run_95_ms=run and run[1],
            )
        )

    async def keep(self) -> None:
        """Look at the fleet now and then, for ever, so that the charts have data when somebody opens them."""
        while True:
            with contextlib.suppress(PyMongoError, TaskMeshError):  # a gap in the charts
                if not self._watchers:
                    await self.stats()
            await asyncio.sleep(max(_UNWATCHED_EVERY_S, _UNWATCHED_REST_SHARE * self._look_took))

    # --- watching ---

    async def watch(self) -> AsyncIterator[str]:
        """Yield server-sent events until the browser goes."""
        if len(self._watchers) >= _MOST_WATCHERS:
            yield "event: full\ndata: {}\n\n"
            return
        told: asyncio.Queue[str] = asyncio.Queue(maxsize=8)
        self._watchers.add(told)
        try:
            self._begin()
            yield "retry: 2000\n\n"
            if self._reading:
                yield _ANYTHING  # the page may have missed what happened since it was rendered
            while True:
                try:
                    yield await asyncio.wait_for(told.get(), _KEEP_ALIVE_S)
                except TimeoutError:
                    yield ": still there\n\n"
        finally:
            self._watchers.discard(told)
            if not self._watchers:
                self._stop_beating()

    def _begin(self) -> None:
        if self._beating is None or self._beating.done():
            self._beating = asyncio.get_running_loop().create_task(self._beat(), name="taskmesh pulse")
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._tell_silence(), name="taskmesh pulse asks")

    def _stop_beating(self) -> list[asyncio.Task[None]]:
        ending = [task for task in (self._beating, self._asking) if task is not None]
        self._beating = self._asking = None
        for task in ending:
            task.cancel()
        return ending

    async def close(self) -> None:
        """Stop beating."""
        ending = self._stop_beating()
        if self._look_behind is not None:
            self._look_behind.cancel()
            ending.append(self._look_behind)
            self._look_behind = None
        if ending:
            await asyncio.wait(ending)

    async def _beat(self) -> None:
        while True:
            try:
                async with asyncio.TaskGroup() as parts:
                    parts.create_task(self._read())
                    parts.create_task(self._tell())
                    parts.create_task(self._look_again_and_again())
            except* Exception as group:  # noqa: BLE001 — the pulse has to go on after any error
                logger.warning("the live view broke (%s): starting again", group.exceptions[0])
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _tell_silence(self) -> None:
        """Tell every second how long ago the database last answered: that is the age of what the pages show."""
        while True:
            begun = time.monotonic()
            with contextlib.suppress(TaskMeshError, PyMongoError):
                await self._connection.connected()
            self._broadcast("silence", {"ms": round(self._connection.silent_s * 1000)})
            await asyncio.sleep(max(0.0, begun + _ASK_EVERY_S - time.monotonic()))

    async def _read(self) -> None:
        mesh = await self._connection.connected()
        reader = mesh.events()
        try:
            await reader
            self._reading = self._more = True
            async for event in reader:
                self._note(event)
        finally:
            self._reading = False
            reader.close()

    def _note(self, event: TaskEvent) -> None:
        if event.kind in ("missed", "gap"):
            self._more = True
            return
        task = (event.name, event.key)
        self._changed[task] = event.kind
        self._changed.move_to_end(task)
        while len(self._changed) > _NAMED_AT_MOST:
            self._changed.popitem(last=False)
            self._more = True
        if event.kind == "published":
            _remember(self._published, task, event.time)
        elif event.kind == "claimed":
            if (published := self._published.pop(task, None)) is not None:
                self._waits.append((event.time - published).total_seconds() * 1000)
            _remember(self._claimed, task, event.time)
        elif event.kind in ("succeeded", "failed") and (claimed := self._claimed.pop(task, None)) is not None:
            self._runs.append((event.time - claimed).total_seconds() * 1000)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            if self._changed or self._more:
                changed, self._changed = self._changed, OrderedDict()
                more, self._more = self._more, False
                listed = [[name, key, kind] for (name, key), kind in changed.items()]
                self._broadcast("changed", {"tasks": listed, "more": more})

    async def _look_again_and_again(self) -> None:
        while True:
            with contextlib.suppress(
                PyMongoError, DatabaseUnavailable
            ):  # the pages show the last numbers, and their age
                await self.stats()
                self._broadcast("overview", {})
            await asyncio.sleep(max(_LOOK_EVERY_S, _REST_SHARE * self._look_took))

    def _broadcast(self, event: str, data: Any) -> None:
        line = f"event: {event}\ndata: {to_json(data)}\n\n"
        for told in self._watchers:
            if told.full():  # a browser that does not read is told of all that it missed in one line
                while not told.empty():
                    told.get_nowait()
                told.put_nowait(_ANYTHING)
            else:
                told.put_nowait(line)


def _remember(times: OrderedDict[tuple[str, str], datetime], task: tuple[str, str], moment: datetime) -> None:
    times[task] = moment
    while len(times) > _REMEMBERED:
        times.popitem(last=False)


def _percentiles(values: deque[float]) -> tuple[float, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]
