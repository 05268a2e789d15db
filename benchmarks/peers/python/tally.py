"""Counts what the handlers of this process did, for whoever measures: a number in a file, and publish → start delays.

It has no import but the standard library's: it runs in the peers' own environments.
"""

import mmap
import os
import struct
import time
from pathlib import Path

DIRECTORY = Path(os.environ["TALLY_DIR"])
BROKER_URL = os.environ["BROKER_URL"]
_pid = 0
_count = 0
_map: mmap.mmap


def done(sent: float = 0.0) -> None:
    """Count one task. `sent`: when it was published, if its delay is wanted."""
    global _pid, _count, _map  # noqa: PLW0603 -- a process's own counter; some peers fork after the import
    if _pid != os.getpid():
        _pid, _count = os.getpid(), 0
        with (DIRECTORY / f"{_pid}.count").open("w+b") as file:
            file.write(bytes(8))
            file.flush()
            _map = mmap.mmap(file.fileno(), 8)
    _count += 1
    struct.pack_into("<Q", _map, 0, _count)
    if sent:
        with (DIRECTORY / f"{_pid}.delays").open("a") as delays:
            delays.write(f"{(time.time() - sent) * 1000}\n")
