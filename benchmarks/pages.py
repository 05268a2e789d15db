"""How long do the dashboard's pages and listings take with a million tasks? `python -m benchmarks.pages [COUNT]`.

Fills a collection with copies of tasks that the engine made, asks each page and each listing of the API several times, and
prints a table: median, slowest, and which queries (by MongoDB's profiler) looked at every document.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any
from urllib.parse import quote

import httpx
from pymongo import MongoClient
from pymongo.database import Database

from benchmarks.machine import server
from taskmesh import TaskError, TaskFailed, TaskMesh, current_task
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
        later = {"delay_ms": 30 * 86_400_000} if kind in ("LATER", "CANCELLED", "INIT") else {}
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
        "bulk: what would be retried": "/bulk?action=retry&where=" + quote("status:FAIL name:shop.task-07"),
        "API: stats": "/api/v1/stats",
        "API: tasks": "/api/v1/tasks?limit=100",
        "API: tasks, FAIL": "/api/v1/tasks?where=status:FAIL",
        "API: count, all": "/api/v1/tasks/count",
        "API: errors": "/api/v1/errors",
        "API: queues": "/api/v1/queues",
    }


async def measured(
    mesh: TaskMesh, database: Database[dict[str, Any]], times: int
) -> dict[str, tuple[list[float], int]]:
    """Ask all; return the milliseconds of each, and how many of its queries looked at every document."""
    some = database.tasks.find_one({"status": "FAIL"})
    assert some is not None
    transport = httpx.ASGITransport(create_app(mesh))
    found: dict[str, tuple[list[float], int]] = {}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=120) as client:
        following: dict[str, str] = {}
        for order, newest in (("newest", "true"), ("key", "false")):
            answer = await client.get("/api/v1/tasks", params={"newest_first": newest, "limit": 50})
            following[order] = quote(answer.json()["following"] or "")
        for what, path in paths(some, following).items():
            took = []
            for number in range(times + 1):
                if number == times:  # once more with the profiler, which takes time itself
                    database.command("profile", 2)
                begun = time.perf_counter()
                answer = await client.get(path)
                took.append((time.perf_counter() - begun) * 1000)
                assert answer.status_code == 200, f"{path}: {answer.text}"
            database.command("profile", 0)
            scans = database["system.profile"].count_documents(
                {"ns": f"{database.name}.tasks", "planSummary": {"$regex": "COLLSCAN"}}
            )
            database.drop_collection("system.profile")
            found[what] = (took[:-1], scans)
    return found


async def _main(count: int) -> None:
    with server() as mongod, MongoClient[dict[str, Any]](mongod.uri) as client:
        async with TaskMesh(mongod.uri, database="pages") as mesh:
            kinds = await templates(mesh)
            begun = time.monotonic()
            await asyncio.to_thread(fill, client.pages, kinds, count)
            print(f"{count} tasks, filled in {time.monotonic() - begun:.0f} s; median of {TIMES}, ms\n")
            print("| page | median | slowest | collection scans |\n| --- | ---: | ---: | ---: |")
            for what, (took, scans) in (await measured(mesh, client.pages, TIMES)).items():
                print(f"| {what} | {statistics.median(took):.0f} | {max(took):.0f} | {scans} |", flush=True)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT))
