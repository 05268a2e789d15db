"""The driver seam: all differences between PyMongo's async API, Motor, and blocking PyMongo.

The rest of the store uses a `Driver` and does not know which of the two is underneath. Motor is no longer developed, but many
code bases have a Motor client, and it must be just as good to start with.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from decimal import Decimal
from typing import Any, cast

from bson.codec_options import CodecOptions, DatetimeConversion, TypeCodec, TypeDecoder, TypeEncoder, TypeRegistry
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import InvalidName as PyMongoInvalidName
from pymongo.errors import OperationFailure, PyMongoError, WriteConcernError
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from taskmesh.model.errors import InvalidName
from taskmesh.model.ids import shown
from taskmesh.store.mongodb.server_errors import Code
from taskmesh.store.mongodb.uncut import Uncut, UncutCalls

Document = dict[str, Any]
MAJORITY = WriteConcern("majority")
TOGETHER_DEADLINE_MS = 500
"""How long the server may work on what several callers write together, plus some for each document. Short, since a locked one
holds up all of them; then they go in parts, or one by one."""
_LONGEST_DATABASE = 63
TRANSACTION: Mapping[str, Any] = {
    "read_concern": ReadConcern("local"),
    "write_concern": MAJORITY,
    "read_preference": ReadPreference.PRIMARY,
}
"""A transaction's options: whatever the client's settings, it reads from the primary and commits with a majority."""


class _DecimalEncoder(TypeEncoder):
    """Stores Python's `Decimal` as MongoDB's Decimal128."""

    python_type = Decimal

    def transform_python(self, value: Any) -> Decimal128:
        return Decimal128(value)


class _DecimalCodec(_DecimalEncoder, TypeCodec):
    """Stores `Decimal` likewise, and reads Decimal128 as `Decimal`."""

    bson_type = Decimal128

    def transform_bson(self, value: Any) -> Decimal:
        return cast(Decimal, value.to_decimal())


class _IntDecoder(TypeDecoder):
    """Reads whole numbers of 64 bits as `int`: a value has one type, whether it was computed just now or read."""

    bson_type = Int64

    def transform_bson(self, value: Any) -> int:
        return int(value)


CODEC: CodecOptions[Document] = CodecOptions(
    tz_aware=True,
    uuid_representation=4,  # the standard one, readable by every other driver
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,  # a foreign date in the year 20 000 must not stop a scan
    type_registry=TypeRegistry([_DecimalCodec(), _IntDecoder()]),
)
PLAIN_CODEC: CodecOptions[Document] = CODEC.with_options(type_registry=TypeRegistry([_DecimalEncoder()]))
"""`CODEC` for reading documents without users' values, or whose values the reader passes through `restored`.

With a decoder of ours, however seldom it is needed, PyMongo decodes a reply in Python, one document at a time: that was a
quarter of all that a busy consumer did (measured)."""


class Driver:
    """One database on one client (PyMongo async, Motor). Reads from the primary, writes `majority`, whatever its settings."""

    def __init__(self, client: Any, database: str) -> None:
        self.client = client
        if not isinstance(client, AsyncMongoClient) and not _is_motors(client):
            raise TypeError(
                f"client must be a MongoDB URI, a pymongo.AsyncMongoClient or a motor AsyncIOMotorClient, "
                f"got {type(client).__name__}"
            )
        if not isinstance(database, str) or len(database.encode()) > _LONGEST_DATABASE:
            why = f"it is a str of up to {_LONGEST_DATABASE} bytes"
            raise InvalidName(f"database must be a name that MongoDB allows, got {shown(database)}: {why}")
        try:
            self.database = own_database(client, database)
        except (PyMongoInvalidName, TypeError) as error:
            raise InvalidName(f"database must be a name that MongoDB allows, got {database!r}: {error}") from None
        self.calls = UncutCalls()

    def collection(
        self, name: str, codec: CodecOptions[Document] = CODEC, *, majority: bool = False, snapshot: bool = False
    ) -> Any:
        """Return a collection. `majority`: it reads only what no failover can roll back, instead of the primary's latest state.

        `snapshot`: the same, and everything that one command reads is as of one moment.
        """
        level = "snapshot" if snapshot else "majority" if majority else None
        read_concern = None if level is None else ReadConcern(level)
        return Uncut(self.calls, self.database.get_collection(name, codec_options=codec, read_concern=read_concern))

    async def command(self, command: Mapping[str, Any], session: Any = None) -> Document:
        """Run a database command and return its reply. Raises also if the reply reports failed writes."""
        call = self.database.command(command, codec_options=CODEC, session=session)
        return checked(await self.calls.run(call, session))

    async def admin(self, command: Mapping[str, Any]) -> Document:
        """Run a command on the `admin` database."""
        return cast(Document, await self.calls.run(self.client.admin.command(command, codec_options=CODEC)))

    async def aggregate(
        self,
        collection: str,
        pipeline: list[Document],
        *,
        majority: bool = False,
        snapshot: bool = False,
        **options: Any,
    ) -> Any:
        """Open a cursor over a pipeline's results. If the index named by `hint` does not exist yet, the server chooses.

        `snapshot`: everything is read as of one moment.
        """
        source = self.collection(collection, majority=majority, snapshot=snapshot)
        try:
            return await maybe(source.aggregate(pipeline, **options))
        except OperationFailure as error:  # a first publication is creating the indexes at this moment
            if "hint" not in options or error.code != Code.BAD_VALUE or "hint provided" not in str(error):
                raise
        del options["hint"]
        return await self.aggregate(collection, pipeline, majority=majority, snapshot=snapshot, **options)

    async def rows(self, collection: str, pipeline: list[Document], **options: Any) -> list[Document]:
        """Return all results of a pipeline. The options are those of `aggregate`."""
        cursor = await self.aggregate(collection, pipeline, **options)
        return await cursor.to_list(None)  # type: ignore[no-any-return]  # both drivers leave it untyped

    async def watch(
        self, pipeline: list[Document], database: str | None = None, collection: str | None = None, **options: Any
    ) -> Any:
        """Open a change stream over the whole database, or over one collection, which may be of another database."""
        source = self.database if database is None else own_database(self.client, database)
        majority: Document = {"codec_options": PLAIN_CODEC, "read_concern": ReadConcern("majority")}
        source = (
            source.with_options(**majority) if collection is None else source.get_collection(collection, **majority)
        )
        return Uncut(self.calls, await self.calls.run(_opened(source.watch(pipeline, **options))))

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        """Open a session. A transaction that is still open at the end is aborted."""
        session = await self.calls.run(maybe(self.client.start_session()))
        try:
            yield session
        finally:
            await self.calls.run(maybe(session.end_session()), session)

    async def start_transaction(self, session: Any) -> None:
        """Start a transaction with majority write concern. Nothing is sent before its first call."""
        await maybe(session.start_transaction(**TRANSACTION))

    async def commit(self, session: Any) -> None:
        """Commit. A cancellation waits for this."""
        await self.calls.run(maybe(session.commit_transaction()), session)

    async def abort(self, session: Any) -> None:
        """Abort the transaction, if it is open. What it wrote is locked until then, so a cancellation waits for this."""
        if session.in_transaction:
            with suppress(PyMongoError):  # the server does it by itself when the transaction's time is over
                await self.calls.run(maybe(session.abort_transaction()), session)

    async def kill(self, session: Any) -> None:
        """End a session at the server, and so a transaction that a failed commit has left open, which locks what it wrote."""
        with suppress(PyMongoError):  # the server does it by itself when the transaction's time is over
            await self.admin({"killSessions": [session.session_id]})

    def sync_database(self, socket_timeout_ms: int | None = None) -> Any:
        """Return the same database on a blocking client of its own, for threads. The caller has to close that client.

        `socket_timeout_ms`: how long to wait for an answer, and for a server to become available, unless the client was created
        with an argument for that.
        """
        settings = settings_of(self.client)
        if socket_timeout_ms is not None:
            settings = {"socketTimeoutMS": socket_timeout_ms, "serverSelectionTimeoutMS": socket_timeout_ms, **settings}
        return own_database(MongoClient(**settings), self.database.name)

    async def close(self) -> None:
        """Close the client."""
        closing = self.client.close()
        if inspect.isawaitable(closing):
            await closing


def own_database(client: Any, name: str) -> Any:
    """Return a database of this client as taskmesh uses it: a claim that a lagging secondary does not show yet would be lost."""
    return client.get_database(
        name,
        codec_options=CODEC,
        read_preference=ReadPreference.PRIMARY,
        write_concern=MAJORITY,
        read_concern=ReadConcern("local"),
    )


async def maybe(value: Any) -> Any:
    """Await the value if it can be awaited: Motor, PyMongo async and blocking PyMongo differ in that."""
    return await value if inspect.isawaitable(value) else value


async def _opened(stream: Any) -> Any:
    """Return a change stream that is open."""
    if inspect.isawaitable(stream):
        return await stream
    # Motor opens a stream at its first read, in a thread.
    await asyncio.to_thread(stream._lazy_init)  # noqa: SLF001 — the only way to open it without reading
    return stream


async def next_event(stream: Uncut) -> Any:
    """Return the stream's next event, or None if none came in time.

    Events that came with an earlier one are here already, so nothing is awaited that could be cut off, and turns of the loop
    are saved: thousands of tasks may have been published at once.
    """
    if not read_ahead(stream):
        return await stream.try_next()
    return await maybe(_of_pymongo(stream).try_next())


def read_ahead(stream: Uncut) -> int:
    """Return how many events of an open stream are here already, so that the next read does not ask the server."""
    return len(_of_pymongo(stream)._cursor._data)  # noqa: SLF001 — the driver tells it nowhere else


def _of_pymongo(stream: Uncut) -> Any:
    """Return PyMongo's stream. Motor's stream contains one."""
    return getattr(stream.wrapped, "delegate", stream.wrapped)


def restored(value: Any) -> Any:
    """Return a value that was read with `PLAIN_CODEC` as it was stored."""
    if isinstance(value, dict):
        return {name: restored(part) for name, part in value.items()}
    if isinstance(value, list):
        return [restored(part) for part in value]
    if isinstance(value, Int64):
        return int(value)
    return value.to_decimal() if isinstance(value, Decimal128) else value


async def find_and_update(collection: Any, *arguments: Any, **options: Any) -> Any:
    """Call `find_one_and_update`, and raise the right error if the primary changes before a majority has the write.

    PyMongo reads this reply undecoded, and fails when it adds the reply's labels to its write concern error.
    """
    try:
        return await collection.find_one_and_update(*arguments, **options)
    except AttributeError as error:
        if "RawBSONDocument" not in str(error):
            raise
        raise WriteConcernError("the write was not acknowledged by a majority; the primary has changed") from error


def checked(reply: Document) -> Document:
    """Raise for failed writes in a successful reply, as the driver's own write methods do."""
    if errors := reply.get("writeErrors"):
        first = errors[0]
        raise OperationFailure(first.get("errmsg", "write failed"), first.get("code"), reply)
    if error := reply.get("writeConcernError"):
        raise WriteConcernError(error.get("errmsg", "write concern failed"), error.get("code"), reply)
    return reply


def twin_of(client: Any) -> Any:
    """Return an async PyMongo client with the settings of `client`, for another event loop."""
    return AsyncMongoClient(**settings_of(client))


def core_of(client: Any) -> Any:
    """Return PyMongo's client. Motor's client contains one."""
    return client.delegate if _is_motors(client) else client


def _is_motors(client: Any) -> bool:
    """Whether it is a Motor client.

    Motor is not imported to find out: whoever has its client has imported it. For others it would slow our import.
    """
    motor = sys.modules.get("motor.motor_asyncio")
    return motor is not None and isinstance(client, motor.AsyncIOMotorClient)


def settings_of(client: Any) -> Document:
    """Return the settings that `client` was created with, for a twin of it (PyMongo keeps them for its own twins)."""
    settings = dict(core_of(client)._init_kwargs)  # noqa: SLF001 — the only place where a client keeps them
    settings.pop("event_loop_thread_id", None)
    settings.pop("_connect", None)
    return settings
