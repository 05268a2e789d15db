"""The event stamp: every write says in one short text field what happened, so that change streams can tell.

It is a text, because a change stream shows changed parts of subdocuments under dotted names, but a text as a whole. It holds
the kind, the time (the server's, or a worker's idea of it; two stamps are never equal, so each shows as a change), the worker,
and the workers whose leases were found to have run out. Pings leave no stamp, so nobody is told of them. Marks behind the time,
which older releases do not read, tell of progress that is written with the outcome of its execution, of a record that a signal
completes, and whether the task is for any one worker: then those that would come third need not look at it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from string import digits

from taskmesh.store import rules

RECORD_EVENT = "record_event"
"""The field with the stamp of a record, which concerns no worker. In no index, other than `event`: so what changes nothing but
the records takes the server no work on indexes. In a transaction that is nine tenths of an update: for each index of each
document MongoDB 6 reads the catalog (docs/decisions/0015-less-of-the-server.md)."""
_SEPARATOR = "\x1f"
_ANY_WORKER, _PROGRESS, _RECORD = "a", "p", "r"
_NOT_THE_SERVERS = "w"
"""Marks a time that is a worker's idea of the server's: no stamp with the server's own time equals it."""
_OPENING = frozenset({"opened", "retried", "failed", "released", "snoozed", "signalled", "stopped"})
"""What may make a task claimable, and changes neither for which workers it is nor for how many."""
_IS_FOR_ANY: rules.Expression = {
    "$and": [{"$eq": ["$task_option.concurrent_worker_cnt", 1]}, {"$not": [rules.PINNED]}],
}


@dataclass(slots=True, frozen=True)
class Stamp:
    """The content of a stamp."""

    kind: str
    worker_id: str | None
    lost: tuple[str, ...]
    progressed: bool = False
    """Whether it comes with progress that was not announced before."""
    recorded: bool = False
    """Whether it comes with the completion of a record."""
    for_any_worker: bool = False
    """Whether the task is known to be for one worker at a time, and for whichever."""


def stamp(
    kind: str,
    now: rules.Expression,
    worker_id: rules.Expression = "",
    lost: rules.Expression | None = None,
    progressed: rules.Expression = False,
    recorded: rules.Expression = False,
) -> rules.Expression:
    """Return the expression of a stamp.

    `worker_id`: an expression for the id (user data in a `$literal`); `lost`: a list of ids.

    `progressed`: whether it comes with progress that was not announced yet. `recorded`: whether it completes a record.
    """
    for_any = _IS_FOR_ANY if kind in _OPENING else False
    marks = ((for_any, _ANY_WORKER), (progressed, _PROGRESS), (recorded, _RECORD))
    parts: list[rules.Expression] = [
        kind + _SEPARATOR,
        {"$toString": {"$toLong": now}},
        # That mark first: older releases look whether the others are the last character.
        *({"$cond": [is_so, mark, ""]} for is_so, mark in marks if is_so),
        _SEPARATOR,
        worker_id,
    ]
    if lost is not None:
        parts.append(
            {"$reduce": {"input": lost, "initialValue": "", "in": {"$concat": ["$$value", _SEPARATOR, "$$this"]}}}
        )
    return {"$concat": parts}


def stamped(kind: str, now: datetime, worker_id: str = "") -> str:
    """Return a stamp as it is stored, where the server evaluates nothing. `now`: the caller's idea of the server's time.

    `worker_id`: a worker whose next stamp on the same task must have a later time.
    """
    mark = _NOT_THE_SERVERS if worker_id else ""
    return _SEPARATOR.join((kind, f"{int(now.timestamp() * 1000)}{mark}", worker_id))


def read_stamp(text: str) -> Stamp:
    """Read a stamp back."""
    kind, time, worker_id, *lost = text.split(_SEPARATOR)
    marks = time.lstrip(digits)
    return Stamp(kind, worker_id or None, tuple(lost), _PROGRESS in marks, _RECORD in marks, _ANY_WORKER in marks)


def starting_with(kinds: Collection[str]) -> dict[str, str]:
    """Return the condition that a stamp says one of these kinds."""
    return {"$regex": f"^({'|'.join(kinds)}){_SEPARATOR}"}
