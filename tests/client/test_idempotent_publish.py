"""However many publish one key, however often: one task, one `created`, no error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import ExecutionTimeout

import taskmesh.client.publisher
import taskmesh.store.publish
from benchmarks.commands import Commands
from taskmesh import TaskMesh, TaskMeshError
from taskmesh.model.configuration import Configuration
from tests import warm
from tests.waiting import eventually, slowness_of_the_machine, wait_until


async def test_t36_a_thousand_publishes_at_once_create_one_task(mesh: TaskMesh) -> None:
    @mesh.task
    async def job(n: int) -> int:
        return n

    handles = await asyncio.gather(*(job.publish("the key", n=n) for n in range(1000)))

    winners = [n for n, handle in enumerate(handles) if handle.created]
    assert len(winners) == 1
    assert not any(handle.updated for handle in handles)
    tasks = [task async for task in mesh.find(params=True)]
    assert [(task.key, task.params) for task in tasks] == [("the key", {"n": winners[0]})]


@pytest.mark.parametrize("processes", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_t36_a_thousand_publishes_from_several_processes_create_one_task(
    mongo_uri: str, database: str, tmp_path: Path, processes: int
) -> None:
    start, errors = tmp_path / "start", tmp_path / "errors"
    words = [mongo_uri, database, str(1_000 // processes), str(start)]
    answers = [tmp_path / f"{number}.answer" for number in range(processes)]
    publishers = [warm.start("publisher", words, stdout=answer, stderr=errors) for answer in answers]
    try:
        wait_until(lambda: all(answer.exists() and answer.read_text() == "ready\n" for answer in answers))
        start.touch()
        assert [publisher.wait(60) for publisher in publishers] == [0] * processes, errors.read_text()
    finally:
        for publisher in publishers:
            publisher.kill()
    created = [int(answer.read_text().split()[1]) for answer in answers]
    assert sorted(created) == [0] * (processes - 1) + [1]
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        assert [task["_id"] for task in client[database]["tasks"].find()] == ["job:the key"]


async def test_many_who_ask_at_once_whether_anybody_lives_read_the_registry_together(
    mongo_uri: str, database: str
) -> None:
    """What a handle's warnings say comes from two aggregations, over workers and over queues."""
    commands = Commands()
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(mongo_uri, event_listeners=[commands], tz_aware=True)
    async with client, TaskMesh(client, database=database) as mesh:
        before = commands.by_name["aggregate"]
        asked = (
            mesh.connection.registry.warnings("job", Configuration(), mesh.clock.now(), found=True) for _ in range(200)
        )
        answers = await asyncio.gather(*asked)
        assert commands.by_name["aggregate"] - before <= 4
    assert all("no worker is alive" in warnings[0] for warnings in answers)


async def test_many_keys_are_published_at_once_with_their_handles_in_order(mesh: TaskMesh) -> None:
    @mesh.task
    async def job(n: int) -> int:
        return n

    await job.publish("key 17", n=-1)
    handles = await job.publish_many({f"key {n}": {"n": n} for n in range(2_500)})

    assert [handle.key for handle in handles] == [f"key {n}" for n in range(2_500)]
    assert [handle.key for handle in handles if not handle.created] == ["key 17"]
    assert (await mesh.get("job", "key 17")).params == {"n": -1}
    assert (await mesh.get("job", "key 2499")).params == {"n": 2499}


@pytest.mark.parametrize("configuration", [{}, {"update_existing_params": True}])
async def test_m28_an_identical_publish_updates_nothing_and_writes_nothing(
    mesh: TaskMesh, mongo_uri: str, database: str, configuration: dict[str, Any]
) -> None:
    @mesh.task
    async def job(n: int) -> int:
        return n

    async def oplog_entries() -> int:
        return await oplog.count_documents({"ns": f"{database}.tasks", "op": {"$ne": "n"}})

    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        oplog, tasks = client["local"]["oplog.rs"], client[database]["tasks"]
        await job.publish("k", n=1)
        before, written = await tasks.find_one({}), await oplog_entries()

        handle = await job.configure(**configuration).publish("k", n=1)

        assert (handle.created, handle.updated) == (False, False)
        assert await tasks.find_one({}) == before
        assert await oplog_entries() == written


async def test_t36_a_key_in_an_open_transaction_is_waited_for_and_created_once(mesh: TaskMesh) -> None:
    @mesh.task
    async def job(n: int) -> int:
        return n

    async with mesh.store.driver.session() as session, await session.start_transaction():
        assert (await job.configure(session=session).publish("k", n=1)).created
        second = asyncio.create_task(job.publish("k", n=2))
        await eventually(lambda: _waits(mesh), what="the second publish waits")
        assert not second.done()

    assert not (await second).created
    assert (await mesh.get("job", "k")).params == {"n": 1}


async def test_t36_a_key_whose_transaction_is_undone_is_created_by_who_waited(mesh: TaskMesh) -> None:
    @mesh.task
    async def job(n: int) -> int:
        return n

    async with mesh.store.driver.session() as session:
        await session.start_transaction()
        await job.configure(session=session).publish("k", n=1)
        second = asyncio.create_task(job.publish("k", n=2))
        await eventually(lambda: _waits(mesh), what="the second publish waits")
        await session.abort_transaction()

    assert (await second).created
    assert (await mesh.get("job", "k")).params == {"n": 2}


@pytest.mark.parametrize("configuration", [{}, {"update_existing_params": True}, {"run_again": True}])
async def test_t36_a_publish_gives_up_at_its_deadline_while_somebodys_transaction_holds_the_key(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, configuration: dict[str, Any]
) -> None:
    @mesh.task
    async def job(n: int) -> int:
        return n

    async with mesh.store.driver.session() as session:
        await session.start_transaction()
        await job.configure(session=session).publish("k", n=1)
        began = time.monotonic()
        async with slowness_of_the_machine(mesh) as slowness:
            with monkeypatch.context() as patch:
                patch.setattr(taskmesh.client.publisher, "PUBLISH_DEADLINE_S", 0.5)
                patch.setattr(taskmesh.client.publisher, "_AFTER_AN_ERROR_S", 0.5)
                patch.setattr(taskmesh.store.publish, "WRITE_DEADLINE_MS", 300)
                with pytest.raises(TaskMeshError, match="'k' waits for somebody's open transaction"):
                    await job.configure(**configuration).publish("k", n=2)
            took_s = time.monotonic() - began
        assert took_s < 5 + slowness.allows.total_seconds()
        await session.abort_transaction()

    assert (await job.publish("k", n=3)).created


async def test_a_publish_that_is_given_up_names_the_transaction_whatever_the_server_says_besides(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    @mesh.task
    async def job() -> None: ...

    await job.publish("first")
    command = mesh.store.driver.command

    async def too_late(what: Mapping[str, Any], session: Any = None) -> dict[str, Any]:
        """Answer as a busy server has done, once in some hundred such cases; no failpoint answers so."""
        if "insert" not in what:
            return await command(what, session)
        said: dict[str, Any] = {"code": 50, "codeName": "MaxTimeMSExpired", "errmsg": "operation exceeded time limit"}
        raise ExecutionTimeout(said["errmsg"], 50, {**said, "ok": 0.0, "writeConcernError": said})

    monkeypatch.setattr(mesh.store.driver, "command", too_late)
    monkeypatch.setattr(taskmesh.client.publisher, "PUBLISH_DEADLINE_S", 0.1)
    monkeypatch.setattr(taskmesh.client.publisher, "_AFTER_AN_ERROR_S", 0.1)
    with pytest.raises(TaskMeshError, match="'k' waits for somebody's open transaction"):
        await job.publish("k")


async def _waits(mesh: TaskMesh) -> bool:
    """Whether an insert of ours hits the write conflict again and again."""
    pipeline: list[dict[str, Any]] = [{"$currentOp": {}}, {"$match": {"op": "insert", "writeConflicts": {"$gt": 0}}}]
    database = mesh.store.driver.client.admin
    return bool(await (await database.aggregate(pipeline)).to_list())
