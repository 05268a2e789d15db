"""Reports: what a handler reports while it runs, its progress and lines of its log."""

from __future__ import annotations

import threading
from collections import deque
from datetime import datetime

from taskmesh.model.errors import InvalidParams
from taskmesh.store.mongodb.driver import Document

LOG_LINES = 100
LOG_LINE_CHARS = 2_000
LOG_BYTES = 32_000
"""The most bytes of one execution's log. A document keeps logs of up to `rules.KEPT_FAILS` executions, and needs room for
results."""
_LINE_BYTES = 60
"""How many bytes a line takes in the document beside its text."""


class Report:
    """The newest progress and the last lines of one execution, and whether they are written. Lines come from any thread."""

    __slots__ = ("_bytes", "_dropped", "_lines", "_lines_unwritten", "_lock", "progress", "progress_unannounced")

    def __init__(self) -> None:
        self.progress: Document | None = None
        self.progress_unannounced = False
        """Whether the newest progress has not been written yet."""
        self._lines: deque[Document] = deque()
        self._bytes = self._dropped = 0
        self._lines_unwritten = False
        self._lock = threading.Lock()

    def set_progress(self, share: float, message: str | None, time: datetime) -> None:
        """Note how far the handler has come. Earlier progress is dropped."""
        self.progress = {"fraction": share, "message": message, "time": time}
        self.progress_unannounced = True

    def add_line(self, text: str, time: datetime) -> None:
        """Keep a line. The oldest lines are dropped when there are too many."""
        with self._lock:
            self._lines.append({"time": time, "message": text})
            self._bytes += len(text.encode())
            while len(self._lines) > LOG_LINES or self._bytes > LOG_BYTES:
                self._bytes -= len(self._lines.popleft()["message"].encode())
                self._dropped += 1
            self._lines_unwritten = True

    @property
    def size(self) -> int:
        """About how many bytes the lines take in the document."""
        return self._bytes + _LINE_BYTES * len(self._lines)

    def logs(self) -> Document:
        """Return the lines as they are stored in the entry; nothing if there are none."""
        with self._lock:
            return {"logs": list(self._lines), "dropped_log_cnt": self._dropped} if self._lines else {}

    def unwritten(self) -> tuple[Document, Document | None]:
        """Return the lines and the progress that have to be written. From now on they count as written."""
        lines, progress = self._lines_unwritten, self.progress_unannounced
        self._lines_unwritten = self.progress_unannounced = False
        return self.logs() if lines else {}, self.progress if progress else None

    def not_written(self, logs: Document, progress: Document | None) -> None:
        """Note that they could not be written."""
        self._lines_unwritten = self._lines_unwritten or bool(logs)
        self.progress_unannounced = self.progress_unannounced or progress is not None


def checked_progress(fraction: object, message: object) -> tuple[float, str | None]:
    """Return fraction and message as they can be stored. Raises `InvalidParams`."""
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise InvalidParams(f"progress must be from 0 to 1, got {fraction!r}")
    return float(fraction), None if message is None else line_of(message)


def line_of(message: object) -> str:
    """Return a line as it can be stored: valid Unicode, and not too long."""
    return str(message).encode("utf-8", "replace").decode()[:LOG_LINE_CHARS]
