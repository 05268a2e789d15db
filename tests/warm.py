"""Processes that start at once: forked from one that has imported everything already.

Half of a second of each process's life, and most of what the tests of the command line cost, would go into importing the
driver, pydantic and the like. A server (this module, run as a program) does that once, and forks: each child is a process
of its own, with its own directory, environment, arguments and files, which ends like any other.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

PROGRAMS = {
    "taskmesh": "taskmesh.cli:main",
    "worker": "tests.processes.worker:main",
    "publisher": "tests.client.publishers:main",
    "payloads": "tests.processes.payload_writers:main",
}
_IMPORTED = (
    "taskmesh.cli.app",
    "anyio._backends._asyncio",
    "uvloop",
    "typer.rich_utils",  # what tells of wrong usage
    "tests.processes.worker",
    "tests.processes.handlers",
    "tests.processes.sabotage",
)


class WarmProcess:
    """What the tests use of `subprocess.Popen`, for a process that the server has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ended_at: float | None = None
        """When (monotonic, the clock of the whole machine) it was gone, as its parent saw: a test's process may be late."""
        self._ended = threading.Event()

    def poll(self) -> int | None:
        """Return the exit status if it has ended; negative: the signal that ended it."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises `subprocess.TimeoutExpired`."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def end(self, status: int, at: float) -> None:
        """Note how and when it ended; the server says so."""
        self.ended_at = at
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()


class _Server:
    """The server, as the tests see it: one for each process that runs tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        self._lock = threading.Lock()
        self._started = threading.Semaphore(0)
        self._newest: WarmProcess | None = None
        self._children: dict[int, WarmProcess] = {}
        threading.Thread(target=self._listen, name="warm processes", daemon=True).start()

    def start(self, order: Mapping[str, Any]) -> WarmProcess:
        """Have a process forked."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            assert self._started.acquire(timeout=60), "the server of warm processes does not answer"
            assert self._newest is not None
            return self._newest  # it may have ended already

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            pid, status, now = json.loads(line)
            if status is None:
                self._newest = self._children[pid] = WarmProcess(pid)
                self._started.release()
            else:
                self._children.pop(pid).end(status, now)


@cache
def _server() -> _Server:
    return _Server()


def start(
    program: str,
    words: Sequence[str],
    *,
    stdout: Path,
    stderr: Path,
    stdin: Path = Path(os.devnull),
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    start_new_session: bool = False,
) -> WarmProcess:
    """Start one of `PROGRAMS` in a process of its own, with files for what it reads and writes."""
    return _server().start(
        {
            "program": program,
            "words": list(words),
            "files": [str(stdin), str(stdout), str(stderr)],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "start_new_session": start_new_session,
        }
    )


def _serve() -> Callable[[], None]:
    """Fork as ordered, and tell who ended; returns in the children, with what they have to do."""
    for module in _IMPORTED:
        importlib.import_module(module)
    importlib.import_module(
        "taskmesh.cli.app"
    ).command()  # read from all signatures: half of what a short command computes
    gc.freeze()  # what is here already is not looked through, and so not copied, in each child
    ended, wake = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = b""
    living: set[int] = set()
    while True:
        readable, _, _ = select.select([0, ended], [], [])
        if ended in readable:
            os.read(ended, 1_000)
            for pid in tuple(living):
                if (found := os.waitpid(pid, os.WNOHANG))[0]:
                    living.discard(pid)
                    _tell(pid, found[1])
        if 0 in readable:
            if not (data := os.read(0, 65_536)):
                for pid in living:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            *orders, waiting = (waiting + data).split(b"\n")
            for order in orders:
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    # Where the tests were started in the background, Ctrl-C is ignored by all that they start; where by
                    # nohup, SIGHUP.
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    signal.signal(signal.SIGHUP, signal.SIG_DFL)
                    os.close(ended)
                    os.close(wake)
                    return _child(json.loads(order))
                living.add(pid)
                _tell(pid, None)


def _tell(pid: int, status: int | None) -> None:
    os.write(1, json.dumps([pid, status, time.monotonic()]).encode() + b"\n")


def _child(order: Mapping[str, Any]) -> Callable[[], None]:
    """Become the process that was ordered."""
    if order["start_new_session"]:
        os.setsid()
    flags = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, (path, flag) in enumerate(zip(order["files"], flags, strict=True)):
        file = os.open(path, flag)
        os.dup2(file, number)
        os.close(file)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    if encoding := os.environ.get("PYTHONIOENCODING"):  # what Python does with it when it starts
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            cast(io.TextIOWrapper, stream).reconfigure(encoding=encoding)
    if "web" in order["words"][:1]:
        _give_pages_time()
    module, _, function = PROGRAMS[order["program"]].partition(":")
    sys.argv = [order["program"], *order["words"]]
    main: Callable[[], None] = getattr(importlib.import_module(module), function)
    return main


def _give_pages_time() -> None:
    """Let a dashboard count however busy the machine is: after 0.1 s it would say that many tasks match."""
    for module, budget in (
        ("taskmesh.web.pages", "_COUNT_WITHIN_MS"),
        ("taskmesh.web.pages", "_FITS_WITHIN_MS"),
        ("taskmesh.admin.listing", "_NEWEST_WITHIN_MS"),
    ):
        assert hasattr(importlib.import_module(module), budget)
        setattr(importlib.import_module(module), budget, 30_000)


def _run(main: Callable[[], None]) -> None:
    """Run it, and end as Python does, except that modules are not taken apart first: that would be half of all the work."""
    status = 0
    try:
        main()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does in its children
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    _run(_serve())
