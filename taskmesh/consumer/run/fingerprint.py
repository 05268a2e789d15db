"""Fingerprints: which function and which arguments a record belongs to, so that it is never taken for another step's."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

from pydantic import BaseModel

_PLAIN = (bool, int, float, complex, Decimal, bytes, date, time, timedelta, UUID, PurePath)
_DEEPEST = 50
_ARGUMENTS_CHARS = 16


def fingerprint(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the function's qualified name and a hash of its arguments, equal in every process and on every run.

    Texts, numbers, times, bytes, paths, UUIDs, enums, lists, mappings, sets, dataclasses and pydantic models are compared by
    value. Of any other object (a client, a connection, an instance of your own class) only the type counts: its contents may
    differ from process to process.
    """
    called: Any = fn
    while isinstance(called, functools.partial):
        args, kwargs, called = (*called.args, *args), {**called.keywords, **kwargs}, called.func
    name = getattr(called, "__qualname__", None) or type(called).__qualname__
    parts = _parts([list(args), dict(kwargs)], _DEEPEST)
    digest = hashlib.sha256("".join(part + "\0" for part in parts).encode("utf-8", "surrogatepass"))
    return f"{name}({digest.hexdigest()[:_ARGUMENTS_CHARS]})"


def _parts(value: Any, depth: int) -> Iterator[str]:
    """Yield the value as texts. Values that MongoDB stores alike yield the same: an argument may come from a record."""
    if value is None or isinstance(value, str):
        yield f"{type(value).__name__}:{value}"
    elif isinstance(value, Enum):
        yield from _parts(value.value, depth)
    elif isinstance(value, _PLAIN):
        yield _plain(value)
    elif depth == 0:
        yield "…"
    elif isinstance(value, Mapping):
        yield "{"
        for key in sorted(value, key=repr):
            yield from _parts(key, depth - 1)
            yield from _parts(value[key], depth - 1)
        yield "}"
    elif isinstance(value, (list, tuple)):
        yield "["
        for part in value:
            yield from _parts(part, depth - 1)
        yield "]"
    elif isinstance(value, (set, frozenset)):
        yield "{"
        yield from sorted(
            "\0".join(_parts(part, depth - 1)) for part in value
        )  # the order of a set differs between processes
        yield "}"
    elif isinstance(value, BaseModel):
        yield from _parts({name: getattr(value, name) for name in type(value).model_fields}, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _parts({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, depth - 1)
    else:
        yield f"<{type(value).__qualname__}>"


def _plain(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"int:{int(value)}"  # a large value read from a record has a class of the driver's
    return f"{type(value).__name__}:{value!r}"
