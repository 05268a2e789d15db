"""How fast can one process publish? Each way beside the bare driver doing the same with the same documents."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from pymongo import AsyncMongoClient, MongoClient
from pymongo.write_concern import WriteConcern

from benchmarks.backlog import Backlogs
from benchmarks.engine import Work
from benchmarks.tables import Answer, Goal, median, spread
from taskmesh import TaskMesh

Way = Callable[[int], Awaitable[None]]
IN_FLIGHT = 64
_prefixes = itertools.count()


def measure(backlogs: Backlogs, *, repetitions: int = 5, share: float = 1.0) -> Answer:
    """Run all ways in turn, again and again, into a collection that is emptied each time."""
    rates: dict[str, list[float]] = {}
    for repetition in range(repetitions):
        with backlogs.database("noop", 1) as database:
            template = backlogs.tasks(database).find_one({}) or {}
            for label, rate in asyncio.run(_one_round(backlogs.uri, database, template, share)).items():
                rates.setdefault(label, []).append(rate)
            label = "publish_sync, one by one"
            rates.setdefault(label, []).append(_publish_sync(backlogs.uri, database, max(50, int(1_000 * share))))
            label = "bare insert_one (blocking), one by one"
            rates.setdefault(label, []).append(
                _insert_sync(backlogs.uri, database, template, max(50, int(1_000 * share)))
            )
        print(f"  publish {repetition + 1}/{repetitions}", flush=True)
    middle = {label: median(found) for label, found in rates.items()}
    answer = Answer(
        "How fast can one process publish? (tasks/s, median of interleaved repetitions)",
        ("way", "tasks/s", "least – greatest"),
        [(label, f"{rate:,.0f}", spread(rates[label])) for label, rate in middle.items()],
        figures=dict(middle),
    )
    answer.goals = [
        Goal("publish_many against bare insert_many", ">=", 0.7, middle[MANY] / middle[BARE_MANY]),
        Goal(
            "64 concurrent publish against 64 bare insert_one", ">=", 0.9, middle[CONCURRENT] / middle[BARE_CONCURRENT]
        ),
    ]
    return answer


MANY = "publish_many, 20 000 at once"
BARE_MANY = "bare insert_many, 1 000 per call"
CONCURRENT = f"publish, {IN_FLIGHT} concurrent"
BARE_CONCURRENT = f"bare insert_one, {IN_FLIGHT} concurrent"


async def _one_round(  # noqa: C901 -- seven ways side by side, each three lines
    uri: str, database: str, template: dict[str, Any], share: float
) -> dict[str, float]:
    mesh = TaskMesh(uri, database=database)
    work = Work(mesh)
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(uri)
    async with mesh, client:
        tasks = client[database].get_collection("tasks", write_concern=WriteConcern("majority"))

        def documents(count: int) -> list[dict[str, Any]]:
            prefix = f"b{next(_prefixes)}"
            return [template | {"_id": f"noop:{prefix}-{n}", "key": f"{prefix}-{n}"} for n in range(count)]

        def keys(count: int) -> list[str]:
            prefix = f"p{next(_prefixes)}"
            return [f"{prefix}-{n}" for n in range(count)]

        async def many(count: int) -> None:
            await work.noop.publish_many({key: {"n": 1} for key in keys(count)})

        async def bare_many(count: int) -> None:
            found = documents(count)
            for start in range(0, count, 1_000):
                await tasks.insert_many(found[start : start + 1_000], ordered=False)

        async def repeated(count: int) -> None:
            await work.noop.publish_many({f"again-{n}": {"n": 1} for n in range(count)})

        async def one_by_one(count: int) -> None:
            for key in keys(count):
                await work.noop.publish(key, n=1)

        async def bare_one_by_one(count: int) -> None:
            for document in documents(count):
                await tasks.insert_one(document)

        async def concurrent(count: int) -> None:
            await _in_flight([work.noop.publish(key, n=1) for key in keys(count)])

        async def bare_concurrent(count: int) -> None:
            await _in_flight([tasks.insert_one(document) for document in documents(count)])

        await repeated(5_000)  # so that these keys are there
        await bare_concurrent(200)  # so that the connections are there
        await concurrent(200)
        rates = {}
        for label, way, count in (
            (BARE_MANY, bare_many, 20_000),
            (MANY, many, 20_000),
            ("publish_many, 5 000 keys that exist", repeated, 5_000),
            (BARE_CONCURRENT, bare_concurrent, 4_000),
            (CONCURRENT, concurrent, 4_000),
            ("bare insert_one, one by one", bare_one_by_one, 1_000),
            ("publish, one by one", one_by_one, 1_000),
        ):
            number = count if label.endswith("exist") else max(50, int(count * share))
            begun = time.perf_counter()
            await way(number)
            rates[label] = number / (time.perf_counter() - begun)
        return rates


async def _in_flight(calls: list[Any]) -> None:
    """Await them all, so many at a time."""
    left = iter(calls)

    async def work() -> None:
        for call in left:
            await call

    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))


def _publish_sync(uri: str, database: str, count: int) -> float:
    mesh = TaskMesh(uri, database=database)
    work = Work(mesh)
    work.noop.publish_sync(f"warm-{next(_prefixes)}", n=1)
    prefix = f"s{next(_prefixes)}"
    begun = time.perf_counter()
    for n in range(count):
        work.noop.publish_sync(f"{prefix}-{n}", n=1)
    return count / (time.perf_counter() - begun)


def _insert_sync(uri: str, database: str, template: dict[str, Any], count: int) -> float:
    prefix = f"bs{next(_prefixes)}"
    with MongoClient[dict[str, Any]](uri) as client:
        tasks = client[database].get_collection("tasks", write_concern=WriteConcern("majority"))
        tasks.find_one({"_id": "warm"})
        begun = time.perf_counter()
        for n in range(count):
            tasks.insert_one(template | {"_id": f"noop:{prefix}-{n}", "key": f"{prefix}-{n}"})
        return count / (time.perf_counter() - begun)
