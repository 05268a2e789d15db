"""The feed: one change stream per process, read once and delivered to all its readers.

It reopens by itself after every fault, after the last event it saw. If that position is lost it tells every reader of the gap,
and the reader looks for itself (a scan, a query). A server that offers no streams is not a fault: that is logged once, and
readers only look.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import operator
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from pymongo.errors import OperationFailure, PyMongoError

from taskmesh.store import Store
from taskmesh.store.change_stream import Change, Interest, change_from, is_behind, open_stream
from taskmesh.store.mongodb.driver import Document, next_event
from taskmesh.store.mongodb.server_errors import is_history_lost, offers_no_stream
from taskmesh.store.mongodb.uncut import CLOSE_DEADLINE_S, ended_in_time

logger = logging.getLogger("taskmesh.feed")

_LONGEST_PAUSE_S = 5.0
_EAGER_AWAIT_MS = 500
_EAGER_PAUSE_S = 0.004
"""About as long as a claim takes: otherwise the next read would be sent just when a claim is answered, and hold that up."""
_RELAXED_AWAIT_MS = 1
_RELAXED_PAUSE_S = 0.1
_RETRY_NOT_OFFERED_S = 60.0


@dataclass(eq=False)
class Subscription:
    """One reader of the feed."""

    interest: Interest
    on_change: Callable[[Change], None]
    on_gap: Callable[[], None]
    relaxed: bool = False
    """Whether a delay of a tenth of a second is acceptable."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a stream that covers the interest is open, or it is known that there is none."""


class Feed:
    """The process's stream over one database."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._subscriptions: list[Subscription] = []
        self._reader: asyncio.Task[None] | None = None
        self._token: Document | None = None
        self._token_is_of = Interest()
        """What the token's stream was for."""
        self.offered = True
        """Whether the server offers us change streams."""
        self._opened_before = False
        self.delivered = 0
        """How many events have come, for tests and metrics."""
        self._moved_at = time.monotonic()

    def subscribe(
        self, interest: Interest, on_change: Callable[[Change], None], on_gap: Callable[[], None]
    ) -> Subscription:
        """Subscribe. Wait for `ready` before the first look, so that nothing is missed in between."""
        subscription = Subscription(interest, on_change, on_gap)
        if not self._subscriptions:
            self._moved_at = time.monotonic()
        covered = self._subscriptions and self._union() | interest == self._union()
        self._subscriptions.append(subscription)
        if covered and self._reader is not None and self._subscriptions[0].ready.is_set():
            subscription.ready.set()
        else:
            self._restart()
        return subscription

    def change(self, subscription: Subscription, interest: Interest, *, relaxed: bool) -> None:
        """Change the interest or the pace of a subscription from now on, starting where the stream is."""
        if subscription.interest != interest or subscription.relaxed != relaxed:
            subscription.interest = interest
            subscription.relaxed = relaxed
            self._restart()

    def unsubscribe(self, subscription: Subscription) -> None:
        """Unsubscribe. The last reader to leave closes the stream. Does nothing if the feed has been closed meanwhile."""
        if subscription not in self._subscriptions:
            return
        self._subscriptions.remove(subscription)
        if not self._subscriptions:
            self._stop()

    @property
    def position(self) -> str | None:
        """The position up to which everything was delivered. None if no stream has been open."""
        return None if self._token is None else self._token["_data"]

    @property
    def silent_ms(self) -> float:
        """How long, in ms, the stream has not advanced. 0 while nobody is subscribed.

        It advances with every write to the server, wanted or not, and each live worker writes every two seconds. So a stream
        that is silent for long is open and dead: a connection that was cut without notice, a primary that lost its majority.
        """
        return (time.monotonic() - self._moved_at) * 1000 if self._subscriptions else 0.0

    def listens(self, subscription: Subscription | None) -> bool:
        """Whether the subscription is still active."""
        return subscription in self._subscriptions

    async def close(self) -> None:
        """Close the stream, even if there are readers."""
        self._subscriptions.clear()
        reader = self._stop()
        if reader is not None:
            await ended_in_time(reader, CLOSE_DEADLINE_S)

    def _union(self) -> Interest:
        return functools.reduce(operator.or_, (s.interest for s in self._subscriptions), Interest())

    def _stop(self) -> asyncio.Task[None] | None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
        self._token = None
        self._opened_before = False
        return reader

    def _restart(self) -> None:
        """Open a stream for what is wanted now. The old one is closed when its last read has ended."""
        if self._reader is not None:
            self._reader.cancel()
        for subscription in self._subscriptions:
            subscription.ready.clear()
        self._reader = asyncio.get_running_loop().create_task(self._read_for_ever(), name="taskmesh feed")

    async def _read_for_ever(self) -> None:
        pause = 0.1
        faults = 0
        while True:
            try:
                async for opened in self._read():
                    if opened:
                        if faults:
                            logger.info("change stream is open again")
                        pause, faults = 0.1, 0
            except OperationFailure as error:
                if is_history_lost(error):
                    logger.warning(
                        "change stream lost its place (code %s, %.200s): opening a new one, and scanning",
                        error.code,
                        error,
                    )
                    self._token = None
                    self._announce_gap()
                elif offers_no_stream(error):
                    if self.offered:
                        logger.warning("the server offers no change stream (%s): relying on scans alone", error)
                    self.offered = False
                    self._set_ready()
                    await asyncio.sleep(_RETRY_NOT_OFFERED_S)
                    continue
                else:
                    self._tell_fault(error, faults)
                faults += 1
            except PyMongoError as error:
                self._tell_fault(error, faults)
                faults += 1
            except Exception:
                logger.exception("unexpected error in the change stream: opening it again")
                faults += 1
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    def _tell_fault(self, error: Exception, faults: int) -> None:
        if faults == 0:  # an outage is one line, however long it lasts
            logger.warning("change stream broke (%s: %.200s): opening it again", type(error).__name__, error)

    async def _read(self) -> AsyncIterator[bool]:
        """Read one stream until it ends or breaks."""
        place, interest = self._token, self._union()
        relaxed = all(subscription.relaxed for subscription in self._subscriptions)
        await_ms = _RELAXED_AWAIT_MS if relaxed else _EAGER_AWAIT_MS
        stream = await open_stream(self._store, interest, place=place, place_is_of=self._token_is_of, await_ms=await_ms)
        try:
            if place is None and self._opened_before:
                self._announce_gap()
            self._opened_before = True
            self._move_to(stream.resume_token, interest)
            self.offered = True
            self._set_ready()
            yield True
            paused_at = time.monotonic()
            while stream.alive:
                event = await next_event(stream)
                if event is not None and (place is None or is_behind(event["_id"], place)):
                    self.delivered += 1
                    self._hand_out(change_from(event))
                self._move_to(stream.resume_token, interest)
                if event is None and relaxed:
                    await asyncio.sleep(_RELAXED_PAUSE_S)
                elif event is not None and time.monotonic() - paused_at > _EAGER_PAUSE_S:
                    # What comes next comes together: every write to the server wakes a read that waits. And other tasks
                    # have their turn, however much has come.
                    await asyncio.sleep(_EAGER_PAUSE_S)
                    paused_at = time.monotonic()
        finally:
            await stream.close()

    def _move_to(self, token: Document | None, interest: Interest) -> None:
        """Note where the stream is, and what it is for. It may start a little before the position from which it continues."""
        if token is None:
            self._moved_at = time.monotonic()
        elif self._token is None or is_behind(token, self._token):
            self._moved_at = time.monotonic()
            self._token, self._token_is_of = token, interest

    def _hand_out(self, change: Change) -> None:
        said = False
        for subscription in tuple(self._subscriptions):
            try:
                subscription.on_change(change)
            except Exception:  # a foreign document must not stop the stream
                if not said:
                    logger.exception("could not read the change of %.200r: skipped", change.id)
                said = True

    def _announce_gap(self) -> None:
        for subscription in tuple(self._subscriptions):
            subscription.on_gap()

    def _set_ready(self) -> None:
        for subscription in self._subscriptions:
            subscription.ready.set()
