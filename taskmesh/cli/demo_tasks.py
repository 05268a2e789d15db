"""What the workers of `taskmesh demo` run: `taskmesh worker taskmesh.cli.demo_tasks:mesh`."""

from __future__ import annotations

import hashlib
import io
import os
import sysconfig
import tokenize
from pathlib import Path
from typing import Any

from taskmesh import TaskMesh, TaskOption, current_task

DIARIES = "TASKMESH_DEMO_DIARIES"
"""Names the directory in which each worker keeps a file of what it has done."""
NAME = "tokenize"
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__"})

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


def count(path: str) -> dict[str, Any]:
    """Return lines, tokens and digest of a file; `tokens` is None for the few that are wrong on purpose."""
    source = (_library() / path).read_bytes()
    tokens: int | None = 0
    try:
        tokens = sum(1 for _ in tokenize.tokenize(io.BytesIO(source).readline))
    except (SyntaxError, tokenize.TokenError, UnicodeError):
        tokens = None
    return {"lines": len(source.splitlines()), "tokens": tokens, "sha256": hashlib.sha256(source).hexdigest()}


def source_files(limit: int | None = None) -> list[str]:
    """Return the paths of the standard library's `.py` files, relative to it; the first `limit` of them."""
    root = _library()
    found: list[str] = []
    for directory, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]  # what other packages have installed is large
        found += (Path(directory, name).relative_to(root).as_posix() for name in names if name.endswith(".py"))
    return sorted(found)[:limit]


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))
