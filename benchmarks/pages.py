"""How long do the dashboard's pages and listings take with a million tasks? `python -m benchmarks.pages [COUNT]`.

Fills a collection with copies of tasks that the engine made, asks each page, each listing of the API and what the commands ask
several times, and prints a table: median, slowest, and (by MongoDB's profiler) how much the worst query of each looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any
from urllib.parse import quote

import httpx
from pymongo import MongoClient
from pymongo.database import Database

from benchmarks.machine import conditions, server
from taskmesh import Task, TaskError, TaskFailed, TaskMesh, current_task
from taskmesh.web import create_app

COUNT = 1_000_000
TIMES = 9
NAMES = 24
QUEUES = 6
_AGE = timedelta(days=14)
_SHARES = {"SUCCESS": 0.900, "FAIL": 0.030, "CANCELLED": 0.010, "LATER": 0.040, "INIT": 0.0199, "RUNNING": 0.0001}
Templates = dict[str, dict[str, Any]]


async def templates(mesh: TaskMesh) -> Templates:
    """Return one document of each kind, as the engine writes it."""
    running = asyncio.Event()

    @mesh.task
    async def template(kind: str, path: str) -> Any:
        current_task().log(f"{path}: opened")
        await current_task().progress(0.5, "half way")
        if kind == "FAIL":
            raise TaskFailed(f"{path} did not answer within 10 s (timeout)")
        if kind == "RUNNING":
            running.set()
            await asyncio.sleep(3_600)
        return {"path": path, "bytes": 173_204}

    kinds = [*_SHARES]
    handles = {}
    for kind in kinds:
        later: dict[str, Any] = {"delay_ms": 30 * 86_400_000} if kind in ("LATER", "CANCELLED", "INIT") else {}
        handles[kind] = await template.configure(worker_timeout_ms=7 * 86_400_000, **later).publish(
            kind, kind=kind, path="original/2026/11/21/IMG_0240.jpg"
        )
    await mesh.cancel("template", "CANCELLED")
    consumer = mesh.consumer(worker_id="photo-1")
    working = asyncio.create_task(consumer.run())
    await running.wait()
    await handles["SUCCESS"].result(timeout=60)
    with contextlib.suppress(TaskError):
        await handles["FAIL"].result(timeout=60)
    tasks = mesh.store.driver.collection(mesh.store.tasks)
    found = {kind: await tasks.find_one({"_id": f"template:{kind}"}) for kind in kinds}
    consumer.begin_stop(grace_ms=0)
    await working
    await tasks.delete_many({})
    found["INIT"]["next_claim_time"] = datetime.now(UTC)
    found["INIT"]["task_state"]["start_time"] = None
    return found


def crowd(kinds: Templates, count: int) -> Iterator[dict[str, Any]]:
    """Yield tasks published over the last two weeks, the kinds well mixed."""
    shares = [(kind, round(share * 10_000)) for kind, share in _SHARES.items()]
    mixed = [kind for kind, share in shares for _ in range(share)]
    now = datetime.now(UTC)
    for number in range(count):
        # 7 919 is prime: one walk through `mixed` takes each place once.
        kind = mixed[number * 7_919 % len(mixed)]
        document = {**kinds[kind], "task_state": {**kinds[kind]["task_state"]}}
        name, key = f"shop.task-{number % NAMES:02}", f"2026/11/{number % 28 + 1:02}/order-{number:08}"
        created = now - _AGE * (1 - number / count)
        document |= {"_id": f"{name}:{key}", "name": name, "key": key, "queue": f"queue-{number % QUEUES}"}
        document["task_state"]["create_time"] = created
        if "finish_time" in document:
            document |= {"finish_time": created, "delete_time": now + timedelta(days=30)}
        if "lane" in document:
            document["lane"] = number % 16
        yield document


def fill(database: Database[dict[str, Any]], kinds: Templates, count: int) -> None:
    """Write the crowd into the collection of tasks."""
    documents = crowd(kinds, count)
    while batch := list(islice(documents, 5_000)):
        database.tasks.insert_many(batch, ordered=False)


def paths(some: dict[str, Any], following: dict[str, str]) -> dict[str, str]:
    """Return what is asked, by what it is. `following`: where second pages begin, by order."""
    name, key = quote(some["name"]), quote(some["key"])
    listings = {
        "all": "",
        "one name": "name:shop.task-07",
        "FAIL": "status:FAIL",
        "RUNNING": "status:RUNNING",
        "INIT of one name": "status:INIT name:shop.task-07",
        "FAIL of a queue": "status:FAIL queue:queue-3",
        "key prefix": "name:shop.task-07 key:2026/11/08",
        "key prefix of any name": "key:2026/11/08/order-000",
        "FAIL with a reason": "status:FAIL error:timeout age>1h",
        "by a worker": "status:RUNNING worker:photo-1",
        "nothing fits": "status:EXPIRED",
    }
    return {
        "overview": "/",
        **{f"tasks: {what}": f"/tasks?where={quote(where)}" for what, where in listings.items()},
        **{f"tasks: second page, {order}": f"/tasks?order={order}&after={at}" for order, at in following.items()},
        "one task": f"/task?name={name}&key={key}",
        "errors": "/errors",
        "workers": "/workers",
        "queues": "/queues",
        "schedules": "/schedules",
        "doctor": "/doctor",
        "bulk: what would be retried": "/bulk?action=retry&where=" + quote("status:FAIL name:shop.task-07"),
        "API: stats": "/api/v1/stats",
        "API: tasks": "/api/v1/tasks?limit=100",
        "API: tasks, FAIL": "/api/v1/tasks?where=status:FAIL",
        "API: count, all": "/api/v1/tasks/count",
        "API: errors": "/api/v1/errors",
        "API: queues": "/api/v1/queues",
    }


def asked(mesh: TaskMesh, some: dict[str, Any]) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return what programs and the command line ask, by what it is."""

    def listed(*of: Any, **how: Any) -> Callable[[], Awaitable[Any]]:
        async def ask() -> list[Task]:
            return [task async for task in mesh.find(*of, **how)]

        return ask

    return {
        "ls --by-key": listed(),
        "ls": listed(sort="newest"),
        "ls --name --by-key": listed("shop.task-07"),
        "ls --status FAIL --by-key": listed(None, "FAIL"),
        "ls --status FAIL": listed(None, "FAIL", sort="newest"),
        "ls --status EXPIRED --by-key": listed(None, "EXPIRED"),
        "ls --name --status INIT --by-key": listed("shop.task-07", "INIT"),
        "ls --queue --by-key": listed(queue="queue-3"),
        "ls --queue": listed(queue="queue-3", sort="newest"),
        "ls --queue --by-key, of nothing": listed(queue="queue-nobody-has"),
        "ls --key-prefix --by-key": listed(key_prefix="2026/11/08/order-000"),
        "ls --key-prefix": listed(key_prefix="2026/11/08/order-000", sort="newest"),
        "ls --key-prefix --by-key, of nothing": listed(key_prefix="2027"),
        "show, explain": lambda: mesh.explain(some["name"], some["key"]),
        "retry --where …, how many": lambda: mesh.listing.count("status:FAIL name:shop.task-07"),
        "workers": mesh.workers,
        "queues": mesh.queues.all,
        "doctor": mesh.inspect.doctor,
        "top: counts taken again": mesh.stats,
    }


@dataclass(frozen=True, slots=True)
class Measured:
    """How one question was answered."""

    took_ms: list[float]
    scans: int
    """Queries that looked at the whole collection without an index."""
    documents: int
    """How many documents the worst of its queries looked at."""
    keys: int
    """The same of index keys."""


async def measured(mesh: TaskMesh, database: Database[dict[str, Any]], times: int) -> dict[str, Measured]:
    """Ask everything so many times, and once more with MongoDB's profiler, which takes time itself."""
    some = database.tasks.find_one({"status": "FAIL"})
    assert some is not None
    transport = httpx.ASGITransport(create_app(mesh))
    found: dict[str, Measured] = {}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=120) as client:
        following: dict[str, str] = {}
        for order, newest in (("newest", "true"), ("key", "false")):
            answer = await client.get("/api/v1/tasks", params={"newest_first": newest, "limit": 50})
            following[order] = quote(answer.json()["following"] or "")

        def page(path: str) -> Callable[[], Awaitable[Any]]:
            async def ask() -> None:
                answer = await client.get(path)
                assert answer.status_code == 200, f"{path}: {answer.text}"

            return ask

        questions = {what: page(path) for what, path in paths(some, following).items()}
        questions |= {f"taskmesh {what}": ask for what, ask in asked(mesh, some).items()}
        for what, ask in questions.items():
            took = []
            for _ in range(times):
                begun = time.perf_counter()
                await ask()
                took.append((time.perf_counter() - begun) * 1000)
            found[what] = Measured(took, *await profiled(database, ask))
    return found


async def profiled(database: Database[dict[str, Any]], ask: Callable[[], Awaitable[Any]]) -> tuple[int, int, int]:
    """Ask once with the profiler; return how many queries scanned, and the most documents and keys that one looked at."""
    database.drop_collection("system.profile")
    database.create_collection("system.profile", capped=True, size=16_000_000)
    database.command("profile", 2)
    await ask()
    database.command("profile", 0)
    queries = list(database["system.profile"].find({"ns": f"{database.name}.tasks"}))
    return (
        sum("COLLSCAN" in query.get("planSummary", "") for query in queries),
        max((query.get("docsExamined", 0) for query in queries), default=0),
        max((query.get("keysExamined", 0) for query in queries), default=0),
    )


async def _main(count: int) -> None:
    with server() as mongod, MongoClient[dict[str, Any]](mongod.uri) as client:
        print("\n".join(f"{name}: {value}" for name, value in conditions(mongod.uri).items()))
        async with TaskMesh(mongod.uri, database="pages") as mesh:
            kinds = await templates(mesh)
            begun = time.monotonic()
            await asyncio.to_thread(fill, client.pages, kinds, count)
            print(f"\n{count} tasks, filled in {time.monotonic() - begun:.0f} s; median of {TIMES}, ms\n")
            print("| page | median | slowest | documents | keys | scans |\n| --- | ---: | ---: | ---: | ---: | ---: |")
            for what, one in (await measured(mesh, client.pages, TIMES)).items():
                times = f"{statistics.median(one.took_ms):.0f} | {max(one.took_ms):.0f}"
                print(f"| {what} | {times} | {one.documents} | {one.keys} | {one.scans} |", flush=True)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT))
