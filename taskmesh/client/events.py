"""Events: what happens to tasks, as an async iterator.

Events are complete, and in order for each task, as the server committed them. The buffer is bounded: a reader that is too slow
gets an event of kind `missed`, which says how many it has missed; if the stream itself lost its position, one of kind `gap`.
All readers of a process share its one stream. A reader that resumes after a token reads a stream of its own, but only until it
has caught up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self

from pymongo.errors import OperationFailure

from taskmesh.client.change_feed import Feed, Subscription
from taskmesh.model.errors import InvalidOption
from taskmesh.model.event import EventKind, TaskEvent
from taskmesh.store import Store
from taskmesh.store.change_stream import FINISHED, Change, Interest, change_from, open_stream
from taskmesh.store.mongodb.server_errors import is_about_us, is_history_lost, is_passing
from taskmesh.store.pipeline.event_stamp import read_stamp

DEFAULT_BUFFER = 10_000
_CATCHING_UP_AWAIT_MS = 50


def events_of(change: Change) -> Iterator[TaskEvent]:
    """Turn one change into events."""
    if not isinstance(change.id, str):
        return
    name, _, key = change.id.partition(":")

    def event(kind: str, worker_id: str | None = None, status: str | None = None) -> TaskEvent:
        return TaskEvent(kind, name, key, worker_id, change.time, status)  # type: ignore[arg-type]  # a stamp's kind

    if change.operation in ("insert", "replace"):
        if not change.is_to_be_accepted:  # then the acceptance is announced
            yield event("published")
        return
    if change.stamp is None:
        return
    stamp = read_stamp(change.stamp)
    for worker_id in stamp.lost:
        yield event("timed_out", worker_id)
    if stamp.progressed:  # in one write with how the execution ended
        yield event("progressed", stamp.worker_id)
    if stamp.kind not in ("settled", "stopped", "opened"):
        yield event("published" if stamp.kind == "replaced" else stamp.kind, stamp.worker_id)
    if stamp.recorded:  # by one write with the signal that a wait was for
        yield event("step_recorded", stamp.worker_id)
    if change.status in FINISHED:
        yield event("finished", stamp.worker_id, change.status)


class EventReader:
    """The async iterator behind `mesh.events()` and `consumer.events()`.

    It collects events from the call that created it. If nobody in the process was subscribed before, opening the stream takes a
    moment: `async with` waits for it, and closes the reader at the end. It ends with the mesh, or with its consumer.
    """

    def __init__(
        self,
        feed: Feed,
        store: Store,
        name: str | None = None,
        key: str | None = None,
        worker_id: str | None = None,
        *,
        after: str | None = None,
        buffer: int = DEFAULT_BUFFER,
    ) -> None:
        self._feed = feed
        self._store = store
        self._name, self._key, self._worker_id = name, key, worker_id
        self._after = None if after is None else _Place.read(after)
        self._past: AsyncIterator[TaskEvent] | None = None
        self._buffer: deque[TaskEvent] = deque()
        self._limit = max(1, buffer)
        self._wake = asyncio.Event()
        self._closed = False
        self._behind: str | None = feed.position
        """The last change that the shared stream delivered, or where it was when it started for this reader."""
        self._began = self._behind
        self._subscription: Subscription | None = feed.subscribe(Interest(events=True), self._take, self._take_gap)

    async def opened(self) -> Self:
        """Wait until the stream is open: from then on at the latest, nothing is left out unannounced."""
        if self._subscription is not None:
            await self._subscription.ready.wait()
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.opened().__await__()

    async def __aenter__(self) -> Self:
        return await self.opened()

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TaskEvent:
        if self._after is not None:
            event = await self._next_of_the_past()
            if event is not None:
                return event
        while True:
            if self._buffer:
                return self._buffer.popleft()
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()

    async def aclose(self) -> None:
        """Unsubscribe, as an async generator would."""
        self._buffer.clear()
        self.close()

    def close(self) -> None:
        """Unsubscribe. The iterator ends after what is buffered."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None and self._feed.listens(subscription):
            self._feed.unsubscribe(subscription)
        self._closed = True
        self._wake.set()

    # --- what the feed hands over ---

    def _take(self, change: Change) -> None:
        self._began = self._began or self._feed.position
        behind, self._behind = self._behind or self._feed.position, change.token["_data"]
        for event in self._wanted_of(change, behind):
            if len(self._buffer) >= self._limit:
                self._note_missing("missed", 1)
            else:
                self._buffer.append(event)
            self._wake.set()

    def _take_gap(self) -> None:
        self._note_missing("gap")
        self._wake.set()

    def _note_missing(self, kind: EventKind, missed: int = 0) -> None:
        """Announce it in its place: after what came before, and before what comes next."""
        last = self._buffer[-1] if self._buffer else None
        if last is None or last.kind not in ("missed", "gap"):
            self._buffer.append(_missing(kind, missed))
        else:
            missed += last.missed
            self._buffer[-1] = _missing("missed" if missed else "gap", missed)

    def _wanted_of(self, change: Change, behind: str | None, skip: int = 0) -> list[TaskEvent]:
        """Return the events of a change that the reader wants, each with its position; `behind`: the change before."""
        events = self._events_of(change)
        wanted = []
        for i, event in enumerate(events):
            is_last = i == len(events) - 1
            place = _Place(change.token["_data"]) if is_last or behind is None else _Place(behind, i + 1)
            if i >= skip and self._is_wanted(event):
                wanted.append(replace(event, token=str(place)))
        return wanted

    def _events_of(self, change: Change) -> list[TaskEvent]:
        return list(events_of(change)) if change.collection == self._store.tasks else []

    def _is_wanted(self, event: TaskEvent) -> bool:
        return (
            (self._name is None or event.name == self._name)
            and (self._key is None or event.key == self._key)
            and (self._worker_id is None or event.worker_id == self._worker_id)
        )

    # --- what happened before ---

    async def _next_of_the_past(self) -> TaskEvent | None:
        if self._past is None:
            self._past = self._read_past()
        event = await anext(self._past, None)
        if event is None:
            self._after = self._past = None
        return event

    async def _read_past(self) -> AsyncIterator[TaskEvent]:
        """Read a stream of our own, from the requested position to where the shared one was when it took over."""
        await self.opened()
        place, end = self._after, self._began or self._feed.position
        if place is None or end is None:  # the server offers no streams
            yield _missing("gap")
            return
        # Meanwhile the shared stream goes on, and `_behind` with it: this one has a position of its own.
        behind, skip = place.data, place.skip
        stream = None
        try:
            all_of_them = Interest(events=True)
            stream = await open_stream(
                self._store,
                all_of_them,
                place={"_data": place.data},
                place_is_of=all_of_them,  # as a reader's token is
                await_ms=_CATCHING_UP_AWAIT_MS,
            )
            try:
                while stream.alive and stream.resume_token["_data"] < end:
                    found = await stream.try_next()
                    if found is None:
                        continue
                    change = change_from(found)
                    if change.token["_data"] > end:  # from here on, the shared stream has it
                        break
                    for event in self._wanted_of(change, behind, skip):
                        yield event
                    behind = change.token["_data"]
                    if self._events_of(change):
                        skip = 0
                if not stream.alive:  # the database was dropped
                    yield _missing("gap")
            finally:
                await stream.close()
        except OperationFailure as error:
            if not is_history_lost(error):
                if stream is not None or is_about_us(error) or is_passing(error):
                    raise
                raise _no_token(str(place)) from error  # cut off, or made up, though of valid characters
            yield _missing("gap")


def _missing(kind: EventKind, missed: int = 0) -> TaskEvent:
    return TaskEvent(kind, "", "", None, datetime.now(UTC), missed=missed)


def _no_token(token: object) -> InvalidOption:
    return InvalidOption(f"after={token!r} is not the token of an event: pass an event's `token`")


@dataclass(frozen=True, slots=True)
class _Place:
    """A position in the stream: after a change, or after the first few events of the change that follows it.

    Tokens of one deployment sort as their texts do: that is how a server merges the streams of shards.
    """

    data: str
    skip: int = 0

    def __str__(self) -> str:
        return f"{self.data}+{self.skip}" if self.skip else self.data

    @classmethod
    def read(cls, token: str) -> _Place:
        """Read a token back. Raises `InvalidOption` for an invalid one."""
        data, _, skip = str(token).partition("+")
        if not data or set(data) - set("0123456789ABCDEFabcdef") or not (skip or "0").isdecimal():
            raise _no_token(token)
        return cls(data, int(skip or 0))
