"""Labels of workers, and what tasks need of them: a value by name, compared with its type.

Stored and compared as words of name and JSON (`gpu=true`, `zone="a"`), so that 1, 1.0, true and "1" are four different values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from taskmesh.model.errors import InvalidOption
from taskmesh.model.ids import checked_text, shown

_MOST = 50
_MOST_CHARS = 1_000

HOST = "host"
"""The label of every worker that names its host."""
WORKER = "worker"
"""The label of a worker that is one of several processes: the id without the process's number."""


def words(labels: Mapping[str, Any]) -> list[str]:
    """Return checked labels as they are stored and compared."""
    return sorted(f"{name}={json.dumps(value, sort_keys=True)}" for name, value in labels.items())


def from_words(stored: Iterable[Any]) -> dict[str, Any]:
    """Read what `words` returned. Anything else is left out."""
    found: dict[str, Any] = {}
    for word in stored:
        name, _, text = str(word).partition("=")
        with suppress(ValueError):
            found[name] = json.loads(text)
    return found


def checked_labels(what: str, labels: Any) -> dict[str, Any]:
    """Return labels, or what is needed of them. Raises `InvalidOption`. `what`: how they are called in messages."""
    if labels is None:
        return {}
    if not isinstance(labels, Mapping) or len(labels) > _MOST:
        raise InvalidOption(f"{what} must be a mapping of up to {_MOST} values by name, got {shown(labels)}")
    for name, value in labels.items():
        if "=" in checked_text(f"a name in {what}", name):
            raise InvalidOption(f"{what}: the name {name!r} must not have a '=': give it another name")
        try:
            text = json.dumps(value, allow_nan=False, sort_keys=True)
        except (TypeError, ValueError, RecursionError):
            raise InvalidOption(
                f"{what}: the value of {name!r} must be one that JSON has, got {shown(value)}"
            ) from None
        if len(text) > _MOST_CHARS:
            raise InvalidOption(
                f"{what}: the value of {name!r} has more than {_MOST_CHARS} characters: use a shorter one"
            )
    return dict(labels)


def label_of(text: str) -> tuple[str, Any]:
    """Read `NAME=VALUE`. The value is JSON if possible, otherwise a text. Raises `InvalidOption`."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise InvalidOption(f"a label must be NAME=VALUE, got {shown(text)}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
