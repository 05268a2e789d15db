"""A mesh in threads, in a second event loop and after a fork: it works, or says at once what to do (trap T42)."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient

from taskmesh import InvalidOption, Status, TaskDefinition, TaskMesh, TaskMeshError, TaskNotFound
from taskmesh.store.mongodb.driver import maybe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def unconnected(mongo_uri: str, database: str) -> TaskMesh:
    return TaskMesh(mongo_uri, database=database)


@pytest.fixture
def job(unconnected: TaskMesh) -> TaskDefinition[..., Any]:
    @unconnected.task
    async def job(n: int) -> int:
        return n

    return job


async def _publish(mesh: TaskMesh, key: str) -> bool:
    async with mesh:
        return (await mesh.definitions["job"].publish(key, n=1)).created


def test_t42_a_mesh_serves_one_loop_after_another(unconnected: TaskMesh, job: TaskDefinition[..., Any]) -> None:
    assert job.name == "job"
    assert asyncio.run(_publish(unconnected, "k"))
    assert not asyncio.run(_publish(unconnected, "k"))


def test_t42_a_mesh_that_is_connected_in_another_loop_says_so(
    unconnected: TaskMesh, job: TaskDefinition[..., Any]
) -> None:
    first = asyncio.new_event_loop()
    first.run_until_complete(unconnected.connect())
    try:
        with pytest.raises(TaskMeshError, match="connected in another event loop: connect it in the one that uses it"):
            asyncio.run(_first_publish(job))
        assert first.run_until_complete(job.publish("k", n=1)).created
    finally:
        first.run_until_complete(unconnected.close())
        first.close()


async def _first_publish(job: TaskDefinition[..., Any]) -> None:
    await job.publish("k", n=1)


async def test_a_mesh_that_is_not_connected_says_so(unconnected: TaskMesh, job: TaskDefinition[..., Any]) -> None:
    with pytest.raises(TaskMeshError, match="this mesh is not connected: use it inside `async with mesh:`"):
        await job.publish("k", n=1)
    consumer = unconnected.consumer()
    for attempt in (
        lambda: unconnected.pause("default"),
        lambda: unconnected.schedules.pause("s"),
        unconnected.stats,
        unconnected.events,
        consumer.events,
    ):
        with pytest.raises(TaskMeshError, match="this mesh is not connected: use it inside `async with mesh:`"):
            await attempt()
    async with unconnected:
        with pytest.raises(TaskMeshError, match="connected already"):
            await unconnected.connect()


def test_t42_publish_sync_works_from_threads(job: TaskDefinition[..., Any], mongo_uri: str, database: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        handles = list(threads.map(lambda n: job.publish_sync(f"k{n % 25}", n=n), range(100)))
    assert sum(handle.created for handle in handles) == 25
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        assert client[database]["tasks"].count_documents({}) == 25
    job.publisher.close_sync()


def test_get_sync_reads_what_was_published_from_any_thread(
    job: TaskDefinition[..., Any], unconnected: TaskMesh
) -> None:
    job.publish_sync("k", n=1)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: unconnected.get_sync(job.name, "k"), range(8)))
    assert [(task.status, task.params) for task in found] == [(Status.INIT, {"n": 1})] * 8
    with pytest.raises(TaskNotFound):
        unconnected.get_sync(job.name, "none")
    unconnected.publisher.close_sync()


async def test_publish_sync_beside_a_connected_mesh_is_closed_with_it(
    unconnected: TaskMesh, job: TaskDefinition[..., Any]
) -> None:
    async with unconnected:
        assert (await asyncio.to_thread(job.publish_sync, "k", n=1)).created
        assert not (await job.publish("k", n=2)).created


def test_publish_sync_in_the_transaction_of_a_blocking_client_comes_with_its_commit(
    job: TaskDefinition[..., Any], unconnected: TaskMesh, mongo_uri: str, database: str
) -> None:
    job.publish_sync("first", n=0)
    with MongoClient[dict[str, Any]](mongo_uri) as client, client.start_session() as session:
        orders = client[database]["orders"]
        for key, commit in (("kept", True), ("undone", False)):
            session.start_transaction()
            orders.insert_one({"_id": key}, session=session)
            assert job.configure(session=session).publish_sync(key, n=1).created
            with pytest.raises(TaskNotFound):
                unconnected.get_sync(job.name, key)
            session.commit_transaction() if commit else session.abort_transaction()
        assert [order["_id"] for order in orders.find()] == ["kept"]
    assert unconnected.get_sync(job.name, "kept").params == {"n": 1}
    with pytest.raises(TaskNotFound):
        unconnected.get_sync(job.name, "undone")
    unconnected.publisher.close_sync()


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("kind", [AsyncMongoClient, AsyncIOMotorClient])
async def test_publish_sync_takes_no_session_of_an_async_client(
    job: TaskDefinition[..., Any], mongo_uri: str, kind: Any, *, connected: bool
) -> None:
    client = kind(mongo_uri)
    if connected:
        await client.admin.command("ping")
    session = await maybe(client.start_session())
    try:
        await maybe(session.start_transaction())
        with pytest.raises(InvalidOption, match=r"publish_sync takes the session of a blocking client.*await publish"):
            await asyncio.to_thread(job.configure(session=session).publish_sync, "k", n=1)
        with pytest.raises(TaskNotFound):
            await asyncio.to_thread(job.publisher.get_sync, "job", "k")
    finally:
        await asyncio.to_thread(job.publisher.close_sync)
        await maybe(session.end_session())
        await maybe(client.close())


@pytest.mark.parametrize("driver", [AsyncMongoClient, AsyncIOMotorClient])
async def test_publish_sync_works_beside_a_client_that_was_passed_in(
    mongo_uri: str, database: str, driver: Any
) -> None:
    client = driver(mongo_uri)
    mesh = TaskMesh(client, database=database)

    @mesh.task
    async def work(n: int) -> int:
        return n

    async with mesh:
        assert (await asyncio.to_thread(work.publish_sync, "k", n=1)).created
        assert not (await work.publish("k", n=2)).created
    assert (await client.admin.command("ping"))["ok"] == 1, "the client is the caller's to close"
    closing = client.close()
    if inspect.isawaitable(closing):
        await closing


# PyMongo leaves a socket to the garbage collector if its client is closed just while it connects.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
def test_publish_sync_without_a_server_says_so_each_time() -> None:
    mesh = TaskMesh("mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=100")

    @mesh.task
    async def work() -> None: ...

    def refusal() -> str:
        with pytest.raises(TaskMeshError) as caught:
            work.publish_sync("k")
        return str(caught.value)

    assert "no MongoDB answers at 127" in refusal()
    assert "no MongoDB answers at 127" in refusal()
    mesh.publisher.close_sync()
    gc.collect()


async def test_publish_sync_inside_a_loop_says_what_to_use(
    unconnected: TaskMesh, job: TaskDefinition[..., Any]
) -> None:
    async with unconnected:
        with pytest.raises(RuntimeError, match="publish_sync would block the running event loop: use `await`"):
            job.publish_sync("k", n=1)


def test_t42_after_a_fork_the_child_publishes_and_the_parent_goes_on(mongo_uri: str, database: str) -> None:
    """In a process of its own, as a web server does it: used, then forked."""
    script = textwrap.dedent("""
        import asyncio, json, os, sys, warnings
        from threading import Thread
        from taskmesh import TaskMesh, TaskMeshError

        mesh = TaskMesh(sys.argv[1], database=sys.argv[2])

        @mesh.task
        async def job(n: int) -> int:
            return n

        async def inherited():
            try:
                await job.publish("inherited", n=1)
            except TaskMeshError as error:
                return str(error)

        unconnected = TaskMesh(sys.argv[1], database=sys.argv[2])

        async def connected_anew(key):
            async with unconnected:
                return (await unconnected.publish("job", key, {"n": 1})).created

        def from_threads(*keys):
            made = []
            threads = [Thread(target=lambda key=key: made.append(job.publish_sync(key, n=1).created)) for key in keys]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            return sum(made)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(mesh.connect())
        answers = {"parent": job.publish_sync("parent", n=1).created}
        answers["parent's threads"] = from_threads(*4 * ["t1", "t2", "t3"])
        answers["connected before"] = asyncio.run(connected_anew("connected before"))
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python and PyMongo warn of forks with threads, rightly
            child = os.fork()
            if child == 0:
                asyncio.set_event_loop(None)
                found = {"child": job.publish_sync("child", n=2).created}
                found["known key"] = job.publish_sync("parent", n=2).created
                found["child's threads"] = from_threads("t1", "t4")
                found["connected anew"] = asyncio.run(connected_anew("connected anew"))
                found["inherited"] = asyncio.new_event_loop().run_until_complete(inherited())
                os.write(writer, json.dumps(found).encode())
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        answers |= json.loads(os.read(reader, 10_000))
        answers["connected after"] = asyncio.run(connected_anew("connected after"))
        answers["after"] = job.publish_sync("after", n=3).created
        mesh.publisher.close_sync()
        answers["after closing"] = job.publish_sync("after", n=4).created
        loop.run_until_complete(mesh.close())
        print(json.dumps(answers))
        sys.stdout.flush()
        os._exit(0)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, mongo_uri, database],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    inherited = answers.pop("inherited")
    assert answers == {
        "parent": True,
        "parent's threads": 3,
        "connected before": True,
        "child": True,
        "known key": False,
        "child's threads": 1,
        "connected anew": True,
        "connected after": True,
        "after": True,
        "after closing": False,
    }
    assert "connected before a fork: connect it again in the child, or use `publish_sync`" in inherited
