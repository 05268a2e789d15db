"""The recipes of docs/recipes.md work."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient, ReturnDocument

from taskmesh import Retry, Snooze, TaskFailed, TaskMesh, TaskOption, current_task
from tests.docs.examples import examples_in
from tests.docs.running import run

DOCUMENT = "docs/recipes.md"
RECIPES = {example.about: example for example in examples_in(DOCUMENT)}
FILES = {"shop.py", "conftest.py", "pytest.ini", "test_shop.py"}
NAMES = (asyncio, functools, logging, ReturnDocument, Retry, Snooze, TaskFailed, TaskMesh, TaskOption, current_task)


@pytest.fixture
async def client(mongo_uri: str) -> AsyncIterator[AsyncMongoClient[dict[str, Any]]]:
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        yield client


@pytest.fixture
def namespace(client: AsyncMongoClient[dict[str, Any]], database: str) -> Iterator[dict[str, Any]]:
    """What a recipe takes for granted; its own data stands in the same database, which is emptied after the test."""
    given = {"client": client, "mesh": TaskMesh(client, database=database), "shop": client[database]}
    logger = logging.getLogger("taskmesh.executor")
    handlers = list(logger.handlers)
    yield {found.__name__: found for found in NAMES} | given
    logger.handlers = handlers


@pytest.mark.parametrize("recipe", sorted(RECIPES.keys() - FILES - {"periodic"}))
async def test_a_recipe_runs(namespace: dict[str, Any], recipe: str) -> None:
    async with namespace["mesh"]:
        await run(RECIPES[recipe].in_place, namespace, DOCUMENT)


async def test_what_was_published_in_a_transaction_is_there(namespace: dict[str, Any]) -> None:
    async with namespace["mesh"] as mesh:
        await run(RECIPES["session"].in_place, namespace, DOCUMENT)
        assert (await mesh.get("ship", "order-7")).params == {"order": 7}
        assert await namespace["shop"]["orders"].count_documents({}) == 1


async def test_schedules_are_stored_when_the_mesh_connects(namespace: dict[str, Any]) -> None:
    await run(RECIPES["periodic"].in_place, namespace, DOCUMENT)
    async with namespace["mesh"] as mesh:
        found = {schedule.schedule_id: (schedule.name, schedule.cron) for schedule in await mesh.schedules.all()}
    assert found == {
        "clean_up": ("clean_up", "0 3 * * *"),
        "thorough": ("clean_up", "30 4 * * sun"),
        "ping": ("ping", None),
    }


@pytest.mark.slow
def test_the_tests_of_handlers_pass_on_the_mongodb_that_comes_along(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_text(RECIPES[name].text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TASKMESH_", "PYTEST_"))}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "test_shop.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 passed" in ended.stdout
    assert not (tmp_path / ".taskmesh").exists(), "nothing is left beside the tests"
