"""The one place that speaks to MongoDB: a `Store` holds the connection; the verbs are the modules beside this one.

In the order of a task's life: `rules`, `publish`, `find`, `claim`, `renew`, `finish`, `control`, `settle`, `limits`; for
the rest of the fleet `change_stream`, `registry` (workers, queues, definitions), `schedules`, `audit` and `schema`
(collections, indexes). The queries for people are in `admin/store`. Every verb that changes a task is one pipeline update
that ends in `rules.derivation`; one that puts a task there, and word of a deletion, have nothing to derive.
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
from taskmesh.store.driver import PLAIN_CODEC, Document, Driver, checked, restored
from taskmesh.store.inserts import Inserts
from taskmesh.store.numbers import Numbers
from taskmesh.store.uncut import CLOSE_DEADLINE_S, ended_in_time

WRITE_DEADLINE_MS = 5_000
"""How long the server may work on one write of ours. An `update_many` waits at a document that an open transaction
has changed (measured: up to 60 s), so every one has a deadline."""


class Store:
    """A task collection and its neighbours, on one connection."""

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
        """Of who publishes by it. Stores that one process has of a mesh share them: its tasks have one order."""
        self.ahead = timedelta(0)
        """How far `move_on` has moved it."""
        self.guarded_until = 0.0
        """Until when, monotonic, reads leave out what is not well-formed (see `malformed`)."""
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
        """Let "now" be so much later for whatever is asked of the database here: for tests, which so need not sleep."""
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
        """The command of a set-based update of tasks: each document atomically, the set not.

        `let`: its variables. `hint`: the index to find the tasks by, where the server might try others.
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
        """Insert tasks of about `size` bytes, in one command with what others insert now, and return the reply for these.

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
        """Update all tasks that match, and return the reply with `n` (matched) and `nModified`.

        `constants`: values that the pipeline refers to by name (`$$name`).

        Not repeated by the driver after a network error: the caller asks by `running_id` what happened.
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
        """Change tasks by modifiers (`$set`, `$push`, …); return how many matched.

        Each change is a query that names a task by `_id`, and the modifiers. Nothing is derived: only for what nothing hangs on.
        Not repeated by the driver after a network error.
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
        """Update the task that matches, and return it as it was written, before anybody else can have changed it.

        None if none matches. `fields`: what of it is returned, if not all. `let`, `hint`: as of `update_command`.

        Not repeated by the driver after a network error: the caller finds out what happened. So that the driver could repeat it,
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
        """Do several pipelined updates in the session's transaction, in this order, and return the sums of the replies.

        Each is a query, a pipeline, and the constants that it refers to.
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
        """Return the matching tasks, with these fields only. `majority`: only what no failover can take back.

        `hint`: the index to find them by, where the server might try others.
        """
        tasks = self.driver.collection(self.tasks, codec, majority=majority)
        cursor = tasks.find(query, fields, batch_size=10_000, hint=hint)
        return await cursor.to_list(None)  # type: ignore[no-any-return]  # both drivers leave it untyped

    async def close(self) -> None:
        """Close the connection, if it is ours. Takes a few seconds at most, though the server be gone for good."""
        await self.driver.calls.ended(CLOSE_DEADLINE_S)
        if self._owned and not await ended_in_time(self.driver.close(), CLOSE_DEADLINE_S):
            # It waits to say goodbye to a server. Closed once more, it has nobody left to say goodbye to; nor has the first.
            await ended_in_time(self.driver.close(), CLOSE_DEADLINE_S)


def _client_of(uri: str) -> Any:
    """Return a client. Raises `TaskMeshError` for a URI that is none; the driver names it in several ways."""
    try:
        return AsyncMongoClient[Any](uri, appname="taskmesh", tz_aware=True)
    except (ValueError, PyMongoError) as error:
        raise TaskMeshError(f"the MongoDB URI cannot be used: {error}") from error


def run_sync(database: Any, command: Document) -> Document:
    """Run a command on a blocking database, with the same checks."""
    return checked(database.command(command))
