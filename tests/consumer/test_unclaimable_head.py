"""T15: tasks that this worker may not have stand before one that it may, and do not starve it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from pymongo import MongoClient

from taskmesh import TaskMesh
from tests.waiting import eventually
from tests.working import finished, parts_of, working

KINDS = ("absent worker", "own retry delay", "done by me", "paused queue")


def _head(template: dict[str, Any], kind: str, number: int) -> dict[str, Any]:
    """A due task of top priority that the worker `me` may not have, made of one that was published."""
    id_ = f"job:{kind}-{number}"
    document = template | {"_id": id_, "key": f"{kind}-{number}", "lane": number % 64}
    option = document["task_option"] = template["task_option"] | {"priority": 10}
    state = document["task_state"] = template["task_state"] | {"worker_states": []}
    entry = {"running_id": f"r-{number}", "worker_id": "me", "start_time": datetime.now(UTC)}
    match kind:
        case "absent worker":
            option["specific_worker_ids"] = ["absent"]
            document["pinned"] = True
        case "own retry delay":
            option |= {"unexpected_retry_delay_scope": "worker", "unexpected_retry_delay_ms": 3_600_000}
            fail = {"state": "FAIL", "fail_time": datetime.now(UTC), "fail_reason": "", "retry_jitter": 0.0}
            state["worker_states"] = [entry | fail]
            document["event"] = "failed\x1f0\x1fme"
        case "done by me":
            option["concurrent_worker_cnt"] = 2
            success = {"state": "SUCCESS", "success_time": datetime.now(UTC), "returns": None}
            state["worker_states"] = [entry | success]
            document["event"] = "succeeded\x1f0\x1fme"
        case "paused queue":
            document["queue"] = "shut"
    return document


def _fill(uri: str, database: str, count: int, kinds: Sequence[str]) -> None:
    with MongoClient[dict[str, Any]](uri, tz_aware=True) as client:
        tasks = client[database]["tasks"]
        template = tasks.find_one_and_delete({"_id": "job:template"}) or {}
        for start in range(0, count, 5_000):
            numbers = range(start, min(count, start + 5_000))
            tasks.insert_many([_head(template, kinds[n % len(kinds)], n) for n in numbers], ordered=False)


@pytest.mark.parametrize("count", [4_000, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.timed
async def test_t15_a_free_task_behind_an_unclaimable_head_starts_at_once(
    mesh: TaskMesh, mongo_uri: str, database: str, count: int
) -> None:
    started = asyncio.Event()

    @mesh.task
    async def job() -> None:
        started.set()

    await job.publish("template")
    await mesh.pause("shut")
    await asyncio.to_thread(_fill, mongo_uri, database, count, KINDS)
    async with working(mesh, "me", concurrency=10):
        await job.configure(priority=-5).publish("free")
        async with asyncio.timeout(20):  # 1 s on a quiet machine
            await started.wait()
        await finished(mesh, "job", "free")
        statuses = (await mesh.stats()).counts["job"]
        assert statuses["INIT"] == count, "the head was left alone"


@pytest.mark.parametrize("count", [3_000, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
async def test_t15_a_free_task_that_stood_there_before_is_found_without_any_event(
    mesh: TaskMesh, mongo_uri: str, database: str, kind: str, count: int
) -> None:
    @mesh.task
    async def job() -> None:
        """Do nothing."""

    await job.publish("template")
    await mesh.pause("shut")
    await asyncio.to_thread(_fill, mongo_uri, database, count, [kind])
    await job.configure(priority=-5).publish("free")
    async with working(mesh, "me", concurrency=10, listen=False):
        await finished(mesh, "job", "free")


@pytest.mark.parametrize("count", [3_000, pytest.param(50_000, marks=pytest.mark.slow)])
async def test_t15_what_on_claim_refuses_does_not_starve_what_it_allows_nor_is_it_tried_again_and_again(
    mesh: TaskMesh, mongo_uri: str, database: str, count: int
) -> None:
    @mesh.task
    async def job() -> None:
        """Do nothing."""

    await job.publish("template")
    await asyncio.to_thread(_fill, mongo_uri, database, count, ["too large"])
    await job.configure(priority=-5).publish("free")
    async with working(mesh, "me", concurrency=10, listen=False, on_claim=lambda _: {"key": "free"}) as consumer:
        await finished(mesh, "job", "free")
        parts = parts_of(consumer)
        scans, tried = parts.scanner.scans, parts.claimer.tried
        began = time.monotonic()
        await eventually(lambda: parts.scanner.scans >= scans + 5)
        assert time.monotonic() - began > 1.5, "there is a pause between scans, soon as long as ever"
        assert parts.claimer.tried == tried
        assert tried < 100


@pytest.mark.parametrize("count", [4_000, pytest.param(50_000, marks=pytest.mark.slow)])
async def test_t15_scanning_an_unclaimable_head_again_and_again_is_cheap(
    mesh: TaskMesh, mongo_uri: str, database: str, count: int
) -> None:
    @mesh.task
    async def job() -> None:
        """Do nothing."""

    await job.publish("template")
    await mesh.pause("shut")
    await asyncio.to_thread(_fill, mongo_uri, database, count, KINDS)
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        profiles = client[database]["system.profile"]
        async with working(mesh, "me", concurrency=10) as consumer:
            await eventually(lambda: parts_of(consumer).scanner.scans >= 3, what="the whole head was read once")
            scans = parts_of(consumer).scanner.scans
            client[database].command("profile", 2)
            await eventually(lambda: parts_of(consumer).scanner.scans >= scans + 5, what="five more scans")
            client[database].command("profile", 0)
            passes = parts_of(consumer).scanner.scans - scans
        examined = sum(
            operation.get("keysExamined", 0)
            for operation in profiles.find({"ns": f"{database}.tasks", "op": {"$in": ["query", "getmore"]}})
        )
    # Passes are counted when they end: one was under way when the profile began. They are made about once a second.
    assert examined / (passes + 1) < 2_000


async def test_with_hundreds_of_queues_no_scan_sorts_the_backlog(mesh: TaskMesh, mongo_uri: str, database: str) -> None:
    """Above about two hundred index ranges in one query the server no longer merges them."""

    @mesh.task
    async def job() -> None:
        """Do nothing."""

    queues = [f"q{n}" for n in range(300)]
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        async with working(mesh, "me", queues=queues) as consumer:
            await job.configure(queue="q299").publish("k")
            client[database].command("profile", 2)
            scans = parts_of(consumer).scanner.scans
            await eventually(lambda: parts_of(consumer).scanner.scans >= scans + 3)
            await finished(mesh, "job", "k")
            client[database].command("profile", 0)
        profiles = client[database]["system.profile"]
        scanned = list(profiles.find({"ns": f"{database}.tasks", "op": "query", "command.sort": {"$exists": True}}))
    assert scanned
    assert not [operation for operation in scanned if operation.get("hasSortStage")]
