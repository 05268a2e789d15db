"""The task of the soak: it does nothing, and is soon forgotten, so that whatever grows is the engine's."""

from __future__ import annotations

from pathlib import Path

from taskmesh import TaskMesh, TaskOption

RETAINED_MS = 5_000


def define(mesh: TaskMesh, _directory: Path | None = None) -> None:
    """Define the task."""

    @mesh.task(
        option=TaskOption(
            ping_interval_ms=500,
            worker_timeout_ms=2_000,
            max_timeouts=1_000,
            retain_success_ms=RETAINED_MS,
        )
    )
    async def job(n: int) -> int:
        return n
