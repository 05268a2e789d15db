"""Backlogs: published once through taskmesh, then copied by the server into each run's own database."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pymongo import MongoClient
from pymongo.collection import Collection

from benchmarks.engine import Work
from taskmesh import TaskMesh

Tasks = Collection[dict[str, Any]]
_TEMPLATES = "bench_templates"


class Backlogs:
    """Fresh databases with as many tasks as a run needs, each as taskmesh would have published it, with its indexes."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.client: MongoClient[dict[str, Any]] = MongoClient(uri)
        self._published: dict[str, int] = {}

    @contextmanager
    def database(self, name: str | None = None, count: int = 0, *, indexes: bool = True) -> Iterator[str]:
        """A database of its own with `count` tasks of the kind `name`; dropped afterwards."""
        database = f"bench_{uuid.uuid4().hex[:12]}"
        if indexes:
            asyncio.run(self._prepare(database))
        if name is not None and count:
            self.copy(name, count, database)
        try:
            yield database
        finally:
            self.client.drop_database(database)

    def tasks(self, database: str) -> Tasks:
        """The collection of tasks."""
        return self.client[database]["tasks"]

    def copy(self, name: str, count: int, database: str) -> None:
        """Put the first `count` tasks of a kind into a database, beside what is there."""
        if self._published.get(name, 0) < count:
            asyncio.run(self._publish(name, self._published.get(name, 0), count))
            self._published[name] = count
        into = {"db": database, "coll": "tasks"}
        chosen = [{"$match": {"name": name, "params.n": {"$lt": count}}}]
        self.client[_TEMPLATES]["tasks"].aggregate([*chosen, {"$merge": {"into": into, "whenMatched": "replace"}}])

    async def _prepare(self, database: str) -> None:
        async with TaskMesh(self.uri, database=database):
            pass

    async def _publish(self, name: str, first: int, count: int) -> None:
        mesh = TaskMesh(self.uri, database=_TEMPLATES)
        Work(mesh)
        async with mesh:
            for start in range(first, count, 5_000):
                stop = min(start + 5_000, count)
                await mesh.publisher.publish_many(name, {str(n): {"n": n} for n in range(start, stop)})

    def let_claim(self, database: str, *, allowed: bool) -> None:
        """Open or close the queue of a backlog, so that consumers can be there before it."""
        asyncio.run(self._let_claim(database, allowed=allowed))

    async def _let_claim(self, database: str, *, allowed: bool) -> None:
        async with TaskMesh(self.uri, database=database) as mesh:
            await (mesh.resume if allowed else mesh.pause)("default")

    def close(self) -> None:
        """Forget the templates."""
        self.client.drop_database(_TEMPLATES)
        self.client.close()
