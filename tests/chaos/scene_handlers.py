"""The task of the scenes: it waits where it is told to, and ends as it is told to."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from taskmesh import Snooze, TaskMesh, TaskOption, current_task
from taskmesh.client.definition import TaskDefinition
from tests.chaos.handlers import failed_future
from tests.chaos.history import DIED_AS_ASKED
from tests.chaos.process_handlers import Poison, beat_until
from tests.processes.history import Notebook, notebook_of
from tests.processes.signs import Signs

IN_PROCESS = "in_process"
OPTION = TaskOption(ping_interval_ms=300, worker_timeout_ms=1_500, unexpected_retry_delay_ms=1)
NAME = "work"


def define(mesh: TaskMesh, directory: Path | None = None) -> TaskDefinition[Any, str]:  # noqa: C901 -- many small ends
    """Define the task. `directory`: where the history and the signs are; None in a process that only publishes."""
    book = Notebook(directory) if directory is not None else None
    signs = Signs(directory or Path())

    @mesh.task(name=NAME, option=OPTION)
    async def work(waits: bool = False, then: str = "return", writes: bool = False) -> str:
        """`waits`: for "… may end". `then`: how the first attempt ends: `return`, `raise`, `snooze`, `close`, `die` or `obey`.

        `writes`: in a transaction, what stands in another one.

        Who is cancelled while it waits cleans up until it is told "… may leave", if anybody has said that it "… cleans up".
        """
        task = current_task()
        assert book is not None, "a process that only publishes ran a handler"
        with book.run() as run:
            if waits:
                await _until_it_may_end(signs, task.worker_id)
            if then == "obey" and not signs.given("obeyed"):
                await _until_told()
                signs.give("obeyed")
                return run.obeys(f"{task.worker_id} {task.running_id}")
            if task.attempt == 1:
                match then:
                    case "raise":
                        raise ValueError("as asked")
                    case "snooze":
                        raise Snooze(delay_ms=60_000)
                    case "close":
                        await failed_future(GeneratorExit)
                    case "die":
                        os._exit(DIED_AS_ASKED)
            if writes:
                async with task.transaction() as session:
                    account = mesh.store.driver.database["scenery"]
                    await account.update_one({"_id": "shared"}, {"$inc": {"n": 1}}, upsert=True, session=session)
                    task.set_result(f"{task.worker_id} {task.running_id}")
            return run.returns(f"{task.worker_id} {task.running_id}")

    @mesh.task(name=IN_PROCESS, option=OPTION, run="process")
    def in_process(waits: bool = False) -> str:
        """Wait for "… may end", or else raise what must not reach the worker."""
        assert directory is not None
        book, task = notebook_of(directory), current_task()  # this process's own
        with book.run(beats=True) as run:
            if not waits:
                raise Poison("as asked")
            signs = Signs(directory)
            while not signs.given(f"{task.worker_id} may end"):
                beat_until(book, time.monotonic() + 0.05)
            return run.returns(f"{task.worker_id} {task.running_id}")

    return work


async def _until_told() -> None:
    """Wait until the execution is told to stop, by `cancelled` or by its cancellation."""
    with suppress(asyncio.CancelledError):
        while not current_task().cancelled:  # noqa: ASYNC110 -- that is what handlers do
            await asyncio.sleep(0.001)


async def _until_it_may_end(signs: Signs, worker_id: str) -> None:
    try:
        await signs.wait(f"{worker_id} may end")
    except asyncio.CancelledError:
        if signs.given(f"{worker_id} cleans up"):
            signs.give(f"{worker_id} is on its way out")
            await signs.wait(f"{worker_id} may leave")
        raise
