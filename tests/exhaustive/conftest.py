"""A walk through a model, on a database of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Protocol

import pytest
from pymongo import MongoClient

from tests.exhaustive.explorer import Explored, Explorer, Model


class Explore(Protocol):
    """Walk through a model, to its end or until a promise is broken."""

    async def __call__(self, model: Model, until_broken: str | None = None) -> Explored:
        """Return what was found."""


@pytest.fixture
def explore(mongo_uri: str) -> Iterator[Explore]:
    prefix = f"test_{uuid.uuid4().hex[:12]}"
    with MongoClient[dict[str, Any]](mongo_uri, tz_aware=True) as client:

        async def walk(model: Model, until_broken: str | None = None) -> Explored:
            database = f"{prefix}_{uuid.uuid4().hex[:6]}"
            return await Explorer(mongo_uri, database, client[database], model).explore(until_broken)

        yield walk
        for name in client.list_database_names():
            if name.startswith(prefix):
                client.drop_database(name)
