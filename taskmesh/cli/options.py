"""What a worker process is to do, as it was asked for on the command line."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What was asked for on the command line."""

    target: str
    uri: str | None
    database: str | None
    collection: str | None
    worker_id: str | None
    concurrency: int
    queues: list[str] | None
    names: list[str] | None
    until_idle: bool
    grace_ms: int
    listen: bool
    log_level: str
    max_tasks: int | None
    health: tuple[str, int] | None
    """Host and port of the probes; a supervisor answers for its children."""

    def command(self, worker_id: str) -> list[str]:
        """Return the command line of a child that does the same under this id. The URI travels by environment."""
        words = [sys.executable, "-m", "taskmesh.cli", "worker", self.target, "--worker-id", worker_id]
        words += ["--concurrency", str(self.concurrency), "--grace-ms", str(self.grace_ms)]
        words += ["--log-level", self.log_level]
        for name, values in (("--queues", self.queues), ("--names", self.names)):
            words += [name, ",".join(values)] if values is not None else []
        words += ["--until-idle"] if self.until_idle else []
        words += [] if self.listen else ["--no-listen"]
        words += ["--max-tasks-per-process", str(self.max_tasks)] if self.max_tasks is not None else []
        return words

    def environment(self) -> dict[str, str]:
        """Return what a child finds in its environment: a password does not belong in a list of processes."""
        where = {
            "TASKMESH_URI": self.uri,
            "TASKMESH_DATABASE": self.database,
            "TASKMESH_COLLECTION": self.collection,
        }
        return os.environ | {name: value for name, value in where.items() if value is not None}
