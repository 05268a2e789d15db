"""A thread that hears the signals of a worker and ends the process if it has not ended by itself in time.

Nothing that hangs may keep a worker that was told to stop: a thread of a handler can go on for ever, so can the driver's own
locks once its server has gone, and a handler can block the event loop itself. So signals come by Python's wakeup descriptor,
to which the interpreter writes whatever its main thread is doing, and to this thread, which takes no lock that a handler could
hold.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection

logger = logging.getLogger("taskmesh.worker")

STUCK_DEADLINE_S = 3.0
"""How long the event loop may take to react to a second signal."""
_WOKEN = b"\0"


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a process in the foreground; not SIGHUP where `nohup` has it ignored: it is to go on."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hang_up]


class ForcedExit:
    """Tells of signals, and ends the process when its time is over. `watch` is called in the main thread."""

    def __init__(self, status: Callable[[], int]) -> None:
        """`status`: what the exit status of a process is that has to be ended."""
        self._status = status
        self._at = float("inf")
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._signals = 0

    def watch(self, numbers: Collection[int], heard: Callable[[int], None]) -> None:
        """Hear these signals from now on; `heard` is called for each, in the thread. The second is not to be left unheard."""
        signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._hand_on)
        run = threading.Thread(target=self._run, args=[frozenset(numbers), heard], name="taskmesh forced exit")
        run.daemon = True
        run.start()

    def _hand_on(self, number: int, _frame: object) -> None:
        """Do nothing: but that there is a handler makes the interpreter write to the wakeup descriptor.

        Unless that is somebody else's by now: a handler that calls `loop.add_signal_handler` gives it to its event loop, and
        takes it away from all when it removes its own. Then this tells the thread, as soon as the main thread comes to it.
        """
        ours = self._writing.fileno()
        taken_by = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if taken_by == ours:
            return
        if taken_by != -1:
            signal.set_wakeup_fd(taken_by, warn_on_full_buffer=False)
        self._tell(bytes([number]))

    def within(self, seconds: float) -> None:
        """End the process after so long; a nearer end that was set before stays."""
        self._set(min(self._at, time.monotonic() + seconds))

    def after(self, seconds: float) -> None:
        """End the process after so long, whatever was set before: the event loop has heard, and turns."""
        self._set(time.monotonic() + seconds)

    def _set(self, at: float) -> None:
        self._at = at
        self._tell(_WOKEN)

    def _tell(self, what: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # it is about to wake up as it is
            self._writing.send(what)

    def _run(self, numbers: frozenset[int], heard: Callable[[int], None]) -> None:
        while (left := self._at - time.monotonic()) > 0:
            readable, _, _ = select.select([self._reading], [], [], None if left == float("inf") else left)
            for number in self._reading.recv(64) if readable else b"":
                if number in numbers:
                    self._signals += 1
                    if self._signals > 1:
                        self._at = min(self._at, time.monotonic() + STUCK_DEADLINE_S)
                    heard(number)
        logger.warning("something is still running after the stop: exiting without waiting for it")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._status())
