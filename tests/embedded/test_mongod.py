from __future__ import annotations

from pathlib import Path

import pytest
from pymongo import MongoClient

from taskmesh.model.errors import EmbeddedUnavailable
from tests.mongod import Mongod
from tests.mongods import ThreeNodes, small_mongod
from tests.waiting import wait_until


def test_the_sessions_server_is_a_primary_with_failpoints(mongod: Mongod, database: str) -> None:
    with MongoClient[dict[str, object]](mongod.uri) as client:
        client[database].things.insert_one({"_id": 1})
        assert client.admin.command("hello")["setName"] == "rs0"
        assert client.admin.command("getParameter", enableTestCommands=1)["enableTestCommands"]


async def test_an_async_test_runs_on_asyncio(anyio_backend_name: str) -> None:
    assert anyio_backend_name == "asyncio"


def test_what_was_acknowledged_survives_a_kill(own_mongod: Mongod) -> None:
    with MongoClient[dict[str, object]](own_mongod.uri) as client:
        client.app.things.insert_one({"_id": 1})
    port = own_mongod.port
    own_mongod.kill()
    assert not own_mongod.running
    own_mongod.start().wait_for_primary()
    assert own_mongod.port == port
    with MongoClient[dict[str, object]](own_mongod.uri) as client:
        assert client.app.things.count_documents({}) == 1


def test_a_suspended_server_answers_again_after_resume(own_mongod: Mongod) -> None:
    own_mongod.suspend()
    own_mongod.resume()
    own_mongod.wait_for_primary()


def test_stop_ends_a_suspended_server(tmp_path: Path) -> None:
    server = small_mongod(tmp_path / "db").start()
    server.suspend()
    server.stop()
    assert not server.running


def test_a_standalone_server_has_no_replica_set(standalone_mongod: Mongod) -> None:
    with MongoClient[dict[str, object]](standalone_mongod.uri) as client:
        assert "setName" not in client.admin.command("hello")
    with pytest.raises(ValueError, match="standalone"):
        standalone_mongod.initiate()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = Mongod(tmp_path / "db", parameters={"noSuchParameter": 1})
    with pytest.raises(EmbeddedUnavailable, match=r"noSuchParameter"):
        server.start()


@pytest.mark.failover
def test_another_member_takes_over_from_a_killed_primary(replica_set: ThreeNodes) -> None:
    primary = replica_set.primary()
    primary.kill()
    assert replica_set.primary() is not primary
    primary.start()
    wait_until(lambda: len(replica_set.secondaries()) == 2)
