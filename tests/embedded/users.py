"""Real processes that attach to the embedded server of a directory, and the servers that then run there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

_ATTACH_AND_WAIT = """
import json, sys
from pathlib import Path
from taskmesh.embedded import attach
server = attach(Path(sys.argv[1]))
print(json.dumps({"uri": server.uri, "port": server.port, "pid": server.pid}), flush=True)
sys.stdin.read()
"""


@dataclass
class User:
    """A process that has attached, and leaves without a word when its standard input ends."""

    process: subprocess.Popen[str]
    _told: dict[str, object] | None = None

    @property
    def attached(self) -> dict[str, object]:
        """What it attached to: `uri`, `port`, and `pid` of mongod. Waits until it has."""
        if self._told is None:
            assert self.process.stdout is not None
            self._told = json.loads(self.process.stdout.readline())
        assert self._told is not None
        return self._told

    @property
    def mongod(self) -> int:
        """The pid of the server that it attached to."""
        return int(str(self.attached["pid"]))

    def leave(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.process.kill()
        self.process.wait()


@contextmanager
def users(directory: Path, count: int, script: str = _ATTACH_AND_WAIT) -> Iterator[list[User]]:
    """Start `count` processes that attach to `directory` at the same time; those that are left are killed."""
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-c", script, str(directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(User(process))
        yield started


def servers_in(directory: Path) -> list[int]:
    """Return the pids of all mongods and watchdogs that work in `directory`."""
    wanted = str(directory.resolve())
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "name"])
        if any(argument in {wanted, f"{wanted}/data"} for argument in process.info["cmdline"] or ())
        and any("mongod" in argument or "watchdog" in argument for argument in process.info["cmdline"])
    ]


def mongods_in(directory: Path) -> list[int]:
    """Return the pids of the mongods whose data is in `directory`."""
    return [pid for pid in servers_in(directory) if "watchdog.py" not in " ".join(psutil.Process(pid).cmdline())]


def watchdog_in(directory: Path) -> int:
    """Return the pid of the one watchdog of `directory`."""
    [pid] = [pid for pid in servers_in(directory) if pid not in mongods_in(directory)]
    return pid
