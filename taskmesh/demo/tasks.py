"""The mesh that the demo's workers run: `taskmesh worker taskmesh.demo.tasks:mesh`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from taskmesh import TaskMesh, TaskOption, current_task
from taskmesh.demo.counting import count

DIARIES = "TASKMESH_DEMO_DIARIES"
"""Names the directory in which each worker keeps a file of what it has done."""

NAME = "tokenize"

mesh = TaskMesh()


# A short lease, so that nobody has to wait long for what the killed worker held.
@mesh.task(name=NAME, option=TaskOption(worker_timeout_ms=3_000, ping_interval_ms=1_000))
def tokenize_file(path: str) -> dict[str, Any]:
    """Count the lines and tokens of a source file, and note in the worker's own diary that it was done."""
    counted = count(path)
    if directory := os.environ.get(DIARIES):
        with (Path(directory) / current_task().worker_id).open("a") as diary:
            diary.write(f"{path}\n")
    return counted
