"""The tasks that the workers of these tests run. Whoever publishes defines them too, and never calls them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taskmesh import TaskMesh, TaskOption, current_task
from taskmesh.client.definition import TaskDefinition
from tests.processes.history import Notebook

SHORT_LEASE = TaskOption(
    ping_interval_ms=300, worker_timeout_ms=1_500, max_timeouts=1_000, unexpected_retry_delay_ms=100
)


@dataclass(frozen=True)
class Handlers:
    """The definitions, for publishing."""

    work: TaskDefinition[Any, str]
    stubborn: TaskDefinition[Any, str]
    poison: TaskDefinition[Any, None]
    flaky: TaskDefinition[Any, str]


def define(mesh: TaskMesh, directory: Path | None = None) -> Handlers:
    """Define the tasks. `directory`: where to write the history; None in a process that only publishes."""
    book = Notebook(directory) if directory is not None else None

    def notebook() -> Notebook:
        assert book is not None, "a process that only publishes ran a handler"
        return book

    @mesh.task(option=SHORT_LEASE)
    async def work(ms: int = 0, slow_on: str | None = None, slow_ms: int = 0) -> str:
        """Take `ms`, on the worker `slow_on` rather `slow_ms`."""
        task = current_task()
        with notebook().run():
            await asyncio.sleep((slow_ms if task.worker_id == slow_on else ms) / 1000)
        return str(task.worker_id)

    @mesh.task(option=SHORT_LEASE)
    async def stubborn(slow_on: str, slow_ms: int, then: str) -> str:
        """On `slow_on`: take long, and when cancelled do all that might change something, then `return` or `raise`."""
        task = current_task()
        if task.worker_id != slow_on:
            with notebook().run():
                return str(task.worker_id)
        with notebook().run():
            try:
                await asyncio.sleep(slow_ms / 1000)
            except asyncio.CancelledError:
                notebook().note("cancelled")
            await _do_all_that_may_change_something(notebook())
            notebook().note("insisted")
        if then == "raise":
            raise ValueError("the late worker fails")
        return "the late worker's result"

    @mesh.task(option=SHORT_LEASE)
    async def poison() -> None:
        """Kill the process."""
        notebook().note("started")
        os._exit(1)

    @mesh.task(option=SHORT_LEASE)
    async def flaky(ms: int = 0, fails: int = 0) -> str:
        """Fail in the first `fails` attempts."""
        task = current_task()
        with notebook().run():
            await asyncio.sleep(ms / 1000)
            if task.attempt <= fails:
                raise ValueError(f"attempt {task.attempt} fails, as asked")
        return str(task.worker_id)

    return Handlers(work, stubborn, poison, flaky)


async def _do_all_that_may_change_something(book: Notebook) -> None:
    task = current_task()

    async def progress() -> None:
        await task.progress(0.9, "too late")

    async def log() -> None:
        task.log("too late")

    async def publish() -> None:
        await task.publish("work", "chained-too-late")

    for attempt in (progress, log, publish):
        try:
            await attempt()
        except Exception as error:  # noqa: BLE001 -- whatever it is, the test wants to know
            book.note("refused", call=attempt.__name__, error=type(error).__name__)
        else:
            book.note("accepted", call=attempt.__name__)
