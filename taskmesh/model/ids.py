"""Ids: checks every name in a request before it enters a query.

A value that is not a text would be an operator there (`{"$ne": ""}`), and match documents that nobody has named. Names and keys
of tasks, of which an `_id` consists, are checked in `task`.
"""

from __future__ import annotations

import reprlib
from typing import Any

from taskmesh.model.errors import InvalidName, InvalidOption

_MOST_CHARS = 256
_MOST_CHARS_OF_A_REMARK = 2_000
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100


def shown(value: Any) -> str:
    """Return how a value is shown in a message, however long it is."""
    return _short.repr(value)


def checked_text(what: str, text: Any, *, most: int = _MOST_CHARS) -> str:
    """Return the text. Raises `InvalidOption` for anything else, and if it is empty, too long, or cannot be stored."""
    if not _is_storable(text) or not 1 <= len(text) <= most:
        raise InvalidOption(f"{what} must be a text of 1 to {most} characters without NUL, got {shown(text)}")
    return str(text)


def checked_count(what: str, count: Any, *, least: int = 1, most: int = 2**31 - 1) -> int:
    """Return the whole number. Raises `InvalidOption` for anything else, and if it is out of bounds."""
    if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= most:
        raise InvalidOption(f"{what} must be a whole number from {least} to {most}, got {shown(count)}")
    return count


def checked_step_name(what: str, name: Any) -> str:
    """Return the name of a step, a sleep or a signal. Raises `InvalidName`."""
    if not _is_storable(name) or not 1 <= len(name) <= _MOST_CHARS:
        raise InvalidName(f"{what} must be a str of 1 to {_MOST_CHARS} characters without NUL, got {shown(name)}")
    return str(name)


def checked_remark(what: str, text: Any) -> str | None:
    """Return a remark (a reason, an author), None for none. Raises `InvalidOption`."""
    return None if text is None or text == "" else checked_text(what, text, most=_MOST_CHARS_OF_A_REMARK)


def checked_worker_id(worker_id: Any) -> str:
    """Return the id of a worker. Raises `InvalidOption`."""
    if not isinstance(worker_id, str) or not 1 <= len(worker_id) <= _MOST_CHARS or not worker_id.isprintable():
        raise InvalidOption(
            f"worker_id must be a printable text of 1 to {_MOST_CHARS} characters, got {shown(worker_id)}"
        )
    return worker_id


def checked_group(group: Any) -> str:
    """Return the group. Raises `InvalidOption`."""
    return checked_text("group", group)


def _is_storable(text: Any) -> bool:
    if not isinstance(text, str) or "\0" in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
