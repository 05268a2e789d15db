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
        self._claims: set[int] = set()

    def started(self, event: CommandStartedEvent) -> None:
        if event.command_name in _NOT_WORK:
            return
        self.by_name[event.command_name] += 1
        if self._sizes:
            self.bytes_sent += len(bson.encode(event.command))
        if event.command_name == "update" and is_claim(event.command):
            self.claims_tried += claimed_ids(event.command)
            self._claims.add(event.request_id)

    def succeeded(self, event: CommandSucceededEvent) -> None:
        if self._sizes and event.command_name not in _NOT_WORK:
            self.bytes_received += len(bson.encode(event.reply))
        if event.request_id in self._claims:
            self._claims.remove(event.request_id)
            self.claims_won += event.reply["nModified"]

    def failed(self, event: CommandFailedEvent) -> None:
        self._claims.discard(event.request_id)

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
    """How many tasks an update tries to claim, as far as they were not tried by the update before it; 0 if it is no claim."""
    return sum(len(query["_id"]["$in"]) for query in _claims(command) if query["status"] == "INIT")


def is_claim(command: Any) -> bool:
    """Whether an update claims: only a claim asks for what is INIT, or for both unfinished statuses."""
    return bool(_claims(command))


def _claims(command: Any) -> list[Any]:
    queries = [_first(_first(update["q"])) for update in command.get("updates", ())]
    return [
        query
        for query in queries
        if query.get("status") in ("INIT", {"$in": ["INIT", "RUNNING"]}) and "$in" in (query.get("_id") or {})
    ]


def _first(query: Any) -> Any:
    return query.get("$and", [query])[0]
