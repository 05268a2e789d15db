"""One execution: one worker's attempt at one task, from its claim to its outcome."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from taskmesh.clock import ServerClock
from taskmesh.errors import InvalidParams, LeaseLost
from taskmesh.option import TaskOption
from taskmesh.store.driver import Document
from taskmesh.store.finish import Outcome

LOG_LINES = 100
LOG_LINE_CHARS = 2_000
_MARGIN_SHARE, _LARGEST_MARGIN_S = 0.1, 1.0
_log_lock = threading.Lock()
"""Handlers in threads log; one lock for all is enough, since it is held for a moment."""


class Stop(Enum):
    """Why an execution is to stop before its handler returns."""

    LEASE_LOST = "the lease was lost"
    CANCELLED = "the task was cancelled"
    DELETED = "the task was deleted"
    NOT_ALLOWED = "this worker is no longer in specific_worker_ids"
    TIMEOUT = "run_timeout_ms has passed"
    WORKER_STOPS = "the worker stops"


class Execution:
    """The state of one execution. Belongs to the event loop, but for the lease, which the pinger's thread renews."""

    def __init__(
        self, document: Document, running_id: str, worker_id: str, claim_sent: float, clock: ServerClock
    ) -> None:
        self.id: str = document["_id"]
        self.name: str = document["name"]
        self.key: str = document["key"]
        self.queue: str = document["queue"]
        self.worker_id = worker_id
        self.running_id = running_id
        self.document = document
        self.stored_option: Document = document["task_option"]
        self._option: TaskOption | None = None
        self.started = time.monotonic()
        self._clock = clock
        self.lease_until = 0.0
        self.next_ping = 0.0
        self.renewed(claim_sent)
        self.task: asyncio.Task[None] | None = None
        self.stop_reason: Stop | None = None
        self.handler_running = False
        self.ended = False
        """Whether its outcome is decided, so that nothing can stop it any more."""
        self.thread_done: asyncio.Event | None = None
        """For a plain handler: set when its thread has really ended, which no cancellation can hasten."""
        self._logs: deque[Document] | None = None
        self._logs_changed = False
        self.progress: Document | None = None
        self.on_report: Any = None
        self.publications: list[tuple[Any, str, dict[str, Any]]] = []
        self.result: Any = None
        self.recorded_or_lost = False
        """Whether its outcome has its fate, so that its lease is of no interest any more."""
        self.recorded = False
        """Whether `transaction()` has recorded SUCCESS already."""
        self.open_transaction: Any = None

    # --- the lease ---

    def renewed(self, sent: float) -> None:
        """Note a renewal that was sent at this monotonic time: the lease is trusted from then, less a margin."""
        length = self.stored_option["worker_timeout_ms"] / 1000
        self.lease_until = sent + length - min(length * _MARGIN_SHARE, _LARGEST_MARGIN_S)
        self.next_ping = sent + self.stored_option["ping_interval_ms"] / 1000

    def ping_again(self, now: float) -> None:
        """Plan the next try after a ping that failed."""
        self.next_ping = now + min(self.stored_option["ping_interval_ms"] / 4000, 1.0)

    # --- what a handler may ask (see context.Running) ---

    @property
    def option(self) -> TaskOption:
        """The task's option as of the claim."""
        if self._option is None:
            self._option = TaskOption(**self.stored_option)
        return self._option

    @property
    def attempt(self) -> int:
        """Which execution of the task this is, from 1."""
        state = self.document["task_state"]
        fails = sum(entry["state"] == "FAIL" for entry in state["worker_states"])
        return int(fails + state.get("dropped_fail_cnt", 0) + state.get("lost_cnt", 0) + 1)

    @property
    def deadline(self) -> datetime | None:
        """When `run_timeout_ms` is over, by the server's clock."""
        limit = self.stored_option.get("run_timeout_ms")
        if limit is None:
            return None
        left = self.started + limit / 1000 - time.monotonic()
        return self._clock.now() + timedelta(seconds=left)

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop."""
        return self.stop_reason is not None or time.monotonic() >= self.lease_until

    def set_progress(self, fraction: float, message: str | None) -> None:
        """Keep the newest progress; it is written soon."""
        self.check_lease()
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise InvalidParams(f"progress goes from 0 to 1, not {fraction!r}")
        text = None if message is None else str(message)[:LOG_LINE_CHARS]
        self.progress = {"fraction": float(fraction), "message": text, "time": self._clock.now()}
        self._report()

    def log(self, message: str) -> None:
        """Keep a line; it is written soon."""
        text = message.encode("utf-8", "replace").decode()[:LOG_LINE_CHARS]
        with _log_lock:
            if self._logs is None:
                self._logs = deque(maxlen=LOG_LINES)
            self._logs.append({"time": self._clock.now(), "message": text})
            self._logs_changed = True
        self._report()

    def add_publication(self, definition: Any, key: str, params: Mapping[str, Any]) -> None:
        """Keep a task to be published with this execution's SUCCESS."""
        self.check_lease()
        self.publications.append((definition, key, dict(params)))

    def set_result(self, value: Any) -> None:
        """Keep the result for the end of a `transaction()`."""
        self.result = value

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a block that commits with the SUCCESS."""
        return self.open_transaction(self)  # type: ignore[no-any-return]  # set by the executor

    def check_lease(self) -> None:
        """Raise `LeaseLost` if nothing that this execution writes counts any more."""
        if self.stop_reason in (Stop.LEASE_LOST, Stop.CANCELLED, Stop.DELETED, Stop.NOT_ALLOWED):
            raise LeaseLost(
                f"task {self.name!r} {self.key!r}: {self.stop_reason.value}, so this execution writes nothing any more"
            )

    def _report(self) -> None:
        if self.on_report is not None:
            self.on_report(self)

    # --- the outcome ---

    def take_report(self) -> Document:
        """Return the log lines as they are to be stored, if there are new ones."""
        if not self._logs_changed or self._logs is None:
            return {}
        with _log_lock:
            self._logs_changed = False
            return {"logs": list(self._logs)}

    def outcome(self, kind: Any, entry: Document, size: int = 0, delay_ms: int | None = None) -> Outcome:
        """Return how this execution ended, with the logs and progress that are not yet written."""
        progress, self.progress = self.progress, None
        return Outcome(self.id, self.running_id, kind, entry | self.take_report(), delay_ms, progress, size)
