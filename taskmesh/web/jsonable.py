"""Values as JSON: what users keep in params and results may be anything that MongoDB stores."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Any

from pydantic import BaseModel

_LARGEST_EXACT = 2**53


def jsonable(value: Any) -> Any:
    """Return the value in JSON's types; what JSON does not know, as a text that a person understands."""
    if value is None or isinstance(value, (bool, str)):
        return _clean(value) if isinstance(value, str) else value
    if isinstance(value, Enum):
        return jsonable(value.value)
    if isinstance(value, int):
        return value if -_LARGEST_EXACT <= value <= _LARGEST_EXACT else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        moment = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, BaseModel):
        return {name: jsonable(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {_clean(str(name)): jsonable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return str(value)
    return _clean(str(value))


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return the value as JSON text."""
    return json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False, indent=indent)


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
