"""The one place that speaks to MongoDB: a `Store` holds the connection; the verbs are the modules beside this one.

In the order of a task's life: `rules`, `publish`, `find`, `claim`, `renew`, `steps`, `signals`, `finish`, `control`, `settle`.
In packages: `relations` between tasks, `queues` (limits, groups, pauses), `triggers` (what publishes without a call), and what
verbs are made of: `pipeline` and `mongodb`, the driver. For the rest of the fleet `change_stream`, `registry` (workers, queues,
definitions), `audit` and `schema` (collections, indexes). The queries for people are in `admin/store`. A verb changes a task by
one pipeline update that ends in `rules.derivation`, or by a short form that writes what would follow (`pipeline.plain`).
Inserts have nothing to derive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from bson.codec_options import CodecOptions
from pymongo import AsyncMongoClient
from pymongo.errors import InvalidName as PyMongoInvalidName
from pymongo.errors import PyMongoError

from taskmesh.model.errors import InvalidName, TaskMeshError
from taskmesh.store import rules
from taskmesh.store.mongodb.driver import PLAIN_CODEC, Document, Driver, checked, restored
from taskmesh.store.mongodb.inserts import Inserts
from taskmesh.store.mongodb.uncut import CLOSE_DEADLINE_S, ended_in_time
from taskmesh.store.numbers import Numbers

WRITE_DEADLINE_MS = 5_000
"""How long the server may work on one of our writes. An `update_many` waits at a document that an open transaction has changed
(measured: up to 60 s), so every write has a deadline."""


class Store:
    """A collection of tasks and the collections beside it, on one connection."""

    def __init__(
        self, client: Any, database: str, collection: str = "tasks", now: rules.Expression = rules.NOW
    ) -> None:
        """`client`: a URI, an `AsyncMongoClient` or an `AsyncIOMotorClient`. `now`: for tests, a literal time."""
        self._owned = isinstance(client, str)
        if self._owned:
            client = _client_of(client)
        self.driver = Driver(client, database)
        try:
            self.driver.collection(collection)
        except (PyMongoInvalidName, TypeError) as error:
            raise InvalidName(f"collection must be a name that MongoDB allows, got {collection!r}: {error}") from None
        if collection.startswith("system."):
            raise InvalidName(f"collection must not begin with 'system.', which is MongoDB's own, got {collection!r}")
        self._name(collection, now)
        self._inserts = Inserts(self.driver, self.tasks)

    def _name(self, collection: str, now: rules.Expression) -> None:
        self.now = now
        self.numbers = Numbers()
        """Numbers for what is published through this store. Stores that one process has of a mesh share them: its tasks have
        one order."""
        self.ahead = timedelta(0)
        """How far `move_on` has moved it."""
        self.guarded_until = 0.0
        """Until when (monotonic) reads leave out malformed documents (see `malformed`)."""
        prefix = "" if collection == "tasks" else f"{collection}."
        self.tasks = collection
        self.workers = f"{prefix}workers"
        self.queues = f"{prefix}queues"
        self.limits = f"{prefix}limits"
        self.schedules = f"{prefix}schedules"
        self.actions = f"{prefix}actions"
        self.undo = f"{prefix}undo"
        self.definitions = f"{prefix}definitions"
        self.flows = f"{prefix}flows"
        self.payloads = f"{prefix}payloads"
        self.sequences = f"{prefix}sequences"
        self.meta = f"{prefix}meta"

    @property
    def collections(self) -> tuple[str, ...]:
        """The names of the collections that are created before they are used."""
        return (
            self.tasks,
            self.workers,
            self.queues,
            self.limits,
            self.schedules,
            self.actions,
            self.undo,
            self.definitions,
            self.flows,
            self.sequences,
        )

    def move_on(self, step: timedelta) -> None:
        """Let "now" be so much later for whatever is asked of the database here, so that tests need not sleep."""
        self.ahead += step
        self.now = {"$add": ["$$NOW", round(self.ahead.total_seconds() * 1000)]}

    def update_command(
        self,
        query: Document,
        pipeline: Sequence[Mapping[str, Any]],
        deadline_ms: int = WRITE_DEADLINE_MS,
        let: Document | None = None,
        hint: str | None = None,
    ) -> Document:
        """Return the command of an update of many tasks: each document atomically, the set not.

        `let`: its variables. `hint`: the index by which to find the tasks, if the server might try others.
        """
        statement: Document = {"q": query, "u": pipeline, "multi": True}
        return {
            "update": self.tasks,
            "updates": [statement if hint is None else statement | {"hint": hint}],
            "let": let or {},
            "writeConcern": {"w": "majority"},
            "maxTimeMS": deadline_ms,
        }

    async def insert(
        self,
        documents: Sequence[Mapping[str, Any]],
        size: int,
        deadline_ms: int = WRITE_DEADLINE_MS,
        *,
        alone: bool = False,
    ) -> Mapping[str, Any]:
        """Insert tasks of about `size` bytes, in one command with what others insert now. Return the reply for these.

        `alone`: in a command of their own. See `Inserts`.
        """
        return await self._inserts.insert(documents, size, deadline_ms, alone=alone)

    async def update(
        self,
        query: Document,
        pipeline: Sequence[Mapping[str, Any]],
        deadline_ms: int = WRITE_DEADLINE_MS,
        session: Any = None,
        constants: Document | None = None,
        hint: str | None = None,
    ) -> Document:
        """Update all matching tasks. Return the reply with `n` (matched) and `nModified`.

        `constants`: values that the pipeline refers to by name (`$$name`).

        The driver does not repeat it after a network error: the caller asks by `running_id` what happened.
        """
        command = self.update_command(query, pipeline, deadline_ms, hint=hint)
        if constants is not None:
            command["updates"][0]["c"] = constants
        if session is not None and session.in_transaction:
            del command["writeConcern"]
            del command["maxTimeMS"]
        return await self.driver.command(command, session)

    async def modify(
        self, changes: Sequence[tuple[Document, Document]], deadline_ms: int = WRITE_DEADLINE_MS, session: Any = None
    ) -> int:
        """Change tasks by modifiers (`$set`, `$push`, …). Return how many matched.

        Each change is a query that names a task by `_id`, and the modifiers. Nothing is derived: use it only where nothing
        depends on the change. The driver does not repeat it after a network error.
        """
        updates = [{"q": query, "u": modifiers, "hint": "_id_"} for query, modifiers in changes]
        command: Document = {"update": self.tasks, "updates": updates}
        if session is None or not session.in_transaction:
            command |= {"ordered": False, "writeConcern": {"w": "majority"}, "maxTimeMS": deadline_ms}
        return int((await self.driver.command(command, session))["n"])

    async def update_one(
        self,
        query: Document,
        pipeline: Sequence[Mapping[str, Any]],
        deadline_ms: int = WRITE_DEADLINE_MS,
        let: Document | None = None,
        fields: Document | None = None,
        hint: str | None = None,
    ) -> Document | None:
        """Update the matching task. Return it as it was written, before anybody else can have changed it; None if none matches.

        `fields`: which of its fields are returned, if not all. `let`, `hint`: as in `update_command`.

        The driver does not repeat it after a network error: the caller finds out what happened. To let the driver repeat it,
        the server would write the document a second time, into `config.image_collection`.
        """
        command: Document = {
            "findAndModify": self.tasks,
            "query": query,
            "update": pipeline,
            "new": True,
            "let": let or {},
            "writeConcern": {"w": "majority"},
            "maxTimeMS": deadline_ms,
        }
        if fields is not None:
            command["fields"] = fields
        if hint is not None:
            command["hint"] = hint
        return restored((await self.driver.command(command))["value"])  # type: ignore[no-any-return]  # a document, or None

    async def update_each(
        self, statements: Sequence[tuple[Document, Sequence[Mapping[str, Any]], Document]], session: Any
    ) -> Document:
        """Make several pipelined updates in the session's transaction, in this order. Return the sums of the replies.

        Each is a query, a pipeline, and the constants to which it refers.
        """
        updates = [{"q": query, "u": pipeline, "multi": True, "c": c} for query, pipeline, c in statements]
        return await self.driver.command({"update": self.tasks, "updates": updates}, session)

    async def find(
        self,
        query: Document,
        fields: Document,
        *,
        majority: bool = False,
        codec: CodecOptions[Document] = PLAIN_CODEC,
        hint: str | None = None,
    ) -> list[Document]:
        """Return the matching tasks, with these fields only. `majority`: only what no failover can roll back.

        `hint`: the index by which to find them, if the server might try others.
        """
        tasks = self.driver.collection(self.tasks, codec, majority=majority)
        cursor = tasks.find(query, fields, batch_size=10_000, hint=hint)
        return await cursor.to_list(None)  # type: ignore[no-any-return]  # both drivers leave it untyped

    async def close(self) -> None:
        """Close the connection, if it is ours. Takes a few seconds at most, even if the server is gone for good."""
        await self.driver.calls.ended(CLOSE_DEADLINE_S)
        if self._owned and not await ended_in_time(self.driver.close(), CLOSE_DEADLINE_S):
            # Closing waits to say goodbye to a server. A second close has nobody left to say goodbye to; nor has the first.
            await ended_in_time(self.driver.close(), CLOSE_DEADLINE_S)


def _client_of(uri: str) -> Any:
    """Return a client. Raises `TaskMeshError` for what is not a URI, which the driver reports in several ways."""
    try:
        return AsyncMongoClient[Any](uri, appname="taskmesh", tz_aware=True)
    except (ValueError, PyMongoError) as error:
        raise TaskMeshError(f"the MongoDB URI cannot be used: {error}") from error


def run_sync(database: Any, command: Document) -> Document:
    """Run a command on a blocking database, with the same checks."""
    return checked(database.command(command))
