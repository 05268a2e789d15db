"""No server outlives the tests that started it: a process beside each test process kills those that are left when that is gone.

It reads a pipe whose other end the test process alone holds, and so learns of its end however that came about. (The kernel's
PR_SET_PDEATHSIG would do it when the *thread* ends that started the server.)
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO


def ends_with_us(pid: int, mark: str) -> None:
    """Have this process killed, if it is still there when ours is gone. `mark`: what stands on its command line."""
    pipe = _pipe(os.getpid())
    pipe.write(f"{pid} {mark}\n".encode())
    pipe.flush()


@cache
def _pipe(_of_process: int) -> IO[bytes]:
    """Start the one that waits for our end."""
    watcher = subprocess.Popen(
        [sys.executable, str(Path(__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # whoever kills all that belongs to a terminal or a group does not kill this one
    )
    assert watcher.stdin is not None
    atexit.register(watcher.communicate)
    return watcher.stdin


def main() -> None:
    """Wait for the end of whoever started us; then kill what is left of what it told."""
    told = [line.rstrip("\n").split(" ", 1) for line in sys.stdin]
    import psutil  # noqa: PLC0415 — this process waits for hours: let it be small

    for pid, mark in told:
        with suppress(psutil.Error, ProcessLookupError):
            if any(mark in argument for argument in psutil.Process(int(pid)).cmdline()):  # and no stranger with its pid
                os.kill(int(pid), signal.SIGKILL)  # reaches suspended ones too


if __name__ == "__main__":
    main()
