"""Waiting for results: all waiters of a process share the feed, and read finished tasks in one query.

The feed announces a finished task; then its waiters are served by reading the task. A slow periodic look at all that is waited
for covers what no event announced.
"""

from __future__ import annotations

import asyncio
import logging
import time

from pymongo.errors import PyMongoError

from taskmesh.client.change_feed import Feed, Subscription
from taskmesh.model.errors import IncompatibleCollection, TaskNotFound
from taskmesh.model.task import Status, Task
from taskmesh.store import Store
from taskmesh.store.change_stream import FINISHED, Change, Interest
from taskmesh.store.find import get
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.pipeline.event_stamp import read_stamp

logger = logging.getLogger("taskmesh.results")

_LOOK_EVERY_S = 5.0
_PER_QUERY = 1_000
_GONE_AFTER_S = 0.1
_LISTEN_ON_S = 30.0
_MOST_REMEMBERED = 5_000
_KEPT_FOR_MS = 60_000
"""How long after its retention, which may end the moment it finishes, a task is still read for those that waited for it."""


class Results:
    """The waiters of one process."""

    def __init__(self, store: Store, feed: Feed) -> None:
        self._store = store
        self._feed = feed
        self._waiters: dict[str, set[asyncio.Future[Document]]] = {}
        self._was_waited_for: set[asyncio.Future[Document]] = set()
        """The waiters that were there before the task was finished."""
        self._ended: dict[str, float] = {}
        """The tasks that were last announced to have ended, and when."""
        self._knows_since: float | None = None
        """Everything that has ended since this moment is in there. None while nothing is announced."""
        self._due: set[str] = set()
        self._wake = asyncio.Event()
        self._subscription: Subscription | None = None
        self._reader: asyncio.Task[None] | None = None

    async def finished(self, id_: str, *, published: bool = False, not_before: float | None = None) -> Document:
        """Return the task's document once it is finished. Raises `TaskNotFound` if it does not exist (any more).

        Callers that wait when it finishes get it whatever its retention. `published`: so does this caller, which has just
        published it. `not_before`: the task did not exist at this moment of the monotonic clock, so that announcements since
        then tell whether it has ended, and nothing need be read.
        """
        self._start()
        waiter: asyncio.Future[Document] = asyncio.get_running_loop().create_future()
        if published:
            self._was_waited_for.add(waiter)
        self._waiters.setdefault(id_, set()).add(waiter)
        try:
            assert self._subscription is not None
            await self._subscription.ready.wait()
            if not self._feed.offered:
                self._knows_since = None
            elif self._knows_since is None:
                self._knows_since = time.monotonic()
            if not_before is None or self._knows_since is None or not_before <= self._knows_since or id_ in self._ended:
                self._look_at(id_)
            return await waiter
        finally:
            self._was_waited_for.discard(waiter)
            waiting = self._waiters.get(id_, set())
            waiting.discard(waiter)
            if not waiting:
                self._waiters.pop(id_, None)

    async def at_once(self, id_: str, *, published: bool = False) -> Document | None:
        """Return the task's document if it is finished now, without waiting. See `finished`."""
        read = await get(self._store, [id_], params=False, majority=True, kept_for_ms=_KEPT_FOR_MS)
        task = _there(id_, read[0] if read else None, forgotten_too=published)
        return task if task["status"] in FINISHED else None

    async def close(self) -> None:
        """Stop waiting. Waiters are cancelled."""
        self._stop()
        for waiters in tuple(self._waiters.values()):
            for waiter in waiters:
                waiter.cancel()

    def _start(self) -> None:
        if self._subscription is None:
            self._subscription = self._feed.subscribe(Interest(finished=True), self._heard, self._missed)
        if self._reader is None or self._reader.done():
            self._reader = asyncio.get_running_loop().create_task(self._serve_for_ever(), name="taskmesh results")

    def _stop(self) -> None:
        subscription, self._subscription = self._subscription, None
        self._knows_since = None
        self._ended.clear()
        if subscription is not None and self._feed.listens(subscription):
            self._feed.unsubscribe(subscription)
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()

    def _heard(self, change: Change) -> None:
        finished = change.status in FINISHED
        if not finished and (change.stamp is None or read_stamp(change.stamp).kind != "deleted"):
            return
        self._remember(change.id)
        if change.id not in self._waiters:
            return
        if finished:
            self._look_at(change.id)
        else:
            # The announcement comes a moment before the removal.
            asyncio.get_running_loop().call_later(_GONE_AFTER_S, self._look_at, change.id)

    def _remember(self, id_: str) -> None:
        if self._knows_since is None:
            return
        self._ended.pop(id_, None)
        self._ended[id_] = time.monotonic()
        if len(self._ended) > _MOST_REMEMBERED:
            self._knows_since = self._ended.pop(next(iter(self._ended)))

    def _missed(self) -> None:
        """There was a gap: the end of some tasks was not announced."""
        if self._knows_since is not None:
            self._knows_since = time.monotonic()
        self._look_at_all()

    def _look_at(self, id_: str) -> None:
        self._due.add(id_)
        self._wake.set()

    def _look_at_all(self) -> None:
        self._due.update(self._waiters)
        self._wake.set()

    async def _serve_for_ever(self) -> None:
        idle_since = time.monotonic()
        while self._reader is asyncio.current_task():  # a cancellation can get lost (see the feed)
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                self._due.update(self._waiters)
            self._wake.clear()
            try:
                await self._serve_due()
            except PyMongoError as error:
                logger.warning("could not read finished tasks (%s): trying again", type(error).__name__)
                await self._look_again_soon()
            except Exception:
                logger.exception("unexpected error while reading finished tasks: trying again")
                await self._look_again_soon()
            if self._waiters:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > _LISTEN_ON_S:
                self._stop()  # a stream that is read costs the server something at every write

    async def _look_again_soon(self) -> None:
        await asyncio.sleep(0.5)
        self._wake.set()

    async def _serve_due(self) -> None:
        while self._due:
            ids = [self._due.pop() for _ in range(min(_PER_QUERY, len(self._due)))]
            try:
                read = get(self._store, ids, params=False, majority=True, kept_for_ms=_KEPT_FOR_MS)
                found = {task["_id"]: task for task in await read}
            except BaseException:
                self._due.update(ids)
                raise
            for id_ in ids:
                self._tell(id_, found.get(id_))

    def _tell(self, id_: str, task: Document | None) -> None:
        for waiter in self._waiters.get(id_, ()):
            if waiter.done():
                continue
            try:
                there = _there(id_, task, forgotten_too=waiter in self._was_waited_for)
            except (TaskNotFound, IncompatibleCollection) as error:
                waiter.set_exception(error)
                continue
            if there["status"] in FINISHED:
                waiter.set_result(there)
            else:
                self._was_waited_for.add(waiter)


def _there(id_: str, task: Document | None, *, forgotten_too: bool) -> Document:
    """Return a task that was read, if its reader may have it. Raises `TaskNotFound`, `IncompatibleCollection`."""
    if task is None or (task["forgotten"] and not forgotten_too):
        name, _, key = id_.partition(":")
        raise TaskNotFound(f"there is no task {name!r} {key!r} (any more): it was deleted, or is past its retention")
    if "queue" not in task or task.get("status") not in set(Status):
        Task.from_document(task)  # it may still have to be accepted; a malformed one never ends
    return {field: value for field, value in task.items() if field != "forgotten"}
