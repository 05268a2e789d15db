"""A call of ours that is cancelled, at whatever point, leaves PyMongo's client usable, and PyMongo as it was."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

from taskmesh import Task, TaskMesh
from taskmesh.store import Store
from taskmesh.store.change_stream import Interest, open_stream
from taskmesh.store.mongodb.driver import core_of
from taskmesh.store.mongodb.uncut import CLOSE_DEADLINE_S
from tests.waiting import eventually

_LOOKED_AT = """
import sys, asyncio, pkgutil, importlib, pymongo, motor, motor.motor_asyncio, bson
import pymongo.asynchronous, pymongo.synchronous
for package in (pymongo, pymongo.asynchronous, pymongo.synchronous):
    for module in pkgutil.iter_modules(package.__path__):
        try:
            importlib.import_module(f"{package.__name__}.{module.name}")
        except ImportError:  # of what is not installed here
            pass

def seen():
    names = [n for n in sys.modules if n.partition(".")[0] in ("pymongo", "motor", "asyncio", "bson", "gridfs")]
    return {name: dict(vars(sys.modules[name])) for name in names}

def changes(before):
    for name, old in before.items():
        for attribute, value in vars(sys.modules[name]).items():
            if attribute not in old or old[attribute] is not value:
                yield f"{name}.{attribute}"

before = seen()
import taskmesh, taskmesh.store, taskmesh.consumer
print([change for change in changes(before) if not change.endswith(".__warningregistry__")])
"""


def test_import_taskmesh_changes_nothing_in_pymongo_motor_and_asyncio() -> None:
    told = subprocess.run([sys.executable, "-c", _LOOKED_AT], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


async def test_calls_that_are_cancelled_while_they_wait_for_a_connection_leave_the_client_usable(
    mongo_uri: str, database: str
) -> None:
    """With one connection for all, each has to wait for PyMongo's lock; a lock that is left taken stops everything after it."""
    chance = random.Random(7)
    async with TaskMesh(f"{mongo_uri}&maxPoolSize=1&waitQueueTimeoutMS=20000", database=database) as mesh:
        for _ in range(20):
            calls = [asyncio.create_task(_first_of_nobody(mesh)) for _ in range(20)]
            for call in calls:
                await asyncio.sleep(chance.random() * 0.001)  # so that it hits at any await
                call.cancel()
            ended, pending = await asyncio.wait(calls, timeout=20.0)
            assert not pending, "a cancellation was lost"
            assert all(call.cancelled() or call.result() is None for call in ended)
        async with asyncio.timeout(20):
            assert [task async for task in mesh.find("nobody")] == []


async def test_a_connect_that_is_cancelled_closes_its_socket() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as full:
        for _ in range(4):  # so that the next connection waits
            waiting = full.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        port = server.getsockname()[1]
        uri = f"mongodb://127.0.0.1:{port}/?connectTimeoutMS=300&serverSelectionTimeoutMS=300"
        connecting = asyncio.create_task(TaskMesh(uri).connect())
        await asyncio.wait([connecting], timeout=0.1)
        connecting.cancel()
        await asyncio.wait([connecting], timeout=20.0)
        assert connecting.cancelled()
        del connecting
        gc.collect()  # "unclosed <socket …>" would be raised here


async def test_what_a_cancelled_call_opens_is_closed(mongo_uri: str, database: str) -> None:
    store = Store(AsyncMongoClient[Any](mongo_uri), database)
    await store.driver.collection("numbers").insert_many([{"n": n} for n in range(1_000)])
    before = await _open_cursors(store)

    async def cursor() -> None:
        found = await store.driver.aggregate("numbers", [{"$match": {}}], batchSize=2)
        await found.to_list(3)
        await found.close()

    async def stream() -> None:
        await (await open_stream(store, Interest(events=True))).close()

    chance = random.Random(8)
    for opening in (cursor, stream):
        for _ in range(20):
            task = asyncio.create_task(opening())
            await asyncio.sleep(chance.random() * 0.003)  # so that it hits at any await
            task.cancel()
            await asyncio.wait([task], timeout=20.0)
            assert task.cancelled() or task.exception() is None
    await store.close()  # waits for what goes on alone

    async def is_as_before() -> bool:
        return await _open_cursors(store) <= before

    await eventually(is_as_before, what="cursors are as before")
    await store.driver.close()


async def test_a_read_of_a_stream_that_waits_holds_up_nobody_who_closes_it(mongo_uri: str, database: str) -> None:
    store = Store(AsyncMongoClient[Any](mongo_uri), database)
    before = await _open_cursors(store)
    stream = await open_stream(store, Interest(events=True), await_ms=600_000)
    reading = asyncio.create_task(stream.try_next())
    await eventually(lambda: _is_read(store), what="it reads")
    reading.cancel()
    async with asyncio.timeout(CLOSE_DEADLINE_S):
        await asyncio.wait([reading])
        await stream.close()
        await store.close()

    async def is_closed() -> bool:
        return await _open_cursors(store) <= before

    await eventually(is_closed)
    await store.driver.close()


@pytest.mark.parametrize("client_class", [AsyncMongoClient, AsyncIOMotorClient])
async def test_a_write_that_is_cancelled_in_a_transaction_is_undone_with_it(
    mongo_uri: str, database: str, client_class: Any
) -> None:
    """It waits for the client's only connection when it is cancelled, and the end of the transaction must not overtake it."""
    client = client_class(mongo_uri, maxPoolSize=1)
    driver = Store(client, database).driver
    await driver.command({"create": "notes"})
    (server,) = core_of(client)._topology._servers.values()
    count = server.pool.operation_count
    sleeping = asyncio.ensure_future(client.admin.command({"sleep": 1, "lock": "none", "millis": 2_000}))
    await eventually(lambda: server.pool.operation_count == count + 1)
    async with driver.session() as session:
        await driver.start_transaction(session)
        writing = asyncio.create_task(driver.command({"insert": "notes", "documents": [{}]}, session))
        await eventually(lambda: server.pool.operation_count == count + 2, what="the write waits for the connection")
        writing.cancel()
        await asyncio.wait([writing])
        assert writing.cancelled()
        await driver.abort(session)
        await sleeping
        await driver.calls.ended(20.0)
    assert await driver.collection("notes").count_documents({}) == 0
    if client_class is AsyncIOMotorClient:
        await asyncio.to_thread(core_of(client).close)  # it would block the event loop
    else:
        await client.close()


async def _first_of_nobody(mesh: TaskMesh) -> Task | None:
    return await anext(mesh.find("nobody"), None)


async def _open_cursors(store: Store) -> int:
    status = await store.driver.admin({"serverStatus": 1})
    return int(status["metrics"]["cursor"]["open"]["total"])


async def _is_read(store: Store) -> bool:
    ours = {"$match": {"op": "getmore", "ns": {"$regex": f"^{store.driver.database.name}[.]"}}}
    reply = await store.driver.admin({"aggregate": 1, "pipeline": [{"$currentOp": {}}, ours], "cursor": {}})
    return bool(reply["cursor"]["firstBatch"])
