"""Which values can be stored: params on their way in, results on their way out.

A value is stored and comes back equal, or it is refused with the path of the culprit; nothing is interpreted. MongoDB's own
types imply two things: times are kept to the millisecond and in UTC, and tuples come back as lists.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence, ValuesView
from collections.abc import Set as AbstractSet
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any

import bson
from bson import ObjectId
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument
from pydantic import BaseModel, Secret, SecretBytes, SecretStr
from pydantic_core import PydanticSerializationError, to_jsonable_python

from taskmesh.store.mongodb.driver import CODEC, Document

MAX_BYTES = 15_000_000
"""Of params or of a result. MongoDB's limit for a whole document is 16 MB, and the rest needs room, too."""

MAX_REASON_CHARS = 4_000
MAX_DEPTH = 150
"""Levels of dicts and lists in params or in a result. MongoDB's limit for a whole document is 180, and the rest needs some,
too."""
_COUNTED_DEPTH = 1_000
_SHALLOW_BYTES = 8 * MAX_DEPTH
"""A value of fewer bytes cannot be nested so deeply: each level takes at least eight."""

SECRETS = (SecretStr, SecretBytes, Secret)
"""Types whose values are stored, but not shown."""
_TEXT = frozenset({str})
_PLAIN = frozenset({str, int, float, bool, type(None), bytes, datetime})


class Unstorable(Exception):
    """A value that MongoDB cannot store as it is."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


class TooLarge(Exception):
    """A value of too many bytes."""


def size_of(value: Any, path: str, most: int = MAX_BYTES) -> int:
    """Return how many bytes the value needs. Raises `Unstorable` with the path of the culprit, or `TooLarge`."""
    return 1 if value is None or value is True or value is False else len(_encoded("v", value, path, most))


def kept(name: str, value: Any, path: str, most: int = MAX_BYTES) -> tuple[Mapping[str, Any], int]:
    """Return a document with this one field, and its size. Later changes of the value do not affect it.

    Raises as `size_of` does.
    """
    if value is None or value is True or value is False:
        return {name: value}, 1
    encoded = _encoded(name, value, path, most)
    return {name: value} if type(value) in _PLAIN else RawBSONDocument(encoded), len(encoded)


def _encoded(name: str, value: Any, path: str, most: int) -> bytes:
    try:
        encoded = bson.encode({name: value}, codec_options=CODEC)
    except _REFUSALS as error:
        raise too_deep(value, path) or _culprit(value, path, error) from None
    if b"$ref\0" in encoded and (reference := _reference(value, path)):
        raise Unstorable(reference, "a dict with `$ref` and `$id` would come back as a DBRef: name its keys otherwise")
    if len(encoded) > _SHALLOW_BYTES and (refusal := too_deep(value, path)):
        raise refusal
    if len(encoded) > most:
        raise TooLarge(
            f"{path} has {len(encoded)} bytes, more than the {most} that fit: store it elsewhere and pass a reference"
        )
    return encoded


def _is_flat(value: Any) -> bool:
    """Whether it is a dict with str keys and values that MongoDB stores as they are.

    Most params are, and there are thousands per second.
    """
    return type(value) is dict and _PLAIN.issuperset(map(type, value.values())) and _TEXT.issuperset(map(type, value))


def too_deep(value: Any, path: str) -> Unstorable | None:
    """Return an error for a value whose dicts and lists are nested too deeply. None: they are not."""
    if _is_flat(value):
        return None
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, (dict, list, tuple))]:
        if depth == _COUNTED_DEPTH:
            break
        depth += 1
        parts = (part for outer in level for part in (outer.values() if isinstance(outer, dict) else outer))
        level = list({id(part): part for part in parts if isinstance(part, (dict, list, tuple))}.values())
    if depth <= MAX_DEPTH:
        return None
    counted = f"{depth} levels deep" if depth < _COUNTED_DEPTH else "too deeply (or holding itself)"
    how = f"nested {counted}, more than the {MAX_DEPTH} levels that fit"
    return Unstorable(path, f"{how}: flatten it, or pass it as a text of JSON")


_REFUSALS = (
    BSONError,
    OverflowError,
    UnicodeError,
    ValueError,
    TypeError,
    ArithmeticError,
    RecursionError,
    SystemError,
)


def _culprit(value: Any, path: str, error: BaseException) -> Unstorable:
    """Find the innermost part that cannot be stored."""
    for step, part in _parts(value):
        if not isinstance(step, str):
            what = (
                f"a key of a dict must be a str, got {type(step).__name__}: make it a str, or annotate the value's type"
            )
            return Unstorable(f"{path}[{step!r}]", what)
        if isinstance(value, dict) and "\0" in step:
            return Unstorable(f"{path}[{step!r}]", "a key of a dict must not have a NUL: take it out")
        inner = f"{path}.{step}" if isinstance(value, dict) else f"{path}{step}"
        try:
            bson.encode({"v": part}, codec_options=CODEC)
        except _REFUSALS as inner_error:
            return _culprit(part, inner, inner_error)
    if isinstance(value, int):
        return Unstorable(path, f"{value} does not fit into 64 bits: pass it as a str or a Decimal")
    if isinstance(value, str):
        return Unstorable(
            path, f"{value[:40]!r} is not valid Unicode text: encode it to bytes, or replace the surrogates"
        )
    if isinstance(value, Decimal):
        what = f"Decimal {value} has more than the 34 digits that MongoDB keeps"
        return Unstorable(path, f"{what}: round it, or pass it as a str")
    if isinstance(value, dict) and any(not isinstance(key, str) for key in value):
        return Unstorable(path, "a key of a dict must be a str: make it one, or annotate the value's type")
    kind = type(value).__qualname__.rpartition(".")[2]
    # The driver's message contains the value itself, and more people read reasons of failures than values.
    why = "" if isinstance(error, bson.errors.InvalidDocument) else f" ({error})"
    how = "a dict, a list, a dataclass or a pydantic model of what can be stored"
    return Unstorable(path, f"MongoDB cannot store a value of type {kind}{why}: use {how}")


def _reference(value: Any, path: str) -> str | None:
    """Return where in the value there is a dict that drivers take for a reference to a document. None if nowhere."""
    if isinstance(value, dict) and isinstance(value.get("$ref"), str) and "$id" in value:
        return path
    inner = (
        _reference(part, f"{path}.{step}" if isinstance(value, dict) else f"{path}{step}")
        for step, part in _parts(value)
    )
    return next((found for found in inner if found is not None), None)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))


def storable(value: Any) -> tuple[Any, bool]:
    """Return the value in MongoDB's types, and whether anything had to be converted for that.

    For validated params, which their annotations convert back at execution: models, dataclasses, enums, sets, dates, paths …
    """
    if type(value) in _PLAIN:
        return value, False
    if _is_flat(value):
        return dict(value), False
    if isinstance(value, dict):
        parts = {key: storable(part) for key, part in value.items()}
        plain = {key: part for key, (part, _) in parts.items()}
        if all(isinstance(key, str) for key in plain):
            return plain, any(turned for _, turned in parts.values())
        return _with_text_keys(plain), True
    if isinstance(value, (list, tuple)):
        items = [storable(item) for item in value]
        return [item for item, _ in items], any(turned for _, turned in items)
    if (parts := _in_parts(value)) is not value:
        return storable(parts)[0], True
    return _without_parts(value)


def _in_parts(value: Any) -> Any:
    """Return the contents of an enum, a secret, a model, a dataclass or a collection; anything else as it is."""
    if isinstance(value, (Enum, *SECRETS)):
        return value.value if isinstance(value, Enum) else value.get_secret_value()
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields} | (value.model_extra or {})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        return value
    return list(value) if isinstance(value, (AbstractSet, Sequence, ValuesView)) else value


def _without_parts(value: Any) -> tuple[Any, bool]:
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value), True
    if isinstance(value, date) and not isinstance(value, datetime):
        return value.isoformat(), True
    if isinstance(value, PurePath):
        return str(value), True
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str) and re.compile(value.pattern) == value:
        return value.pattern, True
    try:
        bson.encode({"v": value}, codec_options=CODEC)
    except _REFUSALS:
        try:
            return to_jsonable_python(value), True
        except (PydanticSerializationError, ValueError):
            return value, False
    return value, False


def _with_text_keys(value: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict with the keys that JSON would give it; unchanged if two became one or one has no text form: it is refused."""
    try:
        texts = [key if isinstance(key, str) else next(iter(to_jsonable_python({key: None}))) for key in value]
    except (PydanticSerializationError, ValueError):
        return value
    return dict(zip(texts, value.values(), strict=True)) if len(set(texts)) == len(texts) else value


def hides(value: Any) -> bool:
    """Whether a value contains something that must not be shown. It must not be nested too deeply."""
    if isinstance(value, SECRETS):
        return True
    if isinstance(value, BaseModel):
        return any(hides(getattr(value, name)) for name in type(value).model_fields) or hides(value.model_extra)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(hides(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, dict):
        return any(hides(part) for part in value.values())
    return isinstance(value, (list, tuple, set, frozenset)) and any(hides(part) for part in value)


def cleaned(text: str) -> str:
    """Return the text without what MongoDB cannot store, cut to the length of a reason."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")[:MAX_REASON_CHARS]


def encoded(value: Mapping[str, Any]) -> bytes:
    """Return a document as it is stored."""
    return bson.encode(value, codec_options=CODEC)


def decoded(data: bytes) -> Document:
    """Read what `encoded` returned. Raises the driver's `InvalidBSON` for anything else."""
    return bson.decode(data, CODEC)


def as_it_comes_back(form: Any) -> Any:
    """Return a value as MongoDB returns it; unchanged if it cannot be stored, which is reported where that is tried."""
    try:
        return decoded(encoded({"v": form}))["v"]
    except _REFUSALS:
        return form


def is_same(again: Any, value: Any) -> bool:
    """Whether a value has come back, as far as MongoDB's own types allow: tuples come back as lists."""
    if again == value:
        return True
    form, turned = storable(value)
    return not turned and bool(storable(again)[0] == form)


def new_id() -> ObjectId:
    """Return an id that nobody else generates."""
    return ObjectId()
