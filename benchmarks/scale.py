"""Does it stay flat as it grows? Other tasks in the collection, a long backlog, many executions at once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks.backlog import Backlogs
from benchmarks.crew import Member, crew, rate_between, wait_for
from benchmarks.engine import Work
from benchmarks.tables import Answer, Goal, cut, median, percentile
from taskmesh import TaskMesh

OTHERS = (0, 100_000, 1_000_000)
LONG_OTHERS = 10_000_000
OWN = 40_000
RUNNING = (1_000, 10_000)
LONG_RUNNING = 100_000
LONG_BACKLOG = 1_000_000
MEMORY_S = 15.0
NAP_S = 10.0


def measure(backlogs: Backlogs, *, repetitions: int = 3, share: float = 1.0, long: bool = False) -> Answer:
    """All of it. `long`: with ten million others, and a hundred thousand executions at once."""
    answer = Answer(
        "Does it stay flat as it grows?",
        ("what", "size", "tasks/s", "start p50 / p99 ms", "worker MB", "indexes MB", "remarks"),
    )
    _throughput(backlogs, answer, repetitions, share, long=long)
    _memory(backlogs, answer, share)
    _executions_at_once(backlogs, answer, share, long=long)
    return answer


def _throughput(backlogs: Backlogs, answer: Answer, repetitions: int, share: float, *, long: bool) -> None:
    sizes = [int(size * share) for size in (*OTHERS, *((LONG_OTHERS,) if long else ()))]
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    delays: dict[int, list[float]] = {size: [] for size in sizes}
    indexes: dict[int, float] = {}
    memory: dict[int, float] = {}
    own = max(2_000, int(OWN * share))
    # All sizes stay there side by side, so that the repetitions can be interleaved.
    stacked = [backlogs.database() for _ in sizes]
    databases = [context.__enter__() for context in stacked]
    try:
        for size, database in zip(sizes, databases, strict=True):
            begun = time.monotonic()
            others(backlogs, database, size)
            print(f"  scale: {size:,} others in {time.monotonic() - begun:.0f} s", flush=True)
        for repetition in range(repetitions):
            for size, database in zip(sizes, databases, strict=True):
                rate, starts, mb = _one_run(backlogs, database, own)
                rates[size].append(rate)
                delays[size] += starts
                memory[size] = max(memory.get(size, 0.0), mb)
                stats = backlogs.client[database].command("collStats", "tasks")
                indexes[size] = stats["totalIndexSize"] / 2**20
                backlogs.tasks(database).delete_many({"name": {"$in": ["noop", "stamp"]}})
                print(f"  scale {repetition + 1}/{repetitions}: {size:,} others: {rate:,.0f}/s", flush=True)
    finally:
        for context in stacked:
            context.__exit__(None, None, None)
    for size in sizes:
        answer.rows.append(
            (
                "other tasks",
                f"{size:,}",
                f"{median(rates[size]):,.0f}",
                f"{cut(percentile(delays[size], 0.5), down=False)} / {cut(percentile(delays[size], 0.99), down=False)}",
                f"{memory[size]:.0f}",
                f"{indexes[size]:.0f}",
                "a third each: finished, future, for another worker only",
            )
        )
    answer.figures["others"] = {str(size): median(rates[size]) for size in sizes}
    answer.goals.append(
        Goal(
            f"throughput with {sizes[2]:,} other tasks, against an empty collection",
            ">=",
            0.9,
            median(rates[sizes[2]]) / median(rates[0]),
        )
    )


def others(backlogs: Backlogs, database: str, count: int) -> None:
    """Fill a collection with tasks that are nothing to the worker: finished, future, and for an absent worker only.

    Made by the server from one task that taskmesh published; half of those for others stand at a higher priority.
    """
    if not count:
        return
    backlogs.copy("noop", 1, database)
    number = {"$add": [{"$multiply": ["$block", 1_000]}, "$n"]}
    kind = {"$mod": ["$number", 3]}
    entry = {
        "running_id": "a-1",
        "worker_id": "gone",
        "state": "SUCCESS",
        "start_time": "$$NOW",
        "success_time": "$$NOW",
        "returns": None,
    }
    day = 86_400_000

    def of_kind(finished: Any, future: Any, pinned: Any) -> dict[str, Any]:
        return {
            "$switch": {
                "branches": [
                    {"case": {"$eq": [kind, 0]}, "then": finished},
                    {"case": {"$eq": [kind, 1]}, "then": future},
                ],
                "default": pinned,
            }
        }

    for first in range(0, count, 100_000):
        last = min(count, first + 100_000)
        pipeline: list[dict[str, Any]] = [
            {"$match": {"_id": "noop:0"}},
            {"$set": {"block": {"$range": [first // 1_000, -(-last // 1_000)]}}},
            {"$unwind": "$block"},
            {"$set": {"n": {"$range": [0, 1_000]}}},
            {"$unwind": "$n"},
            {"$set": {"number": number}},
            {
                "$set": {
                    "_id": {"$concat": ["noop:other-", {"$toString": "$number"}]},
                    "name": {"$cond": [{"$eq": [{"$mod": ["$number", 2]}, 0]}, "noop", "other"]},
                    "key": {"$concat": ["other-", {"$toString": "$number"}]},
                    "lane": {"$mod": ["$number", 64]},
                    "status": of_kind("SUCCESS", "INIT", "INIT"),
                    "pinned": of_kind(False, False, True),
                    "task_option.priority": of_kind(0, 0, {"$mod": ["$block", 2]}),
                    "task_option.specific_worker_ids": of_kind([], [], ["absent"]),
                    "task_state.start_time": of_kind(None, {"$add": ["$$NOW", day]}, None),
                    "task_state.worker_states": of_kind([entry], [], []),
                    "next_claim_time": of_kind("$$REMOVE", {"$add": ["$$NOW", day]}, "$next_claim_time"),
                    "finish_time": of_kind("$$NOW", "$$REMOVE", "$$REMOVE"),
                    "delete_time": of_kind({"$add": ["$$NOW", day]}, "$$REMOVE", "$$REMOVE"),
                }
            },
            # The `_id` has to agree with the name.
            {"$set": {"_id": {"$concat": ["$name", ":", "$key"]}}},
            {"$unset": ["block", "n", "number"]},
            {"$merge": {"into": {"db": database, "coll": "tasks"}, "whenMatched": "replace"}},
        ]
        backlogs.tasks(database).aggregate(pipeline)


def _one_run(backlogs: Backlogs, database: str, own: int) -> tuple[float, list[float], float]:
    """Work off a backlog beside the others; then publish → start on the idle worker."""
    setting: dict[str, Any] = {"uri": backlogs.uri, "database": database}
    consumer = setting | {"worker_id": "w", "concurrency": 200, "names": ["noop", "stamp"], "at_once": True}
    before = backlogs.tasks(database).count_documents({"_id": "noop:0"})
    with crew("consume", [consumer]) as workers:
        worker = workers[0]
        wait_for(lambda: bool(worker.samples), 30, workers)
        first = worker.done
        backlogs.copy("noop", own, database)
        wait_for(lambda: worker.done - first >= own - before, 240, workers)
        rate = rate_between([worker.samples], first + 0.1 * own, first + 0.9 * own)
        mb = worker.rss_mb()
        publisher = setting | {
            "prefix": "t",
            "tick_s": 0.02,
            "per_tick": 1,
            "ticks": 100,
            "results": True,
            "one_by_one": True,
        }
        with crew("publish", [publisher]) as publishers:
            publishers[0].tell("go")
            wait_for(lambda: publishers[0].done > 0, 60, publishers)
            publishers[0].end()
        starts = worker.end()["delays_ms"][1:]
    return rate, starts, mb


def _memory(backlogs: Backlogs, answer: Answer, share: float) -> None:
    """A worker's memory with a long backlog before it, from its second second on."""
    count = max(20_000, int(LONG_BACKLOG * share))
    with backlogs.database() as database:
        _claimable(backlogs, database, count)
        setting = {"uri": backlogs.uri, "database": database, "worker_id": "w", "concurrency": 200, "names": ["noop"]}
        with crew("consume", [setting]) as workers:
            worker = workers[0]
            worker.tell("go")
            wait_for(lambda: worker.done > 0, 60, workers)
            seen = _watch_memory(worker, MEMORY_S if share >= 1 else 5.0)
            done = worker.done
            worker.end()
    half = len(seen) // 2
    growth = max(seen[half:]) - max(seen[:half])
    answer.rows.append(
        (
            "long backlog",
            f"{count:,}",
            f"{done / len(seen) * 4:,.0f}",
            "",
            f"{max(seen):.0f}",
            "",
            f"the second half of {len(seen) / 4:.0f} s took {growth:+.1f} MB more than the first; {done:,} done",
        )
    )
    answer.figures["memory_mb"] = seen
    answer.goals += [
        Goal(f"memory of a worker with a backlog of {count:,}", "<=", 150.0, max(seen), "MB"),
        Goal("the same is flat: growth from the first half of the run to the second", "<=", 5.0, growth, "MB"),
    ]


def _watch_memory(worker: Member, seconds: float) -> list[float]:
    seen = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.25)
        seen.append(worker.rss_mb())
    return seen


def _claimable(backlogs: Backlogs, database: str, count: int) -> None:
    """A backlog of tasks that anybody may claim, made by the server from one that taskmesh published."""
    backlogs.copy("noop", 1, database)
    for first in range(0, count, 100_000):
        blocks = range(first // 1_000, -(-min(count, first + 100_000) // 1_000))
        backlogs.tasks(database).aggregate(
            [
                {"$match": {"_id": "noop:0"}},
                {"$set": {"block": list(blocks), "n": {"$range": [0, 1_000]}}},
                {"$unwind": "$block"},
                {"$unwind": "$n"},
                {"$set": {"key": {"$toString": {"$add": [{"$multiply": ["$block", 1_000]}, "$n", 1]}}}},
                {"$set": {"_id": {"$concat": ["noop:", "$key"]}, "lane": {"$mod": ["$n", 64]}}},
                {"$unset": ["block", "n"]},
                {"$merge": {"into": {"db": database, "coll": "tasks"}, "whenMatched": "replace"}},
            ]
        )


def _executions_at_once(backlogs: Backlogs, answer: Answer, share: float, *, long: bool) -> None:
    """Run many executions at once, their leases renewed each second, and count those that are lost."""
    for size in (*RUNNING, *((LONG_RUNNING,) if long else ())):
        count = max(200, int(size * share))
        lost, mb, started = _nap_run(backlogs, count)
        answer.rows.append(
            ("at once", f"{count:,}", "", "", f"{mb:.0f}", "", f"{started:,} ran at once; leases lost: {lost}")
        )
        answer.figures[f"lost at {count}"] = lost
        if size == 10_000:
            answer.goals.append(Goal(f"leases lost with {count:,} executions at once", "<=", 0, lost, ""))


def _nap_run(backlogs: Backlogs, count: int) -> tuple[int, float, int]:
    with backlogs.database() as database:
        setting: dict[str, Any] = {"uri": backlogs.uri, "database": database}
        tasks = backlogs.tasks(database)
        publish_naps(backlogs.uri, database, count, NAP_S)
        consumer = setting | {"worker_id": "w", "concurrency": count, "names": ["nap"]}
        with crew("consume", [consumer]) as workers:
            worker = workers[0]
            worker.tell("go")
            started = mb = 0.0
            end = time.monotonic() + 30 + 4 * NAP_S + count / 1_000
            while worker.done < count and time.monotonic() < end:
                time.sleep(0.5)
                started = max(started, tasks.count_documents({"status": "RUNNING"}))
                mb = max(mb, worker.rss_mb())
            worker.end()
        lost = tasks.count_documents(
            {"$or": [{"task_state.lost_cnt": {"$gt": 0}}, {"task_state.worker_states.1": {"$exists": True}}]}
        )
        unfinished = tasks.count_documents({"status": {"$ne": "SUCCESS"}})
    return lost + unfinished, mb, int(started)


def publish_naps(uri: str, database: str, count: int, seconds: float) -> None:
    """Publish tasks that last."""

    async def publish() -> None:
        mesh = TaskMesh(uri, database=database)
        work = Work(mesh)
        async with mesh:
            await work.nap.publish_many({str(n): {"s": seconds} for n in range(count)})

    asyncio.run(publish())
