"""What the tests with several processes share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.collection import Collection

from taskmesh import TaskMesh
from tests.processes.handlers import Handlers, define


@pytest.fixture
async def handlers(mesh: TaskMesh) -> Handlers:
    """The definitions of the tasks that the workers run, for publishing."""
    return define(mesh)


@pytest.fixture
def documents(mongo_uri: str, database: str) -> Iterator[Collection[dict[str, Any]]]:
    """The task documents as they are stored."""
    with MongoClient[dict[str, Any]](mongo_uri, tz_aware=True) as client:
        yield client[database]["tasks"]
