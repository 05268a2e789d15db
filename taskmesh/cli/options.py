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
    log_format: str
    max_tasks: int | None
    health: tuple[str, int] | None
    """Host and port of the probes; a supervisor answers for its children."""
    metrics: tuple[str, int] | None
    """Host and port of the metrics; of several children each takes the next port."""

    def command(self, worker_id: str, place: int = 0) -> list[str]:
        """Return the command line of child number `place`, which does the same under this id.

        The URI travels by environment.
        """
        words = [sys.executable, "-m", "taskmesh.cli", "worker", self.target, "--worker-id", worker_id]
        words += ["--concurrency", str(self.concurrency), "--grace-ms", str(self.grace_ms)]
        words += ["--log-level", self.log_level, "--log-format", self.log_format]
        for name, values in (("--queues", self.queues), ("--names", self.names)):
            words += [name, ",".join(values)] if values is not None else []
        if self.metrics is not None:
            host, port = self.metrics
            words += ["--metrics-host", host, "--metrics-port", str(port + place if port else 0)]
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
