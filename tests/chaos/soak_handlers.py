"""The task of the soak: it does nothing, and is soon forgotten, so that whatever grows is the engine's."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from taskmesh import TaskMesh, TaskOption

RETAINED_MS = 5_000
_NOTE_EVERY_S = 0.5


def define(mesh: TaskMesh, directory: Path | None = None) -> None:
    """Define the task. `directory`: where a worker notes how many tasks its event loop has."""
    noted = 0.0

    @mesh.task(
        option=TaskOption(
            ping_interval_ms=500,
            worker_timeout_ms=2_000,
            max_timeouts=1_000,
            retain_success_ms=RETAINED_MS,
        )
    )
    async def job(n: int) -> int:
        nonlocal noted
        if directory is not None and time.monotonic() - noted > _NOTE_EVERY_S:
            noted = time.monotonic()
            note_of(directory, os.getpid()).write_text(str(len(asyncio.all_tasks())))
        return n


def note_of(directory: Path, pid: int) -> Path:
    """The file in which a worker notes how many tasks its event loop has."""
    return directory / f"{pid}.tasks"
