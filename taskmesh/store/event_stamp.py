"""The event stamp: every write says in one short text field what happened, so that change streams can tell.

A text, because a change stream shows changed parts of sub-documents under dotted names, but a text whole. It holds the
kind, the time (the server's, or a worker's idea of it; two stamps are never the same, so each shows as a change), the
worker, and the workers whose leases were found run out. Pings leave no stamp: nobody hears of them. Progress that is
written with the outcome of its execution, and the record that a signal completes, are marks behind the time, which older
releases do not read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from taskmesh.store import rules

_SEPARATOR = "\x1f"
_PROGRESS, _RECORD = "p", "r"
_NOT_THE_SERVERS = "w"
"""Marks a time by a worker's idea of it: no stamp with the server's own equals it."""


@dataclass(slots=True, frozen=True)
class Stamp:
    """What a stamp says."""

    kind: str
    worker_id: str | None
    lost: tuple[str, ...]
    progressed: bool = False
    """Whether progress came with it that nobody was told of before."""
    recorded: bool = False
    """Whether a record came to its end with it."""


def stamp(
    kind: str,
    now: rules.Expression,
    worker_id: rules.Expression = "",
    lost: rules.Expression | None = None,
    progressed: rules.Expression = False,
    recorded: rules.Expression = False,
) -> rules.Expression:
    """The expression of a stamp. `worker_id`: one that gives the id (user data in a `$literal`); `lost`: a list of them.

    `progressed`: whether progress comes with it of which nobody was told yet. `recorded`: whether a record comes to its end.
    """
    parts: list[rules.Expression] = [
        kind + _SEPARATOR,
        {"$toString": {"$toLong": now}},
        *({"$cond": [is_so, mark, ""]} for is_so, mark in ((progressed, _PROGRESS), (recorded, _RECORD)) if is_so),
        _SEPARATOR,
        worker_id,
    ]
    if lost is not None:
        parts.append(
            {"$reduce": {"input": lost, "initialValue": "", "in": {"$concat": ["$$value", _SEPARATOR, "$$this"]}}}
        )
    return {"$concat": parts}


def stamped(kind: str, now: datetime, worker_id: str = "") -> str:
    """A stamp as it is stored: for what the server evaluates nothing of. `now`: the caller's idea of the server's time.

    `worker_id`: of a worker, whose next stamp on the same task must have a later time.
    """
    mark = _NOT_THE_SERVERS if worker_id else ""
    return _SEPARATOR.join((kind, f"{int(now.timestamp() * 1000)}{mark}", worker_id))


def read_stamp(text: str) -> Stamp:
    """Read a stamp back."""
    kind, time, worker_id, *lost = text.split(_SEPARATOR)
    return Stamp(kind, worker_id or None, tuple(lost), time.endswith(_PROGRESS), time.endswith(_RECORD))


def starting_with(kinds: Collection[str]) -> dict[str, str]:
    """The condition on a stamp that says one of these kinds."""
    return {"$regex": f"^({'|'.join(kinds)}){_SEPARATOR}"}
