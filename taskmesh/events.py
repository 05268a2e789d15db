"""Events: what happens to tasks, as an async iterator.

In order for each task, as the server committed it. The buffer is bounded: a reader that is too slow is told how many it
missed by an event of kind `missed`; after a gap in the stream comes one of kind `gap`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Self

from taskmesh.feed import Feed, Subscription
from taskmesh.store.stamp import read_stamp
from taskmesh.store.watch import FINISHED, Change, Interest

EventKind = Literal[
    "published",
    "claimed",
    "progressed",
    "succeeded",
    "failed",
    "snoozed",
    "released",
    "timed_out",
    "cancelled",
    "retried",
    "deleted",
    "option_changed",
    "finished",
    "missed",
    "gap",
]
DEFAULT_BUFFER = 10_000


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """One thing that happened to a task."""

    kind: EventKind
    name: str
    key: str
    worker_id: str | None
    time: datetime
    status: str | None = None
    """For `finished`: the final status."""
    missed: int = 0
    """For `missed`: how many events the reader was too slow for."""
    token: Any = None
    """Where the stream stood: `mesh.events(after=token)` goes on behind it."""


def events_of(change: Change) -> Iterator[TaskEvent]:
    """Turn one change into events."""
    if not isinstance(change.id, str):
        return
    name, _, key = change.id.partition(":")

    def event(kind: str, worker_id: str | None = None, status: str | None = None) -> TaskEvent:
        return TaskEvent(kind, name, key, worker_id, change.time, status, token=change.token)  # type: ignore[arg-type]  # a stamp's kind

    if change.operation in ("insert", "replace"):
        yield event("published")
        return
    if change.stamp is None:
        return
    stamp = read_stamp(change.stamp)
    for worker_id in stamp.lost:
        yield event("timed_out", worker_id)
    if stamp.kind != "settled":
        yield event(stamp.kind, stamp.worker_id)
    if change.status in FINISHED:
        yield event("finished", stamp.worker_id, change.status)


class EventReader:
    """The async iterator behind `mesh.events()` and `consumer.events()`."""

    def __init__(
        self,
        name: str | None = None,
        key: str | None = None,
        worker_id: str | None = None,
        buffer: int = DEFAULT_BUFFER,
    ) -> None:
        self._name, self._key, self._worker_id = name, key, worker_id
        self._buffer: deque[TaskEvent] = deque()
        self._limit = buffer
        self._missed = 0
        self._gaps = 0
        self._wake = asyncio.Event()
        self._closed = False
        self._feed: Feed | None = None
        self._subscription: Subscription | None = None

    async def open(self, feed: Feed) -> Self:
        """Start to listen to the feed; from here on nothing is left out unsaid."""
        self._feed = feed
        self._subscription = feed.subscribe(Interest(events=True), self.take, self.take_gap)
        await self._subscription.ready.wait()
        return self

    def take(self, change: Change) -> None:
        """Keep what the reader asked for of a change."""
        for event in events_of(change):
            self.add(event)

    def add(self, event: TaskEvent) -> None:
        """Keep an event, if the reader asked for such."""
        wrong_task = (self._name is not None and event.name != self._name) or (
            self._key is not None and event.key != self._key
        )
        if wrong_task or (self._worker_id is not None and event.worker_id != self._worker_id):
            return
        if len(self._buffer) >= self._limit:
            self._missed += 1
        else:
            self._buffer.append(event)
        self._wake.set()

    def take_gap(self) -> None:
        """Note that events may be missing here."""
        self._gaps += 1
        self._wake.set()

    def close(self) -> None:
        """Stop to listen; the iterator ends after what is buffered."""
        if self._feed is not None and self._feed.listens(self._subscription):
            assert self._subscription is not None
            self._feed.unsubscribe(self._subscription)
        self._subscription = None
        self._closed = True
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[TaskEvent]:
        try:
            while True:
                while self._buffer:
                    yield self._buffer.popleft()
                if self._missed or self._gaps:
                    kind: EventKind = "missed" if self._missed else "gap"
                    missed, self._missed, self._gaps = self._missed, 0, 0
                    yield TaskEvent(kind, "", "", None, datetime.now().astimezone(), missed=missed)
                    continue
                if self._closed:
                    return
                self._wake.clear()
                await self._wake.wait()
        finally:
            self.close()
