"""Logs as records with fields: which task, which execution, which worker.

The engine's own lines about an execution carry `task`, `key`, `worker` and `running_id`. What a handler logs, with any logger,
gets the same fields from `TaskFields`, a filter for your log handler. `JsonFormatter` writes all fields of a record, one object
per line.

    handler = logging.StreamHandler()
    handler.addFilter(TaskFields())
    handler.setFormatter(JsonFormatter())
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from taskmesh.consumer.run.context import fields_of, running_task

Format = Literal["text", "json"]
SetUp = tuple[int, Format]
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TaskFields(logging.Filter):
    """Adds the fields of the running execution to what is logged inside a handler. Lets every record through."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields that are missing."""
        execution = running_task()
        if execution is not None:
            for name, value in fields_of(execution).items():
                record.__dict__.setdefault(name, value)
        return True


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line.

    Its fields: `time level logger message`, the fields of `extra`, `exception` with traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OWN and name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, ensure_ascii=False, default=str)


_set_up: SetUp | None = None


def set_up(level: int, format_: Format) -> None:
    """Log to standard error, unless the root logger already has a handler. Child processes (`run="process"`) do the same."""
    global _set_up  # noqa: PLW0603 — a fact about this process
    _set_up = level, format_
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(TaskFields())
    handler.setFormatter(JsonFormatter() if format_ == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level, handlers=[handler])


def how_it_is_set_up() -> SetUp | None:
    """Return the arguments of `set_up`, or None if the program configures logging itself."""
    return _set_up
