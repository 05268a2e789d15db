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
import time
import weakref
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import anyio.to_thread

from taskmesh.consumer.subprocess import child as inside
from taskmesh.consumer.subprocess.child import LEASE
from taskmesh.consumer.subprocess.wire import MAX_MESSAGE_BYTES, unpacked

MAX_STARTING = os.cpu_count() or 1
"""How many children start at a time. More would take no less time: a start keeps a core busy."""
MAX_IDLE = max(4, MAX_STARTING)
"""How many children are kept for the next call, however long that takes. Each costs the memory of an interpreter with the
handlers' modules."""
SURPLUS_S = 10.0
"""How long others are kept."""
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
        self._is_up = False
        self.was_free = False
        """Whether it was free before: if it is dead then, the next call has not done it."""
        self.idle_since = 0.0

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._popen.pid

    def wait_until_up(self) -> None:
        """Wait until it can take a call. If it is dead, or does not say so, the call finds out."""
        if not self._is_up:
            with suppress(Exception):
                self.receive()
            self._is_up = True

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
    """The child processes of one consumer.

    Few start at a time, and a call takes whichever child is free first. So a burst of short calls is served by those that are up,
    and only calls that last bring about a child for each slot.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        """The one that was used last is the last one."""
        self._busy: set[Child] = set()
        self._starting = 0
        self._asked: deque[Future[Child]] = deque()
        self._closed = threading.Event()
        self._ends_surplus = False
        _pools.add(self)

    def ask(self) -> Future[Child]:
        """Ask for a child, which is the caller's until it is given back or reaped. Cancel the future to give up.

        The future has an error if no child can be started.
        """
        asked: Future[Child] = Future()
        with self._lock:
            if not self._idle:
                self._start_what_is_needed(more=1)
            self._asked.append(asked)
            if self._idle:
                self._hand_over(self._idle.pop())
        return asked

    def give_back(self, child: Child) -> None:
        """Keep a child for the next call."""
        child.was_free = True
        with self._lock:
            self._busy.discard(child)
            kept = self._hand_over(child)
        if not kept:
            threading.Thread(target=child.dismiss, name="taskmesh child ends", daemon=True).start()

    def _hand_over(self, child: Child) -> bool:
        """Give a child to the first that asks, or keep it. False if it is not needed any more."""
        while self._asked:
            asked = self._asked.popleft()
            if asked.set_running_or_notify_cancel():
                child.renew()
                self._busy.add(child)
                asked.set_result(child)
                return True
        if self._closed.is_set():
            return False
        child.was_free, child.idle_since = True, time.monotonic()
        self._idle.append(child)
        if len(self._idle) > MAX_IDLE and not self._ends_surplus:
            self._ends_surplus = True
            threading.Thread(target=self._end_surplus, name="taskmesh children end", daemon=True).start()
        return True

    def _start_what_is_needed(self, more: int = 0) -> None:
        """Start a child for each that asks and has not given up, and for `more`."""
        needed = sum(not asked.cancelled() for asked in self._asked) + more
        while self._starting < min(MAX_STARTING, needed):
            threading.Thread(target=self._start, name="taskmesh child starts", daemon=True).start()
            self._starting += 1

    def _start(self) -> None:
        """Start a child for the first that asks by then."""
        try:
            child = Child()
        except Exception as error:  # noqa: BLE001 — it is raised where the child was asked for
            with self._lock:
                self._starting -= 1
                if self._asked and (asked := self._asked.popleft()).set_running_or_notify_cancel():
                    asked.set_exception(error)
                self._start_what_is_needed()
            return
        with self._lock:
            self._busy.add(child)  # so that a fork of this process forgets it, too
        child.wait_until_up()
        with self._lock:
            self._starting -= 1
            self._busy.discard(child)
            kept = self._hand_over(child)
            self._start_what_is_needed()
        if not kept:
            child.dismiss()

    def _end_surplus(self) -> None:
        """End the children that nobody has needed for a while, until few are left."""
        while not self._closed.wait(SURPLUS_S / 4):
            with self._lock:
                old = time.monotonic() - SURPLUS_S
                surplus = [child for child in self._idle[:-MAX_IDLE] if child.idle_since <= old]
                self._idle = self._idle[len(surplus) :]  # those that were used first
                self._ends_surplus = len(self._idle) > MAX_IDLE
            for child in surplus:
                child.dismiss()
            if not self._ends_surplus:
                return

    def reap(self, child: Child) -> int:
        """Clean up after a child that died or has to die. Return its exit code."""
        with self._lock:
            self._busy.discard(child)
            self._start_what_is_needed()
        return child.end()

    @property
    def pids(self) -> list[int]:
        """The process ids of the children."""
        with self._lock:
            return [child.pid for child in (*self._idle, *self._busy)]

    async def close(self) -> None:
        """End the idle children. A busy one ends as soon as it is done."""
        with self._lock:
            self._closed.set()
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
        self._starting, self._ends_surplus = 0, False
        self._asked.clear()


def _disown_all() -> None:
    for pool in _pools:
        pool.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
