"""`mesh.on_change`: what the handler gets, which changes become tasks, and what is said when some are lost."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from bson.decimal128 import Decimal128
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

from taskmesh import ChangeEvent, InvalidOption, Status, TaskMesh, TaskOption
from taskmesh.store.triggers import data_changes
from tests.waiting import eventually
from tests.working import all_working, working

_LARGE = 15_500_000


@pytest.fixture
async def own(mongo_uri: str, database: str) -> AsyncIterator[Any]:
    """The database of the test, for what is the developer's own."""
    async with AsyncMongoClient[dict[str, Any]](mongo_uri, tz_aware=True) as client:
        yield client[database]
        await client[database].drop_collection("orders")


async def begun(mesh: TaskMesh) -> None:
    """Wait until the changes are read."""

    async def is_begun() -> bool:
        return bool([place for place in await data_changes.read_all(mesh.store) if "token" in place])

    await eventually(is_begun)


async def findings(mesh: TaskMesh) -> list[tuple[str, str]]:
    """Return what doctor says about it."""
    return [(each.level, each.found) for each in await mesh.inspect.doctor() if each.subject == "data changes"]


async def test_the_handler_gets_what_has_changed_and_how(mesh: TaskMesh, own: Any) -> None:
    seen: list[ChangeEvent] = []

    @mesh.on_change("orders", queue="mail", option=TaskOption(priority=3))
    async def ordered(event: ChangeEvent) -> str | None:
        seen.append(event)
        return event.operation

    async with working(mesh):
        await begun(mesh)
        odd = {
            "$where": 1,
            "a.b": {"$literal": Decimal128("1.5")},
            "when": datetime(2026, 1, 1, tzinfo=UTC),
            "nan": float("nan"),
        }
        await own.orders.insert_one({"_id": "o1", "odd": odd, "lines": {"first": []}})
        await eventually(lambda: len(seen) == 1)
        await own.orders.update_one({"_id": "o1"}, {"$set": {"n": 2, "lines.first": [1]}, "$unset": {"odd": ""}})
        await eventually(lambda: len(seen) == 2)
        await own.orders.replace_one({"_id": "o1"}, {"n": 3})
        await own.orders.delete_one({"_id": "o1"})
        await own.orders.drop()
        await own.orders.insert_one({"_id": "o2"})
        await eventually(lambda: len(seen) == 6, what="the stream goes on behind a drop")
        [task, *_] = [task async for task in mesh.find("ordered", sort="oldest", params=True)]
    assert sorted(event.operation for event in seen if event.operation) == sorted(
        ["insert", "update", "replace", "delete", "drop", "insert"]
    )
    inserted, updated = seen[0], seen[1]
    assert inserted.document_id == "o1"
    assert inserted.full_document is not None
    assert inserted.full_document["odd"]["a.b"] == {"$literal": Decimal("1.5")}
    assert inserted.full_document["odd"]["$where"] == 1
    assert (inserted.database, inserted.collection) == (own.name, "orders")
    assert inserted.cluster_time is not None
    assert abs(inserted.cluster_time - datetime.now(UTC)) < timedelta(minutes=5)
    assert updated.full_document == {"_id": "o1", "n": 2, "lines": {"first": [1]}}
    assert updated.update_description is not None
    assert updated.update_description["updatedFields"] == {"n": 2, "lines.first": [1]}
    assert updated.update_description["removedFields"] == ["odd"]
    assert (task.queue, task.task_option.priority, task.status) == ("mail", 3, Status.SUCCESS)
    assert not any(event.cut for event in seen)


async def test_the_pipeline_chooses_changes_and_adds_fields_and_a_plain_dict_will_do(
    mesh: TaskMesh, own: Any, mongo_uri: str
) -> None:
    seen: list[dict[str, Any]] = []
    other = f"{own.name}_b"

    @mesh.on_change(
        f"{other}.orders",
        [
            {"$match": {"fullDocument.total": {"$gt": 10}}},
            {"$set": {"double": {"$multiply": [2, "$fullDocument.total"]}}},
        ],
        full_document="default",
        name="large.orders",
    )
    def ordered(change: dict[str, Any], times: int = 1) -> None:
        seen.extend([change] * times)

    async with working(mesh), AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        await begun(mesh)
        try:
            await client[other].orders.insert_many([{"_id": n, "total": n} for n in (5, 11, 7, 12)])
            await client[other].orders.update_one({"_id": 12}, {"$set": {"total": 99}})
            await client[other].orders.insert_one({"_id": 13, "total": 13})
            await eventually(lambda: len(seen) == 3)
        finally:
            await client.drop_database(other)
    assert sorted((event["document_id"], event["extra"]["double"]) for event in seen) == [(11, 22), (12, 24), (13, 26)]


@pytest.mark.lasting
async def test_what_changes_while_nobody_reads_becomes_tasks_when_somebody_does(mongo_uri: str, own: Any) -> None:
    """With a Motor client, and without the tasks of what was read before."""
    seen: list[Any] = []
    motor: Any = AsyncIOMotorClient(mongo_uri)
    for n in range(3):
        async with TaskMesh(motor, database=own.name) as reading:

            @reading.on_change("orders", option=TaskOption(retain_success_ms=0))
            async def ordered(event: ChangeEvent) -> None:
                seen.append(event.document_id)

            async with all_working(reading, [f"a{n}", f"b{n}"]):
                await begun(reading)
                await eventually(lambda: len(seen) == n * 701)  # noqa: B023 — waited for before the next round
                await own.orders.insert_one({"_id": f"during {n}"})
                await eventually(lambda: len(seen) == 1 + n * 701)  # noqa: B023 — waited for before the next round
        await own.orders.insert_many([{"_id": f"{n} {m}"} for m in range(700)])
    async with TaskMesh(motor, database=own.name) as reading:

        @reading.on_change("orders", option=TaskOption(retain_success_ms=0))
        async def ordered(event: ChangeEvent) -> None:
            seen.append(event.document_id)

        async with working(reading):
            await eventually(lambda: len(seen) >= 3 + 3 * 700)
    motor.close()
    assert len(seen) == len(set(seen)) == 3 + 3 * 700


@pytest.mark.lasting
async def test_a_change_too_large_for_a_task_or_for_a_message_is_told_without_its_document(
    mesh: TaskMesh, own: Any
) -> None:
    seen: list[ChangeEvent] = []

    @mesh.on_change("orders")
    async def ordered(event: ChangeEvent) -> None:
        seen.append(event)

    async with working(mesh):
        await begun(mesh)
        await own.orders.insert_one({"_id": 1, "x": "x" * _LARGE})
        await own.orders.update_one({"_id": 1}, {"$set": {"x": "y" * _LARGE}})  # twice as large as a message
        await own.orders.insert_one({"_id": 2})
        await eventually(lambda: len(seen) == 3)
    told = sorted((event.document_id, event.operation, event.cut, event.full_document) for event in seen)
    assert told == [(1, "insert", True, None), (1, "update", True, None), (2, "insert", False, {"_id": 2})]


@pytest.mark.parametrize("on_lost", ["stop", "skip"])
async def test_changes_that_are_lost_are_told_and_stop_the_reader_or_are_skipped(
    mesh: TaskMesh, own: Any, caplog: pytest.LogCaptureFixture, on_lost: Any
) -> None:
    seen: list[Any] = []

    @mesh.on_change("orders", on_lost=on_lost)
    async def ordered(event: ChangeEvent) -> None:
        seen.append(event.document_id)

    async with working(mesh, "w1"), await own.orders.watch() as stream:
        await begun(mesh)
        await own.orders.insert_one({"_id": "before"})
        await eventually(lambda: seen == ["before"])
        assert [level for level, _ in await findings(mesh)] == ["ok"]
        event = await stream.next()
    # As after a long time: the oplog does not reach back to where the reader was. That was at an event: a server whose oplog is
    # complete, like this one, finds any time in it, but no event that it has not.
    token = event["_id"]["_data"]
    [place] = await data_changes.read_all(mesh.store)
    long_ago = f"{token[:2]}20000000{token[10:]}"
    await own.meta.update_one({"_id": place["_id"]}, {"$set": {"token": {"_data": long_ago}}})
    await own.orders.insert_one({"_id": "meanwhile"})

    async def is_told() -> bool:
        return bool([found for level, found in await findings(mesh) if level != "ok" and "lost" in found])

    async def has_failed() -> bool:
        reader = await mesh.get("ordered.reader", "fleet")
        return "on_lost='skip'" in (reader.task_state.worker_states[-1].fail_reason or "")

    await mesh.retry("ordered.reader", "fleet")  # while nobody runs it: else it would be refused
    async with working(mesh, "w2"):
        await eventually(is_told)
        found = await findings(mesh)
        await own.orders.insert_one({"_id": "after"})
        if on_lost == "skip":
            await eventually(lambda: seen == ["before", "after"])
            assert [level for level, _ in found] == ["ok", "warning"]
        else:
            assert [level for level, _ in found] == ["error"]
            await eventually(has_failed, what="the reader ends with what is to be done")
            assert seen == ["before"]
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING and "lost" in record.getMessage()]
    assert loud


async def test_what_stands_in_the_way_is_told_and_read_on_when_it_is_gone(mesh: TaskMesh, own: Any) -> None:
    seen: list[Any] = []

    @mesh.on_change("orders", [{"$set": {"share": {"$divide": [1, "$fullDocument.of"]}}}])
    async def ordered(event: ChangeEvent) -> None:
        seen.append(event.extra["share"])

    async def is_told() -> bool:
        return any(level == "error" and "divide by zero" in found for level, found in await findings(mesh))

    async with working(mesh):
        await begun(mesh)
        await own.orders.insert_many([{"of": 2}, {"of": 0}])
        await eventually(is_told)
        assert seen in ([0.5], []), "nothing behind it is told"


def test_what_cannot_be_watched_is_refused_where_it_is_defined() -> None:
    mesh = TaskMesh("mongodb://127.0.0.1:1/")

    async def handler(event: ChangeEvent) -> None: ...

    def nothing() -> None: ...

    def two(event: ChangeEvent, more: int) -> None: ...

    for arguments, settings, function, told in (
        (("",), {}, handler, "name of a collection"),
        ((["orders"],), {}, handler, "name of a collection"),
        (("shop.",), {}, handler, "'shop.orders'"),
        (("orders", {"$match": {}}), {}, handler, "list of stages"),
        (("orders", [{"$group": {"_id": 1}}]), {}, handler, r"\$match, \$project"),
        (("orders", [{"$match": {}, "$project": {}}]), {}, handler, "with that one key"),
        (("orders", [{"$project": {"_id": 0}}]), {}, handler, "leave _id alone"),
        (("orders", [{"$unset": ["_id"]}]), {}, handler, "leave _id alone"),
        (("orders", [{"$match": {"x": object()}}]), {}, handler, "cannot store"),
        (("orders",), {"on_lost": "cry"}, handler, "'stop', 'skip'"),
        (("orders",), {"full_document": "always"}, handler, "'updateLookup'"),
        (("orders",), {"batch": 3}, handler, "it takes"),
        (("orders",), {}, nothing, "takes one parameter"),
        (("orders",), {}, two, "takes one parameter"),
    ):
        with pytest.raises(InvalidOption, match=told):
            mesh.on_change(*arguments, **settings)(function)  # type: ignore[arg-type]  # that is what is tested
    assert not mesh.data_changes


@pytest.mark.parametrize(
    ("collection", "pipeline", "told"),
    [
        ("orders", [{"$match": {"$bad": 1}}], r"(?s)'ordered'.*\$bad.*unknown top level operator"),
        ("orders", [{"$project": {"x": {"$divide": [1]}}}], "takes exactly 2 arguments"),
        ("tasks", [], "taskmesh keeps its own"),
    ],
)
async def test_a_pipeline_that_the_server_refuses_stops_the_worker_at_its_start(
    mesh: TaskMesh, collection: str, pipeline: Any, told: str
) -> None:
    @mesh.on_change(collection, pipeline)
    async def ordered(event: ChangeEvent) -> None: ...

    with pytest.raises(InvalidOption, match=told):
        await mesh.consumer().run()
    assert not [worker for worker in await mesh.workers() if worker.live]
