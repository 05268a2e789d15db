"""Handlers that run in child processes. Whoever kills one leaves it no last line, so each writes beats while it is at work."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

from taskmesh import TaskMesh, TaskOption, current_blocking_task, current_task
from taskmesh.client.definition import TaskDefinition
from taskmesh.consumer.subprocess import child
from tests.processes.history import Notebook, notebook_of

ENDS = ("return", "return", "return", "poison", "exit", "system exit")
"""How a first attempt ends."""
_BEAT_EVERY_S = 0.02


class Poison(Exception):
    """Ends every process in which it is made, but for the child process that raises it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        if not child.serving:
            os._exit(7)


def define(
    mesh: TaskMesh, directory: Path | None, option: TaskOption
) -> tuple[TaskDefinition[Any, int], TaskDefinition[Any, int]]:
    """Define the tasks: one that only works, one that writes in a transaction."""

    @mesh.task(option=option, run="process")
    def in_process(ms: int = 0, polls: bool = False, then: str = "return") -> int:
        """Work, return early when told to, and end the first attempt as is asked. `polls`: ask `cancelled` all the time."""
        book = _notebook(directory)
        with book.run(beats=True) as run:
            if beat_until(book, _in(ms), lambda: polls and current_task().cancelled):
                return run.obeys(value())
            if current_task().attempt == 1:
                _end(book, then)
            return run.returns(value())

    @mesh.task(option=option, run="process")
    def writes_in_process(database: str, ms: int = 0) -> int:
        book = _notebook(directory)
        with book.run(beats=True) as run:
            task = current_blocking_task()
            with task.transaction() as session:
                effects = session.client[database]["effects"]
                effects.insert_one({"task": f"writes_in_process:{task.key}"}, session=session)
                beat_until(book, _in(ms))
                task.set_result(value())
            return run.returns(value())

    return in_process, writes_in_process


def beat_until(book: Notebook, end: float, told: Callable[[], bool] = lambda: False) -> bool:
    """Write beats until this moment (monotonic), or return true as soon as it is told."""
    while time.monotonic() < end:
        book.note("beats")
        if told():
            return True
        time.sleep(_BEAT_EVERY_S)  # that is the work
    return False


def _end(book: Notebook, how: str) -> None:
    if how == "poison":
        raise Poison("as asked")
    if how == "system exit":
        raise SystemExit(3)
    if how == "exit":
        book.note("raised", error="os._exit")  # nobody else could
        os._exit(3)


def _notebook(directory: Path | None) -> Notebook:
    assert directory is not None, "a process that only publishes ran a handler"
    return notebook_of(directory)


def _in(ms: int) -> float:
    return time.monotonic() + ms / 1000


def value() -> int:
    """What this very execution returns: no other returns the same."""
    task = current_task()
    return crc32(f"{task.name}:{task.key}:{task.running_id}".encode())
