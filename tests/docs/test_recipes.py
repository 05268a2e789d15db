"""The recipes of docs/recipes.md work."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from bson.codec_options import CodecOptions
from pymongo import AsyncMongoClient, ReturnDocument
from pymongo.asynchronous.encryption import AsyncClientEncryption

from taskmesh import Retry, Snooze, TaskFailed, TaskMesh, TaskOption, current_task
from tests.docs.examples import examples_in
from tests.docs.running import run

DOCUMENT = "docs/recipes.md"
RECIPES = {example.about: example for example in examples_in(DOCUMENT)}
NAMES = (
    AsyncClientEncryption,
    CodecOptions,
    asyncio,
    functools,
    logging,
    os,
    ReturnDocument,
    Retry,
    Snooze,
    TaskFailed,
    TaskMesh,
    TaskOption,
    current_task,
)


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
    yield {found.__name__: found for found in NAMES} | given | {"Any": Any}
    logger.handlers = handlers


@pytest.mark.parametrize("recipe", sorted(RECIPES.keys() - {"periodic"}))
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
