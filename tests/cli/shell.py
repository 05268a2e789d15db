"""Running `taskmesh` as a real process, and reading what it prints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from pymongo import MongoClient

from taskmesh import TaskFailed, TaskMesh
from taskmesh.cli import main
from taskmesh.store import rules
from tests import warm
from tests.waiting import wait_until

DEADLINE_S = 180.0

APP = '''
"""A module as a user of taskmesh writes it."""

import asyncio
import os
import time

from taskmesh import TaskFailed, TaskMesh, TaskOption, current_task

mesh = TaskMesh(os.environ.get("APP_URI"), database=os.environ.get("APP_DATABASE", "not_this_one"))
quick = TaskOption(worker_timeout_ms=2_000, ping_interval_ms=500, unexpected_retry_delay_ms=100)
patient = TaskOption(worker_timeout_ms=60_000, ping_interval_ms=500)


@mesh.task(option=quick)
async def add(a: int, b: int) -> int:
    return a + b


def begun() -> None:
    """Tell it to `Shell.until_begun`."""
    open(current_task().key + ".begun", "w").close()


@mesh.task(option=quick)
async def nap(ms: int) -> str:
    begun()
    await asyncio.sleep(ms / 1000)
    return current_task().worker_id


@mesh.task(option=patient)
async def until_open() -> str:
    """Go on until somebody opens the door of this key: `Shell.open`."""
    begun()
    while not os.path.exists(current_task().key + ".open"):
        await asyncio.sleep(0.02)
    return current_task().worker_id


@mesh.task(option=quick)
def block(ms: int) -> str:
    begun()
    time.sleep(ms / 1000)
    return "ok"


@mesh.task(option=quick)
async def refuse(why: str) -> None:
    raise TaskFailed(why)


@mesh.task(option=quick)
async def hang(ms: int) -> str:
    time.sleep(ms / 1000)  # in the event loop, where it must not be
    return current_task().worker_id


@mesh.task(option=quick)
async def crash() -> None:
    os._exit(3)


@mesh.task(option=quick)
async def grow(mb: int) -> str:
    grow.__dict__["kept"] = b"x" * (mb * 1_000_000)
    return current_task().worker_id
'''


def defined(mesh: TaskMesh) -> TaskMesh:
    """Give a mesh of this process those tasks of `app` that end by themselves, to fill a database without a process."""

    @mesh.task
    async def add(a: int, b: int) -> int:
        return a + b

    @mesh.task
    async def refuse(why: str) -> None:
        raise TaskFailed(why)

    @mesh.task
    async def nap(ms: int) -> None:
        del ms

    return mesh


@dataclass(frozen=True)
class Ended:
    """What a command that has ended left behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its standard output, parsed."""
        return json.loads(self.out)


@dataclass
class Started:
    """A command that runs on."""

    process: warm.WarmProcess | subprocess.Popen[bytes]
    _out: Path
    _err: Path

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """What it has logged so far."""
        return self._err.read_text()

    @property
    def children(self) -> list[psutil.Process]:
        """The processes that it has started and that run."""
        with_zombies = psutil.Process(self.pid).children()
        return [child for child in with_zombies if child.status() != psutil.STATUS_ZOMBIE]

    def says(self, text: str, times: int = 1) -> None:
        """Wait until it has printed or logged this, so often."""

        def said() -> bool:
            count = (self.out + self.err).count(text)
            assert count >= times or self.process.poll() is None, f"it ended without {text!r}:\n{self.out}{self.err}"
            return count >= times

        try:
            wait_until(said, DEADLINE_S, what=f"it says {text!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.out}{self.err}") from None

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end, and return its exit status."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on and on:\n{self.out}{self.err}") from None

    def stop(self) -> int:
        """Send SIGTERM, wait, and return its exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()


@dataclass
class Shell:
    """A directory with a module `app`, a database, and `taskmesh` to call."""

    uri: str
    database: str
    directory: Path
    stack: ExitStack
    environment: dict[str, str] = field(default_factory=dict)
    _started: int = 0

    def __call__(self, *words: str, typed: str | None = None, **environment: str) -> Ended:
        """Run a command to its end. `typed`: what is in the file that is its standard input."""
        if typed is None:
            return self._run(words, Path(os.devnull), environment)
        with TemporaryDirectory() as directory:
            file = Path(directory) / "in"
            file.write_text(typed)
            return self._run(words, file, environment)

    def at_a_terminal(self, *words: str, typed: str) -> Ended:
        """Run a command likewise, whose standard input is a terminal in which this was typed."""
        keyboard, terminal = os.openpty()
        try:
            os.write(keyboard, typed.encode())
            return self._run(words, Path(os.ttyname(terminal)), {})
        finally:
            os.close(keyboard)
            os.close(terminal)

    def on_a_screen(self, columns: int, *words: str) -> str:
        """Run a command whose standard output is a terminal of this width, and return what it shows, without colours."""
        screen, terminal = os.openpty()
        try:
            name = os.ttyname(terminal)
            ended = self._run(words, Path(os.devnull), {"COLUMNS": str(columns), "TERM": "xterm"}, Path(name))
            assert ended.status == 0, ended
            shown = os.read(screen, 65_536).decode()
        finally:
            os.close(screen)
            os.close(terminal)
        return re.sub(r"\x1b\[[\d;]*m", "", shown).replace("\r\n", "\n")

    def _run(
        self, words: Sequence[str], typing: Path, environment: dict[str, str], screen: Path | None = None
    ) -> Ended:
        with TemporaryDirectory() as directory:
            out, err = (Path(directory) / name for name in ("out", "err"))
            out.touch()
            process = warm.start(
                "taskmesh",
                words,
                stdin=typing,
                stdout=screen or out,
                stderr=err,
                cwd=self.directory,
                env=self._environment(environment),
            )
            try:
                status = process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                _kill_tree(process, psutil.Process(process.pid))
                raise AssertionError(f"{words} goes on and on:\n{out.read_text()}{err.read_text()}") from None
            return Ended(status, out.read_text(), err.read_text())

    def here(self, *words: str) -> Ended:
        """Run a command that ends at once, and whose process is not what matters, in this one."""
        out, err = io.StringIO(), io.StringIO()
        argv, environment = sys.argv, dict(os.environ)
        try:
            sys.argv = ["taskmesh", *words]
            os.environ.clear()
            os.environ.update(self._environment({}))
            with contextlib.chdir(self.directory), redirect_stdout(out), redirect_stderr(err):
                main()
            status: Any = 0
        except SystemExit as end:
            status = end.code or 0
        finally:
            sys.argv = argv
            os.environ.clear()
            os.environ.update(environment)
        return Ended(int(status), out.getvalue(), err.getvalue())

    def done(self, *words: str, typed: str | None = None, **environment: str) -> Ended:
        """Run a command that must succeed."""
        ended = self(*words, typed=typed, **environment)
        assert ended.status == 0, f"{words}: {ended}"
        return ended

    def refuses(self, *words: str, told: str) -> None:
        """Run a command that is used wrongly, in this process."""
        ended = self.here(*words)
        assert ended.status == 2, f"{words}: {ended}"
        assert told in ended.err
        assert "Traceback" not in ended.err

    def start(self, *words: str, **environment: str) -> Started:
        """Start a command; it is killed at the end of the test, with all its children."""
        out, err = self._files()
        process = warm.start(
            "taskmesh",
            words,
            stdout=out,
            stderr=err,
            cwd=self.directory,
            env=self._environment(environment),
            start_new_session=True,
        )
        return self._watched(process, out, err)

    def start_by_nohup(self, *words: str, **environment: str) -> Started:
        """Start a command likewise, by `nohup`."""
        out, err = self._files()
        with out.open("wb") as printed, err.open("wb") as logged:
            process = subprocess.Popen(
                ["nohup", sys.executable, "-m", "taskmesh", *words],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=logged,
                cwd=self.directory,
                env=self._environment(environment),
                start_new_session=True,
            )
        return self._watched(process, out, err)

    def _files(self) -> tuple[Path, Path]:
        self._started += 1
        out, err = (self.directory / f"{self._started}.{name}" for name in ("out", "err"))
        for path in (out, err):
            path.touch()
        return out, err

    def _watched(self, process: warm.WarmProcess | subprocess.Popen[bytes], out: Path, err: Path) -> Started:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
            self.stack.callback(_kill_tree, process, psutil.Process(process.pid))
        return Started(process, out, err)

    def worker(self, *words: str, **environment: str) -> Started:
        """Start `taskmesh worker app:mesh`, and wait until it works."""
        started = self.start("worker", "app:mesh", *words, **environment)
        started.says("at once\n", times=2 if "--processes" not in words else int(words[words.index("--processes") + 1]))
        return started

    def until_begun(self, key: str) -> None:
        """Wait until `until_open`, `nap` or `block` runs: a task that is RUNNING may still be on its way to its handler."""
        wait_until((self.directory / f"{key}.begun").exists, DEADLINE_S, what=f"the handler of {key} has begun")

    def open(self, *keys: str) -> None:
        """Let `until_open` end under these keys."""
        for key in keys:
            (self.directory / f"{key}.open").touch()

    def status(self, name: str, key: str) -> str:
        """Ask for a task's status, as a reader sees it; without a process, since some ask again and again."""
        wanted = [{"$match": {"_id": f"{name}:{key}"}}, {"$project": {"status": rules.status_on_reading()}}]
        [task] = self._client[self.database]["tasks"].aggregate(wanted)
        return str(task["status"])

    def until(self, status: str, name: str, key: str) -> None:
        """Wait until a task has this status."""
        try:
            wait_until(lambda: self.status(name, key) == status, DEADLINE_S, what=f"{name} {key} is {status}")
        except AssertionError as error:
            logs = [path.read_text() for path in sorted(self.directory.glob("*.err"))]
            why = self("explain", name, key).out
            raise AssertionError("\n".join([str(error), why, *logs])) from None

    @cached_property
    def _client(self) -> MongoClient[dict[str, Any]]:
        return self.stack.enter_context(MongoClient[dict[str, Any]](self.uri))

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        base = {name: value for name, value in os.environ.items() if not name.startswith("TASKMESH_")}
        ours = {"TASKMESH_URI": self.uri, "TASKMESH_DATABASE": self.database, "PYTHONDONTWRITEBYTECODE": "1"}
        merged = base | ours | self.environment | more
        return {name: value for name, value in merged.items() if value}  # "" takes one away


@contextmanager
def shell_in(directory: Path, uri: str, database: str) -> Iterator[Shell]:
    """Return a shell whose processes are gone at the end."""
    (directory / "app.py").write_text(APP)
    with ExitStack() as stack:
        yield Shell(uri, database, directory, stack)


def _kill_tree(process: warm.WarmProcess | subprocess.Popen[bytes], known: psutil.Process) -> None:
    """End a process and all that it has started. `known` notices if its pid belongs to a stranger by now."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        if known.is_running():
            family = known.children(recursive=True)
    process.kill()
    process.wait()
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(family, timeout=DEADLINE_S)
