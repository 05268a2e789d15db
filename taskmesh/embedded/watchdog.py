"""The process that owns the shared `mongod` of a directory, and takes it down when its last user has gone.

Run as a script by `attach`, with the standard library alone: it lives as long as the server does and should cost
next to nothing. It runs in a session of its own, so the terminal's Ctrl-C and hang-up do not reach it.

Three files in the directory are locked with `flock`, which the kernel undoes when a process dies, however it dies:

    users      shared, by each attached process; exclusively, by the watchdog that saw the last one go
    watchdog   exclusively, by the watchdog, as long as it lives
    gate       exclusively, by the one process that is attaching just now

Winning `users` exclusively is the decision to stop: nobody can attach any more until this process has ended, and
whoever tries meanwhile waits for that and then starts a server of its own. There is no moment in between.

If the watchdog itself is killed, Linux ends mongod with it (PR_SET_PDEATHSIG). Elsewhere that mongod stays until the
next process attaches there: its watchdog finds it by mongod's own lock file, and ends it before it starts another.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

if sys.platform != "win32":
    import fcntl
    import resource

USERS = "users.lock"
WATCHDOG = "watchdog.lock"
GATE = "gate.lock"
STATE = "server.json"
LAST_PORT = "port"
DATA = "data"
MONGOD_LOG = "mongod.log"
WATCHDOG_LOG = "watchdog.log"

PORT_TAKEN = 48  # mongod's exit status when somebody else listens on its port

_HOST = "127.0.0.1"
_PORT_ATTEMPTS = 5
_STOP_DEADLINE_S = 30.0
_PR_SET_PDEATHSIG = 1
# MongoDB's manual recommends 64 000 ("UNIX ulimit Settings"); macOS refuses more than its OPEN_MAX.
_ENOUGH_FILES = 10_240 if sys.platform == "darwin" else 64_000


class Watchdog:
    """The owner of one `mongod`: starts it, says where it is, stops it after the last user."""

    def __init__(self, directory: Path, command: list[str]) -> None:
        self._directory = directory
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        # Loaded here: between fork and exec there is no time for it.
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._pid = os.getpid()

    def run(self) -> None:
        """Start mongod and return when it has ended, for whatever reason. Call it in the main thread."""
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the process that started us may have blocked some
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda _number, _frame: self._stop_mongod())
        end_leftover(self._directory / DATA)
        allow_many_files()
        threading.Thread(target=self._stop_after_the_last_user, daemon=True).start()
        for _ in range(_PORT_ATTEMPTS):
            if self._stopping.is_set() or self._serve(self._choose_port()) != PORT_TAKEN:
                break
        (self._directory / STATE).unlink(missing_ok=True)

    def _serve(self, port: int) -> int:
        with (self._directory / DATA / MONGOD_LOG).open("wb") as log:
            process = subprocess.Popen(
                [*self._command, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=self._die_with_the_watchdog,  # noqa: PLW1509  # the other thread only waits for a lock
            )
        self._process = process
        if self._stopping.is_set():  # it was decided between our look at it and the start
            process.terminate()
        write_whole(self._directory / LAST_PORT, str(port))
        write_whole(self._directory / STATE, json.dumps({"pid": process.pid, "port": port, "watchdog": self._pid}))
        return process.wait()

    def _stop_after_the_last_user(self) -> None:
        users = open_lock(self._directory / USERS)
        fcntl.flock(users, fcntl.LOCK_EX)  # and never let go: the end of this process does
        self._stop_mongod()
        if self._process is not None:
            try:
                self._process.wait(_STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _stop_mongod(self) -> None:
        self._stopping.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)  # a suspended one would never see the next
            self._process.terminate()

    def _choose_port(self) -> int:
        """Return the port of the last run if it is free, so that the replica set's configuration still fits.

        With another port the configuration is replaced; before that, mongod asks whoever has the old port whether
        it is itself. That takes an instant, or half a minute if something listens there that never answers.
        """
        with contextlib.suppress(OSError, ValueError):
            port = int((self._directory / LAST_PORT).read_text())
            if is_free(port):
                return port
        with socket.socket() as probe:
            probe.bind((_HOST, 0))
            chosen: int = probe.getsockname()[1]
            return chosen

    def _die_with_the_watchdog(self) -> None:
        if self._libc is None:
            return
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != self._pid:  # it died before we asked
            os._exit(1)


def allow_many_files() -> None:
    """Let this process, and those that it starts, have as many open files as the system allows them.

    mongod holds one for each collection and each index, and ends when it gets no more. Most systems give a process 1024
    (macOS 256) unless it asks: a dozen databases of taskmesh.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(_ENOUGH_FILES, hard)
    if 0 <= soft < allowed:  # RLIM_INFINITY is -1 on Linux
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def open_lock(path: Path) -> int:
    """Open (and create) a lock file, and return its descriptor; programs that we execute do not inherit it."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Take the lock if it is free, and tell whether it is ours now."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def release(descriptor: int) -> None:
    """Let go of a lock and close its file, also if a thread of ours forked meanwhile and the child has a copy."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_free(port: int) -> bool:
    """Tell whether the loopback port can be bound now, as mongod binds it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except (OSError, OverflowError):
            return False
        return True


def end_leftover(data: Path) -> None:
    """End a mongod that an earlier watchdog left behind with this data, and wait until it has gone.

    A running mongod holds a lock on `mongod.lock` and keeps its pid in it, so this cannot hit a stranger that was
    given the pid of a dead one.
    """
    lock_file = data / "mongod.lock"
    if not lock_file.exists():
        return
    descriptor = open_lock(lock_file)
    try:
        end = time.monotonic() + _STOP_DEADLINE_S
        while not try_lock(descriptor):
            with contextlib.suppress(OSError, ValueError):
                pid = int(lock_file.read_text())
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGTERM if time.monotonic() < end else signal.SIGKILL)
            time.sleep(0.1)
    finally:
        release(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or the one before."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def main() -> None:
    """Become the watchdog of the directory in argv[1], with the mongod command line that follows it.

    Returns to whoever called (exit status 0) as soon as the watchdog lock is held, and goes on in the background.
    """
    directory, command = Path(sys.argv[1]), sys.argv[2:]
    lock = open_lock(directory / WATCHDOG)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (directory / STATE).unlink(missing_ok=True)  # of a watchdog that had no time to do it
    (directory / DATA).mkdir(exist_ok=True)
    log = os.open(directory / WATCHDOG_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    if os.fork():  # not a child of the caller any more: whoever kills a tree of processes does not kill this one
        os._exit(0)
    os.chdir("/")  # so that nobody's directory or mount is busy because of us
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    Watchdog(directory, command).run()


if __name__ == "__main__":
    main()
