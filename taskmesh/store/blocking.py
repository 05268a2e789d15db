"""The store for code without an event loop: the same verbs, on PyMongo's blocking client.

A verb is a coroutine that waits for nothing but its driver. With a driver that never makes it wait, it runs through at once:
`run_now`. So every write to a task is defined only once, whoever makes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError

from taskmesh.model.errors import InvalidOption
from taskmesh.store import rules
from taskmesh.store.mongodb.driver import CODEC, TRANSACTION, Document, checked, own_database
from taskmesh.store.publication import Publication
from taskmesh.store.publish import Published, publish_in_session
from taskmesh.store.store import Store

T = TypeVar("T")


@dataclass(frozen=True)
class StoreAddress:
    """Where a store is, in a form that can be sent to another process."""

    settings: Mapping[str, Any]
    database: str
    collection: str


def blocking_client(address: StoreAddress) -> Any:
    """Return a blocking client with the settings of the store's own client."""
    return MongoClient(**address.settings)


def drop_database(uri: str, name: str) -> None:
    """Drop a database with everything in it, after a test."""
    with MongoClient[Document](uri) as client:
        client.drop_database(name)


class BlockingStore(Store):
    """A store on a blocking client, which still belongs to its owner. Run its verbs with `run_now`."""

    def __init__(
        self, client: Any, database: str, collection: str = "tasks", now: rules.Expression = rules.NOW
    ) -> None:
        self._owned = False
        self._name(collection, now)
        self.driver = BlockingDriver(client, database)  # type: ignore[assignment]  # as far as a transaction needs it


class BlockingDriver:
    """The part of a `Driver` that the verbs inside a transaction use."""

    def __init__(self, client: Any, database: str) -> None:
        self.client = client
        self.database = own_database(client, database)

    def collection(self, name: str) -> Any:
        """Return a collection whose methods can be awaited, and have done their work by then."""
        return _Eager(self.database.get_collection(name))

    async def command(self, command: Mapping[str, Any], session: Any = None) -> Document:
        """Run a database command and return its reply. Raises also if the reply reports failed writes."""
        return checked(self.database.command(command, codec_options=CODEC, session=session))

    async def start_transaction(self, session: Any) -> None:
        """Start a transaction with majority write concern."""
        session.start_transaction(**TRANSACTION)

    async def commit(self, session: Any) -> None:
        """Commit."""
        session.commit_transaction()

    async def abort(self, session: Any) -> None:
        """Abort the transaction, if it is open."""
        if session.in_transaction:
            with suppress(PyMongoError):  # the server does it by itself when the transaction's time is over
                session.abort_transaction()

    async def kill(self, session: Any) -> None:
        """End a session at the server, and so a transaction that a failed commit has left open."""
        with suppress(PyMongoError):
            self.client.admin.command({"killSessions": [session.session_id]})


class _Eager:
    def __init__(self, collection: Any) -> None:
        self._collection = collection

    def find(self, *args: Any, **kwargs: Any) -> Any:
        """Return a cursor whose methods can be awaited."""
        return _Eager(self._collection.find(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._collection, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return call


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits. Raises `RuntimeError` if it does."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} waited, where nothing may wait")


async def publish_in_any_session(
    store: Store, publications: Sequence[Publication], now: datetime, session: Any
) -> list[Published]:
    """Publish inside the caller's transaction. If its session belongs to a blocking client, this runs in a thread.

    The caller waits meanwhile, so that one thread at a time uses the session. Raises `InvalidOption` if the session belongs to
    other servers.
    """
    client = session.client
    if client is store.driver.client:
        return await publish_in_session(store, publications, now, session)
    blocking = is_blocking(session)
    theirs = await (asyncio.to_thread(client.admin.command, "hello") if blocking else client.admin.command("hello"))
    check_same_servers(await store.driver.admin({"hello": 1}), theirs)
    name = store.driver.database.name
    other = (BlockingStore if blocking else Store)(client, name, store.tasks, store.now)
    other.numbers = store.numbers
    if blocking:
        return await asyncio.to_thread(lambda: run_now(publish_in_session(other, publications, now, session)))
    return await publish_in_session(other, publications, now, session)


def is_blocking(session: Any) -> bool:
    """Whether it is the session of a blocking client."""
    return isinstance(session, ClientSession)


def check_same_servers(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise `InvalidOption` if two replies to `hello` come from different replica sets: no worker would see the tasks."""
    if "setName" not in ours or "setName" not in theirs:
        return  # routers of a sharded cluster do not say which cluster they belong to
    if ours["setName"] != theirs["setName"] or set(ours["hosts"]).isdisjoint(theirs["hosts"]):
        raise InvalidOption(
            f"session is one of another replica set ({theirs['setName']} at {', '.join(theirs['hosts'])}; the mesh is on "
            f"{ours['setName']} at {', '.join(ours['hosts'])}): give configure(session=…) one of a client of the same servers"
        )
