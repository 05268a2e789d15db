"""Form fields for the params of a task, from the JSON schema that its workers registered, and params from such fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEXT, _JSON = "params.text.", "params.json."
_INPUTS = {"integer": "number", "number": "number"}


@dataclass(frozen=True, slots=True)
class ParamField:
    """The form field of one param."""

    label: str
    field: str
    """The name of the form's field: it says whether the input is text or JSON."""
    input: str
    """`text`, `password`, `number`, `select` or `json`."""
    required: bool
    hint: str
    choices: tuple[str, ...] = ()


def param_fields(schema: Any) -> list[ParamField] | None:
    """Return the fields for these params, required ones first; None if the schema does not list them."""
    if not isinstance(schema, dict) or not isinstance(properties := schema.get("properties"), dict):
        return None
    required = schema.get("required")
    named = required if isinstance(required, list) else []
    fields = [_field(name, about, name in named) for name, about in properties.items()]
    return sorted(fields, key=lambda field: not field.required)


def _field(name: str, about: Any, required: bool) -> ParamField:
    about = about if isinstance(about, dict) else {}
    any_of = about.get("anyOf")
    options = [option for option in any_of if option != {"type": "null"}] if isinstance(any_of, list) else []
    kind = {**about, **options[0]} if len(options) == 1 and isinstance(options[0], dict) else about
    type_ = kind.get("type")
    default = f"{json.dumps(about['default'], ensure_ascii=False)} if left empty" if "default" in about else ""
    hint = ", ".join(filter(None, [str(about.get("description") or ""), default]))
    choices = kind.get("enum") if isinstance(kind.get("enum"), list) else [True, False] if type_ == "boolean" else []
    if choices:
        return ParamField(name, _JSON + name, "select", required, hint, tuple(json.dumps(each) for each in choices))
    if type_ == "string":
        secret = kind.get("format") == "password" or kind.get("writeOnly")
        return ParamField(name, _TEXT + name, "password" if secret else "text", required, hint)
    return ParamField(name, _JSON + name, _INPUTS.get(str(type_), "json"), required, hint)


def params_from(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the params that these fields contain, and all other fields. Raises `ValueError` for invalid JSON."""
    params: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for field, value in given.items():
        if field.startswith(_TEXT):
            params[field.removeprefix(_TEXT)] = value
        elif field.startswith(_JSON):
            name = field.removeprefix(_JSON)
            try:
                params[name] = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{name} must be JSON, got {value[:100]!r}: {error}") from None
        else:
            rest[field] = value
    return params, rest
