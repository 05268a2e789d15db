"""The tasks of the kill tests, and those that run in child processes."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taskmesh import TaskMesh, TaskOption, current_blocking_task, current_task
from taskmesh.client.definition import TaskDefinition
from tests.processes.history import Notebook

SHORT_LEASE = TaskOption(
    ping_interval_ms=300, worker_timeout_ms=1_500, max_timeouts=1_000, unexpected_retry_delay_ms=100
)
STEPS = 4


@dataclass(frozen=True)
class Handlers:
    """The definitions, for publishing."""

    journey: TaskDefinition[Any, list[int]]
    family: TaskDefinition[Any, int]
    crowd: TaskDefinition[Any, int]
    child: TaskDefinition[Any, int]
    merge: TaskDefinition[Any, int]


def define(mesh: TaskMesh, directory: Path | None = None) -> Handlers:
    """Define the tasks. `directory`: where to write the history; None in a process that only publishes."""
    book = Notebook(directory) if directory is not None else None

    async def leg(n: int, slow_on: str | None) -> int:
        assert book is not None
        book.note("did", step=n)
        await asyncio.sleep(1.0 if current_task().worker_id == slow_on else 0.02)
        return n

    @mesh.task(option=SHORT_LEASE)
    async def journey(slow_on: str | None = None) -> list[int]:
        """Take some steps, wait for a signal half-way, take a nap. On the worker `slow_on` each step takes a second."""
        assert book is not None
        task = current_task()
        found = []
        for n in range(STEPS):
            found.append(await task.step(f"leg-{n}", leg, n, slow_on))
            book.note("got", step=n)
            if n == 1:
                found.append(await task.wait_for("go on"))
                book.note("heard")
            if n == 2:
                await task.sleep("nap", milliseconds=1_100)
        return found

    @mesh.task(option=SHORT_LEASE)
    async def child(n: int) -> int:
        await asyncio.sleep(0.02)
        return n

    @mesh.task(option=SHORT_LEASE)
    async def family() -> int:
        """Start children and wait for them, twice."""
        task = current_task()
        total = 0
        for half in range(2):
            parts = [await task.start(child, f"{task.key}-{half}-{n}", n=n) for n in range(3)]
            total += sum(await task.results(parts))
        return total

    @mesh.task(option=SHORT_LEASE)
    async def crowd(size: int) -> int:
        """Start many children at once, and wait for all."""
        task = current_task()
        parts = await task.start_many(child, {f"{task.key}-{n}": {"n": n} for n in range(size)})
        values = await task.results(parts)
        assert book is not None
        book.note("joined")
        return sum(values)

    @mesh.task(option=SHORT_LEASE)
    async def merge() -> int:
        """Come after many."""
        assert book is not None
        book.note("merged")
        return sum((await current_task().dependencies()).values())

    return Handlers(journey, family, crowd, child, merge)


def in_a_process(directory: str) -> str:
    """Take a step, wait, take another: each leaves a file."""
    task = current_blocking_task()
    first = task.step("first", leave_a_mark, directory, "first")
    task.sleep("moment", milliseconds=5)
    word = task.wait_for("word")
    second = task.step("second", leave_a_mark_later, directory, "second")
    return f"{first} {word} {second}"


def leave_a_mark(directory: str, name: str) -> str:
    """Leave a file, which must not be there."""
    (Path(directory) / name).open("x").write(str(os.getpid()))
    return name


async def leave_a_mark_later(directory: str, name: str) -> str:
    """Leave a file, as code of an event loop does."""
    await asyncio.sleep(0)
    return leave_a_mark(directory, name)


def in_a_process_with_a_transaction(database: str) -> int:
    """Move money in steps that commit with their records, and fail once in between."""
    task = current_blocking_task()
    for n in range(2):
        task.step(f"move-{n}", move, database, task.key, n, transactional=True)
        if task.attempt == 1:
            raise ValueError("after the step")
    return 2


def move(database: str, key: str, n: int, *, session: Any) -> None:
    """Move a cent, and say so."""
    accounts = session.client[database]["accounts"]
    accounts.update_one({"_id": "ada"}, {"$inc": {"cents": -1}}, session=session)
    accounts.update_one({"_id": "bob"}, {"$inc": {"cents": 1}}, session=session)
    session.client[database]["moves"].insert_one({"key": key, "n": n}, session=session)


def leaf(n: int) -> str:
    """Be a child."""
    return f"leaf {n}"


def with_children() -> list[Any]:
    """Start two children by name, and wait for them."""
    task = current_blocking_task()
    parts = [task.start("leaf", f"l{n}", n=n) for n in range(2)]
    return task.results(parts)
