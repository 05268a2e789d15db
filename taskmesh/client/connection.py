"""A mesh's connection: where it leads, how it is opened and closed, and whether it can be used here (this process, this loop)."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from pymongo.errors import OperationFailure, PyMongoError

from taskmesh.client.acceptance import Acceptance
from taskmesh.client.change_feed import Feed
from taskmesh.client.events import DEFAULT_BUFFER, EventReader
from taskmesh.client.registry import Registry
from taskmesh.client.results import Results
from taskmesh.model.errors import TaskMeshError
from taskmesh.model.task import checked_key, checked_name, why_no_task
from taskmesh.store import Store, apart, malformed, reach, registry, schema
from taskmesh.store.clock import ServerClock
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import is_over_deadline, is_passing, patiently
from taskmesh.store.numbers import Numbers
from taskmesh.store.payloads import Payloads
from taskmesh.store.publish import Changes, Existing
from taskmesh.store.relations.dependencies import Links
from taskmesh.store.signals import Signals

logger = logging.getLogger("taskmesh.connection")

_NOT_CONNECTED = "this mesh is not connected: use it inside `async with mesh:` (or `publish_sync`)"


class LocalConsumer(Protocol):
    """A consumer of this process, as the connection that it works on knows it."""

    worker_id: str

    @property
    def at_work(self) -> bool:
        """Whether it is running."""

    async def stop(self, grace_ms: int = ...) -> None:
        """Stop it within the grace period."""

    async def read_queues(self) -> None:
        """Tell it that a queue's settings have changed."""


class Connection:
    """Where a mesh is connected. Once it is open it has `store`, `clock`, `feed`, `results` and `registry`."""

    _clock: ServerClock
    _feed: Feed
    _results: Results
    _registry: Registry
    _acceptance: Acceptance
    _links: Links
    _existing: Existing
    _changes: Changes
    _signals: Signals

    def __init__(self, client: Any, database: str, collection: str, payloads: Payloads | None = None) -> None:
        self.client = client
        self.payloads = payloads or Payloads()
        """How the values of tasks are written and read."""
        self.database = database
        self.collection = collection
        self._moved = False
        """Whether a caller has changed where it leads."""
        self._store: Store | None = None
        self.numbers = Numbers()
        """Gives tasks their places in the order of publication, across reconnections."""
        self.reached = False
        """Whether the server has ever answered, even if the connection is not open yet."""
        self._created = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._embedded: Any = None
        self._event_readers: weakref.WeakSet[EventReader] = weakref.WeakSet()
        self.consumers: weakref.WeakSet[LocalConsumer] = weakref.WeakSet()

    def lead_to(self, client: Any = None, *, database: str | None = None, collection: str | None = None) -> None:
        """Change where it leads. None: unchanged. Raises `TaskMeshError` if it is open already."""
        if self._store is not None:
            raise TaskMeshError("this mesh is connected already: say where before `async with mesh`")
        if client is not None:
            self.client, self._moved = client, True
        self.database = database or self.database
        self.collection = collection or self.collection

    @property
    def is_open(self) -> bool:
        """Whether it is open, in whatever loop."""
        return self._store is not None

    @property
    def is_placed(self) -> bool:
        """Whether code or `lead_to` says where it leads, and not the environment or the embedded MongoDB."""
        return self.client is not None

    @property
    def address(self) -> str:
        """Where it leads: host and port, database and collection; without credentials."""
        return f"{reach.hosts(self.store)}, database {self.database!r}, collection {self.collection!r}"

    async def open(self, *, create: bool = True) -> None:
        """Connect, check the server, and create the collections and indexes that are missing.

        `create=False`: leave that to the first publication. Raises `NotAReplicaSet`, `IncompatibleCollection`,
        `EmbeddedUnavailable`, or `TaskMeshError` if no server answers.
        """
        if self._store is not None:
            raise TaskMeshError("this mesh is connected already: use one `async with mesh` around all that needs it")
        store = Store(await self._client_or_uri(), self.database, self.collection)
        store.numbers = self.numbers
        clock = ServerClock()
        self._say_where(store)
        try:
            await schema.check_server(store)
            self.reached = True
            for _ in range(3):
                await sample(clock, store)
            await patiently(lambda: schema.create(store) if create else schema.check_readable(store))
        except BaseException:
            await store.close()
            await self._leave_embedded()
            raise
        self._created = create
        self._store, self._clock, self._loop, self._pid = store, clock, asyncio.get_running_loop(), os.getpid()
        self._feed = Feed(store)
        self._results = Results(store, self._feed)
        self._registry = Registry(store)
        self._acceptance = Acceptance(store, clock, self._registry)
        self._links = Links(store)
        self._existing = Existing(store)
        self._changes = Changes(store)
        self._signals = Signals(store)

    async def create_what_is_missing(self) -> None:
        """Do what `open(create=False)` has left out."""
        if not self._created:
            store = self.store
            await patiently(lambda: schema.create(store))
            self._created = True

    async def close(self) -> None:
        """Stop running consumers, within their grace period; then close what `open` opened. A second call does nothing."""
        if self._store is None:
            return
        try:
            await self.stop_consumers()
        finally:
            await self._close()

    async def stop_consumers(self, **grace: int) -> None:
        """Stop them side by side. Those of a parent process, from which this one was forked, are not ours."""
        if self.is_usable_in(asyncio.get_running_loop()):
            at_work = [consumer for consumer in self.consumers if consumer.at_work]
            for consumer in at_work:
                logger.info("worker %s stops, since its mesh is closed", consumer.worker_id)
            await asyncio.gather(*(consumer.stop(**grace) for consumer in at_work))

    async def _close(self) -> None:
        if self._store is None:  # somebody else has closed it meanwhile
            return
        store, self._store = self._store, None
        await self._links.close()
        for reader in tuple(self._event_readers):
            reader.close()
        await self._results.close()
        await self._feed.close()
        await store.close()
        await self._leave_embedded()

    async def _client_or_uri(self) -> Any:
        client = self.client or os.environ.get("TASKMESH_URI")
        if client is not None:
            return client
        from taskmesh.embedded import attach  # noqa: PLC0415 — an extra

        self._embedded = await asyncio.to_thread(attach)
        return self._embedded.uri

    def _say_where(self, store: Store) -> None:
        """Log a warning if TASKMESH_URI names other servers, so that nobody looks for their tasks there."""
        named = os.environ.get("TASKMESH_URI")
        if self.client is None or not named:
            return
        elsewhere = urlsplit(named).netloc.rpartition("@")[2]
        here = urlsplit(self.client).netloc.rpartition("@")[2] if isinstance(self.client, str) else reach.hosts(store)
        if {host.strip() for host in here.split(",")}.isdisjoint(elsewhere.split(",")):
            why = "asked for" if self._moved else "given in the code"
            level = logging.INFO if self._moved else logging.WARNING
            logger.log(level, "connects to %s, as %s, and not to %s, which TASKMESH_URI names", here, why, elsewhere)

    async def _leave_embedded(self) -> None:
        if self._embedded is not None:
            embedded, self._embedded = self._embedded, None
            await asyncio.to_thread(embedded.close)

    def is_usable_in(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether it is open, in this event loop and this process."""
        return self._store is not None and self._loop is loop and self._pid == os.getpid()

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of this process in which it is open. None if there is none, or it no longer runs."""
        open_here = self._store is not None and self._pid == os.getpid()
        return self._loop if open_here and self._loop is not None and self._loop.is_running() else None

    @property
    def store(self) -> Store:
        """Reads and writes MongoDB. Raises `TaskMeshError` if the connection is not open, in this loop and process."""
        if self._store is None:
            raise TaskMeshError(_NOT_CONNECTED)
        if self._pid != os.getpid():
            raise TaskMeshError(
                "this mesh was connected before a fork: connect it again in the child, or use `publish_sync`"
            )
        if self._loop is not asyncio.get_running_loop():
            raise TaskMeshError("this mesh is connected in another event loop: connect it in the one that uses it")
        return self._store

    @property
    def clock(self) -> ServerClock:
        """The server's time. Raises `TaskMeshError` for a mesh that was never connected."""
        if self._loop is None:
            raise TaskMeshError(_NOT_CONNECTED)
        return self._clock

    @property
    def feed(self) -> Feed:
        """Delivers events of tasks to all subscribers in this mesh. Raises `TaskMeshError` as `clock` does."""
        if self._loop is None:
            raise TaskMeshError(_NOT_CONNECTED)
        return self._feed

    @property
    def results(self) -> Results:
        """Serves callers that wait for results. Raises as `store` does."""
        _ = self.store
        return self._results

    @property
    def registry(self) -> Registry:
        """The workers, and what they have registered. Raises as `store` does."""
        _ = self.store
        return self._registry

    @property
    def acceptance(self) -> Acceptance:
        """Accepts what other languages insert. Raises as `store` does."""
        _ = self.store
        return self._acceptance

    @property
    def links(self) -> Links:
        """Links publications in lines, and with dependencies, to other tasks. Raises as `store` does."""
        _ = self.store
        return self._links

    @property
    def existing(self) -> Existing:
        """Reads what publications are going to change. Raises as `store` does."""
        _ = self.store
        return self._existing

    @property
    def changes(self) -> Changes:
        """Changes existing tasks as publications ask. Raises as `store` does."""
        _ = self.store
        return self._changes

    @property
    def signals(self) -> Signals:
        """Sends signals. Raises as `store` does."""
        _ = self.store
        return self._signals

    def events(
        self, name: str | None, key: str | None, *, after: str | None, buffer: int = DEFAULT_BUFFER
    ) -> EventReader:
        """Return a reader of events that ends with this connection. Raises `InvalidOption`."""
        name = None if name is None else checked_name(name)
        key = None if key is None else checked_key(key)
        reader = EventReader(self.feed, self.store, name, key, after=after, buffer=buffer)
        self._event_readers.add(reader)
        return reader

    async def fetched(self, document: Document) -> Document:
        """Return the document of a task with its separately stored values."""
        return await patiently(lambda: self.payloads.fetched(self.store, document))

    async def refuse_strangers(self, ids: Sequence[str], error: PyMongoError) -> None:
        """Raise `IncompatibleCollection` if a malformed document among these may be why a change of them has failed."""
        if isinstance(error, OperationFailure) and not (is_passing(error) or is_over_deadline(error)):
            for document in await malformed.strangers(self.store, ids):
                raise why_no_task(document) from error

    async def remove_apart(self, ids: Iterable[Any]) -> None:
        """Remove values that no task refers to any more. A sweep finds what cannot be removed now."""
        try:
            await apart.remove(self.store, ids)
        except PyMongoError as error:
            logger.debug(
                "values stored apart could not be deleted now (%s): a sweep deletes them later", type(error).__name__
            )

    async def queues_changed(self) -> None:
        """Tell our own consumers before the caller goes on, and publishers; others learn of it from their streams."""
        self.registry.outdate()
        for consumer in tuple(self.consumers):
            await consumer.read_queues()


async def sample(clock: ServerClock, store: Store) -> None:
    """Ask the server for its time. Consumers get it with every heartbeat; code that only publishes has to ask."""
    sent = time.monotonic()
    clock.observe(await registry.server_time(store), sent, time.monotonic())
