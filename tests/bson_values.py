"""Values that a MongoDB document can hold, as hypothesis makes them, and how they come back."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from bson import ObjectId, Regex, Timestamp
from hypothesis import strategies as st

TRICKY_TEXTS = [
    "",
    "$",
    "$$NOW",
    "$$ROOT",
    "$$REMOVE",
    "$set",
    "$literal",
    "$where",
    "a.b",
    ".",
    "$.a",
    "task_state.worker_states",
    "__proto__",
    "ünïcödé 🦜 \u202e",
    "\x1f",
    "\r\n\t",
]

texts = st.sampled_from(TRICKY_TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = texts.filter(lambda name: "\0" not in name)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.sampled_from([2**31, -(2**31) - 1, 2**63 - 1, -(2**63)])
    | st.floats()
    | texts
    | st.binary(max_size=20)
    | st.datetimes(min_value=datetime(1, 1, 2), max_value=datetime(9999, 12, 30))  # noqa: DTZ001  # naive ones are part of the test
    | st.datetimes(
        min_value=datetime(1, 1, 2),  # noqa: DTZ001  # hypothesis adds the zone
        max_value=datetime(9999, 12, 30),  # noqa: DTZ001  # likewise
        timezones=st.timezones(),
    )
    | st.decimals(places=6, min_value=Decimal(-(10**20)), max_value=10**20)
    | st.sampled_from([Decimal("NaN"), Decimal("Infinity"), Decimal("-0"), Decimal("1E-6000"), Decimal("9.99E+6000")])
    | st.uuids()
    | st.builds(ObjectId)
    | st.sampled_from([Regex("^a.*$", "i"), Timestamp(1_700_000_000, 3)])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


def as_it_comes_back(value: Any) -> Any:
    """What MongoDB's types make of a value, in a form that compares exactly: `1`, `1.0` and `True` differ, NaN is NaN."""
    if isinstance(value, dict):
        return {name: as_it_comes_back(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_it_comes_back(part) for part in value]
    if isinstance(value, datetime):
        aware = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        return "datetime", aware.replace(microsecond=aware.microsecond // 1000 * 1000)
    if isinstance(value, float):
        return "float", "nan" if math.isnan(value) else (value, math.copysign(1, value))
    if isinstance(value, Decimal):
        return "Decimal", str(value)
    return type(value).__name__, value
