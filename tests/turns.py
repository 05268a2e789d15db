"""Tests that are about time run while no others do: what they measure is taskmesh, and not the load of its other tests."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(*, timed: bool) -> Iterator[None]:
    """Run a timed test beside timed ones only, and any other when no timed one runs (they come first, see conftest.py)."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        yield  # one test at a time
        return
    with (Path(tempfile.gettempdir()) / f"taskmesh-timed-{run}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if timed else fcntl.LOCK_EX)
        if not timed:
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield
