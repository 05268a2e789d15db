"""Prepared pipelines and projections: those that are the same every time are built and encoded once.

The rule is long. Building and encoding it for each command took the client most of a millisecond, as much as everything else
for thirty tasks. What differs from command to command is passed as variables (`let`), or in stages of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument

from taskmesh.store import rules

Build = Callable[..., Any]


def prepared(build: Build, now: rules.Expression, *arguments: Hashable) -> Any:
    """Return what `build(now, *arguments)` returns, a document or a list of them, ready to be sent.

    For tests, whose `now` is a literal, and for mutants of the rule it is built each time.
    """
    return _encoded(build, *arguments) if now == rules.NOW else build(now, *arguments)


@lru_cache(maxsize=256)
def _encoded(build: Build, *arguments: Hashable) -> Any:
    built = build(rules.NOW, *arguments)
    if isinstance(built, list):
        return [RawBSONDocument(bson.encode(document)) for document in built]
    return RawBSONDocument(bson.encode(built))
