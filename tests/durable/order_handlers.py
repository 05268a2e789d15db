"""Flows of orders that do all that can be recorded: the tasks of the test in which workers and the primary go."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from taskmesh import TaskMesh, current_task
from taskmesh.client.definition import TaskDefinition
from tests.durable.handlers import SHORT_LEASE
from tests.processes.history import Notebook

ACCOUNTS = 64
TRANSFERS = 2
MEMBERS = 4


@dataclass(frozen=True)
class Handlers:
    """The definition that a test publishes."""

    plan: TaskDefinition[Any, str]


def define(mesh: TaskMesh, directory: Path | None = None) -> Handlers:
    """Define the tasks. `directory`: where to write the history; None in a process that only publishes."""
    book = Notebook(directory) if directory is not None else None

    def note(what: str, **more: Any) -> None:
        assert book is not None, "a process that only publishes ran a handler"
        book.note(what, **more)

    async def leg(n: int) -> int:
        note("did", step=n)
        await asyncio.sleep(0.02)
        return n

    async def transfer(n: int) -> None:
        """Move a cent between two accounts, in the transaction that records it."""
        task, shop = current_task(), mesh.store.driver.database
        giver, taker = Random(f"{task.key}/{n}").sample(range(ACCOUNTS), 2)

        async def move(*, session: Any) -> None:
            await shop["accounts"].update_one({"_id": giver}, {"$inc": {"cents": -1}}, session=session)
            await shop["moves"].insert_one({"of": f"{task.key}/{n}"}, session=session)
            await shop["accounts"].update_one({"_id": taker}, {"$inc": {"cents": 1}}, session=session)

        await task.step(f"transfer-{n}", move, transactional=True)

    @mesh.task(option=SHORT_LEASE)
    async def part(n: int) -> int:
        await asyncio.sleep(0.02)
        return n

    @mesh.task(option=SHORT_LEASE)
    async def order() -> int:
        """Take a step, move money, wait for a signal, take a nap, join children, move money, take a step."""
        task = current_task()
        await task.step("begin", leg, 0)
        note("got", step=0)
        await transfer(0)
        heard = await task.wait_for("go on")
        await task.sleep("nap", milliseconds=1_100)
        parts = [await task.start(part, f"{task.key}-{n}", n=n) for n in range(2)]
        total = sum(await task.results(parts))
        await transfer(1)
        await task.step("end", leg, 1)
        note("got", step=1)
        return int(heard) + total

    @mesh.task(option=SHORT_LEASE)
    async def settled() -> int:
        """Come after the orders of a flow."""
        task, shop = current_task(), mesh.store.driver.database
        note("joined")

        async def join(*, session: Any) -> None:
            await shop["joins"].insert_one({"of": task.key}, session=session)

        await task.step("join", join, transactional=True)
        return sum((await task.dependencies()).values())

    @mesh.task(option=SHORT_LEASE)
    async def plan() -> str:
        """Publish a flow of orders and what comes after them."""
        key = current_task().key
        async with mesh.flow(key) as flow:
            parts = [flow.add(order, f"{key}-{n}") for n in range(MEMBERS)]
            flow.add(settled, key, after=parts)
        return key

    return Handlers(plan)
