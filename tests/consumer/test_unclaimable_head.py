"""T15: tasks that this worker may not have stand before one that it may, and do not starve it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import MongoClient

from taskmesh import TaskDefinition, TaskMesh, TaskOption, current_task
from taskmesh.consumer import scanner
from taskmesh.store.find import OpenScan, Page
from tests.faults import another_mesh
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
        case "done by me" | "done by me, named":
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


async def test_all_that_stands_behind_is_read_although_a_cursor_was_lost(
    mesh: TaskMesh, mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a failover, or ten minutes without a look. The driver then returns no more rows, as if that were the end."""
    monkeypatch.setattr(scanner, "_READ_BEHIND_S", 3_600.0)
    monkeypatch.setattr(scanner, "_OVERLAP", timedelta())  # what was published a moment ago would be found at once

    @mesh.task
    async def job() -> None:
        """Do nothing."""

    await job.publish("template")
    await asyncio.to_thread(_fill, mongo_uri, database, 4_000, ["own retry delay"])
    await job.configure(priority=-5).publish("free")
    killed: list[int] = []
    original = OpenScan.next_page

    async def read_and_lose(self: OpenScan) -> Page:
        page = await original(self)
        if not killed and self.limit == scanner._PAGE_OF_REFUSED:
            killed.append(self.cursor.cursor_id)
            await self.store.driver.client[database].command("killCursors", "tasks", cursors=killed)
        return page

    monkeypatch.setattr(OpenScan, "next_page", read_and_lose)
    async with working(mesh, "me", concurrency=10, listen=False) as consumer:
        await finished(mesh, "job", "free")
        assert killed
        assert parts_of(consumer).scanner.scans < 5, "it is not read page by page, one in each pass"
    assert "taskmesh.scanner" not in {record.name for record in caplog.records}, "nobody has to act"


async def test_tasks_that_name_a_worker_are_found_behind_those_that_it_has_done(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    """As with broadcasts: each waits for another worker that it names, too."""

    @mesh.task(option=TaskOption(specific_worker_ids=("me", "absent"), concurrent_worker_cnt=2))
    async def job() -> None:
        """Do nothing."""

    await job.publish("template")
    await asyncio.to_thread(_fill, mongo_uri, database, 3_000, ["done by me, named"])
    await job.configure(priority=-5).publish_many({f"k{n}": {} for n in range(20)})
    async with working(mesh, "me", concurrency=10, listen=False) as consumer:
        await eventually(lambda: consumer.finished == 20)
        await eventually(lambda: not parts_of(consumer).candidates.unread, what="it has looked at all")


async def test_a_worker_with_room_takes_from_busy_ones_what_stands_behind_tasks_that_nobody_may_have(
    mesh: TaskMesh, mongo_uri: str
) -> None:
    go_on = asyncio.Event()
    done: set[str] = set()

    def define(one: TaskMesh) -> TaskDefinition[[], None]:
        @one.task
        async def job() -> None:
            if current_task().key.startswith("long"):
                await go_on.wait()
            done.add(current_task().key)

        return job

    job = define(mesh)
    await job.configure(needs={"gpu": True}).publish_many({f"front{n}": {} for n in range(300)})
    for busy in ("b", "c"):
        await job.configure(specific_worker_ids=(busy,)).publish(f"long {busy}")
    async with AsyncExitStack() as fleet:
        consumers = []
        for worker_id in ("a", "b", "c"):
            of_worker = await fleet.enter_async_context(another_mesh(mongo_uri, mesh.connection.database, worker_id))
            define(of_worker)
            size = 50 if worker_id == "a" else 1
            consumers.append(await fleet.enter_async_context(working(of_worker, worker_id, concurrency=size)))
        await eventually(lambda: all(len(parts_of(each).registration.fleet) == 3 for each in consumers))
        await eventually(lambda: all(each.running for each in consumers[1:]), what="two are busy")
        await job.publish_many({f"k{n}": {} for n in range(60)})
        await eventually(lambda: len(done) == 60, what="the third does all, also what is in their lanes")
        go_on.set()


async def test_what_comes_due_behind_tasks_that_nobody_may_have_is_found(mesh: TaskMesh) -> None:
    """It is told of by no event: who listens is told of what is due soon."""

    @mesh.task
    async def job() -> None:
        """Do nothing."""

    await job.configure(needs={"gpu": True}, priority=5).publish_many({f"front{n}": {} for n in range(3_000)})
    delayed = await job.configure(delay_ms=7_500).publish("delayed")
    due = (await delayed.task()).next_claim_time
    assert due is not None
    async with working(mesh, "me") as consumer:
        await eventually(lambda: mesh.clock.now() > due)
        scanner = parts_of(consumer).scanner
        before = scanner.scans
        await delayed.result(60)
        assert scanner.scans - before <= 6, "not one page at each pass, which takes thirteen"


async def test_what_comes_together_with_thousands_that_nobody_may_have_is_found(mesh: TaskMesh) -> None:
    """By scans alone: more of it is due since the last pass than one look shows."""

    @mesh.task
    async def job() -> None:
        """Do nothing."""

    nobodys = job.configure(needs={"gpu": True}, priority=5)
    await nobodys.publish_many({f"front{n}": {} for n in range(3_000)})
    async with working(mesh, "me", listen=False) as consumer:
        await (await job.publish("first")).result(60)
        scanner = parts_of(consumer).scanner
        before = scanner.scans
        await eventually(lambda: scanner.scans >= before + 3, what="it has read to the end")
        await nobodys.publish_many({f"another{n}": {} for n in range(3_000)})
        before = scanner.scans
        await (await job.publish("second")).result(60)
        assert scanner.scans - before <= 6, "not one page at each pass, which takes nine or more"


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
            scanner = parts_of(consumer).scanner

            def whole_head_was_read() -> bool:
                return bool(scanner._heads_refused) and scanner._heads_refused <= scanner._read_to.keys()

            await eventually(whole_head_was_read, 200)
            scans = scanner.scans
            await eventually(lambda: scanner.scans >= scans + 4, what="it has not come due of late")
            await eventually(whole_head_was_read, 200)  # once more, if it had
            scans = scanner.scans
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
    """Above about two hundred index ranges in one query the server no longer merges them.

    Sorting a single task is right: only a backlog shows that the server does not.
    """
    may_end = asyncio.Event()

    @mesh.task
    async def job() -> None:
        await may_end.wait()

    queues = [f"q{n}" for n in range(300)]
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        for queue in queues:
            await job.configure(queue=queue).publish_many({f"{queue}-{n}": {} for n in range(10)})
        async with working(mesh, "me", queues=queues, concurrency=1) as consumer:
            await eventually(lambda: consumer.running)
            client[database].command("profile", 2)
            parts = parts_of(consumer)
            scans = parts.scanner.scans
            parts.candidates.order_scan()
            await eventually(lambda: parts.scanner.scans >= scans + 3)
            client[database].command("profile", 0)
            may_end.set()
        profiles = client[database]["system.profile"]
        scanned = list(profiles.find({"ns": f"{database}.tasks", "op": "query", "command.sort": {"$exists": True}}))
    assert [operation for operation in scanned if operation["nreturned"]]
    sorted_in_memory = [operation for operation in scanned if operation.get("hasSortStage")]
    assert not sorted_in_memory, str(sorted_in_memory)  # whole: pytest would shorten it
