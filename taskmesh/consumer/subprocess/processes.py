"""Child processes for `run="process"` handlers: a crash, a hang or a leak there affects one execution.

A child runs one call at a time and is used again after it. It is killed, with all that its handler started, the moment its
execution is cancelled, times out or loses its lease; the last it does by itself if this process is suspended. It ends with this
process, even if that is killed by force. How the two talk is in `conversation`, its inside in `child`. Why we use no library
for it: docs/decisions/0009-child-processes.md.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import anyio.to_thread

from taskmesh.consumer.subprocess import child as inside
from taskmesh.consumer.subprocess.child import LEASE
from taskmesh.consumer.subprocess.wire import MAX_MESSAGE_BYTES, unpacked

MAX_IDLE = max(4, os.cpu_count() or 1)
"""How many children are kept for the next call. Each costs the memory of an interpreter with the handlers' modules."""
MAX_ENDING_S = 2.0
"""How long to wait for the end of a child that was told to end, or killed."""
_LOOK_EVERY_S = 0.2
_BOOT = (
    "import sys; _, *fds = sys.argv[:4]; sys.path[:], sys.argv[1:] = sys.argv[4:], []; "
    f"from {inside.__name__} import main; main(*map(int, fds))"
)


class Child:
    """One child process. Created and used in threads; `kill` may be called from anywhere."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        lifeline, self._our_lifeline = os.pipe()
        lease, self._lease = _shared_memory(LEASE.size)
        fds = theirs.fileno(), lifeline, lease
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *map(str, fds), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,  # a group of its own: it gets no signals of our terminal, and is killed as a whole
            )
        finally:
            theirs.close()
            os.close(lifeline)
            os.close(lease)
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.used = False

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._popen.pid

    def lease_until(self, moment: float) -> None:
        """Tell it until when (monotonic) its call may go on; then it ends by itself."""
        struct.pack_into("d", self._lease, 0, moment)

    @property
    def saw_its_lease_end(self) -> bool:
        """Whether it found, or told its handler, that the lease of its call was over."""
        return bool(LEASE.unpack_from(self._lease)[1])

    def receive(self) -> list[Any]:
        """Wait for its next message. Raises `EOFError` once it is gone, and any error for what cannot be understood."""
        # Not by the end of the socket alone: what the handler started may keep that open after the handler's death.
        while not self.connection.poll(_LOOK_EVERY_S):
            if self._popen.poll() is not None and not self.connection.poll(0):
                raise EOFError
        return unpacked(self.connection.recv_bytes(MAX_MESSAGE_BYTES))

    def renew(self) -> None:
        """Reset it, as if it had had no call before."""
        LEASE.pack_into(self._lease, 0, float("inf"), 0.0)

    def kill(self) -> None:
        """Kill it at once, with whatever it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill what is left of it. Return its exit code, or minus the signal that ended it."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_LOOK_EVERY_S)  # one that is about to end by itself tells why
        self.kill()
        code = self._popen.wait()
        self.connection.close()
        self._close_lifeline()
        return code

    def hang_up(self) -> None:
        """Tell an idle child that it is not needed any more."""
        self.connection.close()

    def dismiss(self) -> None:
        """Let an idle child end by itself, so that its exit handlers run; but not for long."""
        self.hang_up()
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(MAX_ENDING_S)
        self.kill()
        self._popen.wait()
        self._close_lifeline()

    def disown(self) -> None:
        """Forget it, in a fork of the process to which it belongs."""
        self._popen.returncode = 0  # not our child: nobody here waits for it
        self.connection.close()
        self._close_lifeline()

    def _close_lifeline(self) -> None:
        os.close(self._our_lifeline)


def _shared_memory(size: int) -> tuple[int, mmap.mmap]:
    """Return memory, and a descriptor by which another process can access it, too."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("taskmesh")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd, mmap.mmap(fd, size)


_pools: weakref.WeakSet[Processes] = weakref.WeakSet()


class Processes:
    """The child processes of one consumer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._closed = False
        _pools.add(self)

    def take(self) -> Child:
        """Return a free child."""
        with self._lock:
            child = self._idle.pop() if self._idle else None
        child = child or Child()
        child.renew()
        with self._lock:
            self._busy.add(child)
        return child

    def give_back(self, child: Child) -> None:
        """Keep a child for the next call, unless there are enough."""
        with self._lock:
            self._busy.discard(child)
            keep = len(self._idle) < MAX_IDLE and not self._closed
            if keep:
                child.used = True
                self._idle.append(child)
        if not keep:
            threading.Thread(target=child.dismiss, name="taskmesh child ends", daemon=True).start()

    def reap(self, child: Child) -> int:
        """Clean up after a child that died or has to die. Return its exit code."""
        with self._lock:
            self._busy.discard(child)
        return child.end()

    @property
    def pids(self) -> list[int]:
        """The process ids of the children."""
        with self._lock:
            return [child.pid for child in (*self._idle, *self._busy)]

    async def close(self) -> None:
        """End the idle children. A busy one ends as soon as it is done."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            child.hang_up()  # all first, so that they end side by side
        for child in idle:
            await anyio.to_thread.run_sync(child.dismiss)

    def disown(self) -> None:
        """Forget all children: they belong to the process from which this one was forked."""
        self._lock = threading.Lock()
        for child in (*self._idle, *self._busy):
            child.disown()
        self._idle, self._busy = [], set()


def _disown_all() -> None:
    for pool in _pools:
        pool.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
