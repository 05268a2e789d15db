"""Decides, for every committed write, whether a queue's limits hold; and all else that the checker of the chaos runs knows.

Nobody polls: what was so for a millisecond is seen too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.chaos.checker import check_version
from tests.chaos.findings import Findings
from tests.chaos.versions import Document, Version, Versions, Watcher
from tests.consumer.sampling import most_starts_within


@dataclass
class LimitsHeld:
    """What the limits are, and what was seen of them."""

    running: int | None = None
    group_running: int | None = None
    group_rate: int | None = None
    rate: int | None = None
    per_ms: int = 1_000
    most: int = 0
    """The most that ran at once."""
    starts: list[datetime] = field(default_factory=list)
    starts_of: dict[str, list[datetime]] = field(default_factory=dict)
    """By group."""
    broken: list[str] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    _versions: Versions = field(default_factory=Versions)
    _live: dict[str, list[tuple[str | None, Document]]] = field(default_factory=dict)

    def see(self, event: Mapping[str, Any]) -> None:
        """Take the next event of the change stream."""
        version = self._versions.apply(event)
        if version is not None:
            self.findings += check_version(version)
            self._take(version)

    def _take(self, version: Version) -> None:
        before, after = (_entries(document) for document in (version.before, version.after))
        known = {entry["running_id"] for entry in before}
        started = [entry["start_time"] for entry in after if entry["running_id"] not in known]
        self.starts += started
        if version.after is not None and (group := version.after.get("group")) is not None:
            self.starts_of.setdefault(group, []).extend(started)
        self._live.pop(version.id, None)
        if version.after is not None and (running := [entry for entry in after if entry["state"] == "RUNNING"]):
            self._live[version.id] = [(version.after.get("group"), entry) for entry in running]
        live = [
            group
            for of_task in self._live.values()
            for group, entry in of_task
            if entry["ping_expire_time"] > version.time
        ]
        self.most = max(self.most, len(live))
        if self.running is not None and len(live) > self.running:
            self.broken.append(f"{len(live)} run at once at {version.time}")
        if self.group_running is not None:
            full = {group for group in live if group is not None and live.count(group) > self.group_running}
            self.broken += [f"{live.count(group)} of group {group} run at once at {version.time}" for group in full]

    def check(self) -> None:
        """Raise `AssertionError` if a limit, or any other promise, was broken."""
        assert self.broken == []
        assert self.findings.violations == []
        if self.rate is not None:
            assert most_starts_within(sorted(self.starts), self.per_ms) <= self.rate
        if self.group_rate is not None:
            for group, starts in self.starts_of.items():
                most = most_starts_within(sorted(starts), self.per_ms)
                assert most <= self.group_rate, f"{most} starts of group {group} in {self.per_ms} ms"


def _entries(document: Document | None) -> list[Document]:
    return [] if document is None else document["task_state"]["worker_states"]


@contextmanager
def watched(uri: str, database: str, held: LimitsHeld) -> Iterator[None]:
    """See every write in the block; whoever writes has to be gone at its end."""
    watcher = Watcher(uri, database, held.see)
    watcher.start()
    yield
    watcher.stop()
