"""The server that is measured, and what has to stand beside every figure: date, machine, versions."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil
from pymongo import MongoClient

from taskmesh.model import distribution
from tests.mongod import Mongod

CACHE_GB = 4.0


@contextmanager
def server(cache_gb: float = CACHE_GB) -> Iterator[Mongod]:
    """A fresh one-node replica set of our own, journaled, on disk, gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="taskmesh-bench-", ignore_cleanup_errors=True) as directory,
        Mongod(Path(directory) / "db", cache_gb=cache_gb) as mongod,
    ):
        yield mongod.initiate()


def conditions(uri: str | None = None) -> dict[str, str]:
    """What the figures hang on."""
    memory_gb = psutil.virtual_memory().total / 2**30
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {memory_gb:.0f} GB; servers and clients together on it",
        "load": f"{os.getloadavg()[0]:.1f} in the minute before the start (anything above 0.3 is somebody else's work)",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "pymongo": version("pymongo"),
        "taskmesh": f"{distribution.VERSION} at {_commit()}",
    }
    if uri is not None:
        with MongoClient[dict[str, object]](uri) as client:
            facts["mongod"] = f"{client.server_info()['version']}, one node, journaled, writes `majority`"
    return facts


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def _commit() -> str:
    """The commit, and whether the engine's code differs from it."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "../taskmesh")
        return git("rev-parse", "--short", "HEAD") + (" with local changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "an unknown commit"
