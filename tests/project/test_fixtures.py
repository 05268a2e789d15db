"""The guards that every other test relies on do guard."""

from __future__ import annotations

import pytest
from anyio import to_thread
from blockbuster import BlockingError
from pymongo import AsyncMongoClient, MongoClient

from taskmesh import TaskMesh
from taskmesh.embedded import replica
from tests.databases import Databases, counted


async def test_code_of_ours_that_blocks_the_event_loop_fails_the_test() -> None:
    with pytest.raises(BlockingError):
        replica.wait_for(lambda: False, 0.01)


async def test_blocking_in_a_thread_is_fine() -> None:
    await to_thread.run_sync(replica.wait_for, lambda: True, 0.01)


@pytest.mark.blocks_the_loop
async def test_a_test_may_say_that_it_blocks_the_loop() -> None:
    assert not replica.wait_for(lambda: False, 0.01)


async def test_each_test_has_an_empty_database_that_the_async_driver_reaches(mongo_uri: str, database: str) -> None:
    async with AsyncMongoClient[dict[str, object]](mongo_uri) as client:
        assert await client[database].list_collection_names() == []
        await client[database].things.insert_one({"_id": 1})
        assert await client[database].things.count_documents({}) == 1


async def test_what_a_mesh_makes_is_what_databases_that_are_used_again_have(mesh: TaskMesh, mongo_uri: str) -> None:
    """Else none is, and `make test` takes longer without a word."""
    with MongoClient[dict[str, object]](mongo_uri) as client:
        assert counted(client[mesh.store.driver.database.name]) is not None
        await mesh.store.driver.collection("tasks").insert_one({"_id": "a task of another test"})
        client[mesh.store.driver.database.name]["a test's own"].insert_one({"_id": 1})
        databases = Databases(client)
        for name in (mesh.store.driver.database.name, *(databases.new() for _ in range(8))):
            databases.rest(name)
        assert databases.prepared() == mesh.store.driver.database.name
        assert client[mesh.store.driver.database.name]["tasks"].estimated_document_count() == 0
        assert "a test's own" not in client[mesh.store.driver.database.name].list_collection_names()
