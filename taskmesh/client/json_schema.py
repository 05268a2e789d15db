"""Checks params against the JSON schema that a worker has registered for its handler, for publishers without its code.

Only what the handler would certainly refuse is refused. Pydantic accepts `"7"` for a number and a timestamp for a time, and the
schema says neither; what the schema does not say, or JSON cannot express, passes, and is checked at execution.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Schema = Any
"""A JSON schema: a mapping, or True or False."""

_DEEPEST = 100
_BOOLEANS = frozenset(["true", "false", "t", "f", "yes", "no", "y", "n", "on", "off", "1", "0"])
_MISSING = object()
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("at least", operator.ge),
    "maximum": ("at most", operator.le),
    "exclusiveMinimum": ("more than", operator.gt),
    "exclusiveMaximum": ("less than", operator.lt),
}
_SIZES = {
    "array": (("minItems", "at least"), ("maxItems", "at most")),
    "string": (("minLength", "at least"), ("maxLength", "at most")),
    "object": (("minProperties", "at least"), ("maxProperties", "at most")),
}


def misfits(value: Any, schema: Schema) -> Iterator[str]:
    """Yield what does not fit in the params, each as a sentence that names the value."""
    yield from _misfits(value, schema, schema, "", 0)


def _misfits(value: Any, schema: Schema, root: Schema, where: str, depth: int) -> Iterator[str]:
    if schema is False:
        yield f"{where or 'params'!r}={value!r:.200} is not taken"
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return
    if "$ref" in schema:
        yield from _misfits(value, _resolved(schema["$ref"], root), root, where, depth + 1)
    for part in schema.get("allOf", ()):
        yield from _misfits(value, part, root, where, depth + 1)
    # For `oneOf`, too, one that fits is enough: that only one does applies to readers that do not convert.
    for ways in (schema.get("anyOf"), schema.get("oneOf")):
        if ways and all(any(True for _ in _misfits(value, way, root, where, depth + 1)) for way in ways):
            yield f"{where or 'params'!r}={value!r:.200} fits none of the accepted types: {_told(ways, root)}"
            return
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        taken = [(kind, _taken_as(kind, value)) for kind in kinds]
        fitting = next(((kind, found) for kind, found in taken if found is not _MISSING), None)
        if fitting is None:
            yield f"{where or 'params'!r}={value!r:.200} does not fit: {' or '.join(map(str, kinds))} is taken"
            return
        yield from _bounds(*fitting, schema, where)
        if fitting[0] == "object":
            yield from _properties(value, schema, root, where, depth)
        elif fitting[0] == "array" and isinstance(value, (list, tuple)):
            yield from _items(value, schema, root, where, depth)
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and _is_json(value) and value not in allowed and str(value) not in map(str, allowed):
        yield f"{where or 'params'!r}={value!r:.200} is none of {', '.join(map(repr, allowed)):.300}"


def _items(value: Sequence[Any], schema: Mapping[str, Any], root: Schema, where: str, depth: int) -> Iterator[str]:
    first = schema.get("prefixItems", [])
    for place, item in enumerate(value):
        of_item = first[place] if place < len(first) else schema.get("items", True)
        yield from _misfits(item, of_item, root, f"{where}[{place}]", depth + 1)


def _properties(
    value: Mapping[str, Any], schema: Mapping[str, Any], root: Schema, where: str, depth: int
) -> Iterator[str]:
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{_below(where, name)!r} is missing"
    others = schema.get("additionalProperties", True)
    for name, part in value.items():
        if name in known:
            yield from _misfits(part, known[name], root, _below(where, name), depth + 1)
        elif others is False:
            yield f"there is no parameter {_below(where, name)!r} (given: {part!r:.200})"
        else:
            yield from _misfits(part, others, root, _below(where, name), depth + 1)


def _below(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)


def _resolved(reference: str, root: Schema) -> Schema:
    """Return what a reference inside the schema means; for any other reference, a schema that accepts everything."""
    found = root
    for step in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ["?"]:
        if not isinstance(found, Mapping) or step not in found:
            return True
        found = found[step]
    return found


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool, list, dict))


def _taken_as(kind: str, value: Any) -> Any:
    """Return the value as pydantic would convert it for this type, or `_MISSING` if it would not."""
    try:
        match kind:
            case "null":
                return value if value is None else _MISSING
            case "object":
                return value if isinstance(value, Mapping) else _MISSING
            case "array":
                return value if isinstance(value, (list, tuple, set, frozenset)) else _MISSING
            case "boolean":
                said = str(value).lower().removesuffix(".0")
                return value if isinstance(value, (bool, int, float, str)) and said in _BOOLEANS else _MISSING
            case "integer" | "number" if value is None or isinstance(value, (list, tuple, Mapping)):
                return _MISSING
            case "integer":
                number = float(value)
                return (value if isinstance(value, int) else number) if number.is_integer() else _MISSING
            case "number":
                return value if isinstance(value, (int, float)) else float(value)
            case "string":
                # A number may be a time, and what JSON has no words for is a text there. Which, the format tells.
                return _MISSING if value is None or isinstance(value, (bool, list, tuple, Mapping)) else value
            case _:
                return value
    except (TypeError, ValueError, OverflowError):
        return _MISSING


def _bounds(kind: str, value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if isinstance(value, (int, float)) and kind in ("integer", "number"):
        for name, (said, holds) in _BOUNDS.items():
            if name in schema and not holds(value, schema[name]):
                yield f"{where!r}={value!r} does not fit: it has to be {said} {schema[name]}"
    if kind == "string" and isinstance(value, (int, float)) and "format" not in schema:
        yield f"{where!r}={value!r} does not fit: string is taken"
    elif kind in _SIZES and isinstance(value, (str, list, tuple, Mapping)):
        for name, said in _SIZES[kind]:
            if name in schema and (len(value) < schema[name] if name.startswith("min") else len(value) > schema[name]):
                yield f"{where or 'params'!r}={value!r:.200} does not fit: its length has to be {said} {schema[name]}"
    if isinstance(value, str) and isinstance(pattern := schema.get("pattern"), str) and not _matches(pattern, value):
        yield f"{where!r}={value!r:.200} does not match {pattern!r}"


def _matches(pattern: str, value: str) -> bool:
    try:
        return re.search(pattern, value) is not None
    except re.error:  # of another dialect
        return True


def _told(ways: list[Schema], root: Schema) -> str:
    """Name the types of several alternatives, as far as they have names."""
    found = [_resolved(way["$ref"], root) if isinstance(way, Mapping) and "$ref" in way else way for way in ways]
    return " or ".join(str(way.get("title") or way.get("type", "…")) for way in found if isinstance(way, Mapping))
