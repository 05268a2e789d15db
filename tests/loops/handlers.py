"""What the workers of these tests run; see `tests/processes/worker.py`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from taskmesh import TaskMesh, TaskOption, current_blocking_task, current_task
from tests.processes.history import Notebook

LEASE_MS = 1_500
SHORT_LEASE = TaskOption(ping_interval_ms=300, worker_timeout_ms=LEASE_MS, unexpected_retry_delay_ms=100)
LONG_LEASE = TaskOption(worker_timeout_ms=120_000)


def define(mesh: TaskMesh, directory: Path) -> None:
    """Define the tasks; they write their history into `directory`."""
    book = Notebook(directory)

    @mesh.singleton(option=SHORT_LEASE)
    async def leader() -> None:
        with book.run():
            await asyncio.sleep(3_600)

    @mesh.singleton(option=LONG_LEASE)
    async def steady() -> None:
        with book.run():
            await asyncio.sleep(3_600)

    @mesh.singleton(option=LONG_LEASE)
    def in_a_thread() -> None:
        with book.run() as returning:
            while not current_blocking_task().cancelled:
                time.sleep(0.01)
            returning.obeys(None)

    mesh.singleton(in_a_child, option=LONG_LEASE, run="process")

    @mesh.loop(interval_ms=50, option=SHORT_LEASE)
    async def counted() -> None:
        with book.run():
            await asyncio.sleep(0.01)

    @mesh.loop(interval_ms=100, per="worker", option=SHORT_LEASE)
    async def in_each() -> None:
        with book.run():
            pass

    @mesh.loop(interval_ms=100, per="host", option=SHORT_LEASE)
    async def on_each_host() -> None:
        with book.run():
            pass

    @mesh.broadcast(option=SHORT_LEASE)
    async def reload(slow_on: str | None = None) -> None:
        with book.run():
            await asyncio.sleep(3_600 if current_task().worker_id == slow_on else 0)


def in_a_child() -> None:
    """Go on for long, in a process of its own."""
    time.sleep(3_600)
