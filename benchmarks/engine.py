"""What members of a crew do with taskmesh, through its public names alone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from pymongo import AsyncMongoClient

from benchmarks.commands import Commands
from benchmarks.line import Line, Role, Setting
from taskmesh import Consumer, TaskDefinition, TaskMesh, TaskOption, current_task

HEARTBEAT = TaskOption(ping_interval_ms=1_000, worker_timeout_ms=3_000)


class Work:
    """The tasks of the benchmarks."""

    def __init__(self, mesh: TaskMesh) -> None:
        self.delays_ms: list[float] = []
        """Publish → start, of each `stamp` that ran here."""

        @mesh.task
        async def noop(n: int = 0) -> None:
            """Do nothing; the param costs what a param costs."""

        @mesh.task
        async def answer(n: int = 0) -> dict[str, Any]:
            """Return a small result, another for each task."""
            return {"n": n, "text": f"result {n}"}

        @mesh.task
        async def stamp(sent: float) -> float:
            """Note how long it took from publishing (`sent`, monotonic) to here."""
            started = time.monotonic()
            self.delays_ms.append((started - sent) * 1000)
            return started

        @mesh.task(option=HEARTBEAT)
        async def nap(s: float) -> int:
            """Last, while the lease is renewed."""
            await asyncio.sleep(s)
            return int(current_task().attempt)

        self.noop: TaskDefinition[Any, Any] = noop
        self.answer: TaskDefinition[Any, Any] = answer
        self.stamp: TaskDefinition[Any, Any] = stamp
        self.nap: TaskDefinition[Any, Any] = nap


@contextlib.asynccontextmanager
async def consuming(
    setting: Setting, commands: Commands | None = None
) -> AsyncIterator[tuple[TaskMesh, Work, Consumer, asyncio.Task[None]]]:
    """A consumer as the setting tells, running from `go` on."""
    client: Any = setting["uri"]
    if commands is not None:
        client = AsyncMongoClient(setting["uri"], event_listeners=[commands], tz_aware=True)
    mesh = TaskMesh(client, database=setting["database"])
    work = Work(mesh)
    async with mesh:
        consumer = mesh.consumer(
            worker_id=setting.get("worker_id"),
            concurrency=setting.get("concurrency", 100),
            names=setting.get("names"),
            listen=setting.get("listen", True),
        )
        running = asyncio.create_task(consumer.run())
        try:
            yield mesh, work, consumer, running
        finally:
            await consumer.stop(grace_ms=0)
            await running


async def consume(line: Line, setting: Setting) -> None:
    """Run a consumer from `go` to `end`."""
    commands = Commands() if setting.get("counted") else None
    if not setting.get("at_once"):
        line.say(ready=True)
        await line.go.wait()
    async with consuming(setting, commands) as (_, work, consumer, running):
        while consumer.state == "ready":  # noqa: ASYNC110 -- the consumer has no event for it
            await asyncio.sleep(0.01)
        if setting.get("at_once"):
            await asyncio.sleep(setting.get("settle_s", 0.5))  # until the others' registrations have been read
            line.say(ready=True)
        sampling = asyncio.create_task(line.sample(lambda: consumer.finished))
        await asyncio.wait({running, asyncio.ensure_future(line.end.wait())}, return_when=asyncio.FIRST_COMPLETED)
        sampling.cancel()
        report: dict[str, Any] = {"finished": consumer.finished, "delays_ms": work.delays_ms}
        if commands is not None:
            report |= commands.summary()
    line.say(report=report)


async def stand_by(line: Line, setting: Setting) -> None:
    """Be many consumers at once, each with a connection and a stream of its own, that find nothing to do until `end`."""
    async with contextlib.AsyncExitStack() as stack:
        for n in range(setting["workers"]):
            await stack.enter_async_context(consuming(setting | {"worker_id": f"light-{setting['first'] + n}"}))
        await asyncio.sleep(setting.get("settle_s", 3.0))  # until each has registered, and scanned
        line.say(ready=True)
        await line.end.wait()
    line.say(report={})


async def publish_steadily(line: Line, setting: Setting) -> None:
    """Publish `stamp` tasks at a rate from `go` on, and wait for some of the results."""
    mesh = TaskMesh(setting["uri"], database=setting["database"])
    work = Work(mesh)
    async with mesh:
        warm = await work.stamp.publish(f"{setting['prefix']}-warm", sent=time.monotonic())
        await warm.result(30)
        line.say(ready=True)
        await line.go.wait()
        results_ms: list[float] = []
        waits: set[asyncio.Task[None]] = set()
        tick_s, per_tick = setting["tick_s"], setting["per_tick"]
        begun = time.monotonic()
        for tick in range(setting["ticks"]):
            if setting.get("one_by_one"):
                await asyncio.sleep(tick_s)
            else:
                await asyncio.sleep(max(0.0, begun + tick * tick_s - time.monotonic()))
            sent = time.monotonic()
            if per_tick == 1:
                handle = await work.stamp.publish(f"{setting['prefix']}-{tick}", sent=sent)
            else:
                many = {f"{setting['prefix']}-{tick}-{i}": {"sent": sent} for i in range(per_tick)}
                handle = (await work.stamp.publish_many(many))[0]
            if setting.get("results"):
                wait = asyncio.create_task(_wait_for(handle, sent, results_ms))
                waits.add(wait)
                if setting.get("one_by_one"):
                    await wait
        took = time.monotonic() - begun
        await asyncio.gather(*waits)
        line.say(t=time.monotonic(), n=setting["ticks"] * per_tick)
        await line.end.wait()
    line.say(report={"results_ms": results_ms, "published_per_s": setting["ticks"] * per_tick / took})


async def _wait_for(handle: Any, sent: float, results_ms: list[float]) -> None:
    await handle.result(60)
    results_ms.append((time.monotonic() - sent) * 1000)


ROLES: dict[str, Role] = {"consume": consume, "stand_by": stand_by, "publish": publish_steadily}
