"""A fleet under a steady load and faults: `SOAK_SECONDS=600 python -m tests.chaos.soak`. Its exit status tells.

Nothing may grow: memory, file descriptors, threads and tasks of the event loop of a worker that lives through it all, connections
to the servers, the collection and its indexes. And after each fault the rate has to come back to 80 % of what is published.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from pymongo.errors import PyMongoError

from taskmesh import TaskMesh, TaskMeshError
from tests.chaos.__main__ import say
from tests.chaos.cluster import Cluster, cluster
from tests.chaos.soak_handlers import define, note_of
from tests.processes.fleet import Fleet, Worker

WORKERS = 8
_SAMPLE_EVERY_S = 1.0
_FAULT_EVERY_S = 20.0
_BACK_SHARE = 0.8
_BACK_WITHIN_S = 60.0
_LEAST_RATE = 12.5
_WINDOW_S = 2.0
_BATCHES_PER_S = 10
_HISTORY = {"minSnapshotHistoryWindowInSeconds": 10}
"""By default a server keeps what was deleted for five minutes more, so that a run would have to last far longer to be flat."""
MAY_GROW = {"memory MB": 30.0, "file descriptors": 15, "threads": 5, "tasks of the event loop": 75, "connections": 60}
"""By how much the last third may lie above the first, in the median: what a fault leaves behind for a moment, or an allocator."""
MAY_GROW_BY_SHARE = {"documents": 1.0, "collection MB": 1.0, "indexes MB": 1.0}
"""The same, as a share: a backlog after a fault is work, and space once taken is used again but not given back."""
_NEGLIGIBLE = {"documents": 2_000, "collection MB": 20.0, "indexes MB": 20.0}


@dataclass
class Soak:
    """One run."""

    servers: Cluster
    fleet: Fleet
    rate: float
    seed: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    recoveries: list[tuple[str, float | None]] = field(default_factory=list)
    published = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.workers = {f"w{n}": self.fleet.start(f"w{n}", **_SETTING) for n in range(WORKERS)}
        for worker in tuple(self.workers.values()):
            worker.wait_ready()
        self.witness = psutil.Process(self.workers["w0"].pid)
        self.reached = asyncio.Event()
        """Set when all that has to be opened is open, and what grows now grows for no reason."""
        self.done = asyncio.Event()

    # --- loops ---

    async def publish(self, mesh: TaskMesh) -> None:
        """Publish at a steady rate, however things stand."""
        definition = mesh.definitions["job"]
        batch, began, owed, last = 0, time.monotonic(), 0.0, 0
        while not self.done.is_set():
            owed += self.rate / _BATCHES_PER_S
            first, last = last, last + int(owed)
            owed -= last - first
            try:
                await definition.publish_many({f"{n}": {"n": n} for n in range(first, last)})
                self.published += last - first
            except (PyMongoError, TaskMeshError) as error:
                say(f"a publish was told {type(error).__name__}")
            batch += 1
            await asyncio.sleep(max(0.0, began + batch / _BATCHES_PER_S - time.monotonic()))
            if time.monotonic() - began > (batch + _BATCHES_PER_S) / _BATCHES_PER_S:
                began = time.monotonic() - batch / _BATCHES_PER_S  # an outage is not made up for

    async def sample(self, mesh: TaskMesh) -> None:
        """Measure what must not grow."""
        while not self.done.is_set():
            await asyncio.sleep(_SAMPLE_EVERY_S)
            for worker_id, worker in tuple(self.workers.items()):
                if not worker.running and worker_id != "w0":
                    self.restart(worker_id)
            if not self.reached.is_set():
                continue
            with suppress(PyMongoError, AssertionError, FileNotFoundError):
                for what, value in (await self._measured(mesh)).items():
                    self.samples.setdefault(what, []).append(value)

    async def _measured(self, mesh: TaskMesh) -> dict[str, float]:
        database = mesh.store.driver.database
        stats = await database.command("collStats", "tasks")
        status = await mesh.store.driver.admin({"serverStatus": 1})
        return {
            "memory MB": self.witness.memory_info().rss / 1e6,
            "file descriptors": self.witness.num_fds(),
            "threads": self.witness.num_threads(),
            "tasks of the event loop": float(note_of(self.fleet.history_directory, self.witness.pid).read_text() or 0),
            "connections": status["connections"]["current"],
            "documents": stats["count"],
            "collection MB": stats["storageSize"] / 1e6,
            "indexes MB": stats["totalIndexSize"] / 1e6,
        }

    async def inject(self, mesh: TaskMesh, seconds: float) -> None:
        """Break something every now and then, and measure how long it takes until all is well."""
        while (took := await self._seconds_until_back(mesh)) is None:
            if self.rate / 2 < _LEAST_RATE:
                self.done.set()
                return
            # What a machine can do is its own matter: whether that lasts, and comes back, is ours.
            say(f"{self.rate:g} tasks/s are more than this machine can do at present: going on with half of that")
            self.rate /= 2
        say(f"{self.rate:g} tasks/s are reached after {took:.1f} s; from now on everything is measured")
        self.reached.set()
        end = time.monotonic() + seconds
        while time.monotonic() + _FAULT_EVERY_S < end:
            await asyncio.sleep(_FAULT_EVERY_S / 2)
            name = self.chance.choice(list(_FAULTS))
            await asyncio.to_thread(_FAULTS[name], self)
            took = await self._seconds_until_back(mesh)
            say(
                f"{seconds - (end - time.monotonic()):6.1f} s  {name}: back after {took if took is None else round(took, 1)} s"
            )
            self.recoveries.append((name, took))
        await asyncio.sleep(max(0.0, end - time.monotonic()))
        self.done.set()

    async def _seconds_until_back(self, mesh: TaskMesh) -> float | None:
        began = time.monotonic()
        await asyncio.sleep(_WINDOW_S)  # so that all that is counted has ended after the fault
        while (waited := time.monotonic() - began) < _BACK_WITHIN_S:
            with suppress(PyMongoError):
                since = mesh.clock.now() - timedelta(seconds=_WINDOW_S)
                tasks = mesh.store.driver.collection("tasks")
                if await tasks.count_documents({"finish_time": {"$gte": since}}) >= _BACK_SHARE * self.rate * _WINDOW_S:
                    return waited
            await asyncio.sleep(0.25)
        return None

    # --- faults ---

    def other_worker(self) -> tuple[str, Worker]:
        """Any but the witness."""
        return self.chance.choice([item for item in self.workers.items() if item[0] != "w0"])

    def restart(self, worker_id: str) -> None:
        """Start it anew."""
        self.workers[worker_id] = self.fleet.start(worker_id, **_SETTING)

    # --- the verdict ---

    def verdict(self) -> list[str]:
        """Print the tables, and return what is wrong."""
        wrong = [
            f"the rate was not back {_BACK_WITHIN_S:g} s after: {name}"
            for name, took in self.recoveries
            if took is None
        ]
        say("\n| what | first third | last third | may grow by |\n| --- | ---: | ---: | ---: |")
        for what, values in self.samples.items():
            third = max(1, len(values) // 3)
            first, last = statistics.median(values[:third]), statistics.median(values[-third:])
            by_share = max(_NEGLIGIBLE.get(what, 0), first * MAY_GROW_BY_SHARE.get(what, 0.0))
            may_grow = MAY_GROW.get(what, by_share)
            say(f"| {what} | {first:.1f} | {last:.1f} | {may_grow:.1f} |")
            if last > first + may_grow:
                wrong.append(f"{what} grew from {first:.1f} to {last:.1f}")
        say("\n| fault | times | seconds until the rate is back, median | most |\n| --- | ---: | ---: | ---: |")
        for name in sorted({name for name, _ in self.recoveries}):
            times = [_BACK_WITHIN_S if took is None else took for fault, took in self.recoveries if fault == name]
            say(f"| {name} | {len(times)} | {statistics.median(times):.1f} | {max(times):.1f} |")
        if not self.reached.is_set():
            wrong.append(f"{self.rate:g} tasks/s were not reached within {_BACK_WITHIN_S:g} s: see SOAK_RATE")
        elif not self.samples or not self.recoveries:
            wrong.append("nothing could be measured")
        return wrong


_SETTING: dict[str, Any] = {"handlers": "tests.chaos.soak_handlers", "concurrency": 50, "grace_ms": 1_000}


def _kill_worker(soak: Soak) -> None:
    worker_id, worker = soak.other_worker()
    worker.kill()
    soak.restart(worker_id)


def _stop_worker(soak: Soak) -> None:
    worker_id, worker = soak.other_worker()
    worker.terminate()
    worker.wait()
    soak.restart(worker_id)


def _cut(soak: Soak) -> None:
    for proxy in soak.servers.proxies:
        proxy.cut()


def _kill_primary(soak: Soak) -> None:
    member = soak.servers.members[soak.servers.primary()]
    member.kill()
    member.start()


_FAULTS: dict[str, Callable[[Soak], None]] = {
    "worker killed (SIGKILL)": _kill_worker,
    "worker stopped (SIGTERM)": _stop_worker,
    "all connections cut": _cut,
    "primary stepped down": lambda soak: soak.servers.step_down(),
    "primary killed (SIGKILL)": _kill_primary,
}


async def _soak(soak: Soak, seconds: float) -> None:
    mesh = TaskMesh(soak.fleet.uri, database=soak.fleet.database)
    define(mesh)
    async with mesh, asyncio.TaskGroup() as loops:
        loops.create_task(soak.publish(mesh))
        loops.create_task(soak.sample(mesh))
        loops.create_task(soak.inject(mesh, seconds))


def main() -> int:
    """Run, and return the exit status."""
    argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__).parse_args()
    seconds = float(os.environ.get("SOAK_SECONDS") or 600)
    rate = float(os.environ.get("SOAK_RATE") or 300)
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    directory = Path(tempfile.mkdtemp(prefix="taskmesh-soak-"))
    say(f"soak for {seconds:g} s at {rate:g} tasks/s, SEED={seed}, logs below {directory}")
    with (
        cluster(directory / "cluster", parameters=_HISTORY) as servers,
        Fleet(servers.uri, "soak", directory / "fleet") as fleet,
    ):
        soak = Soak(servers, fleet, rate, seed)
        asyncio.run(_soak(soak, seconds))
    wrong = soak.verdict()
    say(f"\n{soak.published} tasks published, {len(soak.recoveries)} faults")
    for finding in wrong:
        say(f"WRONG: {finding}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
