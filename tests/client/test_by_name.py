"""Publishing by name, without the code: queue, option and params are those that a worker has registered."""

from __future__ import annotations

import asyncio
import time
import warnings
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from itertools import count
from typing import Annotated, Any, Literal
from uuid import UUID

import httpx
import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from taskmesh import (
    InvalidParams,
    Status,
    TaskMesh,
    TaskNotFound,
    TaskOption,
    current_blocking_task,
    current_task,
)
from taskmesh.client.json_schema import misfits
from taskmesh.client.params import Params
from taskmesh.web import create_app
from tests.cli.shell import Shell
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import finished, working

MAIL = TaskOption(priority=7, max_unexpected_retries=0, worker_timeout_ms=9_000, ping_interval_ms=3_000)


class Address(BaseModel):
    street: str
    number: int = Field(ge=1)


def with_mail(mongo_uri: str, database: str, option: TaskOption = MAIL) -> TaskMesh:
    """A mesh as that of a worker's process."""
    mesh = TaskMesh(mongo_uri, database=database)

    @mesh.task(queue="mail", option=option)
    async def send_email(to: str, address: Address | None = None, copies: int = 1) -> int:
        return copies * len(to) if address is None else address.number

    return mesh


async def test_a_publisher_without_the_code_uses_what_a_worker_has_registered(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    async with with_mail(mongo_uri, database) as of_worker:
        async with working(of_worker, "w1"):
            handle = await mesh.publish("send_email", "k", {"to": "ann"}, priority=3)
            assert handle.warnings == []
            task = await finished(mesh, "send_email", "k")
            assert task.queue == "mail"
            assert task.task_option == MAIL.changed(priority=3)
        for params, problem in (
            ({}, "'to' is missing"),
            ({"to": "ann", "copies": "many"}, "'copies'='many'"),
            ({"to": "ann", "cpies": 2}, "there is no parameter 'cpies'"),
            ({"to": "ann", "address": {"street": "High Street", "number": 0}}, "'address'="),
        ):
            with pytest.raises(InvalidParams) as refused:
                await mesh.publisher.publish_many("send_email", {"good": {"to": "bob"}, "bad": params})
            assert problem in str(refused.value)
            with pytest.raises(TaskNotFound):
                await mesh.get("send_email", "good")
        # The worker has stopped by now: what it registered outlives it.
        await mesh.publish("send_email", "later", {"to": "ann", "copies": "2"})
        assert (await mesh.get("send_email", "later")).queue == "mail"


async def test_the_definition_of_the_newest_start_stands_and_an_unchanged_one_is_not_written_again(
    mesh: TaskMesh, mongo_uri: str, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    definitions = mesh.store.driver.collection(mesh.store.definitions)
    async with with_mail(mongo_uri, database) as old, working(old, "w1"):
        await mesh.publish("send_email", "0", {"to": "ann"})
        newer = MAIL.changed(priority=9)
        async with with_mail(mongo_uri, database, newer) as new, working(new, "w2"):
            keys = map(str, count(1))

            async def is_new() -> bool:
                handle = await mesh.publish("send_email", next(keys), {"to": "ann"})
                return (await handle.task()).task_option == newer

            await eventually(is_new)
        assert "could not be registered" not in caplog.text
        async with failing_commands(mongo_uri, ["update"], errorCode=13, namespace=f"{database}.definitions"):
            async with with_mail(mongo_uri, database, newer) as same, working(same, "w3"):
                assert "could not be registered" not in caplog.text, "there was nothing to write"
            async with with_mail(mongo_uri, database) as old_again, working(old_again, "w4"):
                assert "could not be registered" in caplog.text, "it works all the same"
        assert await definitions.count_documents({"option.priority": 9}) == 1


async def test_a_name_that_live_workers_know_but_none_has_registered_gives_a_warning(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    async with with_mail(mongo_uri, database) as of_worker, working(of_worker, "w1", queues=["mail", "default"]):
        # As of a worker of an older release.
        await mesh.store.driver.collection(mesh.store.definitions).delete_many({})
        handle = await mesh.publish("send_email", "k", {"anything": 1})
        [warning] = handle.warnings
        assert "are not registered" in warning
        assert (await mesh.get("send_email", "k")).queue == "default"


async def test_the_command_line_and_rest_use_it_too(taskmesh: Shell, mongo_uri: str, database: str) -> None:
    async with with_mail(mongo_uri, database) as of_worker:
        async with working(of_worker, "w1"):
            await finished(of_worker, "send_email", (await of_worker.publish("send_email", "0", {"to": "a"})).key)
        await asyncio.to_thread(taskmesh.done, "publish", "send_email", "cli", '{"to": "ann"}')
        told = "'to' is missing"
        await asyncio.to_thread(lambda: taskmesh.refuses("publish", "send_email", "no", "{}", told=told))
        assert (await of_worker.get("send_email", "cli")).queue == "mail"
        async with TaskMesh(mongo_uri, database=database) as without_code:
            origin = "http://127.0.0.1:8080"
            transport = httpx.ASGITransport(create_app(without_code))
            async with httpx.AsyncClient(transport=transport, base_url=origin, headers={"Origin": origin}) as client:
                body: dict[str, Any] = {"name": "send_email", "key": "rest", "params": {"to": "ann"}}
                assert (await client.post("/api/v1/tasks", json=body)).status_code == 200
                refused = await client.post("/api/v1/tasks", json={**body, "key": "no", "params": {}})
                assert (refused.status_code, refused.json()["error"]) == (422, "InvalidParams")
        assert (await of_worker.get("send_email", "rest")).queue == "mail"


async def test_a_schedule_declared_without_the_code_ticks_as_the_workers_have_registered_it(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    async with with_mail(mongo_uri, database) as of_worker, working(of_worker, "w1"):
        await of_worker.publish("send_email", "0", {"to": "a"})
        await mesh.every("send_email", interval_ms=3_600_000, params={"to": "ann"})
        handle = await mesh.schedules.trigger("send_email")
        assert (await handle.task()).queue == "mail"
        with pytest.raises(InvalidParams):
            await mesh.every("send_email", interval_ms=3_600_000, params={"whom": "ann"})


async def test_a_handler_publishes_and_starts_by_name_as_the_workers_have_registered_it(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    reads = Reads("definitions")
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(mongo_uri, event_listeners=[reads])
    shop = TaskMesh(client, database=database)

    @shop.task
    async def order() -> None:
        await current_task().publish("send_email", "async", to="ann")
        with pytest.raises(InvalidParams, match="'to' is missing"):
            await current_task().publish("send_email", "no")
        for i in range(20):
            await current_task().publish("send_email", f"many-{i}", to="ann")
        await current_task().start("send_email", "child", to="bob")

    @shop.task
    def order_in_a_thread() -> None:
        current_blocking_task().publish("send_email", "thread", to="ann")

    async with client, with_mail(mongo_uri, database) as of_worker, shop, working(shop, "shop"):
        async with working(of_worker, "mail"):
            pass  # what it has registered outlives it
        reads.seen, began = 0, time.monotonic()
        await order.publish("k")
        await order_in_a_thread.publish("k")
        assert (await finished(mesh, "order", "k")).status is Status.SUCCESS
        assert (await finished(mesh, "order_in_a_thread", "k")).status is Status.SUCCESS
        for key in ("async", "thread", "child", "many-7"):
            task = await mesh.get("send_email", key)
            assert (task.queue, task.task_option) == ("mail", MAIL)
        took_s = time.monotonic() - began
        assert reads.seen <= 3 + took_s / 2, "one every two seconds, however many are published"


class Reads(CommandListener):
    """Counts the reads of one collection."""

    def __init__(self, collection: str) -> None:
        self.collection = collection
        self.seen = 0

    def started(self, event: CommandStartedEvent) -> None:
        self.seen += event.command_name == "find" and event.command["find"] == self.collection

    def succeeded(self, event: CommandSucceededEvent) -> None: ...
    def failed(self, event: CommandFailedEvent) -> None: ...


class Colour(Enum):
    RED = "red"
    BLUE = 2


VALUES: list[Any] = [
    *(0, 1, -3, 2.0, 2.5, 1e300, True, False, None, "", "7", "7.0", "2.5", "true", "Off", "red", "abc", "2026-11-21"),
    *("2026-11-21T10:00:00Z", "12345678-1234-5678-1234-567812345678", b"bytes", Decimal("1.5"), UUID(int=5)),
    *(datetime(2026, 11, 21, tzinfo=UTC), [], [1], ["1", 2], ["a"], [1, "a"], {}, {"a": 1}, {"a": "x"}, {"1": 2}),
    *({"street": "s", "number": 3}, {"street": "s", "number": 0}, {"street": "s"}, {"number": 1}),
]
ANNOTATIONS: list[Any] = [
    *(int, float, bool, str, bytes, list, dict, set[int], list[int], list[str], tuple[int, str], dict[str, int]),
    *(dict[int, int], int | None, str | int, int | list[int], Literal["red", 2], Colour, Decimal, UUID, datetime, date),
    *(
        Address,
        Address | None,
        list[Address],
        Any,
        Annotated[int, Field(gt=0, le=7)],
        Annotated[str, Field(max_length=3)],
    ),
    *(Annotated[list[int], Field(min_length=1)], Annotated[str, Field(pattern="^a")], object, type(None)),
]


@pytest.mark.parametrize("annotation", ANNOTATIONS, ids=str)
def test_what_the_handler_takes_is_never_refused(annotation: Any) -> None:
    def handler(value) -> None:  # type: ignore[no-untyped-def]  # the annotation is set below
        ...

    handler.__annotations__["value"] = annotation
    schema = Params("work", handler).json_schema()
    assert schema is not None
    adapter = TypeAdapter(annotation)
    wrongly: list[Any] = []
    refused = 0
    for value in VALUES:
        problems = list(misfits({"value": value}, schema))
        refused += bool(problems)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                adapter.validate_python(value)
        except ValidationError:
            continue
        if problems:
            wrongly.append((value, problems))
    assert wrongly == []
    if annotation not in (Any, object):
        assert refused, "it tells some values that do not fit"
