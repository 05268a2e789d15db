"""Databases for tests: each test has one with nothing in it, and most need not wait until one is made.

Making all collections and indexes of taskmesh takes the server longer than most tests take; emptying them does not.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from uuid import uuid4

from pymongo import MongoClient
from pymongo.database import Database

from taskmesh.store import schema

_RESTING = 8
"""How many tests go by before a database is used again: whatever a test left behind has ended by then."""
_QUICKLY_EMPTIED = 500
_ID = {"_id_": [("_id", 1)]}


def _named(indexes: dict[str, tuple[list[tuple[str, int]], Any]]) -> dict[str, list[tuple[str, int]]]:
    return _ID | {f"taskmesh_{name}": keys for name, (keys, _) in indexes.items()}


_AS_MADE = {
    "tasks": _named(schema.INDEXES),
    "workers": _named(schema.WORKER_INDEXES),
    "schedules": _named(schema.SCHEDULE_INDEXES),
    "actions": _named(schema.ACTION_INDEXES),
    "undo": _named(schema.UNDO_INDEXES),
    "flows": _named(schema.FLOW_INDEXES),
    "sequences": _named(schema.SEQUENCE_INDEXES),
} | dict.fromkeys(("queues", "limits", "definitions", "meta"), _ID)


class Databases:
    """The databases of one server."""

    def __init__(self, client: MongoClient[dict[str, Any]]) -> None:
        self._client = client
        self._resting: deque[str] = deque()

    def new(self) -> str:
        """Return the name of a database that there never was."""
        return f"test_{uuid4().hex[:16]}"

    def prepared(self) -> str:
        """Return the name of one that has no documents, and perhaps all collections and indexes already."""
        if len(self._resting) > _RESTING:
            database = self._client[self._resting.popleft()]
            found = counted(database)
            if found is not None and found["tasks"] <= _QUICKLY_EMPTIED:
                for collection in (name for name, count in found.items() if count):
                    database[collection].delete_many({})
                return database.name
            self.drop(database.name)
        return self.new()

    def rest(self, name: str) -> None:
        """Take back what was prepared."""
        self._resting.append(name)

    def drop(self, name: str) -> None:
        """Remove one that is not used again."""
        self._client.drop_database(name)


def counted(database: Database[dict[str, Any]]) -> dict[str, int] | None:
    """How many documents each collection has; None if somebody has changed or removed one, or an index. Drops what was added.

    In two commands, since nearly every test waits for it.
    """
    found = {collection["name"]: collection for collection in database.list_collections()}
    for name in found.keys() - _AS_MADE.keys():
        database.drop_collection(name)
        del found[name]
    if found.keys() != _AS_MADE.keys() or any(collection["options"] for collection in found.values()):
        return None
    of_each = [
        stage
        for name in _AS_MADE
        for stage in ({"$unionWith": {"coll": name, "pipeline": one}} for one in _looks(name))
    ]
    rows = list(database["no such collection"].aggregate(of_each))
    indexes: dict[str, dict[str, Any]] = {name: {} for name in _AS_MADE}
    counts: dict[str, int] = {}
    for row in rows:
        if "count" in row:
            counts[row["of"]] = row["count"]
        else:
            indexes[row["of"]][row["name"]] = list(row["key"].items())
    return counts if indexes == _AS_MADE else None


def _looks(name: str) -> list[list[dict[str, Any]]]:
    """What to ask about a collection: its indexes, and how many documents it has (without reading them)."""
    return [
        [{"$indexStats": {}}, {"$project": {"_id": 0, "of": name, "name": 1, "key": 1}}],
        [{"$collStats": {"count": {}}}, {"$project": {"_id": 0, "of": name, "count": 1}}],
    ]
