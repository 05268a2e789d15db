"""What does a feature cost? As many tasks that use it, beside as many that do not: processor time of worker and server together.

All in one process with one worker. The ratio shows what has no way of its own to do many at once, however the machine is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
from pymongo import AsyncMongoClient

from benchmarks.backlog import Backlogs
from benchmarks.tables import Answer, median
from taskmesh import Snooze, TaskDefinition, TaskMesh, current_task

COUNT = 1_000
_CONCURRENCY = 500
Feature = Callable[[TaskMesh, int], Awaitable[None]]


def _keys(count: int) -> dict[str, dict[str, Any]]:
    return {str(n): {"n": n} for n in range(count)}


def _define(mesh: TaskMesh) -> dict[str, TaskDefinition[Any, Any]]:
    """The handlers, by name. Each does nothing but use its feature."""
    snoozed = set[str]()

    @mesh.task
    async def plain(n: int) -> int:
        return n

    @mesh.task
    def in_a_thread(n: int) -> int:
        return n

    @mesh.task
    async def snoozes_once(n: int) -> int:
        if current_task().key not in snoozed:
            snoozed.add(current_task().key)
            raise Snooze(delay_ms=50)
        return n

    @mesh.task
    async def steps(n: int) -> int:
        return await current_task().step("s", _same, n)

    @mesh.task
    async def starts_a_child(n: int) -> int:
        task = current_task()
        [value] = await task.results([await task.start(plain, f"child-{task.key}", n=n)])
        return int(value)

    @mesh.task
    async def publishes(n: int) -> int:
        await current_task().publish(plain, f"published-{current_task().key}", n=n)
        return n

    @mesh.task
    async def in_a_transaction(n: int) -> int:
        async with current_task().transaction() as session:
            await session.client[mesh.store.driver.database.name]["own"].insert_one({"n": n}, session=session)
            current_task().set_result(n)
        return n

    kinds = (plain, in_a_thread, snoozes_once, steps, starts_a_child, publishes, in_a_transaction)
    return {each.name: each for each in kinds}


async def _same(n: int) -> int:
    return n


def _tasks_of(name: str) -> Feature:
    async def publish(mesh: TaskMesh, count: int) -> None:
        await mesh.publisher.publish_many(name, _keys(count))

    return publish


async def _one_by_one(mesh: TaskMesh, count: int) -> None:
    await asyncio.gather(*(mesh.publish("plain", key, params) for key, params in _keys(count).items()))


async def _after(mesh: TaskMesh, count: int) -> None:
    await mesh.publisher.publish_many("plain", _keys(count // 2))
    keys = _keys(count // 2)
    await asyncio.gather(*(mesh.publish("plain", f"after-{key}", {"n": 0}, after=[("plain", key)]) for key in keys))


async def _fed(mesh: TaskMesh, count: int) -> None:
    await mesh.publisher.publish_many("plain", _keys(count // 2))
    keys = _keys(count // 2)
    await asyncio.gather(*(mesh.publish("plain", f"fed-{key}", after={"n": mesh.handle("plain", key)}) for key in keys))


async def _in_lines(mesh: TaskMesh, count: int) -> None:
    keys = _keys(count).items()
    await asyncio.gather(*(mesh.publish("plain", k, p, sequence_key=str(p["n"] % 100)) for k, p in keys))


async def _again(mesh: TaskMesh, count: int) -> None:
    await mesh.publisher.publish_many("plain", _keys(count // 2))
    while await mesh.listing.count("status:SUCCESS") < count // 2:  # noqa: ASYNC110 -- there is no event for it
        await asyncio.sleep(0.02)
    await mesh.publisher.publish_many("plain", _keys(count // 2), run_again=True)


async def _again_one_by_one(mesh: TaskMesh, count: int) -> None:
    await mesh.publisher.publish_many("plain", _keys(count // 2))
    while await mesh.listing.count("status:SUCCESS") < count // 2:  # noqa: ASYNC110 -- there is no event for it
        await asyncio.sleep(0.02)
    keys = _keys(count // 2).items()
    await asyncio.gather(*(mesh.publish("plain", key, params, run_again=True) for key, params in keys))


async def _limited(mesh: TaskMesh, count: int) -> None:
    await mesh.queues.set_limit("limited", running=50)
    await mesh.publisher.publish_many("plain", _keys(count), queue="limited")


FEATURES: dict[str, Feature] = {
    "plain tasks": _tasks_of("plain"),
    "published one by one, at one moment": _one_by_one,
    "handlers in threads": _tasks_of("in_a_thread"),
    "run twice, since the handler snoozes": _tasks_of("snoozes_once"),
    "one step each": _tasks_of("steps"),
    "half start a child, and wait for its result": _tasks_of("starts_a_child"),
    "half publish another with their SUCCESS": _tasks_of("publishes"),
    "a document and the SUCCESS in one transaction": _tasks_of("in_a_transaction"),
    "half wait for another by after=": _after,
    "half get the result of another as a param": _fed,
    "in 100 sequences": _in_lines,
    "half as many, each published again to run again": _again,
    "half as many, each published again, one by one": _again_one_by_one,
    "in a queue of which 50 may run": _limited,
}
_BRING_ANOTHER = ("half start a child, and wait for its result", "half publish another with their SUCCESS")


def measure(backlogs: Backlogs, *, repetitions: int = 3, share: float = 1.0) -> Answer:
    """Measure one after the other, again and again: the median of each."""
    answer = Answer(
        "What does a feature cost? (processor time of worker and server for each of 1,000 tasks, medians)",
        ("what", "worker and publisher", "server", "sum against plain tasks"),
    )
    took: dict[str, list[tuple[float, float]]] = {what: [] for what in FEATURES}
    count = max(100, int(COUNT * share))
    for _ in range(repetitions):
        for what, feature in FEATURES.items():
            with backlogs.database() as database:
                took[what].append(asyncio.run(_measured(backlogs, database, feature, what, count)))
    plain = median([sum(each) for each in took["plain tasks"]])
    for what, found in took.items():
        own, server = median([own for own, _ in found]), median([server for _, server in found])
        ratio = median([sum(each) for each in found]) / plain
        answer.rows.append((what, f"{1e6 * own / count:,.0f} µs", f"{1e6 * server / count:,.0f} µs", f"{ratio:.1f}"))
    answer.figures = {
        what: [{"client_s": own, "server_s": server} for own, server in found] for what, found in took.items()
    }
    return answer


async def _measured(backlogs: Backlogs, database: str, feature: Feature, what: str, count: int) -> tuple[float, float]:
    """Return the processor time of this process and of the server until everything is finished."""
    server = psutil.Process(backlogs.client.admin.command("serverStatus")["pid"])
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(backlogs.uri, tz_aware=True)
    mesh = TaskMesh(client, database=database)
    async with client, mesh:
        _define(mesh)
        await client[database].create_collection("own")
        consumer = mesh.consumer(worker_id="w", concurrency=_CONCURRENCY)
        running = asyncio.create_task(consumer.run())
        while consumer.state == "ready":  # noqa: ASYNC110 -- the consumer has no event for it
            await asyncio.sleep(0.01)
        own_before, server_before = time.process_time(), sum(server.cpu_times()[:2])
        await feature(mesh, count // 2 if what in _BRING_ANOTHER else count)
        unfinished = {"status": {"$in": ["INIT", "RUNNING"]}}
        while await client[database]["tasks"].count_documents(unfinished):  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.02)
        own, of_server = time.process_time() - own_before, sum(server.cpu_times()[:2]) - server_before
        await consumer.stop(grace_ms=0)
        await running
    return own, of_server
