"""T16: every query and update that the engine issues is served by an index, whatever else is in the collection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import MongoClient

from taskmesh import TaskMesh, TaskOption, current_task
from taskmesh.store import Store, flows
from taskmesh.store.relations import sequences
from tests.waiting import eventually
from tests.working import finished, parts_of, working

pytestmark = pytest.mark.usefixtures("never_used")

NAMES = ("job", "flaky", "napping", "other", "another")
SIZES = [3_000, pytest.param(200_000, marks=pytest.mark.slow)]


@pytest.fixture
def size(request: pytest.FixtureRequest) -> int:
    """How many there are of each sort."""
    return int(request.param)


@pytest.fixture
async def crowded(mesh: TaskMesh, mongo_uri: str, database: str, size: int) -> TaskMesh:
    """A collection with `size` finished and as many delayed tasks of five kinds, made of one that was published."""
    await mesh.publish("job", "template")
    await asyncio.to_thread(_fill, mongo_uri, database, size)
    return mesh


def _fill(uri: str, database: str, size: int) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    with MongoClient[dict[str, Any]](uri, tz_aware=True) as client:
        tasks = client[database]["tasks"]
        template = tasks.find_one_and_delete({}) or {}

        def made(number: int, *, delayed: bool) -> dict[str, Any]:
            name, key = NAMES[number % len(NAMES)], f"{'delayed' if delayed else 'done'}-{number}"
            document = template | {"_id": f"{name}:{key}", "name": name, "key": key, "lane": number % 64}
            if delayed:
                return document | {"next_claim_time": tomorrow}
            del document["next_claim_time"]
            return document | {"status": "SUCCESS", "finish_time": datetime.now(UTC), "delete_time": tomorrow}

        for start in range(0, size, 5_000):
            numbers = range(start, min(size, start + 5_000))
            tasks.insert_many([made(n, delayed=delayed) for n in numbers for delayed in (True, False)], ordered=False)


async def _live(mesh: TaskMesh) -> None:
    """Do about everything that the engine can do."""

    @mesh.task
    async def job(n: int = 0) -> int:
        current_task().log("seen")
        await current_task().progress(0.5)
        return n

    @mesh.task(option=TaskOption(max_unexpected_retries=1, unexpected_retry_delay_ms=10))
    async def flaky() -> None:
        if current_task().attempt == 1:
            raise ValueError("the first attempt fails")

    @mesh.task(option=TaskOption(ping_interval_ms=100, worker_timeout_ms=2_000))
    async def napping() -> None:
        await asyncio.sleep(0.5)

    async with working(mesh, "w", concurrency=20) as consumer:
        handles = await job.publish_many({f"k{n}": {"n": n} for n in range(80)})
        await flaky.publish_many({f"k{n}": {} for n in range(10)})
        await napping.publish_many({f"k{n}": {} for n in range(10)})
        await job.configure(specific_worker_ids=["w"], priority=3).publish("mine")
        assert await handles[3].result(60) == 3
        await job.configure(run_again=True).publish("k3", n=4)
        await job.configure(update_existing_params=True).publish("k4", n=4)
        await job.configure(delay_ms=60_000).publish("later")
        await mesh.set_option("job", "later", priority=1)
        await mesh.cancel("job", "later")
        await mesh.retry("job", "k5") if (await finished(mesh, "job", "k5")).status.finished else None
        await mesh.explain("job", "k6", worker_id="w")
        await mesh.delete("job", "k7")
        assert [task async for task in mesh.find("flaky", limit=5)]
        assert [task async for task in mesh.find("job", key_prefix="k1", limit=5)]
        assert [task async for task in mesh.find(sort="newest", limit=5)]
        await mesh.pause("default")
        await mesh.resume("default")
        await mesh.set_limit("default", running=15)
        await job.publish_many({f"limited{n}": {"n": n} for n in range(20)})
        for n in range(10):
            await finished(mesh, "flaky", f"k{n}")
            await finished(mesh, "napping", f"k{n}")
            await finished(mesh, "job", f"limited{n}")
        scanner = parts_of(consumer).scanner
        scans = scanner.scans
        await eventually(lambda: scanner.scans >= scans + 4, what="four more scans")


@pytest.mark.parametrize("size", SIZES, indirect=True)
async def test_t16_nothing_that_the_engine_issues_scans_the_collection(
    crowded: TaskMesh, mongo_uri: str, database: str
) -> None:
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        client[database].create_collection("system.profile", capped=True, size=64_000_000)
        client[database].command("profile", 2)
        await _live(crowded)
        client[database].command("profile", 0)
        operations = list(client[database]["system.profile"].find({"ns": f"{database}.tasks"}))
    assert len(operations) > 50

    for operation in operations:
        shown = {field: operation.get(field) for field in ("op", "command", "planSummary", "keysExamined", "nreturned")}
        assert "COLLSCAN" not in operation.get("planSummary", ""), str(shown)[:1500]
        assert not operation.get("hasSortStage"), str(shown)[:1500]
        if {"$count": "n"} in operation["command"].get("pipeline", ()):
            continue  # asked for by a user, who is told how many wait: it reads up to 10 000 keys, and no document
        touched = max(operation.get(field, 0) for field in ("nreturned", "nMatched", "nModified", "ndeleted"))
        # One key beside each wanted is where a bound of the index ends.
        assert operation.get("keysExamined", 0) <= 10 * touched + 100, str(shown)[:1500]


@pytest.mark.parametrize("size", [1_000], indirect=True)
async def test_counting_by_name_and_status_reads_no_document(crowded: TaskMesh, mongo_uri: str, database: str) -> None:
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        client[database].command("profile", 2)
        stats = await crowded.stats()
        client[database].command("profile", 0)
        operations = list(client[database]["system.profile"].find({"ns": f"{database}.tasks"}))
    assert sum(sum(by_status.values()) for by_status in stats.counts.values()) == 2_000
    assert not [operation for operation in operations if "COLLSCAN" in operation.get("planSummary", "")]


async def test_a_worker_reads_no_more_than_a_page_of_groups_that_have_to_wait(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    many, groups, page = 6_000, 10, 1_000

    @mesh.task
    async def job() -> None: ...

    await mesh.set_limit("default", group_rate=1, group_per_ms=3_600_000)
    for group in range(groups):
        await job.configure(group=f"g{group}").publish_many({f"{group}-{n}": {} for n in range(many // groups)})

    async with working(mesh, "w") as consumer:
        for group in range(groups):
            await finished(mesh, "job", f"{group}-0")
        with MongoClient[dict[str, Any]](mongo_uri) as client:
            documents = client[database]
            documents.create_collection("system.profile", capped=True, size=64_000_000)
            documents.command("profile", 2)
            scanner = parts_of(consumer).scanner
            scans = scanner.scans
            await eventually(lambda: scanner.scans >= scans + 6, what="six more scans")
            documents.command("profile", 0)
            done = list(documents["system.profile"].find({"ns": f"{database}.tasks"}))
    asked = [each for each in done if "group: 1, name" in each.get("planSummary", "") and each["op"] == "command"]
    whether_any = [each for each in asked if each["command"].get("hint") == "taskmesh_by_group"]
    assert whether_any
    assert len(asked) > len(whether_any), "in which groups something is due"
    for operation in done:
        examined = operation.get("keysExamined", 0) + operation.get("docsExamined", 0)
        assert examined <= 2 * page, str(operation)[:1500]


async def test_an_idle_worker_reads_nothing_of_flows_schedules_and_sequences_that_have_time(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    """They are looked at about once a second."""
    many, names = 1_000, [mesh.store.flows, mesh.store.schedules, mesh.store.sequences]

    @mesh.task
    async def job() -> None: ...

    @mesh.task
    async def lasting() -> None:
        await asyncio.Event().wait()

    await mesh.every("job", interval_ms=8 * 3_600_000)
    async with mesh.flow("first"):
        await job.publish("k")

    async with working(mesh, "w") as consumer:
        await lasting.configure(sequence_key="s").publish("k")
        with MongoClient[dict[str, Any]](mongo_uri) as client:
            documents = client[database]
            await eventually(lambda: documents[mesh.store.flows].count_documents({"state": "opened"}) == 1)
            await eventually(lambda: documents[mesh.store.sequences].count_documents({}) == 1)
            for collection in (documents[name] for name in names):
                template = collection.find_one() or {}
                collection.insert_many([template | {"_id": f"{template['_id']}-{n}"} for n in range(many)])
            documents.create_collection("system.profile", capped=True, size=64_000_000)
            documents.command("profile", 2)
            scanner = parts_of(consumer).scanner
            scans = scanner.scans
            await eventually(lambda: scanner.scans >= scans + 4, what="four more scans")
            documents.command("profile", 0)
            done = list(documents["system.profile"].find({"ns": {"$regex": rf"^{database}\."}}))
    asked = [str(operation["command"]) for operation in done]
    for name in names:
        assert [each for each in asked if f"'{name}'" in each], name
    for operation in done:
        examined = operation.get("keysExamined", 0) + operation.get("docsExamined", 0)
        assert examined < 10, str(operation)[:1500]


LONG_AGO = datetime.now(UTC) - timedelta(hours=1)


@pytest.mark.parametrize(
    ("name", "due", "sweep"),
    [
        ("sequences", {"check_time": LONG_AGO, "head": "job:k", "place": 1}, sequences.sweep),
        ("flows", {"state": "opened", "check_time": LONG_AGO, "members": ["job:k"]}, flows.sweep),
    ],
)
async def test_a_sweep_looks_at_a_part_of_what_is_due(
    mesh: TaskMesh,
    mongo_uri: str,
    database: str,
    name: str,
    due: dict[str, Any],
    sweep: Callable[[Store], Awaitable[object]],
) -> None:
    swept = getattr(mesh.store, name)
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        documents = client[database]
        documents[swept].insert_many([{"_id": f"default:s{n}", **due} for n in range(2_000)])
        documents.create_collection("system.profile", capped=True, size=64_000_000)
        documents.command("profile", 2)
        await sweep(mesh.store)
        documents.command("profile", 0)
        done = list(documents["system.profile"].find({"ns": f"{database}.{swept}"}))
    examined = [operation.get("keysExamined", 0) + operation.get("docsExamined", 0) for operation in done]
    assert 0 < max(examined) < 1_000, examined
