"""Pipelines and projections that are the same every time: built and encoded once.

The rule is long. To build and encode it anew for each command took the client most of a millisecond, as much as all else
that it does for thirty tasks. What differs from command to command goes in as variables (`let`) or in stages of its own.
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
    """Return what `build(now, *arguments)` does, a document or a list of them, ready to be sent.

    Tests, whose `now` is a literal, and mutants of the rule get it built anew each time.
    """
    return _encoded(build, *arguments) if now == rules.NOW else build(now, *arguments)


@lru_cache(maxsize=256)
def _encoded(build: Build, *arguments: Hashable) -> Any:
    built = build(rules.NOW, *arguments)
    if isinstance(built, list):
        return [RawBSONDocument(bson.encode(document)) for document in built]
    return RawBSONDocument(bson.encode(built))
