"""Waiting for results: what has been heard need not be asked, and what was not heard is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from benchmarks.commands import Commands
from taskmesh import InvalidKey, InvalidName, TaskExpired, TaskHandle, TaskMesh, TaskNotFound
from taskmesh.client import results
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import finished, working

SOON_S = results._LOOK_EVERY_S - 2
"""Less than it takes until all that is waited for is looked at."""
APPNAME = "the publisher"


@pytest.fixture
def commands() -> Commands:
    """What the publisher asks of the server."""
    return Commands()


@pytest.fixture
async def publisher(mongo_uri: str, mesh: TaskMesh, database: str, commands: Commands) -> AsyncIterator[TaskMesh]:
    """A mesh that publishes what another one works on."""
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(
        mongo_uri, event_listeners=[commands], appname=APPNAME, tz_aware=True
    )

    @mesh.task(name="double")
    async def work(n: int) -> int:
        return 2 * n

    async with client, TaskMesh(client, database=database) as publisher:
        yield publisher


async def test_a_result_is_read_once(publisher: TaskMesh, mesh: TaskMesh, commands: Commands) -> None:
    async with working(mesh):
        assert await (await publisher.publish("double", "first", {"n": 0})).result(60) == 0  # from now on it listens
        before = commands.by_name.copy()
        for n in range(20):
            assert await (await publisher.publish("double", f"{n}", {"n": n})).result(60) == 2 * n
    cost = commands.by_name - before
    # One each. The rest is what the publisher knows of the fleet, read anew every two seconds.
    assert cost["find"] + cost["aggregate"] < 30, cost


@pytest.mark.parametrize("remembered", [results._MOST_REMEMBERED, 1])
async def test_what_ended_before_it_is_waited_for_is_found_at_once(
    publisher: TaskMesh, mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, remembered: int
) -> None:
    """Also if more has ended since than is remembered."""
    monkeypatch.setattr(results, "_MOST_REMEMBERED", remembered)
    async with working(mesh):
        assert await (await publisher.publish("double", "first", {"n": 0})).result(60) == 0
        handles = [await publisher.publish("double", f"{n}", {"n": n}) for n in range(5)]
        last = await publisher.publish("double", "last", {"n": 9})
        for handle in handles:
            await finished(mesh, "double", handle.key)
        assert await last.result(60) == 18  # so what came before it has been heard of
        for n, handle in enumerate(handles):
            assert await handle.result(SOON_S) == 2 * n
            assert await handle.result(SOON_S) == 2 * n, "and again"


async def test_a_result_is_found_where_what_ended_was_not_heard(
    publisher: TaskMesh, mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    async with working(mesh):
        assert await (await publisher.publish("double", "first", {"n": 0})).result(60) == 0
        async with failing_commands(
            mongo_uri,
            ["getMore", "aggregate"],
            appname=APPNAME,
            namespace=f"{database}.$cmd.aggregate",
            errorCode=286,  # the stream has lost its place
        ) as have_failed:
            await have_failed()
            handle = await publisher.publish("double", "unheard", {"n": 1})
            await finished(mesh, "double", "unheard")
        position = publisher.feed.position
        await eventually(lambda: publisher.feed.position != position, what="the stream is open again")
        assert await handle.result(SOON_S) == 2


async def test_a_result_is_found_at_once_where_the_server_offers_no_stream(
    publisher: TaskMesh, mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    async with (
        working(mesh),
        failing_commands(
            mongo_uri, ["aggregate"], appname=APPNAME, namespace=f"{database}.$cmd.aggregate", errorCode=40573
        ),
    ):
        for n in range(3):
            handle = await publisher.publish("double", f"{n}", {"n": n})
            await finished(mesh, "double", f"{n}")
            assert await handle.result(SOON_S) == 2 * n
    assert not publisher.feed.offered


async def test_no_time_at_all_is_one_look(publisher: TaskMesh, mesh: TaskMesh) -> None:
    handle = await publisher.publish("double", "k", {"n": 1}, retain_success_ms=0)
    async with mesh.flow("both") as flow:
        last = flow.add(mesh.definitions["double"], "member", params={"n": 2})
    for waiting in (handle, last):
        with pytest.raises(TimeoutError, match="has not finished within 0 s"):
            await waiting.result(0)
    status = await mesh.flow_status("both")
    with pytest.raises(TimeoutError):
        await status.result(0)
    async with working(mesh):
        assert await last.result(60) == 4
        await eventually(lambda: _has_value(handle))
    assert (await last.result(0), await last.result(-1)) == (4, 4)
    assert await status.result(0) == {("double", "member"): 4}
    await publisher.delete("double", "member")
    with pytest.raises(TaskNotFound):
        await last.result(0)


async def _has_value(handle: TaskHandle[Any]) -> bool:
    """As programs ask that come by again and again; its retention is over by the time that it is finished."""
    try:
        return bool(await handle.result(0) == 2)
    except TimeoutError:
        return False


async def test_what_has_expired_is_told_at_once_though_no_worker_writes_it_down(publisher: TaskMesh) -> None:
    now = publisher.clock.now()
    first = await publisher.publish("double", "first", {"n": 1}, expire_time=now - timedelta(seconds=1))
    with pytest.raises(TaskExpired):
        await first.result(60)
    late = await publisher.publish("double", "late", {"n": 1}, expire_time=now - timedelta(seconds=1))
    with pytest.raises(TaskExpired):
        await late.result(SOON_S)


async def test_a_key_that_is_published_anew_waits_for_its_new_result(publisher: TaskMesh, mesh: TaskMesh) -> None:
    async with working(mesh):
        assert await (await publisher.publish("double", "k", {"n": 1})).result(60) == 2
        await publisher.delete("double", "k")
        for n in range(3):
            handle = await publisher.publish("double", "k", {"n": n})
            assert handle.created
            assert await handle.result(60) == 2 * n
            await publisher.delete("double", "k")


async def test_a_task_that_was_published_elsewhere_is_waited_for_by_name_and_key(
    publisher: TaskMesh, mesh: TaskMesh
) -> None:
    work = mesh.definitions["double"]
    async with working(mesh):
        await publisher.publish("double", "k", {"n": 4})
        for handle in (mesh.handle("double", "k"), publisher.handle("double", "k"), work.handle("k")):
            assert await handle.result(60) == 8
            assert (handle.name, handle.key, handle.created, handle.updated) == ("double", "k", False, False)
            assert handle.warnings == []
            assert (await handle.task()).status == "SUCCESS"
    with pytest.raises(TaskNotFound):
        await publisher.handle("double", "never published").result(0)


async def test_a_handle_reads_a_result_as_its_handler_is_annotated(publisher: TaskMesh, mesh: TaskMesh) -> None:
    @mesh.task
    async def later(days: int) -> timedelta:
        return timedelta(days=days)

    async with working(mesh):
        await later.publish("k", days=2)
        assert await later.handle("k").result(60) == timedelta(days=2)
        assert await mesh.handle("later", "k").result(60) == timedelta(days=2)
        assert await publisher.handle("later", "k").result(60) != timedelta(days=2), "plain: its handler is not known"


def test_a_handle_for_a_bad_name_or_key_is_refused() -> None:
    mesh = TaskMesh("mongodb://127.0.0.1:1")  # never asked
    with pytest.raises(InvalidName, match="a task's name must be 1 to 100 characters"):
        mesh.handle("no name", "k")
    with pytest.raises(InvalidKey, match="key must be a str, got int 7"):
        mesh.handle("double", 7)  # type: ignore[arg-type]
