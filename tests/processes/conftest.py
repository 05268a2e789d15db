"""What the tests with several processes share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.collection import Collection

from taskmesh import TaskMesh
from tests.processes.fleet import Fleet
from tests.processes.handlers import Handlers, define


@pytest.fixture
def fleet(mongo_uri: str, database: str, tmp_path: Path) -> Iterator[Fleet]:
    """Worker processes on the test's database; those that are left are killed."""
    with Fleet(mongo_uri, database, tmp_path / "fleet") as workers:
        yield workers


@pytest.fixture
async def mesh(mongo_uri: str, database: str) -> AsyncIterator[TaskMesh]:
    """A connected mesh of this process, to publish with and to look."""
    async with TaskMesh(mongo_uri, database=database) as connected:
        yield connected


@pytest.fixture
async def handlers(mesh: TaskMesh) -> Handlers:
    """The definitions of the tasks that the workers run, for publishing."""
    return define(mesh)


@pytest.fixture
def documents(mongo_uri: str, database: str) -> Iterator[Collection[dict[str, Any]]]:
    """The task documents as they are stored."""
    with MongoClient[dict[str, Any]](mongo_uri, tz_aware=True) as client:
        yield client[database]["tasks"]
