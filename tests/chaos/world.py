"""All that takes part in a run: a cluster, workers that are started again when they die, producers, and the witnesses."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from pymongo.errors import PyMongoError

from taskmesh import TaskMesh
from taskmesh.store.mongodb.server_errors import patiently
from tests.chaos.findings import Findings
from tests.chaos.producer import PER_MS, RATE, RATED, read_notes
from tests.chaos.witnesses import Witnesses
from tests.processes.fleet import Fleet, Worker
from tests.waiting import wait_until

_CLOCKS_S = (0.0, 0.0, 0.0, 3_600.0, -3_600.0)
_FINISHED = ("SUCCESS", "FAIL", "CANCELLED", "EXPIRED")
_STUCK_S = 100.0
"""Longer than the longest lease, which is that of a transaction: as long as the server lets one live, and a little."""
WORKERS = 4


class World:
    """One run on one database."""

    def __init__(
        self,
        uri: str,
        directory: Path,
        seed: int,
        *,
        workers: int = WORKERS,
        producers: int = 2,
        per_s: float = 10.0,
        broken: Sequence[str] = (),
    ) -> None:
        """`broken`: in every worker and producer, see `tests/processes/broken.py`."""
        self.uri = uri
        self._directory = directory
        self.chance = random.Random(seed)
        self._seed = seed
        self.worker_ids = [f"w{number}" for number in range(1, workers + 1)]
        self._producer_count, self._per_s = producers, per_s
        self._broken = list(broken)
        self.database = "chaos"
        self.fleet = Fleet(uri, self.database, directory / "fleet")
        self._newest: dict[str, Worker] = {}
        self._producers: list[subprocess.Popen[bytes]] = []
        self.witnesses = Witnesses(uri, self.database)
        self.started_again = 0
        self._fewest_left, self._last_progress = float("inf"), 0.0

    # --- life ---

    def __enter__(self) -> Self:
        self.witnesses.start()
        self._on_mesh(lambda mesh: mesh.set_limit(RATED, rate=RATE, per_ms=PER_MS))
        for worker_id in self.worker_ids:
            self._start_worker(worker_id)
        for worker in self._newest.values():
            worker.wait_ready()
        self._start_producers()
        # One that is not connected yet when the first fault comes may be told that there is no server.
        wait_until(lambda: len(list(self._directory.glob("*.published"))) == self._producer_count, 60.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for producer in self._producers:
            producer.kill()
            producer.wait()
        self.fleet.__exit__(kind, error, trace)

    def tend(self) -> None:
        """Start every worker again that has died."""
        for worker_id, worker in self._newest.items():
            if not worker.running:
                self.started_again += 1
                self._start_worker(worker_id)

    def pause(self, seconds: float) -> None:
        """Let the run go on for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.tend()
            time.sleep(min(0.05, left))  # the rhythm of the faults, not a wait for something

    def newest(self, worker_id: str) -> Worker:
        """The process that runs under this id."""
        self.tend()
        return self._newest[worker_id]

    def any_worker(self) -> Worker:
        """A worker that runs."""
        return self.newest(self.chance.choice(self.worker_ids))

    def set_paused(self, queue: str, paused: bool) -> None:
        """Pause a queue, or let it go on."""
        self._on_mesh(lambda mesh: mesh.pause(queue) if paused else mesh.resume(queue))

    def _on_mesh(self, change: Callable[[TaskMesh], Awaitable[object]]) -> None:
        async def make() -> None:
            async with TaskMesh(self.uri, database=self.database) as mesh:
                await patiently(lambda: change(mesh))

        asyncio.run(make())

    def wind_down(self) -> None:
        """Stop publishing, let everything come to its end, stop the workers and the witnesses."""
        for producer in self._producers:
            producer.terminate()
        for producer in self._producers:
            assert producer.wait(90.0) == 0, "a producer failed"
        self._fewest_left, self._last_progress = float("inf"), time.monotonic()
        wait_until(self._all_ended_or_stuck, 3_600.0)
        for worker in self._newest.values():
            if worker.running:
                worker.terminate()
        for worker in self._newest.values():
            worker.wait(90.0)
        self.witnesses.stop()

    def check(self) -> Findings:
        """Decide everything. After `wind_down`."""
        return self.witnesses.check(self.fleet, *read_notes(self._directory))

    # --- parts ---

    def _all_ended_or_stuck(self) -> bool:
        """Whether all tasks have ended; or nothing gets on any more, which is a finding."""
        self.tend()
        with suppress(PyMongoError), self.witnesses.client() as client:
            left = client[self.database]["tasks"].count_documents({"status": {"$nin": list(_FINISHED)}})
            if left < self._fewest_left:
                self._fewest_left, self._last_progress = left, time.monotonic()
        return self._fewest_left == 0 or time.monotonic() - self._last_progress > _STUCK_S

    def _start_worker(self, worker_id: str) -> None:
        self._newest[worker_id] = self.fleet.start(
            worker_id,
            handlers="tests.chaos.handlers",
            concurrency=self.chance.choice((5, 10, 20)),
            grace_ms=1_000,
            wrong_clock_s=self.chance.choice(_CLOCKS_S),
            disk_full=self.chance.random() < 0.1,
            listen=self.chance.random() < 0.9,
            broken=self._broken,
        )

    def _start_producers(self) -> None:
        for number in range(self._producer_count):
            order = {
                "uri": self.uri,
                "database": self.database,
                "directory": str(self._directory),
                "number": number,
                "seed": self._seed,
                "per_s": self._per_s,
                "worker_ids": self.worker_ids,
                "broken": self._broken,
            }
            with (self._directory / f"producer{number}.log").open("wb") as log:
                self._producers.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.chaos.producer", json.dumps(order)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                    )
                )
