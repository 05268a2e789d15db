"""One `mongod` process of a test, on a loopback port: start, form a replica set, stop, kill, suspend, resume.

Whoever starts one stops it: it is an ordinary child process and outlives a parent that is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from taskmesh.embedded import find_mongod, replica
from taskmesh.embedded.mongod import HOST, last_log_line, mongod_command
from taskmesh.embedded.watchdog import MONGOD_LOG, PORT_TAKEN, allow_many_files
from taskmesh.model.errors import EmbeddedUnavailable

_PORT_ATTEMPTS = 5


def free_port() -> int:
    """Return a loopback port that was free a moment ago; somebody else may take it before you do."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class Mongod:
    """A `mongod` child process of this one.

    `replica_set=None` makes a standalone server. `parameters` become `--setParameter name=value`, `arguments` are
    added as they are. `port=None` chooses a free one at each first start; a restart keeps it.

    Use it as a context manager, or call `start` and `stop`. After `kill` or `stop`, `start` goes on with the same
    data on the same port.
    """

    def __init__(
        self,
        dbpath: Path,
        *,
        port: int | None = None,
        replica_set: str | None = "rs0",
        cache_gb: float = 0.25,
        parameters: Mapping[str, object] | None = None,
        arguments: Sequence[str] = (),
        binary: Path | None = None,
    ) -> None:
        self.dbpath = dbpath
        self.replica_set = replica_set
        self._wished_port = port
        self._port = port
        self._command = mongod_command(
            binary or find_mongod(),
            dbpath,
            replica_set=replica_set,
            cache_gb=cache_gb,
            parameters=parameters,
            arguments=arguments,
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """The loopback port. Known from the first `start` on, or from the beginning if it was given."""
        if self._port is None:
            raise RuntimeError("this mongod has no port yet: start() it first")
        return self._port

    @property
    def address(self) -> str:
        """`127.0.0.1:port`, as it stands in the replica set's configuration."""
        return f"{HOST}:{self.port}"

    @property
    def uri(self) -> str:
        """A MongoDB URI: of the replica set if there is one, else of this server."""
        return f"mongodb://{self.address}/" + (f"?replicaSet={self.replica_set}" if self.replica_set else "")

    @property
    def pid(self) -> int:
        """The process id of the running (or last) process."""
        return self._child().pid

    @property
    def running(self) -> bool:
        """Whether the process exists. A suspended one does."""
        return self._process is not None and self._process.poll() is None

    @property
    def serves_reads(self) -> bool:
        """Whether it runs as a primary, or as a secondary whose copy of the data is complete."""
        hello = replica.hello(self.address) if self.running else {}
        return bool(hello.get("isWritablePrimary") or hello.get("secondary"))

    def start(self, deadline_s: float = 30.0) -> Self:
        """Start the process and wait until it answers. Does nothing if it runs.

        Raises:
            EmbeddedUnavailable: it ended, or did not answer in time; with the reason that its log gives.
        """
        if self.running:
            return self
        self.dbpath.mkdir(parents=True, exist_ok=True)
        for attempts_left in reversed(range(_PORT_ATTEMPTS)):
            keep_port = self._wished_port is not None or self._process is not None
            port = self._port if keep_port and self._port is not None else free_port()
            self._port = port
            process = self._spawn(port)
            if self._answers(process, deadline_s):
                self._process = process
                return self
            # Between our look for a free port and mongod's bind, another process may have taken it.
            if process.returncode != PORT_TAKEN or keep_port or attempts_left == 0:
                break
        raise EmbeddedUnavailable(f"mongod did not start in {str(self.dbpath)!r}: {last_log_line(self.dbpath)}")

    def initiate(self, *others: Mongod, settings: Mapping[str, object] | None = None, deadline_s: float = 30.0) -> Self:
        """Form the replica set of this server and `others`, all started, and wait for a primary. Idempotent."""
        if self.replica_set is None:
            raise ValueError("a standalone mongod has no replica set to initiate; give replica_set a name")
        members: list[Mongod] = [self, *others]
        addresses = [member.address for member in members]
        replica.ensure_replica_set(self.address, self.replica_set, addresses, settings)
        self.wait_for_primary(*others, deadline_s=deadline_s)
        return self

    def wait_for_primary(self, *others: Mongod, deadline_s: float = 30.0) -> Mongod:
        """Wait until this server or one of `others` is a primary that accepts writes, and return that one.

        Raises:
            EmbeddedUnavailable: none is within `deadline_s`.
        """
        found: list[Mongod] = []

        def elected() -> bool:
            found.extend(one for one in (self, *others) if one.running and replica.is_primary(one.address))
            return bool(found)

        if not replica.wait_for(elected, deadline_s):
            raise EmbeddedUnavailable(f"no primary within {deadline_s:g} s: {last_log_line(self.dbpath)}")
        return found[0]

    def stop(self, deadline_s: float = 30.0) -> None:
        """End the process cleanly (SIGTERM; resumed first if it is suspended), by SIGKILL after `deadline_s`."""
        if not self.running:
            return
        self.resume()
        process = self._child()
        process.terminate()
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process as a crash would: SIGKILL. What was acknowledged with `j: true` or majority survives."""
        if self.running:
            self._child().kill()
        self._child().wait()

    def suspend(self) -> None:
        """Freeze the process (SIGSTOP): its connections stay open and nothing answers. Not on Windows.

        On Linux it is frozen when this returns: a signal takes effect some time after it was sent, on a busy machine long enough
        for an answer.
        """
        process = self._child()
        process.send_signal(signal.SIGSTOP)
        if hasattr(os, "waitid"):  # macOS: from Python 3.13 on
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a suspended process go on (SIGCONT). Harmless if it is not suspended. Does nothing on Windows."""
        if hasattr(signal, "SIGCONT"):
            self._child().send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        allow_many_files()
        # Without --logpath mongod logs to its standard output: one file for everything that it says, and no
        # files renamed at each start. It tells of the last run alone.
        with (self.dbpath / MONGOD_LOG).open("wb") as log:
            return subprocess.Popen(
                [*self._command, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for us, not for our database
            )

    def _answers(self, process: subprocess.Popen[bytes], deadline_s: float) -> bool:
        wished = str(self.dbpath)

        def answered_or_ended() -> bool:
            return process.poll() is not None or replica.dbpath_of(self.address) == wished

        if not replica.wait_for(answered_or_ended, deadline_s):
            process.kill()
            process.wait()
        return process.poll() is None

    def _child(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("this mongod was never started")
        return self._process
