"""Values as JSON: params and results may be anything that MongoDB stores."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from types import NoneType
from typing import Any

from pydantic import BaseModel

_LARGEST_EXACT = 2**53


def jsonable(value: Any, *, for_javascript: bool = False) -> Any:
    """Return the value in JSON's types. Others become texts: times in ISO 8601, bytes in base64; durations in seconds.

    `for_javascript`: integers beyond 2**53 become texts, since a browser would round them, and times look like its own.
    """
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {_text(str(name)): jsonable(each, for_javascript=for_javascript) for name, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(each, for_javascript=for_javascript) for each in value]
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, datetime):
        return _moment(value, for_javascript=for_javascript)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    too_large = for_javascript and isinstance(value, int) and abs(value) > _LARGEST_EXACT
    if too_large or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value if isinstance(value, (int, float, bool, NoneType)) else _text(str(value))


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text


def _moment(value: datetime, *, for_javascript: bool) -> str:
    moment = value if value.tzinfo else value.replace(tzinfo=UTC)
    if for_javascript:
        return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return moment.isoformat()


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return the value as JSON text for browsers and for programs in any language."""
    return json.dumps(jsonable(value, for_javascript=True), ensure_ascii=False, allow_nan=False, indent=indent)
