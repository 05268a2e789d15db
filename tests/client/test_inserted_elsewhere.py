"""The insert is the protocol: what other languages insert becomes a task like all others, or says why it cannot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import Timestamp
from pymongo import AsyncMongoClient
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import PyMongoError

from taskmesh import Status, TaskError, TaskMesh, TaskOption, current_task
from taskmesh.client.handle import TaskHandle
from taskmesh.model.dependency import OnDependencyFailure
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import all_working, finished, parts_of, working

Tasks = AsyncCollection[dict[str, Any]]
PATIENCE_S = 30.0


@pytest.fixture
async def tasks(mongo_uri: str, database: str) -> AsyncIterator[Tasks]:
    """The collection as another program sees it."""
    async with AsyncMongoClient[dict[str, Any]](mongo_uri, tz_aware=True) as client:
        yield client[database]["tasks"]


def inserted(name: str, key: str, params: Any = None, **fields: Any) -> dict[str, Any]:
    """What a publisher writes that knows nothing but the protocol."""
    document = {"_id": f"{name}:{key}", "name": name, "key": key, "status": "INIT", "publish_time": Timestamp(0, 0)}
    return document | ({} if params is None else {"params": params}) | fields


async def result_of(mesh: TaskMesh, name: str, key: str) -> Any:
    return await (await _handle(mesh, name, key)).result(PATIENCE_S)


async def _handle(mesh: TaskMesh, name: str, key: str) -> TaskHandle[Any]:
    handle = await mesh.publish(name, key, {"n": 0})  # the key is taken: this publishes nothing
    assert not handle.created
    return handle


async def test_an_inserted_task_runs_with_the_option_and_queue_of_its_definition(mesh: TaskMesh, tasks: Tasks) -> None:
    @mesh.task(queue="images", option=TaskOption(priority=4, worker_timeout_ms=90_000))
    async def resize(n: int, width: int = 200) -> int:
        return n * width

    async with working(mesh):
        await tasks.insert_one(inserted("resize", "a", {"n": 2}, repo_id=7))
        task = await finished(mesh, "resize", "a")
    assert task.successes[0].returns == 400
    assert (task.queue, task.task_option.priority, task.task_option.worker_timeout_ms) == ("images", 4, 90_000)
    assert (task.params, task.extra) == ({"n": 2}, {"repo_id": 7})
    stored = await tasks.find_one({"_id": "resize:a"})
    assert stored is not None
    assert not {"configuration", "publish_time"} & stored.keys()


async def test_an_inserted_task_differs_in_nothing_from_one_published_by_python(mesh: TaskMesh, tasks: Tasks) -> None:
    @mesh.task(queue="q", option=TaskOption(max_timeouts=2))
    async def job(n: int) -> None: ...

    until = datetime(2100, 1, 1, tzinfo=UTC)
    settings: dict[str, Any] = {
        "priority": 3,
        "tags": ["a", "b"],
        "group": "g",
        "needs": {"gpu": True},
        "start_time": until,
    }
    settings |= {"expire_time": until + timedelta(days=1), "retain_success_ms": None, "specific_worker_ids": ["w9"]}
    await job.configure(**settings, fields={"repo": 1}).publish("python", n=1)
    async with working(mesh, "w1"):
        await tasks.insert_one(inserted("job", "elsewhere", {"n": 1}, configuration=settings, repo=1))
        await eventually(lambda: tasks.find_one({"_id": "job:elsewhere", "queue": "q"}))
    ours, theirs = [await tasks.find_one({"_id": f"job:{key}"}) for key in ("python", "elsewhere")]
    assert ours is not None
    assert theirs is not None
    own = ("_id", "key", "lane", "publish_id", "publish_number", "event")
    for task in (ours, theirs):
        assert task["task_state"].pop("create_time") <= datetime.now(UTC) + timedelta(seconds=5)
        for field in own:
            assert task.pop(field, None) is not None
    assert theirs == ours


@pytest.mark.parametrize("policy", ["fail", "run", "wait"])
async def test_what_nobody_has_accepted_yet_is_waited_for(
    mesh: TaskMesh, tasks: Tasks, policy: OnDependencyFailure
) -> None:
    @mesh.task
    async def job(n: int) -> int:
        return n

    await tasks.insert_one(inserted("job", "elsewhere", {"n": 1}))
    waiting = await job.configure(after=[("job", "elsewhere")], on_dependency_failure=policy).publish("after", n=2)
    stored = await tasks.find_one({"_id": "job:elsewhere"})
    assert stored is not None
    assert "queue" not in stored
    async with working(mesh):
        assert await waiting.result(PATIENCE_S) == 2
    first, second = [(await mesh.get("job", key)).successes[0] for key in ("elsewhere", "after")]
    assert first.success_time is not None
    assert second.start_time is not None
    assert first.success_time <= second.start_time


async def test_a_delay_counts_from_the_insert(mesh: TaskMesh, tasks: Tasks) -> None:
    @mesh.task
    async def job() -> None: ...

    await tasks.insert_one(inserted("job", "late", configuration={"delay_ms": 2_592_000_000.0}))  # as Node stores it
    stored = await tasks.find_one({"_id": "job:late"})
    assert stored is not None
    second = stored["publish_time"].as_datetime()
    async with working(mesh):
        accepted = await eventually(lambda: tasks.find_one({"_id": "job:late", "queue": "default"}))
    starts = accepted["task_state"]["start_time"] - timedelta(days=30)
    assert second <= starts <= second + timedelta(seconds=1)
    assert accepted["next_claim_time"] == accepted["task_state"]["start_time"]


async def test_inserted_tasks_run_in_the_order_of_their_inserts(mesh: TaskMesh, tasks: Tasks) -> None:
    ran: list[str] = []

    @mesh.task
    async def job() -> None:
        ran.append(current_task().key)

    keys = [f"{n * 37 % 100:02}" for n in range(100)]
    for key in keys:
        await tasks.insert_one(inserted("job", key))
    # All are accepted before the first is claimed: what is accepted later comes later.
    await mesh.pause("default")
    async with working(mesh, concurrency=1):
        await eventually(lambda: _all_accepted(tasks))
        await mesh.resume("default")
        await eventually(lambda: len(ran) == len(keys))
    assert ran == keys


async def _all_accepted(tasks: Tasks) -> bool:
    return await tasks.find_one({"queue": {"$exists": False}}) is None


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"params": {"n": "many"}}, "'n'"),
        ({"params": ["n"]}, "params must be a dict"),
        ({"params": {}}, "'n'"),
        ({"params": {"n": 1}, "configuration": {"priority": "high"}}, "priority='high'"),
        ({"params": {"n": 1}, "configuration": {"run_again": True}}, "unknown setting run_again"),
        ({"params": {"n": 1}, "configuration": 7}, "configuration must be a document"),
        ({"params": {"n": 1}, "lane": 3, "settle_time": "now"}, "lane, settle_time: fields of taskmesh's own"),
        ({"params": {"n": 1}, "publish_time": datetime(2026, 1, 1, tzinfo=UTC)}, "publish_time must be an empty BSON"),
    ],
    ids=["type", "list", "missing", "option", "setting", "no document", "not his", "time"],
)
async def test_what_does_not_fit_fails_for_good_with_its_reason(
    mesh: TaskMesh, tasks: Tasks, fields: dict[str, Any], complaint: str
) -> None:
    ran: list[int] = []

    @mesh.task
    async def job(n: int) -> None:
        ran.append(n)

    async with working(mesh, "w1"):
        await tasks.insert_one(inserted("job", "bad") | fields)
        with pytest.raises(TaskError, match=complaint):
            await result_of(mesh, "job", "bad")
    assert ran == []
    stored = await tasks.find_one({"_id": "job:bad"})
    assert stored is not None
    assert "settle_time" not in stored
    assert stored["delete_time"] > stored["finish_time"], "it is not kept for ever"
    assert (await mesh.retry("job", "bad")).status is Status.INIT


async def test_strangers_stay_as_they_are(mesh: TaskMesh, tasks: Tasks, caplog: pytest.LogCaptureFixture) -> None:
    @mesh.task
    async def job() -> str:
        return "done"

    strangers: list[dict[str, Any]] = [
        {"_id": 7, "name": "job", "key": "2", "status": "INIT"},
        {"_id": "job:", "name": "job", "key": 5, "status": "INIT"},
        {"_id": "job:1", "name": "job", "key": "2", "status": "INIT"},
        {"_id": "x", "status": "INIT"},
    ]
    async with working(mesh, "w1"):
        await eventually(
            lambda: any(each.ready.is_set() for each in mesh.feed._subscriptions), what="the worker listens"
        )
        await tasks.insert_many(strangers)
        await tasks.insert_one(inserted("job", "good"))
        await finished(mesh, "job", "good")
        await eventually(lambda: len(_told(caplog)) == 2, what="those whose _id has another form are told of")
    left = await tasks.find({"_id": {"$ne": "job:good"}}).sort("_id").to_list(None)
    assert left == strangers
    assert len(_told(caplog)) == 2


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if "its _id must be name:key" in line]


async def test_before_any_worker_has_come_it_can_be_seen_and_changed(mesh: TaskMesh, tasks: Tasks) -> None:
    def key_of(n: int) -> dict[str, Any]:
        return inserted("job", str(n), {"n": n}, configuration={"queue": "slow"})

    await tasks.insert_many([key_of(n) for n in range(7)])
    assert [task.key async for task in mesh.find()] == [str(n) for n in range(7)]
    task = await mesh.get("job", "0")
    assert (task.status, task.queue, task.params) == (Status.INIT, "slow", {"n": 0})
    assert (await mesh.cancel("job", "1")).status is Status.CANCELLED
    assert (await mesh.delete("job", "2")).key == "2"
    assert (await mesh.set_option("job", "3", priority=8)).task_option.priority == 8
    assert (await mesh.retry("job", "4")).status is Status.INIT
    await mesh.signal("job", "5", "go", {"n": 1})
    assert (await mesh.get("job", "5")).task_state.signals[0].payload == {"n": 1}
    again = await mesh.publish("job", "6", {"n": 66}, run_again=True)
    assert not again.created
    assert (await mesh.get("job", "6")).params == {"n": 66}
    await tasks.insert_one(key_of(8))
    assert await mesh.explain("job", "8")


async def test_a_publication_in_a_transaction_changes_what_nobody_has_accepted_yet(
    mesh: TaskMesh, tasks: Tasks
) -> None:
    @mesh.task
    async def job(n: int) -> int:
        return n

    policies: list[dict[str, Any]] = [{"update_existing_params": True}, {"run_again": True}, {"clean_failed": True}]
    begun: list[int] = []
    client = tasks.database.client
    for i, policy in enumerate(policies):
        key = str(i)

        async def change(session: Any, key: str = key, policy: dict[str, Any] = policy) -> None:
            begun.append(len(begun))
            await client[tasks.database.name]["orders"].insert_one({"key": key}, session=session)  # a snapshot is taken
            handle = await job.configure(session=session, **policy).publish(key, n=2)
            assert not handle.created

        await tasks.insert_one(inserted("job", key, {"n": 1}))
        async with client.start_session() as session:
            await session.with_transaction(change)
    assert len(begun) >= 2 * len(policies), "each was accepted at the first attempt, which could not see that"
    async with working(mesh):
        assert [await result_of(mesh, "job", str(i)) for i in range(len(policies))] == [2, 2, 1]


async def test_a_signal_that_comes_before_the_acceptance_is_not_lost(mesh: TaskMesh, tasks: Tasks) -> None:
    @mesh.task
    async def job() -> Any:
        return await current_task().wait_for("go", timeout_ms=60_000)

    signal = {"event": "go", "id": "s1", "payload": {"by": "ann"}, "size": 120, "time": datetime.now(UTC)}
    await tasks.insert_one(inserted("job", "k", task_state={"signals": [signal], "signals_bytes": 120}))
    async with working(mesh):
        assert (await finished(mesh, "job", "k")).successes[0].returns == {"by": "ann"}


async def test_several_workers_accept_a_burst_once_each_and_without_a_stream(mesh: TaskMesh, tasks: Tasks) -> None:
    ran: list[str] = []

    @mesh.task
    async def job() -> None:
        ran.append(current_task().key)

    keys = [str(n) for n in range(250)]
    await tasks.insert_many([inserted("job", key) for key in keys], ordered=False)
    async with all_working(mesh, ["w1", "w2"], listen=False):
        await eventually(lambda: len(ran) >= len(keys))
    assert sorted(ran) == sorted(keys)


@pytest.mark.parametrize(
    "fault",
    [{"writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}}, {"closeConnection": True}],
    ids=["the answer is lost", "the connection is cut before"],
)
async def test_an_acceptance_that_fails_is_repeated_and_counts_once(
    mesh: TaskMesh, tasks: Tasks, mongo_uri: str, fault: dict[str, Any]
) -> None:
    await tasks.insert_one(inserted("job", "k"))
    acceptance = mesh.connection.acceptance
    async with failing_commands(mongo_uri, ["update"], times=1, **fault):
        with pytest.raises(PyMongoError):
            await acceptance.accept(["job:k"], "w1")
    await acceptance.accept(["job:k"], "w2")
    first = await tasks.find_one({"_id": "job:k"})
    assert first is not None
    assert first["queue"] == "default"
    assert await acceptance.accept(["job:k"], "w3") == 0
    assert await tasks.find_one({"_id": "job:k"}) == first


async def test_an_urgent_one_passes_a_backlog(mesh: TaskMesh, tasks: Tasks) -> None:
    """While more waits than a worker can take, its stream tells of no new tasks; of what is to be accepted it does."""
    ran: list[str] = []

    @mesh.task
    async def job() -> None:
        ran.append(current_task().key)
        await asyncio.sleep(0.02)

    await job.publish_many({str(n): {} for n in range(3_000)})
    async with working(mesh, concurrency=2) as consumer:
        await eventually(lambda: ran and not parts_of(consumer).listener.wants_hints)
        parts_of(consumer).inserted_tasks._next_look = time.monotonic() + 3_600  # it has to hear of it
        await tasks.insert_one(inserted("job", "urgent", configuration={"priority": 9}))
        await eventually(lambda: "urgent" in ran)
        waiting = [task async for task in mesh.find(status="INIT", limit=1)]
    assert waiting, "the backlog was worked off before: the test proves nothing"


async def test_until_idle_waits_for_what_was_inserted(mesh: TaskMesh, tasks: Tasks) -> None:
    ran: list[int] = []

    @mesh.task
    async def job(n: int) -> None:
        ran.append(n)

    await tasks.insert_one(inserted("job", "k", {"n": 3}))
    await mesh.consumer(listen=False).run(until_idle=True)
    assert ran == [3]


async def test_events_tell_of_the_publication_once(mesh: TaskMesh, tasks: Tasks) -> None:
    @mesh.task
    async def job() -> None: ...

    kinds: list[str] = []
    async with mesh.events("job", "k") as events, working(mesh):
        await tasks.insert_one(inserted("job", "k"))
        async for event in events:
            kinds.append(event.kind)
            if event.kind == "finished":
                break
    assert kinds == ["published", "claimed", "succeeded", "finished"]
