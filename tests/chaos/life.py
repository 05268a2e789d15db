"""A few seconds in which everything happens to tasks that can: what the matrix of faults breaks at every verb in turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from bson import ObjectId
from pymongo import AsyncMongoClient, monitoring
from pymongo.errors import PyMongoError

from taskmesh import Consumer, Retry, Snooze, TaskMesh, TaskMeshError, TaskOption, current_task
from taskmesh.store.claim import CLAIMED_FIELDS, claim_one
from tests.waiting import eventually

T = TypeVar("T")
# Longer than a life: what a fault has left claimed is not to be healed by time alone.
_LEASE = TaskOption(
    ping_interval_ms=400, worker_timeout_ms=120_000, unexpected_retry_delay_ms=50, max_unexpected_retries=5
)
_PATIENCE_S = 60.0
_FURTHER = 100


@dataclass
class Life:
    """What became of the tasks."""

    statuses: dict[str, str] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)
    charged: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By key: losses and failures that the tasks were charged."""
    steps: Counter[str] = field(default_factory=Counter)
    """How often each step's function ran: again only where a fault took its record away."""
    effects: int = 0
    """What handlers wrote in `transaction()`."""
    asked_anew: int = 0
    """How often `mesh.retry` was called for 'anew': again when the answer was an error."""
    told: list[str] = field(default_factory=list)
    """Errors that a caller was told, who then tried again."""


EXPECTED_RUNS = {"plain": 1, "twice": 1, "flaky": 2, "retries": 2, "reports": 1, "chains": 1, "after": 1, "writes": 1}
EXPECTED_RUNS |= {"long": 1, "later": 1, "limited-0": 1, "limited-1": 1, "last": 1, "anew": 2, "snoozes": 2}
EXPECTED_RUNS |= {"child": 1, "joined": 1}  # a handler starts the one; the other waits for it
EXPECTED_RUNS |= {"abandoned": 1}
EXPECTED_FAILS = {"flaky": 1, "retries": 1}
EXPECTED_LOSSES = {"abandoned": 1}


async def live(
    uri: str,
    database: str,
    listener: monitoring.CommandListener | None = None,
    *,
    armed: Callable[[], None] | None = None,
    complete: Callable[[], bool] = lambda: True,
) -> Life:
    """Live through it all. `armed` is called when the fleet works, to begin with the faults.

    `complete`: whether everything has happened that was to; until then, there is more to do for the fleet.
    """
    life = Life()
    client: Any = AsyncMongoClient(uri, appname="taskmesh", event_listeners=[listener] if listener else [])
    mesh = TaskMesh(client, database=database)
    _define(mesh, life)
    if armed is not None:
        armed()
    try:
        await _again(life, mesh.connect)
        try:
            await _work(mesh, life, complete)
        finally:
            await mesh.close()
    finally:
        await client.close()
    return life


async def _work(mesh: TaskMesh, life: Life, complete: Callable[[], bool]) -> None:
    consumers, running = await _start(mesh, life, "first")
    try:
        await _publish(mesh, life)
        keys = [key for key in EXPECTED_RUNS if key not in ("last", "abandoned")]
        await eventually(lambda: _are_done(mesh, life, keys), _PATIENCE_S, what="all but 'held' are done")
        assert life.runs["held"] == 1
        await _abandon(mesh, life)
        second, running_second = await _start(mesh, life, "second")
        await consumers.stop(grace_ms=0)  # what it runs is given back, and 'second' has it
        await running
        consumers, running = second, running_second
        await _again(life, lambda: mesh.publish("work", "last"))
        await _again(life, lambda: mesh.fleet.set_concurrency("second", 7))
        await eventually(lambda: second.concurrency == 7, _PATIENCE_S, what="the order is obeyed")
        await eventually(
            lambda: _are_done(mesh, life, ["last", "held", "abandoned"]),
            _PATIENCE_S,
            what="the second has done the rest",
        )
        for number in range(_FURTHER):
            if complete():
                break
            await _one_more(mesh, life, f"further-{number}")
        await _read(mesh, life)
        assert not running.done(), "the consumer goes on"
    finally:
        await consumers.stop(grace_ms=0)
        await running


async def _start(mesh: TaskMesh, life: Life, worker_id: str) -> tuple[Consumer, asyncio.Task[None]]:
    while True:
        consumer = mesh.consumer(worker_id=worker_id, concurrency=20)
        running = asyncio.create_task(consumer.run())
        await eventually(lambda: consumer.state == "running" or running.done(), _PATIENCE_S)  # noqa: B023 -- awaited here
        if not running.done():
            return consumer, running
        error = running.exception()
        assert isinstance(error, (PyMongoError, TaskMeshError)), error
        life.told.append(f"run: {error}")


async def _publish(mesh: TaskMesh, life: Life) -> None:
    """Publish of every kind; each as a user would, who tries again after an error."""
    for key in (
        "plain",
        "flaky",
        "snoozes",
        "retries",
        "reports",
        "chains",
        "writes",
        "long",
        "held",
        "twice",
        "anew",
        "stopped",
    ):
        await _again(life, lambda key=key: mesh.publish("work", key))  # type: ignore[misc]  # the key is bound now
    await _again(life, lambda: mesh.publish("work", "later", delay_ms=1_500, priority=1))
    await _again(life, lambda: mesh.publish("work", "cancelled", delay_ms=3_600_000))
    await _again(life, lambda: mesh.publish("work", "deleted", delay_ms=3_600_000))
    await _again(life, lambda: mesh.publish("work", "tuned", delay_ms=3_600_000))
    await _again(life, lambda: mesh.publish("work", "expires", delay_ms=3_600_000, expire_time=_soon(mesh)))
    await _again(life, lambda: mesh.set_limit("narrow", running=1))
    for number in range(2):
        await _again(life, lambda n=number: mesh.publish("work", f"limited-{n}", queue="narrow"))  # type: ignore[misc]
    await _again(life, lambda: mesh.publish("work", "twice", {"ms": 1}, update_existing_params=True))
    await _again(life, lambda: mesh.cancel("work", "cancelled"))
    await _again(life, lambda: _deleted(mesh))
    await _again(life, lambda: mesh.set_option("work", "tuned", priority=7))
    await _again(life, lambda: mesh.pause("other"))
    await _again(life, lambda: mesh.publish("journey", "journey"))
    await _again(life, lambda: mesh.publish("work", "joined", after=[("journey", "journey")]))
    await _again(life, lambda: mesh.signal("journey", "journey", "go", {"by": "us"}, signal_id="once"))
    await _again(life, lambda: mesh.publish("journey", "given-up", {"gives_up": True}))
    await eventually(lambda: _is_there(mesh, life, "orphan"), _PATIENCE_S, what="who is given up has started its child")
    await _again(life, lambda: mesh.cancel("journey", "given-up"))
    await eventually(lambda: life.runs["stopped"] == 1, _PATIENCE_S, what="the handler that is to be stopped has begun")
    await _again(life, lambda: mesh.cancel("work", "stopped"))
    handle = await _again(life, lambda: mesh.publish("work", "anew"))
    await _again(life, lambda: handle.result(_PATIENCE_S))
    if life.runs["anew"] == 1:
        await _again(life, lambda: _retried(mesh, life))


async def _abandon(mesh: TaskMesh, life: Life) -> None:
    """Leave a task as a worker does that has died: claimed, and its lease over."""
    await _again(life, lambda: mesh.publish("work", "abandoned", queue="other"))  # which is paused
    running_id = str(ObjectId())
    await _again(life, lambda: claim_one(mesh.store, "work:abandoned", "dead", running_id, fields=dict(CLAIMED_FIELDS)))
    # As it stands when time has passed: nobody has written to it.
    past = mesh.clock.now() - timedelta(seconds=1)
    moments = {"task_state.worker_states.0.ping_expire_time": past, "next_claim_time": past}
    tasks = mesh.store.driver.collection("tasks")
    await _again(life, lambda: tasks.update_one({"_id": "work:abandoned"}, {"$set": moments}))
    await _again(life, lambda: mesh.resume("other"))


def _soon(mesh: TaskMesh) -> Any:
    return mesh.clock.now()


async def _deleted(mesh: TaskMesh) -> None:
    if [task async for task in mesh.find(key_prefix="deleted")]:
        await mesh.delete("work", "deleted")


async def _retried(mesh: TaskMesh, life: Life) -> None:
    life.asked_anew += 1
    await mesh.retry("work", "anew")


async def _again(life: Life, call: Callable[[], Awaitable[T]]) -> T:
    """Call until it goes well; what the caller is told on the way is noted."""
    for _ in range(5):
        try:
            return await call()
        except (PyMongoError, TaskMeshError) as error:
            life.told.append(f"{type(error).__name__}: {error}")
    raise AssertionError(f"this does not go well however often it is tried: {life.told}")


async def _are_done(mesh: TaskMesh, life: Life, keys: list[str]) -> bool:
    tasks = await _again(life, lambda: _all_tasks(mesh))
    left = [key for key in keys if tasks.get(key) != "SUCCESS"]
    by_others = tasks.get("expires") == "EXPIRED" and tasks.get("orphan") == "CANCELLED"
    return not left and by_others and life.runs["anew"] >= 2


async def _is_there(mesh: TaskMesh, life: Life, key: str) -> bool:
    return key in await _again(life, lambda: _all_tasks(mesh))


async def _all_tasks(mesh: TaskMesh) -> dict[str, str]:
    return {task.key: task.status.value async for task in mesh.find(limit=0)}


async def _one_more(mesh: TaskMesh, life: Life, key: str) -> None:
    """Publish a task, and wait until it is done."""
    await _again(life, lambda: mesh.publish("work", key))
    await eventually(lambda: _are_done(mesh, life, [key]), _PATIENCE_S, what=f"{key} is done")


async def _until_renewed_twice(mesh: TaskMesh, life: Life, key: str) -> None:
    """Wait until the lease of a task's one entry was made longer twice."""
    ends: set[Any] = set()

    async def renewed() -> bool:
        query, fields = {"name": "work", "key": key}, {"task_state.worker_states.ping_expire_time": 1}
        task = await _again(life, lambda: mesh.store.driver.collection("tasks").find_one(query, fields))
        ends.update(entry["ping_expire_time"] for entry in task["task_state"]["worker_states"])
        return len(ends) > 2

    await eventually(renewed, _PATIENCE_S, what="the place was kept twice")


async def _read(mesh: TaskMesh, life: Life) -> None:
    for task in await _again(life, lambda: _listed(mesh)):
        life.statuses[task.key] = task.status.value
        fails = sum(entry.state == "FAIL" for entry in task.task_state.worker_states)
        life.charged[task.key] = (task.task_state.lost_cnt, fails)
    effects = mesh.store.driver.database["effects"]
    life.effects = await _again(life, lambda: effects.count_documents({}))
    await _again(life, mesh.workers)
    await _again(life, mesh.stats)


async def _listed(mesh: TaskMesh) -> list[Any]:
    return [task async for task in mesh.find(limit=0)]


def _define(mesh: TaskMesh, life: Life) -> None:
    _define_work(mesh, life)

    def count() -> int:
        life.steps["number"] += 1
        return life.steps["number"]

    @mesh.task(option=_LEASE)
    async def journey(gives_up: bool = False) -> str:
        task = current_task()
        if gives_up:
            orphan = await task.start("work", "orphan", ms=3_600_000)
            await task.results([orphan])
        number: int = await task.step("number", count)
        await task.sleep("nap", seconds=1.1)
        signal = await task.wait_for("go")
        child = await task.start("work", "child")
        [value] = await task.results([child])
        return f"{number}: {value} by {signal['by']}"


def _define_work(mesh: TaskMesh, life: Life) -> None:
    @mesh.task(option=_LEASE)
    async def work(ms: int = 0) -> str:
        task = current_task()
        life.runs[task.key] += 1
        await asyncio.sleep(ms / 1000)
        match task.key:
            case "flaky" if task.attempt == 1:
                raise ValueError("as asked")
            case "retries" if task.attempt == 1:
                raise Retry(delay_ms=100)
            case "snoozes" if life.runs["snoozes"] == 1:
                raise Snooze(delay_ms=100)
            case "reports":
                await task.progress(0.5, "half way")
                task.log("going on")
                await asyncio.sleep(1.0)
            case "long":
                await asyncio.sleep(1.5)
            case "held" if life.runs["held"] == 1:
                await asyncio.sleep(60)
            case "stopped":
                try:
                    await asyncio.sleep(60)
                finally:
                    await _until_renewed_twice(mesh, life, task.key)  # cleans up, and keeps its place until then
            case "chains":
                await task.publish("work", "after")
            case "writes":
                async with task.transaction() as session:
                    await mesh.store.driver.database["effects"].insert_one({"_id": task.running_id}, session=session)
                    task.set_result(task.key)
        return str(task.key)
