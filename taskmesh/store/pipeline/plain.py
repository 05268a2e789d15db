"""Plain tasks: which fields a task must not have, so that a short form of a verb does the same to it as the whole rule.

Most claims meet a task that nobody has tried, most SUCCESSes a task with one execution. For these the rule amounts to a few
fields, and writing them directly costs the server half (docs/decisions/0015-less-of-the-server.md). A short form names the
fields that it takes into account; every other field that the whole form reads has to be absent. So tasks with the field of a
new gate go to the whole form, and nothing has to be changed here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from taskmesh.store import rules
from taskmesh.store.mongodb.driver import Document

ALONE: Document = {"task_option.concurrent_worker_cnt": 1}
"""A condition of the short claim and of the short SUCCESS: the task is for one worker at a time."""


_SHUT = [{"$gt": [f"$task_state.{name}", None]} for name in ("waits_for", "in_line", "flow")]
_LATEST: rules.Expression = {
    "$max": [f"$task_state.{name}" for name in ("create_time", "start_time", "resume_time", "suspended_until")]
}
CLAIMABLE_FROM: rules.Expression = {
    "$cond": [{"$or": [*_SHUT, {"$gte": [_LATEST, rules.NEVER]}]}, "$$REMOVE", _LATEST],
}
"""The `next_claim_time` of an INIT task without entries that has no gates but those of others, and times."""


def without_others(whole: rules.Expression, handled: Collection[str]) -> Document:
    """Return the condition that a task has none of the fields that `whole` reads, except for those in `handled`.

    These the short form checks, or writes as the whole form would.
    """
    return dict.fromkeys(sorted(set(_fields_read(whole)).difference(handled)))


def _fields_read(expression: rules.Expression) -> Iterator[str]:
    """Yield the stored fields that an expression reads: of option and state each field, otherwise the top-level field."""
    if isinstance(expression, str):
        name, _, inner = expression.removeprefix("$").partition(".")
        # A variable starts with two dollars; with an underscore, what an earlier stage has put there.
        if expression.startswith("$") and not name.startswith(("$", "_")):
            yield f"{name}.{inner.partition('.')[0]}" if name in ("task_option", "task_state") and inner else name
    elif isinstance(expression, dict):
        for operator, operand in expression.items():
            if operator != "$literal":  # a user's value
                yield from _fields_read(operand)
    elif isinstance(expression, (list, tuple)):
        for operand in expression:
            yield from _fields_read(operand)
