"""The code of docs/migrating.md runs, and its commands are taken."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from pymongo import AsyncMongoClient

from taskmesh import Retry, TaskMesh, TaskOption, current_task
from tests.cli.shell import Shell
from tests.docs.examples import examples_in
from tests.docs.running import run
from tests.working import working

DOCUMENT = "docs/migrating.md"
EXAMPLES = {example.about: example for example in examples_in(DOCUMENT)}


@pytest.fixture
async def namespace(mesh: TaskMesh) -> AsyncIterator[dict[str, Any]]:
    given: dict[str, Any] = {found.__name__: found for found in (Retry, TaskOption, current_task)} | {"mesh": mesh}
    yield given
    if "app" in given:
        await anyio.to_thread.run_sync(given["app"].close)


async def test_celerys_calls_and_new_ones(mesh: TaskMesh, namespace: dict[str, Any]) -> None:
    await run(EXAMPLES["celery"].in_place, namespace, DOCUMENT)
    async with working(mesh):
        assert await anyio.to_thread.run_sync(namespace["old_code"]) == [5, 4, 5, 6, [1, 2]]
        await run(EXAMPLES["new"].in_place, namespace, DOCUMENT)
        assert await namespace["handle"].result(60) == 5
    assert (await mesh.get("shop.add", "sum-7")).queue == "slow"


async def test_arqs_and_rqs_way(mesh: TaskMesh, namespace: dict[str, Any]) -> None:
    await run(EXAMPLES["arq"].in_place, namespace, DOCUMENT)
    await run(EXAMPLES["rq"].in_place, namespace, DOCUMENT)
    assert await anyio.to_thread.run_sync(namespace["view"]) == "2026-11"
    async with working(mesh):
        assert await namespace["handle"].result(60) == len("https://example.com")
        assert await (await mesh.publish("render", "2026-11", {"month": ""})).result(60) == "report of 2026-11"
    await anyio.to_thread.run_sync(mesh.publisher.close_sync)


@pytest.mark.parametrize("peer", ["agenda", "mscheduler"])
async def test_the_commands(taskmesh: Shell, mongo_uri: str, database: str, peer: str) -> None:
    jobs: dict[str, dict[str, Any]] = {
        "agenda": {"_id": 1, "name": "send email", "data": {"to": "ann"}, "nextRunAt": None, "lockedAt": None},
        "mscheduler": {"_id": 1, "key": "k", "params": "a.png"},
    }
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        [now] = [reply["localTime"] for reply in [await client.admin.command("hello")]]
        option = {
            "ping_interval_ms": 1,
            "worker_timeout_ms": 5,
            "max_unexpected_retries": 1,
            "concurrent_worker_cnt": 1,
        }
        state = {"create_time": now, "start_time": now, "worker_states": []}
        fields = {"nextRunAt": now} if peer == "agenda" else {"task_option": option, "task_state": state}
        await client[database]["jobs"].insert_one(jobs[peer] | fields)
    told = []
    for command, _ in EXAMPLES[peer].commands:
        words = re.sub(r"app\.\w+", f"{database}.jobs", command.removeprefix("taskmesh "))
        told.append(taskmesh.done(*(word.strip('"') for word in re.findall(r'"[^"]*"|\S+', words))).out)
    name = {"agenda": "send_email agenda-1", "mscheduler": "resize k"}[peer]
    assert told[0].startswith(f"would move 1 to {name}\n")
    assert told[1].startswith(f"moved 1 to {name}\n")
