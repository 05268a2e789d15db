"""What fails, and why: failures grouped by task name, type of error and the place in the user's code where it was raised."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from taskmesh.admin.filters import TaskFilter
from taskmesh.admin.store import error_groups
from taskmesh.model.read_only import ReadOnly
from taskmesh.model.task import Status
from taskmesh.store import Store

LOST = "lost"
"""The type of a group whose executions were lost, and none failed."""
_VARYING = re.compile(
    r"""\w+://\S+|[^\s'"]+@[^\s'"]+|(?<!\w)(?:/[\w.-]+)+|0x[0-9a-f]+|\d+(?:[.,:/-]\d+)*|"[^"]*"|'[^']*'"""
)
"""Parts of a message that vary: addresses, paths, numbers, and quoted text."""
_SEVERAL = re.compile(r"…(?: …)+")
_AT_THE_ENDS = " '\"([{"
"""Stripped from the ends of a text, since they would need quoting in a filter."""
_ALIKE = 0.5
"""Two texts from one place are one message if this share of their words is equal; the others are taken for names."""
_TELLING_CHARS = 8
_UNFINISHED = (Status.INIT, Status.RUNNING)


class ErrorGroup(ReadOnly):
    """Failures of one kind."""

    name: str
    """The name of the tasks."""
    error: str
    """The error's type; for a `TaskFailed` its text without numbers and names; `lost`: the worker died, hung or was cut off."""
    message: str
    """The first line of one of the failures."""
    frame: str | None
    """Where it was raised: the end of the path, line and function of the innermost frame outside of libraries."""
    failed: int
    """FAIL tasks with this as their newest failure."""
    retrying: int
    """Tasks that will be retried, with this as their newest failure."""
    executions: int
    first_time: datetime | None
    last_time: datetime | None
    example_key: str
    where: str
    """A filter for these tasks, as narrow as a filter can be (it may match similar ones, too), for `ls --where` and the like."""


class ErrorReport(ReadOnly):
    """What fails, the most frequent first."""

    groups: list[ErrorGroup]
    looked_at: int
    """How many tasks were examined, including those without a failure."""
    complete: bool
    """False: there are more; those with the last keys of each name and queue were examined."""


async def read_errors(store: Store, name: str | None, at_most: int, deadline_ms: int) -> ErrorReport:
    """Examine up to this many tasks, and group their failures."""
    sample = await error_groups.sample(store, name, at_most, deadline_ms)
    alike: dict[Any, list[dict[str, Any]]] = {}
    for row in error_groups.telling(sample.rows):
        kind = None if _says_itself(row) else kind_of(row)
        alike.setdefault((row["name"], row.get("type"), row.get("frame"), kind), []).append(row)
    groups = [
        _group(rows, kind or text)
        for (*_, kind), found in alike.items()
        for text, rows in ([("", found)] if kind else by_text(found))
    ]
    groups.sort(key=lambda group: (-group.failed - group.retrying, group.name, group.error))
    return ErrorReport(groups=groups, looked_at=sample.looked_at, complete=sample.complete)


def _says_itself(row: dict[str, Any]) -> bool:
    """Whether the text of the error says more than its type: for `TaskFailed`, `Retry` and the like."""
    return row.get("type") is not None and not str(row.get("line")).startswith(row["type"])


def kind_of(row: dict[str, Any]) -> str:
    """Return the type of an error, as it was stored, or its text without the parts that vary."""
    return LOST if row.get("lost") else row.get("type") or _masked(str(row.get("line") or ""))


def _masked(line: str) -> str:
    return _SEVERAL.sub("…", " ".join(_VARYING.sub("…", line).split()))[:100]


def by_text(rows: Iterable[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Split failures of one type from one place by their message: its text without numbers and names, and its rows.

    Names are often not quoted. Texts with equally many words, half of which are equal, count as one message with names in it; a
    single word may always be a name.
    """
    found: list[tuple[list[str], list[dict[str, Any]]]] = []
    for row in rows:
        words = _masked(str(row.get("line") or "")).split()
        for text, members in found:
            same = sum(one == other for one, other in zip(text, words, strict=False))
            if len(text) == len(words) and (same >= _ALIKE * len(words) or len(words) == 1):
                text[:] = [one if one == other else "…" for one, other in zip(text, words, strict=True)]
                members.append(row)
                break
        else:
            found.append((words, [row]))
    return [(_SEVERAL.sub("…", " ".join(text)), members) for text, members in found]


def _group(rows: Sequence[dict[str, Any]], kind: str) -> ErrorGroup:
    first = rows[0]
    failed = sum(row["tasks"] for row in rows if row["status"] == Status.FAIL)
    lines = [str(row.get("line") or "") for row in rows]
    lost = kind == LOST
    which = TaskFilter(
        name=first["name"],
        status=(Status.FAIL,) if failed else _UNFINISHED,
        lost=True if lost else None,
        error=None if lost else telling_part(lines, kind),
    )
    return ErrorGroup(
        name=first["name"],
        error=(kind.strip("… ") and kind) or first.get("type") or "(no reason)",
        message="the worker died, hung or was cut off" if lost else lines[0],
        frame=first.get("frame"),
        failed=failed,
        retrying=sum(row["tasks"] for row in rows) - failed,
        executions=sum(row["executions"] for row in rows),
        first_time=min((row["first"] for row in rows if row.get("first") is not None), default=None),
        last_time=max((row["last"] for row in rows if row.get("last") is not None), default=None),
        example_key=first["key"],
        where=str(which),
    )


def telling_part(lines: Sequence[str], kind: str = "") -> str | None:
    """Return the longest easily found text that all these lines contain, to tell them from others.

    `kind`: their message without the parts that vary.
    """
    beginning = os.path.commonprefix(list(lines))  # noqa: RUF071 — not of paths: characters are meant
    if all(line == beginning for line in lines):
        return beginning.strip() or None
    before_a_quote = [beginning[: beginning.rfind(quote)] for quote in "'\"" if beginning.count(quote) % 2]
    constant = [*_VARYING.split(lines[0]), *kind.split("…")]
    pieces = [piece for piece in constant if all(piece in line for line in lines)]
    found = max([*(before_a_quote or [beginning]), *pieces], key=len)
    return (found if len(found) >= _TELLING_CHARS else beginning).strip(_AT_THE_ENDS) or None
