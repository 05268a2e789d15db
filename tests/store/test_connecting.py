"""Connecting: the server is checked, what is missing is created, and what will not do is refused with the remedy."""

from __future__ import annotations

import asyncio
import gc
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient

from taskmesh import IncompatibleCollection, NotAReplicaSet, TaskMesh, TaskMeshError
from taskmesh.store.schema import INDEXES
from tests.mongod import Mongod
from tests.waiting import eventually
from tests.working import working

Tasks = dict[str, Any]


async def test_t23_a_standalone_server_is_refused_at_once_with_the_remedy(standalone_mongod: Mongod) -> None:
    mesh = TaskMesh(standalone_mongod.uri, database="app")
    began = time.monotonic()
    with pytest.raises(NotAReplicaSet, match=r"is a standalone server.*--replSet rs0 and run rs.initiate\(\) once"):
        await mesh.connect()
    assert time.monotonic() - began < 5
    with MongoClient[Tasks](standalone_mongod.uri) as client:
        assert "app" not in client.list_database_names(), "nothing was created there"


# PyMongo leaves a socket to the garbage collector if its client is closed just while it connects.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
async def test_without_a_server_connecting_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    uri = "mongodb://user:secret@127.0.0.1:1/?serverSelectionTimeoutMS=300&replicaSet=rs0"
    message = await _refusal(TaskMesh(uri))
    assert "no MongoDB answers at 127.0.0.1:1: start one, or correct the URI" in message
    assert "secret" not in message
    monkeypatch.setenv("TASKMESH_URI", uri)
    assert await _refusal(TaskMesh()) == message
    gc.collect()


async def _refusal(mesh: TaskMesh) -> str:
    """Why it cannot connect: as a text, which keeps no frame and so no socket alive."""
    with pytest.raises(TaskMeshError) as caught:
        await mesh.connect()
    return str(caught.value)


async def test_what_is_no_client_is_refused() -> None:
    with pytest.raises(TypeError, match="client must be a MongoDB URI"):
        await TaskMesh(17).connect()
    with (
        MongoClient[Tasks]("mongodb://127.0.0.1:1", connect=False) as client,
        pytest.raises(TypeError, match="got MongoClient"),
    ):
        await TaskMesh(client).connect()


async def test_many_meshes_connect_at_once_and_the_indexes_are_there(mongo_uri: str, database: str) -> None:
    meshes = [TaskMesh(mongo_uri, database=database) for _ in range(10)]
    await asyncio.gather(*(mesh.connect() for mesh in meshes))
    await asyncio.gather(*(mesh.close() for mesh in meshes))
    with MongoClient[Tasks](mongo_uri) as client:
        assert set(client[database]["tasks"].index_information()) == {"_id_"} | {f"taskmesh_{n}" for n in INDEXES}
        assert client[database]["meta"].find_one({"_id": "schema"}) is not None


async def test_indexes_of_an_older_release_go_when_its_last_worker_has_gone(mongo_uri: str, database: str) -> None:
    """Workers of both releases run side by side during a deployment, and each finds the indexes that it looks for."""
    with MongoClient[Tasks](mongo_uri) as client:
        tasks, workers = client[database]["tasks"], client[database]["workers"]
        waiting = {"pinned": False, "next_claim_time": {"$exists": True}}
        keys = [("queue", 1), ("name", 1), ("task_option.priority", -1), ("next_claim_time", 1), ("lane", 1)]
        tasks.create_index(keys, name="taskmesh_claimable", partialFilterExpression=waiting)
        workers.insert_one({"_id": "older", "state": "running", "version": "0.1.0", "last_seen": datetime.now(UTC)})
        ours = {"_id_"} | {f"taskmesh_{name}" for name in INDEXES}

        async with TaskMesh(mongo_uri, database=database) as mesh:
            assert set(tasks.index_information()) == ours | {"taskmesh_claimable"}

            @mesh.task
            async def job() -> None: ...

            async with working(mesh, "newer"):  # it needs none of the older indexes, and says so
                await eventually(lambda: workers.count_documents({"_id": "newer"}) == 1, what="it is registered")
                workers.update_one({"_id": "older"}, {"$set": {"state": "stopped"}})
                async with TaskMesh(mongo_uri, database=database):
                    assert set(tasks.index_information()) == ours


async def test_m29_an_index_that_is_in_the_way_is_a_clear_error_at_start(mongo_uri: str, database: str) -> None:
    with MongoClient[Tasks](mongo_uri) as client:
        client[database]["tasks"].create_index([("status", 1)], name="taskmesh_status", unique=True)
        with pytest.raises(IncompatibleCollection, match=r"an index of .*\.tasks is in the way .*drop it"):
            await TaskMesh(mongo_uri, database=database).connect()
        client[database]["tasks"].drop_index("taskmesh_status")
    async with TaskMesh(mongo_uri, database=database) as mesh:
        assert (await mesh.publish("job", "k")).created


@pytest.mark.parametrize("version", [2, 0, "1", None])
async def test_data_of_an_unknown_schema_version_is_refused_untouched(
    mongo_uri: str, database: str, version: object
) -> None:
    with MongoClient[Tasks](mongo_uri) as client:
        client[database]["meta"].insert_one({"_id": "schema", "version": version})
        with pytest.raises(IncompatibleCollection, match=f"has schema version {version!r}, and this"):
            await TaskMesh(mongo_uri, database=database).connect()
        assert client[database].list_collection_names() == ["meta"]


async def test_two_collections_of_one_database_have_nothing_in_common(mongo_uri: str, database: str) -> None:
    one, other = (TaskMesh(mongo_uri, database=database, collection=name) for name in ("tasks", "more"))
    async with one, other:
        assert (await one.publish("job", "k")).created
        assert (await other.publish("job", "k")).created
        assert [task.key async for task in other.find()] == ["k"]


async def test_a_mesh_closes_its_own_connections(mongod: Mongod, database: str) -> None:
    with MongoClient[Tasks](mongod.uri) as client:
        await eventually(lambda: _connections(client) == 0, what="those of the test before are closed")
        async with TaskMesh(mongod.uri, database=database) as mesh:
            await mesh.publish("job", "k")
            assert _connections(client) > 0
        await mesh.close()
        await eventually(lambda: _connections(client) == 0, what="the server has seen the last of them close")
        with pytest.raises(TaskMeshError, match="not connected"):
            await mesh.publish("job", "k")


def _connections(client: MongoClient[Tasks]) -> int:
    found = client.admin.aggregate([{"$currentOp": {"allUsers": True, "idleConnections": True}}])
    return sum(operation.get("appName") == "taskmesh" for operation in found)


async def test_a_look_creates_nothing_until_something_is_published(mongo_uri: str, database: str) -> None:
    mesh = TaskMesh(mongo_uri, database=database)
    mesh.every("job", interval_ms=60_000)
    await mesh.connect(create=False)
    try:
        with MongoClient[Tasks](mongo_uri) as client:
            assert [task async for task in mesh.find()] == []
            assert (await mesh.stats()).counts == {}
            assert client[database].list_collection_names() == []
            assert (await mesh.publish("job", "k")).created
            assert set(client[database]["tasks"].index_information()) == {"_id_"} | {f"taskmesh_{n}" for n in INDEXES}
            assert client[database]["meta"].find_one({"_id": "schema"}) is not None
    finally:
        await mesh.close()


async def test_a_look_refuses_what_it_could_not_list(mongo_uri: str, database: str) -> None:
    with MongoClient[Tasks](mongo_uri) as client:
        client[database]["tasks"].insert_one({"_id": "somebody else's"})
        with pytest.raises(IncompatibleCollection, match=r"lacks taskmesh_.*name another database or collection"):
            await TaskMesh(mongo_uri, database=database).connect(create=False)
        client[database]["meta"].insert_one({"_id": "schema", "version": 7})
        with pytest.raises(IncompatibleCollection, match="has schema version 7"):
            await TaskMesh(mongo_uri, database=database).connect(create=False)


async def test_a_client_in_the_code_wins_over_the_environment_and_says_so_once(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TASKMESH_URI", "mongodb://ann:s3cret@127.0.0.1:1/")
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(mongo_uri, tz_aware=True)
    for given in (mongo_uri, client):
        caplog.clear()
        async with TaskMesh(given, database=database) as mesh:
            await mesh.stats()
        (told,) = [record.getMessage() for record in caplog.records if "TASKMESH_URI" in record.getMessage()]
        assert told.endswith("and not to 127.0.0.1:1, which TASKMESH_URI names")
    await client.close()
    caplog.clear()
    monkeypatch.setenv("TASKMESH_URI", mongo_uri)
    async with TaskMesh(mongo_uri, database=database):
        assert not [record for record in caplog.records if "TASKMESH_URI" in record.getMessage()]
