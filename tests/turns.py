"""Tests that are about time run while no others do: what they measure is taskmesh, and not the load of its other tests."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def booting() -> Iterator[None]:
    """Start a server, and let no timed test begin before it is there: each process that runs tests starts one of its own."""
    if (path := _path("booting")) is None:
        yield
        return
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


@contextmanager
def turn(*, timed: bool) -> Iterator[None]:
    """Run a timed test beside timed ones only, and any other when no timed one runs (they come first, see conftest.py)."""
    if (path := _path("timed")) is None:
        yield
        return
    if (boot := _path("booting")) is not None and timed:
        with boot.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if timed else fcntl.LOCK_EX)
        if not timed:
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield


def _path(name: str) -> Path | None:
    """A file that all processes of this run of the tests know. None: there is but one process, and so one test at a time."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    return None if run is None else Path(tempfile.gettempdir()) / f"taskmesh-{name}-{run}"
