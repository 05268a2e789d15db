"""A fleet of real worker processes that a test starts, kills, suspends and stops; it keeps a record of what it did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests import warm
from tests.processes.history import Mark, Run, read_history, runs_in
from tests.processes.wrong_clock import FAKETIME, faked
from tests.waiting import wait_until

READY_WITHIN_S = 30.0


class Worker:
    """One worker process."""

    def __init__(
        self, process: subprocess.Popen[bytes] | warm.WarmProcess, worker_id: str, output: Path, log: Path
    ) -> None:
        self.process = process
        self.worker_id = worker_id
        self._output = output
        self._log = log
        self.gone: float | None = None
        """When (monotonic) it was known to be gone."""
        self.suspended: list[tuple[float, float]] = []
        """From when to when it was suspended; the end is infinite while it is."""
        self._reaper = threading.Thread(target=self._reap, name=f"reaper of {worker_id}", daemon=True)
        self._reaper.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process exists. A suspended one does."""
        return self.gone is None

    @property
    def told(self) -> dict[str, Any]:
        """All that it has told so far."""
        facts: dict[str, Any] = {}
        for line in self._output.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                facts |= json.loads(line)
        return facts

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self._log.read_text(errors="replace")

    def wait_ready(self) -> Self:
        """Wait until it claims."""
        wait_until(lambda: "ready" in self.told or not self.running, READY_WITHIN_S, what="the worker is ready")
        assert "ready" in self.told, f"the worker ended with {self.process.returncode}:\n{self.log[-3000:]}"
        return self

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self._reaper.join()

    def suspend(self) -> None:
        """Freeze it, as a laptop's lid or a hypervisor does."""
        self.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: self._is_stopped() or not self.running, READY_WITHIN_S, what="the worker is frozen")
        self.suspended.append((time.monotonic(), float("inf")))

    def resume(self) -> None:
        """Let it go on."""
        self.suspended[-1] = (self.suspended[-1][0], time.monotonic())
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Ask it to stop."""
        self.process.terminate()

    def wait(self, deadline_s: float = 60.0) -> int:
        """Wait until it has ended, and return its exit status."""
        self._reaper.join(deadline_s)
        assert not self.running, f"the worker has not ended within {deadline_s:g} s:\n{self.log[-3000:]}"
        assert self.process.returncode is not None
        return self.process.returncode

    def _is_stopped(self) -> bool:
        """A signal takes effect some time after it was sent, for each of its threads."""
        try:
            states = [stat.read_text().rpartition(") ")[2][0] for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        except OSError:  # a thread has ended meanwhile
            return False
        return set(states) <= {"T"}

    def _reap(self) -> None:
        """A thread of its own waits for the end, so that its time is known, and no zombie holds the worker's id."""
        self.process.wait()
        ended_at = self.process.ended_at if isinstance(self.process, warm.WarmProcess) else None
        self.gone = ended_at or time.monotonic()


@dataclass
class Fleet:
    """All worker processes of one test, on one database."""

    uri: str
    database: str
    directory: Path

    def __post_init__(self) -> None:
        self.workers: list[Worker] = []
        self._numbers = count(1)
        self.history_directory = self.directory / "history"
        self.history_directory.mkdir(parents=True, exist_ok=True)

    def start(
        self, worker_id: str | None = None, *, clock_offset_s: float = 0.0, disk_full: bool = False, **setting: Any
    ) -> Worker:
        """Start a worker; see `worker.Setting` for what can be set. `wait_ready` tells when it claims.

        `clock_offset_s`: how far the machine's wall clock is to be off for this process, all libraries included; without
        libfaketime, for Python alone. (It makes some sleeps fail, on which threads of the driver die: for short tests.)
        `disk_full`: whatever it logs cannot be written.
        """
        number = next(self._numbers)
        worker_id = worker_id or f"w{number}"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        if clock_offset_s and FAKETIME.exists():
            environment |= faked(clock_offset_s)
        elif clock_offset_s:
            setting["wrong_clock_s"] = clock_offset_s
        told = {
            "uri": self.uri,
            "database": self.database,
            "history": str(self.history_directory),
            "worker_id": worker_id,
            **setting,
        }
        output, log = self.directory / f"{number}.told", self.directory / f"{number}.log"
        log.touch()
        errors = Path("/dev/full") if disk_full else log
        process: subprocess.Popen[bytes] | warm.WarmProcess
        if "LD_PRELOAD" in environment:  # a library that must be there from the start
            with output.open("wb") as out, errors.open("wb") as err:
                command = [sys.executable, "-m", "tests.processes.worker", json.dumps(told)]
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment)
        else:
            output.touch()
            process = warm.start("worker", [json.dumps(told)], stdout=output, stderr=errors, env=environment)
        worker = Worker(process, worker_id, output, log)
        self.workers.append(worker)
        return worker

    def start_many(self, count: int, **setting: Any) -> list[Worker]:
        """Start some workers, and wait until all of them claim."""
        workers = [self.start(**setting) for _ in range(count)]
        for worker in workers:
            worker.wait_ready()
        return workers

    @property
    def history(self) -> list[Mark]:
        """What the handlers have noted so far."""
        return read_history(self.history_directory)

    @property
    def runs(self) -> list[Run]:
        """The handlers' runs so far."""
        return runs_in(self.history)

    @property
    def suspended(self) -> list[tuple[int, float, float]]:
        """Which process was suspended from when to when."""
        return [(worker.pid, *interval) for worker in self.workers for interval in worker.suspended]

    @property
    def died(self) -> dict[int, list[float]]:
        """When processes were gone, by process id: in a long run the system gives an id to several, one after the other."""
        died: dict[int, list[float]] = {}
        for worker in self.workers:
            if worker.gone is not None:
                died.setdefault(worker.pid, []).append(worker.gone)
        return died

    @property
    def exits(self) -> list[tuple[str, int]]:
        """With what exit code, or minus which signal's number, workers have ended that had worked."""
        codes = [(worker, worker.process.returncode) for worker in self.workers if "ready" in worker.told]
        return [(worker.worker_id, code) for worker, code in codes if code is not None]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            if worker.running:
                worker.kill()
