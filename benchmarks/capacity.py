"""What does a task cost in all, so that capacity can be reckoned? Processor time, oplog and index, and what standing by costs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil
from bson import Timestamp

from benchmarks.backlog import Backlogs
from benchmarks.crew import crew, wait_for
from benchmarks.engine import Work
from benchmarks.limit import engine_variant
from benchmarks.tables import Answer, Goal, median
from taskmesh import TaskMesh

COUNT = 20_000
STANDING = (64,)
_IN_ONE_PROCESS = 64
_MANY = 3
"""So many times as many tasks are worked off beside those that stand by, of which the second half is measured: they take some
seconds to see how much is written."""
_WATCHED_S = 10.0


def measure(backlogs: Backlogs, *, repetitions: int = 3, share: float = 1.0) -> Answer:
    """Publish and work off, first by one worker alone, then beside others who have other work to wait for."""
    count = max(2_000, int(COUNT * share))
    found: dict[str, list[float]] = {}
    for repetition in range(repetitions):
        with backlogs.database() as database:
            idle = _server_share(backlogs)
            published = _publish(backlogs, database, count)
            alone = _work_off(backlogs, database, count, idle)
            sizes = _sizes(backlogs, database, count)
        told = {
            **{f"publish: {name}": value for name, value in published.items()},
            **{f"claim to SUCCESS: {name}": value for name, value in alone.items()},
            **sizes,
        }
        for workers in STANDING:
            each_ms, each_us = _standing_by(backlogs, workers, count * _MANY, idle, alone["server, µs"])
            told[f"one of {workers} that stand by: server, ms each second"] = each_ms
            told[f"one of {workers} that stand by: server, µs for each task of others"] = each_us
        for label, value in told.items():
            found.setdefault(label, []).append(value)
        print(
            f"  capacity {repetition + 1}/{repetitions}: {', '.join(f'{k} {v:.2f}' for k, v in told.items())}",
            flush=True,
        )
    return Answer(
        "What does a task cost in all? (median, and in brackets the least)",
        ("what", "median (least)"),
        [(label, f"{median(values):.2f} ({min(values):.2f})") for label, values in found.items()],
        figures=dict(found),
        notes=[
            "an empty mongod's own work is taken off",
            "indexes after `compact`: those of a busy collection are larger",
            f"those that stand by are {_IN_ONE_PROCESS} to a process, each with connections of its own; theirs is other work",
        ],
        goals=[
            Goal(
                f"one of {workers} that stand by: server, for each task of others",
                "<=",
                1.0,
                median(found[f"one of {workers} that stand by: server, µs for each task of others"]),
                "µs",
            )
            for workers in STANDING
        ],
    )


def _standing_by(backlogs: Backlogs, workers: int, count: int, idle: float, alone_us: float) -> tuple[float, float]:
    """Return what one of so many costs the server: in ms each second, and in µs for each task of others."""
    with backlogs.database() as database:
        common = {"uri": backlogs.uri, "database": database, "names": ["stamp"], "workers": _IN_ONE_PROCESS}
        settings = [common | {"first": first} for first in range(0, workers, _IN_ONE_PROCESS)]
        with crew("stand_by", settings) as members:
            standing = _server_share(backlogs)
            _publish(backlogs, database, count)
            beside = _work_off(backlogs, database, count, standing, from_share=0.5)
            for member in members:
                member.kill()  # all at once: that each takes its leave takes long
    return 1e3 * (standing - idle) / workers, (beside["server, µs"] - alone_us) / workers


def _server_cpu_s(backlogs: Backlogs) -> float:
    times = psutil.Process(backlogs.client.admin.command("serverStatus")["pid"]).cpu_times()
    return float(times.user + times.system)


def _server_share(backlogs: Backlogs) -> float:
    """How much of a core the server uses, as things are."""
    used, began = _server_cpu_s(backlogs), time.monotonic()
    time.sleep(_WATCHED_S)
    return (_server_cpu_s(backlogs) - used) / (time.monotonic() - began)


def _now(backlogs: Backlogs) -> Timestamp:
    now: Timestamp = backlogs.client.admin.command("hello")["lastWrite"]["opTime"]["ts"]
    return now


def _oplog_bytes(backlogs: Backlogs, since: Timestamp) -> int:
    """How long the entries are that were written since then."""
    stages: list[dict[str, Any]] = [
        {"$match": {"ts": {"$gt": since}}},
        {"$group": {"_id": None, "bytes": {"$sum": {"$bsonSize": "$$ROOT"}}}},
    ]
    return int(next(iter(backlogs.client["local"]["oplog.rs"].aggregate(stages)))["bytes"])


def _publish(backlogs: Backlogs, database: str, count: int) -> dict[str, float]:
    """Publish a backlog by `publish_many`, a thousand at a time."""

    async def publish() -> None:
        mesh = TaskMesh(backlogs.uri, database=database)
        work = Work(mesh)
        async with mesh:
            for start in range(0, count, 1_000):
                await work.noop.publish_many({str(n): {"n": n} for n in range(start, min(start + 1_000, count))})

    since, server, own = _now(backlogs), _server_cpu_s(backlogs), time.process_time()
    asyncio.run(publish())
    server, own = _server_cpu_s(backlogs) - server, time.process_time() - own
    return {
        "server, µs": 1e6 * server / count,
        "publisher, µs": 1e6 * own / count,
        "oplog, bytes": _oplog_bytes(backlogs, since) / count,
    }


def _work_off(
    backlogs: Backlogs, database: str, count: int, otherwise: float, *, from_share: float = 0.1
) -> dict[str, float]:
    """Let one consumer do all, and measure from this share of them on. `otherwise`: how much of a core the server uses anyway."""
    setting = engine_variant(1, 1_000, answers=False).setting
    with crew("consume", [{"uri": backlogs.uri, "database": database, **setting}]) as members:
        worker = members[0]
        since = _now(backlogs)
        worker.tell("go")
        wait_for(lambda: worker.done >= from_share * count, 240, members)
        done, own, server, began = worker.done, worker.cpu_s(), _server_cpu_s(backlogs), time.monotonic()
        wait_for(lambda: worker.done >= 0.9 * count, 240, members)
        done, own = worker.done - done, worker.cpu_s() - own
        server = _server_cpu_s(backlogs) - server - otherwise * (time.monotonic() - began)
        wait_for(lambda: worker.done >= count, 60, members)
        worker.end()
    return {
        "server, µs": 1e6 * server / done,
        "worker, µs": 1e6 * own / done,
        "oplog, bytes": _oplog_bytes(backlogs, since) / count,
    }


def _sizes(backlogs: Backlogs, database: str, count: int) -> dict[str, float]:
    """How large a finished task is, and its index entries without those that are gone."""
    backlogs.client[database].command({"compact": "tasks", "force": True})
    told = backlogs.client[database].command("collStats", "tasks")
    return {
        "a finished task: document, bytes": float(told["avgObjSize"]),
        "a finished task: indexes on disk, bytes": told["totalIndexSize"] / count,
    }
