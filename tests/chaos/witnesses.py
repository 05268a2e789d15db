"""Who sees all that happens to a database: every committed version, decided as it comes, and what a reader of events is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pymongo import MongoClient

from tests.chaos.checker import check_version
from tests.chaos.endings import check_endings
from tests.chaos.findings import Findings
from tests.chaos.history import Asked, Evidence, Log, Published
from tests.chaos.reader import Reader
from tests.chaos.reading import Reading
from tests.chaos.versions import Document, Versions, Watcher
from tests.processes.fleet import Fleet


class Witnesses:
    """The witnesses of one run."""

    def __init__(self, uri: str, database: str) -> None:
        self._uri, self._database = uri, database
        self.findings = Findings()
        self.versions = Versions()
        self.log = Log()
        self.watcher = Watcher(uri, database, self._on_event)
        self.reader = Reader(uri, database)

    def start(self) -> None:
        """Start, and return when nothing can be missed any more."""
        self.watcher.start()
        self.reader.start()

    def stop(self, patience_s: float = 20.0) -> None:
        """Stop once nothing has come for a while; wait so long for what the reader has not been told yet."""
        self.watcher.stop()
        self.reader.stop(sum(len(kinds) for kinds in self.log.happened.values()), patience_s)

    def check(self, fleet: Fleet, published: Sequence[Published], asked: Sequence[Asked]) -> Findings:
        """Decide everything. After `stop`."""
        with self.client() as client:
            documents = {task["_id"]: task for task in client[self._database]["tasks"].find()}
            effects = list(client[self._database]["effects"].find())
            accounts = {account["_id"]: account["balance"] for account in client[self._database]["accounts"].find()}
            limits = list(client[self._database]["limits"].find())
        assert documents == self.versions.newest, "the watcher has missed something"
        evidence = Evidence(
            published=published,
            asked=asked,
            done=self.log.done,
            documents={id_: task for id_, task in documents.items() if not Reading(task).deleted},
            limits=limits,
            marks=fleet.history,
            died=fleet.died,
            suspended=fleet.suspended,
            exits=fleet.exits,
            effects=[effect["task"] for effect in effects],
            moves=[(effect["giver"], effect["taker"]) for effect in effects if "giver" in effect],
            accounts=accounts,
            told=self.reader.told,
            claims=self.log.claims,
            happened=self.log.happened,
        )
        self.findings += check_endings(evidence)
        return self.findings

    def client(self) -> MongoClient[Document]:
        """A client of the checker's own."""
        return MongoClient(self._uri, tz_aware=True, socketTimeoutMS=10_000)

    def _on_event(self, event: Mapping[str, Any]) -> None:
        version = self.versions.apply(event)
        if version is not None:
            self.log.add(version)
            self.findings += check_version(version)
