"""Counting what a client asks of the server: commands, their bytes, and what claims won. By PyMongo's own monitoring."""

from __future__ import annotations

from collections import Counter
from typing import Any

import bson
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

_NOT_WORK = {"hello", "ping", "isMaster", "endSessions", "saslStart", "createIndexes", "create", "killCursors"}


class Commands(CommandListener):
    """Give it to a client as an event listener. With `sizes`, bytes are counted too (which costs time)."""

    def __init__(self, *, sizes: bool = False) -> None:
        self.by_name: Counter[str] = Counter()
        self.bytes_sent = 0
        self.bytes_received = 0
        self.claims_tried = 0
        self.claims_won = 0
        self._sizes = sizes
        self._claims: dict[int, int] = {}

    def started(self, event: CommandStartedEvent) -> None:
        if event.command_name in _NOT_WORK:
            return
        self.by_name[event.command_name] += 1
        if self._sizes:
            self.bytes_sent += len(bson.encode(event.command))
        if event.command_name == "update" and (tried := claimed_ids(event.command)):
            self.claims_tried += tried
            self._claims[event.request_id] = tried

    def succeeded(self, event: CommandSucceededEvent) -> None:
        if self._sizes and event.command_name not in _NOT_WORK:
            self.bytes_received += len(bson.encode(event.reply))
        if self._claims.pop(event.request_id, None) is not None:
            self.claims_won += event.reply["nModified"]

    def failed(self, event: CommandFailedEvent) -> None:
        self._claims.pop(event.request_id, None)

    @property
    def total(self) -> int:
        """All commands that are work."""
        return sum(self.by_name.values())

    def summary(self) -> dict[str, Any]:
        """All of it, to be told."""
        return {
            "commands": dict(self.by_name),
            "claims_tried": self.claims_tried,
            "claims_won": self.claims_won,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
        }


def claimed_ids(command: Any) -> int:
    """How many tasks an update tries to claim; 0 if it is none: only a claim asks for both unfinished statuses."""
    for update in command.get("updates", ()):
        query = update["q"]
        query = query.get("$and", [query])[0]
        if query.get("status") == {"$in": ["INIT", "RUNNING"]} and "$in" in (query.get("_id") or {}):
            return len(query["_id"]["$in"])
    return 0
