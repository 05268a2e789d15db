"""No server outlives the tests that started it: a process beside each test process kills those that are left when that is gone.

Their data goes with them where it lies in memory, which nobody else would ever give back.

It reads a pipe whose other end the test process alone holds, and so learns of its end however that came about. (The kernel's
PR_SET_PDEATHSIG would do it when the *thread* ends that started the server.)
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

IN_MEMORY = Path("/dev/shm")
"""Where servers of tests keep their data if they can (see `tests.mongods.quick_directory`)."""


def ends_with_us(pid: int, dbpath: Path) -> None:
    """Have this server killed, if it is still there when our process is gone."""
    pipe = _pipe(os.getpid())
    pipe.write(f"{pid} {dbpath}\n".encode())
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

    for pid, dbpath in told:
        with suppress(psutil.Error, ProcessLookupError):
            if any(
                dbpath in argument for argument in psutil.Process(int(pid)).cmdline()
            ):  # and no stranger with its pid
                os.kill(int(pid), signal.SIGKILL)  # reaches suspended ones too
                psutil.Process(int(pid)).wait(10)
        if Path(dbpath).is_relative_to(IN_MEMORY):
            shutil.rmtree(dbpath, ignore_errors=True)


if __name__ == "__main__":
    main()
