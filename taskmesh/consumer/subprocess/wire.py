"""What a child process sends to its parent: only data, and errors as data.

A handler is in the child, and can make it send anything: so messages are BSON, reading which calls nobody's code, and a message
that cannot be understood ends the conversation and nothing else. (Down goes pickle, since the parent is trusted.)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from typing import Any

from taskmesh.client.params import checked_size
from taskmesh.consumer.run.outcome import Reason, ReasonElsewhere, reason_of
from taskmesh.model.configuration import Configuration
from taskmesh.model.error_policy import Raised, raised
from taskmesh.model.errors import LeaseLost, Retry, Snooze, TaskFailed, TransactionConflict, UnstorableValue, delay_of
from taskmesh.model.option import TaskOption
from taskmesh.model.stage import Next, checked_next
from taskmesh.store.values import MAX_BYTES, cleaned, decoded, encoded, storable

MAX_MESSAGE_BYTES = 2 * MAX_BYTES
_MAX_DETAIL_BYTES = 4_000
_MOST_OF_A_GROUP = 100
_KINDS: tuple[type[Exception], ...] = (TaskFailed, UnstorableValue, Retry, TransactionConflict, Snooze, LeaseLost, Next)
"""Errors that say how an execution ends."""
_LOCAL = ("option", "tuned", "placed", "session", "after")
"""Fields of a configuration that are sent in another form, or not at all."""


class HandlerError(Exception):
    """Represents an error that was raised in a child process, and whose class is not known here."""


class PutAside(Exception):
    """Tells a child process that its execution is suspended. Raised there as `TaskSuspended`."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(kind, name)
        self.kind = kind
        self.name = name


def packed(kind: str, *parts: Any) -> bytes:
    """Return a message."""
    return encoded({"said": [kind, *parts]})


def unpacked(message: bytes) -> list[Any]:
    """Return the kind and the parts of a message. Raises any error for what is not a message."""
    said = decoded(message)["said"]
    if not (isinstance(said, list) and said and isinstance(said[0], str)):
        raise ValueError(f"{said!r:.200} is not a message")
    return said


# --- errors ---


def error_as_data(error: BaseException) -> dict[str, Any]:
    """Return an error as data: its classes by name, its reason with the traceback, the kind of ending, its plain attributes."""
    kind = next((kind for kind in _KINDS if isinstance(error, kind)), None)
    delay_ms = None
    if isinstance(error, (Retry, Snooze)):
        try:
            delay_ms = delay_of(error)
        except Exception as refusal:  # noqa: BLE001 — an attribute of a handler's own class may be anything
            return error_as_data(refusal)
    if isinstance(error, Next):
        try:
            if checked_next(error).params is not None:
                error.params, _ = storable(error.params)
                checked_size("next", error.params)
        except Exception as refusal:  # noqa: BLE001 — its params may be anything
            return error_as_data(refusal)
    reason = reason_of(error)
    return {
        "module": cleaned(str(type(error).__module__)),
        "class": cleaned(type(error).__qualname__),
        "kind": kind.__name__ if kind is not None else None,
        "reason": asdict(reason),
        "lineages": [list(map(cleaned, each.lineage)) for each in raised(error)[:_MOST_OF_A_GROUP]],
        "delay_ms": delay_ms,
        "args": list(error.args) if _travels(list(error.args)) else [_text(error, reason.text)],
        "attributes": {
            name: value for name, value in vars(error).items() if isinstance(error, Next) or _travels({name: value})
        },
    }


def error_of(told: Mapping[str, Any]) -> BaseException:
    """Return the child's error as an error here, with its reason as the cause.

    It has the same class if that is known here, and is created without calling any code of that class: what a class does when
    an instance is created, copied or unpickled is a matter of the child.
    """
    reason, delay_ms = _reason(told["reason"]), told["delay_ms"]
    error: BaseException = HandlerError(reason.text)
    with suppress(Exception):
        error = _made(told) or error
    kind = next((kind for kind in _KINDS if kind.__name__ == told["kind"]), None)
    if kind is not None and not isinstance(error, kind):
        error = kind(reason.text)
    if isinstance(error, (Retry, Snooze)):
        error.delay_ms = delay_ms
        delay_of(error)
    met = [Raised(tuple(cleaned(str(name)) for name in lineage)) for lineage in told["lineages"]]
    error.__cause__ = ReasonElsewhere(reason, met)
    if isinstance(error, Next):
        checked_next(error)
    return error


def _reason(told: Mapping[str, Any]) -> Reason:
    type_, frame = (None if told[part] is None else cleaned(str(told[part])) for part in ("type", "frame"))
    return Reason(cleaned(str(told["text"])), type_, frame)


def _made(told: Mapping[str, Any]) -> Exception | None:
    kind = _known(told["module"], told["class"])
    if kind is None or not issubclass(kind, Exception) or issubclass(kind, (StopIteration, StopAsyncIteration)):
        return None
    native = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    error = native.__new__(kind, *told["args"])
    error.__dict__.update(told["attributes"])
    return error if isinstance(error, Exception) else None


def _known(module: str, qualname: str) -> type | None:
    """Return a class by its name, if it is loaded here. Nothing is imported for it."""
    place: Any = sys.modules.get("__main__" if module == "__mp_main__" else module)
    for part in qualname.split("."):
        place = vars(place).get(part) if place is not None else None
    return place if isinstance(place, type) else None


def _travels(value: Any) -> bool:
    try:
        return len(encoded({"v": value})) <= _MAX_DETAIL_BYTES
    except Exception:  # noqa: BLE001 — whatever it is, it is no plain value
        return False


def _text(error: BaseException, otherwise: str) -> str:
    try:
        return cleaned(str(error))
    except Exception:  # noqa: BLE001 — an exception whose own text cannot be made must not hide that it was raised
        return otherwise


# --- publications ---


def configuration_as_data(configuration: Configuration) -> dict[str, Any]:
    """Return the settings of a definition as data."""
    settings = {f.name: getattr(configuration, f.name) for f in fields(configuration) if f.name not in _LOCAL}
    option, tuned, placed = dict(configuration.option), list(configuration.tuned), list(configuration.placed)
    settings["after"] = None if configuration.after is None else configuration.after.as_data()
    return {"option": option, "tuned": tuned, "placed": placed, "settings": settings}


def configuration_of(told: Mapping[str, Any]) -> Configuration:
    """Return them as settings again, checked like those of a publisher. Raises `InvalidOption`."""
    option = TaskOption(**told["option"])
    tuned = {name: getattr(option, name) for name in told["tuned"]}
    made = Configuration(option=option).changed(**told["settings"], **tuned)
    # Otherwise its queue and group would seem to be set by the publisher: only those that the child's publisher set are.
    return replace(made, placed={name: made.placed[name] for name in ("queue", "group") if name in told["placed"]})
