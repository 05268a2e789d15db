"""The tasks of the chaos suite: each kind attacks a promise of its own."""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from taskmesh import Ending, Retry, Snooze, Task, TaskMesh, TaskOption, current_task
from taskmesh.client.definition import TaskDefinition
from tests.chaos import process_handlers
from tests.chaos.history import DIED_AS_ASKED
from tests.chaos.process_handlers import value as _value
from tests.processes.history import Notebook

PATIENT = TaskOption(
    ping_interval_ms=500,
    worker_timeout_ms=2_000,
    max_timeouts=10_000,
    max_unexpected_retries=10_000,
    unexpected_retry_delay_ms=100,
)
_CHANCE = random.Random()
_CLEANS_FOR_S = 3.0
"""Longer than a lease."""
_ACCOUNTS = 4


@dataclass(frozen=True)
class Kinds:
    """The definitions, for publishing."""

    work: TaskDefinition[Any, int]
    in_thread: TaskDefinition[Any, int]
    blocks: TaskDefinition[Any, int]
    flaky: TaskDefinition[Any, int]
    doomed: TaskDefinition[Any, None]
    deadly: TaskDefinition[Any, int]
    snoozes: TaskDefinition[Any, int]
    retries: TaskDefinition[Any, int]
    reports: TaskDefinition[Any, int]
    chains: TaskDefinition[Any, int]
    writes: TaskDefinition[Any, int]
    transfers: TaskDefinition[Any, int]
    refreshes: TaskDefinition[Any, int]
    obeys: TaskDefinition[Any, int]
    obeys_in_thread: TaskDefinition[Any, int]
    closes: TaskDefinition[Any, int]
    cleans: TaskDefinition[Any, int]
    joins: TaskDefinition[Any, int]
    in_process: TaskDefinition[Any, int]
    writes_in_process: TaskDefinition[Any, int]


def define(mesh: TaskMesh, directory: Path | None = None) -> Kinds:  # noqa: C901, PLR0915 -- many small handlers
    """Define the tasks. `directory`: where to write the history; None in a process that only publishes."""
    book = Notebook(directory) if directory is not None else None

    def notebook() -> Notebook:
        assert book is not None, "a process that only publishes ran a handler"
        return book

    @mesh.task(option=PATIENT)
    async def work(ms: int = 0, chained_by: str | None = None) -> int:  # noqa: ARG001 -- for the checker: who published it
        with notebook().run() as run:
            await asyncio.sleep(ms / 1000)
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    def in_thread(ms: int = 0) -> int:
        with notebook().run() as run:
            time.sleep(ms / 1000)
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    async def blocks(ms: int = 0) -> int:
        """Hold up the event loop."""
        with notebook().run() as run:
            time.sleep(ms / 1000)  # noqa: ASYNC251 -- that is what it is for
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    async def flaky(ms: int = 0, fails: int = 1) -> int:
        with notebook().run() as run:
            await asyncio.sleep(ms / 1000)
            if current_task().attempt <= fails:
                raise ValueError("as asked")
            return run.returns(_value())

    @mesh.task(option=PATIENT.changed(max_unexpected_retries=2))
    async def doomed(ms: int = 0) -> None:
        with notebook().run():
            await asyncio.sleep(ms / 1000)
            raise ValueError("always")

    @mesh.task(option=PATIENT)
    async def deadly(deaths: int = 1) -> int:
        """Kill the process in the first attempts."""
        with notebook().run() as run:
            if current_task().attempt <= deaths:
                os._exit(DIED_AS_ASKED)
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    async def snoozes() -> int:
        with notebook().run() as run:
            if _CHANCE.random() < 0.5:
                raise Snooze(delay_ms=200)
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    async def retries() -> int:
        with notebook().run() as run:
            if current_task().attempt == 1:
                raise Retry(delay_ms=300)
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    async def reports(ms: int = 0) -> int:
        with notebook().run() as run:
            task = current_task()
            for step in range(4):
                await task.progress(step / 4, "going on")
                task.log(f"step {step}")
                await asyncio.sleep(ms / 4000)
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    async def chains(ms: int = 0) -> int:
        with notebook().run() as run:
            task = current_task()
            await task.publish("work", f"after-{task.key}", chained_by=task.key)
            await asyncio.sleep(ms / 1000)
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    async def writes(ms: int = 0) -> int:
        with notebook().run() as run:
            task = current_task()
            async with task.transaction() as session:
                effects = mesh.store.driver.database["effects"]
                await effects.insert_one({"task": f"writes:{task.key}"}, session=session)
                await asyncio.sleep(ms / 1000)
                task.set_result(_value())
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    async def transfers(ms: int = 0) -> int:
        """Take from one of few accounts and give to another; half of them in place again at each conflict."""
        with notebook().run() as run:
            task = current_task()
            number = crc32(task.key.encode())
            giver, taker = (
                f"a{number % _ACCOUNTS}",
                f"a{(number + 1 + number // _ACCOUNTS % (_ACCOUNTS - 1)) % _ACCOUNTS}",
            )

            async def move(session: Any) -> int:
                shop = mesh.store.driver.database
                await shop["accounts"].update_one(
                    {"_id": giver}, {"$inc": {"balance": -1}}, upsert=True, session=session
                )
                effect = {"task": f"transfers:{task.key}", "giver": giver, "taker": taker}
                await shop["effects"].insert_one(effect, session=session)
                await asyncio.sleep(ms / 1000)
                await shop["accounts"].update_one(
                    {"_id": taker}, {"$inc": {"balance": 1}}, upsert=True, session=session
                )
                return _value()

            if number >> 16 & 1:
                await task.in_transaction(move)
            else:
                async with task.transaction() as session:
                    task.set_result(await move(session))
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    async def refreshed(refreshed_by: str) -> int:  # noqa: ARG001 -- for whoever looks at what was found
        with notebook().run() as run:
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    async def refreshes() -> int:
        """Publish the one key that all of these publish."""
        with notebook().run() as run:
            task = current_task()
            await task.publish(refreshed.configure(run_again=True), "all", refreshed_by=task.key)
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    async def obeys(ms: int = 0) -> int:
        """Return with half of the work done when it is told to stop: by `cancelled`, or by a cancellation that it swallows."""
        with notebook().run() as run:
            end = time.monotonic() + ms / 1000
            try:
                while time.monotonic() < end:
                    if current_task().cancelled:
                        return run.obeys(_value())
                    await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                return run.obeys(_value())
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    def obeys_in_thread(ms: int = 0) -> int:
        with notebook().run() as run:
            end = time.monotonic() + ms / 1000
            while time.monotonic() < end:
                if current_task().cancelled:
                    return run.obeys(_value())
                time.sleep(0.005)
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    async def closes(ms: int = 0) -> int:
        """Be closed, in the first attempt, by what arrives through a future."""
        with notebook().run() as run:
            await asyncio.sleep(ms / 1000)
            if current_task().attempt == 1:
                await failed_future(GeneratorExit)
            return run.returns(_value())

    async def before(task: Task) -> None:
        if (kind := _sometimes()) is not None:
            notebook().note_hook(task, "before raised")
            await failed_future(kind)

    async def after(_: Task, __: Ending) -> None:
        if (kind := _sometimes()) is not None:
            await failed_future(kind)

    if book is not None and _CHANCE.random() < 0.5:
        mesh.hooks(before=before, after=after)

    @mesh.task(option=PATIENT)
    async def cleans(ms: int = 0) -> int:
        """Clean up for long when somebody has stopped it: it keeps its place."""
        with notebook().run() as run:
            try:
                await asyncio.sleep(ms / 1000)
            except asyncio.CancelledError:
                await _clean_up()
                raise
            return run.returns(_value())

    @mesh.task(option=PATIENT)
    async def joins() -> int:
        """Come after others, and get what they returned."""
        with notebook().run() as run:
            assert all(isinstance(value, int) for value in (await current_task().dependencies()).values())
            return run.returns(_value())

    in_process, writes_in_process = process_handlers.define(mesh, directory, PATIENT)
    return Kinds(
        work=work,
        in_thread=in_thread,
        blocks=blocks,
        flaky=flaky,
        doomed=doomed,
        deadly=deadly,
        snoozes=snoozes,
        retries=retries,
        reports=reports,
        chains=chains,
        writes=writes,
        transfers=transfers,
        refreshes=refreshes,
        obeys=obeys,
        obeys_in_thread=obeys_in_thread,
        closes=closes,
        cleans=cleans,
        joins=joins,
        in_process=in_process,
        writes_in_process=writes_in_process,
    )


async def _clean_up() -> None:
    """Take longer than the checker forgives, but not when the lease is lost: then the place is."""
    execution: Any = current_task()._running
    until = time.monotonic() + _CLEANS_FOR_S
    while execution.leaving and time.monotonic() < min(until, execution.lease_until):  # noqa: ASYNC110 -- time alone tells
        await asyncio.sleep(0.02)


async def failed_future(kind: type[BaseException]) -> None:
    """Raise something that arrives through a future, as from a thread."""
    loop = asyncio.get_running_loop()
    failed = loop.create_future()
    loop.call_soon(failed.set_exception, kind("as asked"))  # later: what is there already is raised on the spot
    await failed


def _sometimes() -> type[BaseException] | None:
    """What a hook raises this time, if anything."""
    return _CHANCE.choice((GeneratorExit, SystemExit, KeyboardInterrupt)) if _CHANCE.random() < 0.03 else None
