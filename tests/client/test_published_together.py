"""What is published at one moment in one process is inserted together, and means to each caller what it would mean alone."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator
from pymongo import AsyncMongoClient
from pymongo.errors import OperationFailure

from benchmarks.commands import Commands
from taskmesh import TaskMesh, TaskRunning
from tests.consumer.test_lost_answers import CUT_OFF, GHOST, GHOST_OF_AN_ELECTION
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import working

NOT_PRIMARY = {"errorCode": 10107, "errorLabels": ["RetryableWriteError"]}


async def test_two_hundred_publishes_at_once_are_a_few_inserts_and_each_has_its_own_answer(
    mongo_uri: str, database: str
) -> None:
    commands = Commands()
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(mongo_uri, event_listeners=[commands], tz_aware=True)
    async with client, TaskMesh(client, database=database) as mesh:

        @mesh.task
        async def job(n: int) -> None: ...

        await job.publish("k17", n=-1)
        before = commands.by_name["insert"]
        changing = job.configure(update_existing_params=True)
        handles = await asyncio.gather(
            *(job.publish(f"k{n}", n=n) for n in range(200)), changing.publish("k17", n=-2), job.publish("k3", n=-3)
        )

        assert commands.by_name["insert"] - before <= 4
        assert [handle.key for handle in handles[:200] if not handle.created] == ["k17"]
        assert [(handle.created, handle.updated) for handle in handles[200:]] == [(False, True), (False, False)]
        stored = {task.key: (task.params or {})["n"] async for task in mesh.find("job", params=True, limit=300)}
        assert stored == {f"k{n}": n for n in range(200)} | {"k17": -2}


@pytest.mark.parametrize(
    "fault",
    [GHOST, GHOST_OF_AN_ELECTION, CUT_OFF, NOT_PRIMARY],
    ids=["writeConcernError", "election", "closeConnection", "notPrimary"],
)
async def test_a_lost_answer_is_told_to_none_of_them_and_nothing_is_there_twice(
    mesh: TaskMesh, mongo_uri: str, fault: dict[str, Any]
) -> None:
    @mesh.task
    async def job(n: int) -> None: ...

    await job.publish("there", n=0)
    async with failing_commands(mongo_uri, ["insert"], times=3, **fault):
        handles = await asyncio.gather(
            *(job.publish(f"k{n}", n=n) for n in range(60)),
            *(job.configure(run_again=True).publish(f"again{n}", n=n) for n in range(60)),
            job.publish("there", n=1),
        )
    assert [handle.created for handle in handles] == [True] * 120 + [False]
    assert len([task async for task in mesh.find("job", limit=200)]) == 121


def _check_failures(answers: list[Any]) -> None:
    """Of call 13 the server refuses what it writes, call 30 would change what runs, and all others succeed."""
    failed = {n: answer for n, answer in enumerate(answers) if isinstance(answer, BaseException)}
    assert failed.keys() == {13, 30}
    assert isinstance(failed[13], OperationFailure)
    assert "Document failed validation" in str(failed[13])
    assert isinstance(failed[30], TaskRunning)


async def test_what_the_server_refuses_of_one_is_an_error_of_that_one_alone(mesh: TaskMesh) -> None:
    @mesh.task
    async def job(n: int) -> None: ...

    running, go_on = asyncio.Event(), asyncio.Event()

    @mesh.task
    async def busy() -> None:
        running.set()
        await go_on.wait()

    await busy.publish("k")
    rule = {"params.n": {"$ne": 13}}
    await mesh.store.driver.database.command({"collMod": "tasks", "validator": rule})
    async with working(mesh, names=["busy"]):
        await running.wait()
        answers = await asyncio.gather(
            *(job.publish(f"k{n}", n=n) for n in range(30)),
            busy.configure(not_update_running=True, run_again=True).publish("k"),
            return_exceptions=True,
        )
        go_on.set()
    _check_failures(answers)
    assert {task.key async for task in mesh.find("job")} == {f"k{n}" for n in range(30) if n != 13}


async def test_what_one_change_of_many_meets_concerns_that_one_alone(mesh: TaskMesh) -> None:
    running, go_on = asyncio.Event(), asyncio.Event()

    @mesh.task
    async def job(n: int) -> int:
        running.set()
        await go_on.wait()
        return n

    await job.publish("running", n=0)
    changing = job.configure(update_existing_params=True, not_update_running=True)
    async with working(mesh):
        await running.wait()
        await asyncio.gather(*(job.configure(delay_ms=3_600_000).publish(f"k{n}", n=n) for n in range(30)))
        # Of inserts, which come first, it refuses none.
        rule = {"$or": [{"params.n": {"$ne": 113}}, {"change_ids": {"$exists": False}}]}
        await mesh.store.driver.database.command({"collMod": "tasks", "validator": rule})
        answers = await asyncio.gather(
            *(changing.publish(f"k{n}", n=100 + n) for n in range(30)),
            changing.publish("running", n=1),
            changing.publish("new", n=2),
            changing.publish("k7", n=3),
            return_exceptions=True,
        )
        go_on.set()
    _check_failures(answers)
    assert [handle.created for handle in answers if not isinstance(handle, BaseException)] == [False] * 29 + [
        True,
        False,
    ]
    stored = {task.key: (task.params or {})["n"] async for task in mesh.find("job", params=True)}
    assert stored.pop("k7") in (107, 3)
    assert stored == {f"k{n}": 100 + n for n in range(30) if n not in (7, 13)} | {"k13": 13, "running": 0, "new": 2}


async def test_a_locked_task_holds_up_none_of_those_that_are_changed_with_it(mesh: TaskMesh) -> None:
    @mesh.task
    async def job(n: int) -> None: ...

    await job.publish_many({key: {"n": 0} for key in ("locked", *(f"k{n}" for n in range(40)))})
    changing = job.configure(run_again=True)
    async with mesh.store.driver.session() as session:
        await session.start_transaction()
        await job.configure(session=session, run_again=True).publish("locked", n=1)
        waiting = asyncio.create_task(changing.publish("locked", n=2))
        handles = await asyncio.gather(*(changing.publish(f"k{n}", n=2) for n in range(40)))
        assert all(handle.updated for handle in handles)
        assert not waiting.done()
        assert (await changing.publish("k0", n=3)).updated
        assert not waiting.done()
        await session.commit_transaction()
    assert (await waiting).updated
    found = {task.key: (task.params or {})["n"] async for task in mesh.find("job", params=True)}
    assert found == {f"k{n}": 2 for n in range(40)} | {"k0": 3, "locked": 2}


async def test_a_locked_task_holds_up_none_of_those_that_one_call_changes_with_it(mesh: TaskMesh) -> None:
    @mesh.task
    async def job(n: int) -> None: ...

    keys = [f"k{n}" for n in range(40)]
    await job.publish_many({key: {"n": 0} for key in keys})

    async def changed() -> set[str]:
        return {task.key async for task in mesh.find("job", params=True) if (task.params or {})["n"] == 2}

    async def all_but_one() -> bool:
        return await changed() == set(keys) - {"k20"}

    async with mesh.store.driver.session() as session:
        await session.start_transaction()
        await job.configure(session=session, run_again=True).publish("k20", n=1)
        waiting = asyncio.create_task(job.configure(run_again=True).publish_many({key: {"n": 2} for key in keys}))
        await eventually(all_but_one, what="all but one are changed")
        assert not waiting.done()
        await session.commit_transaction()
    assert all(handle.updated for handle in await waiting)
    assert await changed() == set(keys)


async def test_a_locked_key_holds_up_none_of_those_that_are_published_with_it(mesh: TaskMesh) -> None:
    @mesh.task
    async def job(n: int) -> None: ...

    async with mesh.store.driver.session() as session:
        await session.start_transaction()
        await job.configure(session=session).publish("locked", n=1)
        waiting = asyncio.gather(*(job.publish("locked", n=n) for n in range(2)))
        await asyncio.gather(*(job.publish(f"k{n}", n=n) for n in range(40)))
        assert not waiting.done()
        assert (await job.publish("later", n=1)).created
        assert not waiting.done()
        await session.commit_transaction()
    assert [handle.created for handle in await waiting] == [False, False]


async def test_who_is_cancelled_takes_no_other_with_it(mesh: TaskMesh, mongo_uri: str) -> None:
    @mesh.task
    async def job(n: int) -> None: ...

    async with failing_commands(mongo_uri, ["insert"], blockConnection=True, blockTimeMS=300) as have_begun:
        first = [asyncio.create_task(job.publish(f"first{n}", n=n)) for n in range(20)]
        await have_begun()
        second = [asyncio.create_task(job.publish(f"second{n}", n=n)) for n in range(20)]
        await asyncio.sleep(0)
        for publishing in (*first[::2], *second[::2]):
            publishing.cancel()
        answers = await asyncio.gather(*first, *second, return_exceptions=True)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])
    assert all(not isinstance(answer, BaseException) and answer.created for answer in answers[1::2])
    found = {task.key async for task in mesh.find("job")}
    assert found >= {f"{when}{n}" for when in ("first", "second") for n in range(1, 20, 2)}
    await eventually(lambda: not mesh.store.driver.calls._left_alone, what="nothing is left on its way")


async def test_large_tasks_at_one_moment_are_split_into_commands_that_fit(mesh: TaskMesh) -> None:
    @mesh.task
    async def job(text: str) -> None: ...

    text = "x" * 3_000_000
    handles = await asyncio.gather(*(job.publish(f"k{n}", text=text) for n in range(12)))
    assert all(handle.created for handle in handles)


CHECKED: list[int] = []


_SEEN: set[int] = set()


def _noted(n: int) -> int:
    """Note when it is checked first; what has code in its annotation is checked once more, as it will be read."""
    if n not in _SEEN:
        _SEEN.add(n)
        CHECKED.append(n)
    return n


async def test_others_have_their_turn_while_many_are_published_and_come_behind_them(mesh: TaskMesh) -> None:
    @mesh.task
    async def job(n: Annotated[int, AfterValidator(_noted)]) -> None: ...

    await job.publish("before", n=0)  # so that the server's time is known
    many = asyncio.create_task(job.publish_many({f"k{n}": {"n": n} for n in range(5_000)}))
    CHECKED.clear()
    _SEEN.clear()
    at_each_turn = [0]
    while not many.done():
        await asyncio.sleep(0)
        at_each_turn.append(len(CHECKED))
        if len(at_each_turn) == 3:
            later = asyncio.create_task(job.publish("later", n=-1))
    assert len(CHECKED) == 5_001
    assert max(now - before for before, now in pairwise(at_each_turn)) <= 501
    assert all(handle.created for handle in await many)
    assert (await later).created
    tasks = mesh.store.driver.collection("tasks")
    [last] = await tasks.find({}, {"key": 1}).sort("publish_number", -1).limit(1).to_list(None)
    assert last["key"] == "later", "it was called for after them, and checked before most of them"


async def test_a_set_that_the_server_gives_up_is_sent_again_however_long_all_ids_are_together(
    mesh: TaskMesh, mongo_uri: str
) -> None:
    """One query by all of them would be larger than MongoDB takes."""

    @mesh.task
    async def job() -> None: ...

    await job.publish("first")
    params: dict[str, dict[str, Any]] = {f"{n:0200}": {} for n in range(82_000)}
    async with failing_commands(mongo_uri, ["insert"], times=1, errorCode=50) as have_failed:
        handles = await job.publish_many(params)
        await have_failed()
    assert len(handles) == 82_000
    assert (await mesh.stats()).counts["job"]["INIT"] == 82_001


async def test_what_the_server_refuses_is_told_as_that_however_long_all_ids_are_together(
    mesh: TaskMesh, mongo_uri: str
) -> None:
    """It is looked for a spoilt document among them; a query by all of them would be refused in its turn."""

    @mesh.task
    async def job() -> None: ...

    await job.publish("first")
    params: dict[str, dict[str, Any]] = {f"{n:0200}": {} for n in range(82_000)}
    async with failing_commands(mongo_uri, ["insert"], errorCode=13):
        with pytest.raises(OperationFailure) as refused:
            await job.publish_many(params)
    assert refused.value.code == 13


async def test_thousands_that_took_longer_than_the_deadline_survive_their_first_error_all_the_same(
    mesh: TaskMesh, mongo_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskmesh.client.publisher.PUBLISH_DEADLINE_S", 0.0)  # as if they had

    @mesh.task
    async def job() -> None: ...

    await job.publish("first")
    async with failing_commands(mongo_uri, ["insert"], times=2, closeConnection=True) as have_failed:
        handles = await job.publish_many({f"k{n}": {} for n in range(3_000)})
        await have_failed(2)
    assert all(handle.created for handle in handles)
