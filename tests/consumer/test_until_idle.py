"""`run(until_idle=True)` waits for what this worker may run, and for nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient, WriteConcern
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from taskmesh import Next, Status, TaskMesh, TaskOption, current_task
from taskmesh.consumer import idleness
from taskmesh.store.claim import claim
from taskmesh.store.find import unfinished_left
from tests.waiting import eventually
from tests.working import status_is, working

SOON_S = 30.0


async def _works_until_idle(mesh: TaskMesh, worker_id: str = "me") -> None:
    async with asyncio.timeout(SOON_S):
        await mesh.consumer(worker_id=worker_id).run(until_idle=True)


async def test_it_does_not_wait_for_what_runs_elsewhere_and_may_never_be_its_own(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None:
        if current_task().worker_id == "other":
            await asyncio.sleep(60)

    await job.configure(specific_worker_ids=["other"]).publish("for another")
    shared = await job.configure(concurrent_worker_cnt=2).publish("for two")
    async with working(mesh, "other") as other:
        await eventually(lambda: len(other.running) == 2)
        await _works_until_idle(mesh)
        assert [entry.worker_id for entry in (await shared.task()).successes] == ["me"]
        assert sorted(other.running) == ["for another", "for two"]


async def test_it_waits_for_what_runs_elsewhere_and_may_come_to_it(mesh: TaskMesh) -> None:
    began = asyncio.Event()

    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=0, unexpected_retry_jitter=0.0))
    async def job() -> None:
        if current_task().worker_id == "other":
            began.set()
            await asyncio.sleep(60)

    handle = await job.publish("k")
    async with working(mesh, "other") as other:
        await began.wait()
        waiting = asyncio.create_task(_works_until_idle(mesh))
        await eventually(lambda: len([w for w in mesh.connection.consumers if w.at_work]) == 2)
        await other.stop(grace_ms=0)
        await waiting
    assert [entry.worker_id for entry in (await handle.task()).successes] == ["me"]


@pytest.mark.parametrize("limited", ["running", "rate"])
async def test_it_does_not_wait_for_a_queue_in_which_nothing_may_run(mesh: TaskMesh, limited: str) -> None:
    @mesh.task(queue="shut")
    async def job() -> None: ...

    await (mesh.set_limit("shut", running=0) if limited == "running" else mesh.set_limit("shut", rate=0))
    handle = await job.publish("k")
    await _works_until_idle(mesh)
    assert await handle.status() is Status.INIT
    [*_, explained] = await mesh.explain("job", "k", worker_id="nobody")
    [gate] = [gate for gate in explained.gates if gate.name == "queue"]
    assert not gate.open
    assert "0" in gate.reason
    await mesh.set_limit("shut", running=None, rate=None)
    await _works_until_idle(mesh)
    assert await handle.status() is Status.SUCCESS


@pytest.mark.parametrize("limited", ["one group", "every group", "the rate of every group"])
async def test_it_does_not_wait_for_a_group_of_which_nothing_may_run(mesh: TaskMesh, limited: str) -> None:
    @mesh.task(queue="shared")
    async def job() -> None: ...

    if limited == "one group":
        await mesh.queues.set_group_limit("shared", "shut", 0)
    elif limited == "the rate of every group":
        await mesh.set_limit("shared", group_rate=0)
    else:
        await mesh.set_limit("shared", group_running=0)
        await mesh.queues.set_group_limit("shared", "open", 2)
    shut = await job.configure(group="shut").publish("of a shut group")
    others = [await job.publish("of none")]
    if limited != "the rate of every group":
        others.append(await job.configure(group="open").publish("of another"))
    await _works_until_idle(mesh)
    assert await shut.status() is Status.INIT
    assert [await other.status() for other in others] == [Status.SUCCESS] * len(others)


async def test_it_runs_what_a_group_may_run_one_at_a_time(mesh: TaskMesh) -> None:
    @mesh.task(queue="shared")
    async def job() -> None: ...

    await mesh.set_limit("shared", group_running=1)
    handles = await job.configure(group="narrow").publish_many({f"k{n}": {} for n in range(5)})
    await _works_until_idle(mesh)
    assert [await handle.status() for handle in handles] == [Status.SUCCESS] * 5


async def test_what_its_filter_leaves_out_it_does_not_wait_for(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    mine, others = await job.publish("mine"), await job.publish("others")
    async with asyncio.timeout(SOON_S):
        await mesh.consumer(on_claim=lambda _: {"key": "mine"}).run(until_idle=True)
    assert [await handle.status() for handle in (mine, others)] == [Status.SUCCESS, Status.INIT]


async def test_a_worker_that_claims_nothing_for_now_does_not_wait(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    handle = await job.publish("k")
    async with asyncio.timeout(SOON_S):
        await mesh.consumer(on_claim=lambda _: None).run(until_idle=True)
    assert await handle.status() is Status.INIT


async def test_a_filter_that_fails_for_a_while_is_no_reason_to_return(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    asked = 0

    def on_claim(_: object) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if asked < 10:
            raise OSError("the budget cannot be read")
        return {}

    handle = await job.publish("k")
    async with asyncio.timeout(SOON_S):
        await mesh.consumer(on_claim=on_claim).run(until_idle=True)
    assert await handle.status() is Status.SUCCESS


async def test_a_paused_worker_does_not_wait_but_for_what_runs_in_it(mesh: TaskMesh) -> None:
    release = asyncio.Event()

    @mesh.task
    async def job() -> None:
        await release.wait()

    running = await job.publish("running")
    consumer = mesh.consumer(worker_id="me", concurrency=1)
    until_idle = asyncio.create_task(consumer.run(until_idle=True))
    await eventually(lambda: consumer.running == ["running"])
    consumer.pause()
    waiting = await job.publish("waiting")
    finished_early, _ = await asyncio.wait([until_idle], timeout=0.5)
    assert not finished_early
    release.set()
    async with asyncio.timeout(SOON_S):
        await until_idle
    assert [await handle.status() for handle in (running, waiting)] == [Status.SUCCESS, Status.INIT]


@pytest.mark.parametrize("left_out", ["paused", "limited", "filtered"])
async def test_it_does_not_wait_for_what_runs_elsewhere_and_it_may_not_have(mesh: TaskMesh, left_out: str) -> None:
    @mesh.task(queue="elsewhere")
    async def job() -> None:
        await asyncio.sleep(60)

    await job.publish("k")
    async with working(mesh, "other") as other:
        await eventually(lambda: other.running == ["k"])
        if left_out == "paused":
            await mesh.pause("elsewhere")
        elif left_out == "limited":
            await mesh.set_limit("elsewhere", running=0)
        filters = {"queue": "default"} if left_out == "filtered" else {}
        async with asyncio.timeout(SOON_S):
            await mesh.consumer(worker_id="me", on_claim=lambda _: filters).run(until_idle=True)
        assert other.running == ["k"]


class _AfterCommand(CommandListener):
    """Does something as soon as so many commands on tasks were answered."""

    def __init__(self) -> None:
        self.commands = 0
        self.act: dict[int, Callable[[], object]] = {}

    def started(self, event: CommandStartedEvent) -> None: ...
    def failed(self, event: CommandFailedEvent) -> None: ...
    def succeeded(self, event: CommandSucceededEvent) -> None:  # noqa: ARG002 -- the driver's signature
        self.commands += 1
        if act := self.act.pop(self.commands, None):
            act()


@pytest.mark.blocks_the_loop  # what happens between two commands is done by a blocking client
@pytest.mark.parametrize("after", range(1, 6))
async def test_what_is_given_back_while_it_is_asked_is_seen(mongo_uri: str, database: str, after: int) -> None:
    """Whichever of its questions was answered just before."""
    listener = _AfterCommand()
    async with (
        AsyncMongoClient[dict[str, Any]](mongo_uri, event_listeners=[listener]) as client,
        TaskMesh(client, database=database) as mesh,
    ):
        await mesh.publish("job", "k", queue="elsewhere")
        with MongoClient[dict[str, Any]](mongo_uri) as other:
            tasks = other[database].get_collection("tasks", write_concern=WriteConcern("majority"))
            as_published = tasks.find_one({"_id": "job:k"})
            assert as_published is not None
            assert await claim(mesh.store, ["job:k"], "other", "r1") == 1
            listener.act[listener.commands + after] = lambda: tasks.replace_one({"_id": "job:k"}, as_published)
            assert await unfinished_left(mesh.store, "me", ["job"], None)


@pytest.mark.blocks_the_loop  # as above
@pytest.mark.parametrize("after", range(1, 8))
async def test_what_goes_on_in_another_queue_while_it_is_asked_is_seen(
    mongo_uri: str, database: str, after: int
) -> None:
    """Whichever of its questions was answered just before."""
    listener = _AfterCommand()
    async with (
        AsyncMongoClient[dict[str, Any]](mongo_uri, event_listeners=[listener]) as client,
        TaskMesh(client, database=database) as mesh,
    ):
        await mesh.publish("job", "k", queue="here")
        with MongoClient[dict[str, Any]](mongo_uri) as other:
            tasks = other[database].get_collection("tasks", write_concern=WriteConcern("majority"))
            move = {"$set": {"queue": "there"}}
            listener.act[listener.commands + after] = lambda: tasks.update_one({"_id": "job:k"}, move)
            assert await unfinished_left(mesh.store, "me", ["job"], None)


async def test_what_this_worker_has_moved_on_while_it_asked_is_seen(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    @mesh.task(queue="q0")
    async def hop(n: int) -> int:
        if n == 3:
            return n
        raise Next(queue=f"q{n + 1}", params={"n": n + 1})

    handle = await hop.publish("k", n=0)

    async def too_late_for_one_queue_and_too_early_for_the_next(*_: Any, **__: Any) -> bool:
        before = await handle.task()

        async def has_moved() -> bool:
            now = await handle.task()
            return now.status.finished or now.queue != before.queue

        await eventually(has_moved)
        return False

    monkeypatch.setattr(idleness, "unfinished_left", too_late_for_one_queue_and_too_early_for_the_next)
    async with asyncio.timeout(SOON_S):
        # It scans for each, so that for a moment nothing goes on here.
        await mesh.consumer(worker_id="me", listen=False).run(until_idle=True)
    assert await handle.status() is Status.SUCCESS


async def test_asking_does_not_look_at_what_is_delayed(mesh: TaskMesh, mongo_uri: str, database: str) -> None:
    @mesh.task
    async def job() -> None: ...

    count = 2_000
    await job.configure(delay_ms=3_600_000).publish_many({f"k{n}": {} for n in range(count)})
    await job.configure(start_time=datetime.now(UTC) + timedelta(hours=2), specific_worker_ids=["me"]).publish("mine")

    def examined(profiles: Any) -> int:
        return sum(found.get("docsExamined", 0) for found in profiles.find({"ns": f"{database}.tasks"}))

    with MongoClient[dict[str, Any]](mongo_uri) as client:
        client[database].command("profile", 2)
        try:
            assert not await unfinished_left(mesh.store, "me", ["job"], None)
        finally:
            client[database].command("profile", 0)
        assert examined(client[database]["system.profile"]) < 20
    await job.publish("due")
    assert await unfinished_left(mesh.store, "me", ["job"], None)
    async with working(mesh, "me"):
        await status_is(mesh, "job", "due", Status.SUCCESS)
    assert not await unfinished_left(mesh.store, "me", ["job"], None)


@pytest.mark.parametrize("specific_worker_ids", [[], ["me"]])
async def test_it_sees_what_is_due_in_whatever_queue(mesh: TaskMesh, specific_worker_ids: list[str]) -> None:
    @mesh.task
    async def job() -> None: ...

    handle = await job.configure(queue="elsewhere", specific_worker_ids=specific_worker_ids).publish("k")
    assert await unfinished_left(mesh.store, "me", ["job"], None)
    assert not await unfinished_left(mesh.store, "me", ["job"], ["default"])
    await _works_until_idle(mesh)
    assert await handle.status() is Status.SUCCESS
