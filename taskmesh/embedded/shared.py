"""The `mongod` that all processes started in one directory share: `attach`, and what it returns.

It starts with the first process that attaches and stops with the last, also when that one is killed; its data stays.
How that is decided without a race is told in watchdog.py; this file is the users' half of it.

Linux: as described. macOS: the same, except when the watchdog itself is killed with SIGKILL: the server then stays
until the next process attaches there. Windows: not available (no `flock`); run a MongoDB and set TASKMESH_URI.

The server listens on 127.0.0.1 without a password: every user of this machine can reach it. It is for development.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from pymongo.errors import PyMongoError

from taskmesh.embedded import replica, watchdog
from taskmesh.embedded.mongod import HOST, find_mongod, last_log_line, mongod_command
from taskmesh.model.errors import EmbeddedUnavailable

DIRECTORY = Path(".taskmesh")
REPLICA_SET = "rs0"


@dataclass
class EmbeddedServer:
    """This process's hold on the shared server of `directory`. The server runs at least until `close`.

    A forked child shares the hold: the server then stays until the child has ended (or closed it) too. A program
    that is executed does not. `pid` is that of mongod.
    """

    uri: str
    directory: Path
    port: int
    pid: int
    _hold: int | None = field(repr=False)

    def close(self) -> None:
        """Detach. The server stops a moment later if nobody else is attached. Idempotent."""
        hold, self._hold = self._hold, None
        if hold is not None:
            os.close(hold)  # not `release`, which would take it from our forked children as well

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def attach(directory: Path | None = None, *, cache_gb: float = 1.0, deadline_s: float = 60.0) -> EmbeddedServer:
    """Return the running server of `directory` (`./.taskmesh`), started if need be, as a primary that takes writes.

    Blocking: async code calls it in a thread. Safe to call from any number of threads and processes at once; each
    call holds the server until its `close`, or until its process ends. `cache_gb` counts for the one that starts it.

    Raises:
        EmbeddedUnavailable: it cannot be started here; the message says what is missing and what helps.
    """
    if sys.platform == "win32":
        raise EmbeddedUnavailable("there is no embedded MongoDB on Windows: run one and put its URI into TASKMESH_URI")
    deadline = time.monotonic() + deadline_s
    place = _prepare(directory or DIRECTORY)
    gate = watchdog.open_lock(place / watchdog.GATE)
    users = watchdog.open_lock(place / watchdog.USERS)
    try:
        _await_lock(gate, deadline, f"another process has been attaching to {str(place)!r}", shared=False)
        # Refused only while a watchdog is stopping the server: wait until it has.
        _await_lock(users, deadline, f"the MongoDB in {str(place)!r} has been stopping", shared=True)
        port, pid = _server_of(place, cache_gb, deadline)
    except BaseException:
        watchdog.release(users)
        raise
    finally:
        watchdog.release(gate)
    return EmbeddedServer(uri=_uri(port), directory=place, port=port, pid=pid, _hold=users)


def running_in(directory: Path | None = None) -> str | None:
    """Return the URI of the server that runs in `directory`, or None. Starts nothing, and holds nothing."""
    place = (directory or DIRECTORY).resolve()
    state = _read_state(place)
    if state is None or replica.dbpath_of(f"{HOST}:{state[0]}") != str(place / watchdog.DATA):
        return None
    return _uri(state[0])


def _uri(port: int) -> str:
    return f"mongodb://{HOST}:{port}/?replicaSet={REPLICA_SET}"


def _prepare(directory: Path) -> Path:
    try:
        place = directory.resolve()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        (place / ".gitignore").write_text("*\n")  # also the proof that we may write here
    except OSError as error:
        raise EmbeddedUnavailable(
            f"the embedded MongoDB cannot keep its data in {str(directory)!r} ({error.strerror}): "
            "start in a directory that you may write to, or put the URI of a MongoDB into TASKMESH_URI"
        ) from error
    return place


def _await_lock(descriptor: int, deadline: float, why_not: str, *, shared: bool) -> None:
    left = deadline - time.monotonic()
    if not replica.wait_for(lambda: watchdog.try_lock(descriptor, shared=shared), left):
        raise EmbeddedUnavailable(f"{why_not} for {left:.0f} s: see which process that is, and end it")


def _has_watchdog(place: Path) -> bool:
    """Tell whether a watchdog lives. Only for the holder of the gate, who alone may start one."""
    probe = watchdog.open_lock(place / watchdog.WATCHDOG)
    try:
        return not watchdog.try_lock(probe)
    finally:
        watchdog.release(probe)


def _server_of(place: Path, cache_gb: float, deadline: float) -> tuple[int, int]:
    """Return port and pid of the server that runs here, or is started."""
    server = _await_server(place, deadline) if _has_watchdog(place) else None
    if server is None and not _has_watchdog(place):  # there was none, or its mongod had just died, and it went too
        _start_watchdog(place, cache_gb, deadline)
        server = _await_server(place, deadline)
    if server is None:
        said = last_log_line(place / watchdog.DATA)
        raise EmbeddedUnavailable(f"the embedded MongoDB did not start in {str(place)!r}: {said}")
    return server


def _start_watchdog(place: Path, cache_gb: float, deadline: float) -> None:
    command = mongod_command(find_mongod(), place / watchdog.DATA, replica_set=REPLICA_SET, cache_gb=cache_gb)
    python = [sys.executable, "-I", "-S", str(Path(watchdog.__file__).resolve())]  # -I -S: nothing but the stdlib
    try:
        subprocess.run(
            [*python, str(place), *command],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            timeout=max(1.0, deadline - time.monotonic()),
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        reason = said.decode("utf-8", "replace").strip().splitlines()[-1] if said else str(error)
        raise EmbeddedUnavailable(f"the watchdog of the embedded MongoDB did not start: {reason}") from error


def _await_server(place: Path, deadline: float) -> tuple[int, int] | None:
    """Wait until the watchdog's server is a primary, and return its port and pid; None if the watchdog ends, or too late."""
    data = place / watchdog.DATA
    found: list[tuple[int, int]] = []

    def ready() -> bool:
        state = _read_state(place)
        if state is None or replica.dbpath_of(f"{HOST}:{state[0]}") != str(data):
            return False
        found.append(state)
        return _becomes_primary(f"{HOST}:{state[0]}")

    ended = replica.wait_for(lambda: ready() or not _has_watchdog(place), deadline - time.monotonic())
    if ended and found and _has_watchdog(place):
        return found[-1]
    return None


def _becomes_primary(address: str) -> bool:
    """Have the replica set formed, and tell whether it has its primary. What fails now is tried again."""
    try:
        replica.ensure_replica_set(address, REPLICA_SET, [address])
    except PyMongoError:
        return False
    return replica.is_primary(address)


def _read_state(place: Path) -> tuple[int, int] | None:
    try:
        state = json.loads((place / watchdog.STATE).read_text())
    except (OSError, ValueError):
        return None  # not there yet
    return int(state["port"]), int(state["pid"])
