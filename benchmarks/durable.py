"""What does durable work cost? Steps, signals, children, dependents, and tasks that wait; each beside its own bare measure.

All of it in one process with one consumer, both sides of a ratio in turn, so that somebody else's load falls on both. Where the
clock is noisy the processor time of client and server together tells the same ratio.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from pymongo import AsyncMongoClient, UpdateOne
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.write_concern import WriteConcern

from benchmarks.backlog import Backlogs
from benchmarks.tables import Answer, Goal, cut, median, percentile
from taskmesh import Consumer, TaskDefinition, TaskHandle, TaskMesh, current_task

Tasks = AsyncCollection[dict[str, Any]]
_CROWD = 10_000
_SUSPENDED = 100_000
_AT_REST_S = 0.1
_OFTEN = 4
"""What takes half a second is measured so much oftener than the rest."""
_STEPS, _AT_ONCE, _STEPS_AT_ONCE, _SIGNALS = 200, 200, 10, 60


@dataclass
class Took:
    """How long something took, and the processor time of this process and the server, in seconds."""

    wall: float
    cpu: float


class Bench:
    """One database, with a consumer at work, and the collection of its tasks beside it."""

    def __init__(self, mesh: TaskMesh, tasks: Tasks, server: psutil.Process) -> None:
        self.mesh = mesh
        self._consumer: Consumer | None = None
        self.tasks = tasks
        self._server = server
        self._running: asyncio.Task[None] | None = None

        @mesh.task
        async def noop(n: int = 0) -> int:
            return n

        @mesh.task
        async def crowd(size: int) -> int:
            task = current_task()
            parts = await task.start_many(noop, {f"{task.key}-{n}": {"n": n} for n in range(size)})
            return len(await task.results(parts))

        self.noop: TaskDefinition[Any, int] = noop
        self.crowd: TaskDefinition[Any, int] = crowd

    async def begin(self) -> None:
        """Start the consumer, now that all handlers are defined."""
        consumer = self._consumer = self.mesh.consumer(worker_id="w", concurrency=500)
        self._running = asyncio.create_task(consumer.run())
        while consumer.state == "ready":  # noqa: ASYNC110 -- the consumer has no event for it
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        """Stop it."""
        if self._consumer is not None and self._running is not None:
            await self._consumer.stop(grace_ms=0)
            await self._running

    def _cpu(self) -> float:
        times = self._server.cpu_times()
        return time.process_time() + float(times.user + times.system)

    async def took(self, doing: Awaitable[Any]) -> Took:
        """Do it, and tell how long that took."""
        cpu, began = self._cpu(), time.monotonic()
        await doing
        return Took(time.monotonic() - began, self._cpu() - cpu)

    async def at_rest(self) -> None:
        """Wait until the consumer listens again: after a flood it looks for tasks by scans, and finds the next a second later."""
        for n in range(1_000):
            sent = time.monotonic()
            await (await self.noop.publish(f"rest-{time.monotonic_ns()}-{n}")).result(60)
            if time.monotonic() - sent < _AT_REST_S:
                return

    async def unrelated(self, prefix: str, count: int) -> None:
        """Publish so many tasks, and wait until all are done."""
        await self.noop.publish_many({f"{prefix}-{n}": {"n": n} for n in range(count)})
        which = f"name:noop status:SUCCESS key:{prefix}-"
        while await self.mesh.listing.count(which) < count:  # noqa: ASYNC110 -- what is measured is this
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def _bench(backlogs: Backlogs, database: str) -> AsyncIterator[Bench]:
    server = psutil.Process(backlogs.client.admin.command("serverStatus")["pid"])
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(backlogs.uri, tz_aware=True)
    mesh = TaskMesh(client, database=database)
    async with client, mesh:
        tasks = client[database].get_collection("tasks", write_concern=WriteConcern("majority"))
        bench = Bench(mesh, tasks, server)
        try:
            yield bench
        finally:
            await bench.end()


def measure(backlogs: Backlogs, *, repetitions: int = 3, share: float = 1.0) -> Answer:
    """Measure each in turn, again and again."""
    answer = Answer(
        "What does durable work cost? (medians of interleaved repetitions)",
        ("what", "durable", "beside it", "ratio", "ratio of processor time"),
    )
    for ask in (_steps, _steps_at_once, _signals, _crowd, _dependents, _suspended):
        with backlogs.database() as database:
            asyncio.run(_asked(ask, backlogs, database, answer, repetitions, share))
        print(f"  durable: {answer.rows[-1]}", flush=True)
    return answer


Ask = Callable[[Bench, Answer, int, float], Awaitable[None]]


async def _asked(ask: Ask, backlogs: Backlogs, database: str, answer: Answer, repetitions: int, share: float) -> None:
    async with _bench(backlogs, database) as bench:
        await ask(bench, answer, repetitions, share)


def _push(n: int) -> dict[str, Any]:
    return {"$push": {"task_state.steps": {"id": f"s{n}", "value": n}}, "$set": {"task_state.timeout_cnt": 0}}


async def _empty(value: int) -> int:
    return value


async def _steps(bench: Bench, answer: Answer, repetitions: int, share: float) -> None:
    """Steps of one handler, one after the other, beside as many updates of one such task."""
    count = max(20, int(_STEPS * share))
    took: dict[str, list[Took]] = {"durable": [], "bare": []}
    mesh = bench.mesh

    @mesh.task
    async def stepper() -> None:
        task = current_task()

        async def steps() -> None:
            for n in range(count):
                await task.step(f"s{n}", _empty, n)

        took["durable"].append(await bench.took(steps()))

    await bench.begin()

    async def bare(id_: str) -> None:
        for n in range(count):
            await bench.tasks.update_one({"_id": id_, "status": "INIT"}, _push(n))

    for repetition in range(_OFTEN * repetitions):
        await (await stepper.publish(str(repetition))).result(120)
        await bench.noop.configure(delay_ms=3_600_000).publish(f"bare-{repetition}")
        took["bare"].append(await bench.took(bare(f"noop:bare-{repetition}")))
    _compare(answer, f"a step ({count}, one after the other)", took, count, "bare majority update", "<=", 1.3)


async def _steps_at_once(bench: Bench, answer: Answer, repetitions: int, share: float) -> None:
    """Steps of many executions at once, beside updates of as many tasks in sets."""
    at_once, each = max(20, int(_AT_ONCE * share)), _STEPS_AT_ONCE
    took: dict[str, list[Took]] = {"durable": [], "bare": []}
    mesh = bench.mesh
    ready, go = asyncio.Semaphore(0), asyncio.Event()

    @mesh.task
    async def stepper() -> None:
        task = current_task()
        ready.release()
        await go.wait()
        for n in range(each):
            await task.step(f"s{n}", _empty, n)

    await bench.begin()

    async def durable(handles: Sequence[Any]) -> None:
        go.set()
        await asyncio.gather(*(handle.result(120) for handle in handles))

    async def bare(ids: list[str]) -> None:
        for n in range(each + 1):  # one more, for the SUCCESS
            await bench.tasks.bulk_write([UpdateOne({"_id": id_, "status": "INIT"}, _push(n)) for id_ in ids])

    for repetition in range(_OFTEN * repetitions):
        go.clear()
        handles = await stepper.publish_many({f"{repetition}-{n}": {} for n in range(at_once)})
        for _ in handles:
            await ready.acquire()
        took["durable"].append(await bench.took(durable(handles)))
        later = bench.noop.configure(delay_ms=3_600_000)
        await later.publish_many({f"bare-{repetition}-{n}": {} for n in range(at_once)})
        took["bare"].append(await bench.took(bare([f"noop:bare-{repetition}-{n}" for n in range(at_once)])))
    what = f"steps of {at_once} executions at once"
    _compare(answer, what, took, at_once * each, "bare set updates", ">=", 0.5)


async def _signals(bench: Bench, answer: Answer, repetitions: int, share: float) -> None:
    """From a signal to the waiting handler, beside publish → start."""
    mesh = bench.mesh
    count = max(10, int(_SIGNALS * share * repetitions))
    arrived: asyncio.Queue[float] = asyncio.Queue()

    @mesh.task
    async def waiter() -> None:
        await current_task().wait_for("go")
        arrived.put_nowait(time.monotonic())

    @mesh.task
    async def stamp() -> None:
        arrived.put_nowait(time.monotonic())

    await bench.begin()
    signals, starts = [], []
    for n in range(count):
        handle = await waiter.publish(str(n))
        await _suspends(handle)
        sent = time.monotonic()
        await handle.signal("go")
        signals.append(1000 * (await arrived.get() - sent))
        sent = time.monotonic()
        await stamp.publish(str(n))
        starts.append(1000 * (await arrived.get() - sent))
    ours, theirs = median(signals), median(starts)
    answer.figures["signals"] = {"signal_ms": signals, "publish_ms": starts}
    tail = f"p99 {percentile(signals, 0.99):.1f} and {percentile(starts, 0.99):.1f} ms"
    row = (
        "signal → waiting handler, publish → start",
        f"{ours:.2f} ms",
        f"{theirs:.2f} ms",
        f"{ours / theirs:.2f}",
        tail,
    )
    answer.rows.append(row)
    answer.goals.append(Goal("signal → waiting handler against publish → start, p50", "<=", 1.5, ours / theirs))


async def _crowd(bench: Bench, answer: Answer, repetitions: int, share: float) -> None:
    """One parent of many children and the join, beside as many unrelated tasks."""
    size = max(500, int(_CROWD * share))
    took: dict[str, list[Took]] = {"durable": [], "bare": []}
    await bench.begin()
    await bench.unrelated("warm", size // 5)
    for repetition in range(repetitions):
        await bench.at_rest()
        took["bare"].append(await bench.took(bench.unrelated(f"u{repetition}", size)))
        await bench.at_rest()
        handle = await bench.crowd.publish(str(repetition), size=size)
        took["durable"].append(await bench.took(handle.result(600)))
    stored = await bench.tasks.find_one({"_id": "crowd:0"}, {"size": {"$bsonSize": "$$ROOT"}})
    answer.notes.append(f"a parent of {size:,} children has {0 if stored is None else stored['size']:,} bytes")
    _compare(answer, f"fan-out of {size:,} children and a join", took, size, "unrelated tasks", ">=", 0.6)


async def _dependents(bench: Bench, answer: Answer, repetitions: int, share: float) -> None:
    """How long after its SUCCESS all that wait for a task are open."""
    size = max(500, int(_CROWD * share))
    took: list[float] = []
    await bench.begin()
    for repetition in range(repetitions):
        base = await bench.noop.configure(delay_ms=2_000).publish(f"base-{repetition}")
        closed = bench.noop.configure(after=[base], specific_worker_ids=("nobody",))
        await closed.publish_many({f"d{repetition}-{n}": {} for n in range(size)})
        await base.result(120)
        waiting = {"task_state.after.ids": base.name + ":" + base.key, "task_state.waits_for": {"$exists": True}}
        while await bench.tasks.find_one(waiting, {"_id": 1}):  # noqa: ASYNC110 -- it is not to be disturbed
            await asyncio.sleep(0.2)
        [finished] = [task.finish_time for task in [await base.task()] if task.finish_time is not None]
        opened = [
            task["event"] async for task in bench.tasks.find({"key": {"$regex": f"^d{repetition}-"}}, {"event": 1})
        ]
        last = max(int(event.split("\x1f")[1].rstrip("a")) for event in opened) / 1000
        took.append(last - finished.timestamp())
    answer.figures["dependents_s"] = took
    answer.rows.append((f"SUCCESS → the last of {size:,} dependents is open", f"{median(took):.2f} s", "", "", ""))
    answer.goals.append(
        Goal(f"{size:,} dependents of one task are open after its SUCCESS", "<=", 2.0, median(took), "s")
    )


async def _suspended(bench: Bench, answer: Answer, repetitions: int, share: float) -> None:
    """What tasks that sleep and wait cost the others: throughput, publish → start, and what the worker holds of them."""
    size, suspended = max(500, int(_CROWD * share)), max(2_000, int(_SUSPENDED * share))
    mesh = bench.mesh
    arrived: asyncio.Queue[float] = asyncio.Queue()

    @mesh.task
    async def sleeper() -> None:
        await current_task().sleep("night", hours=8)

    @mesh.task
    async def waiter() -> None:
        await current_task().wait_for("go")

    @mesh.task
    async def stamp() -> None:
        arrived.put_nowait(time.monotonic())

    async def starts(prefix: str) -> float:
        found = []
        for n in range(40):
            sent = time.monotonic()
            await stamp.publish(f"{prefix}-{n}")
            found.append(await arrived.get() - sent)
        return 1000 * median(found)

    await bench.begin()
    throughput: dict[str, list[Took]] = {"durable": [], "bare": []}
    delays: dict[str, list[float]] = {"durable": [], "bare": []}
    await bench.unrelated("warm", size // 5)
    for repetition in range(repetitions):
        for side in ("bare", "durable"):
            if side == "durable":
                await _fill(bench, (sleeper, waiter), suspended)
            throughput[side].append(await bench.took(bench.unrelated(f"{side}{repetition}", size)))
            delays[side].append(await starts(f"{side}{repetition}"))
            if side == "durable":
                await bench.tasks.delete_many({"name": {"$in": ["sleeper", "waiter"]}})
    what = f"tasks beside {suspended:,} that sleep or wait"
    _compare(answer, what, throughput, size, "without these", ">=", 0.9)
    ours, theirs = median(delays["durable"]), median(delays["bare"])
    row = (f"publish → start beside {suspended:,}", f"{ours:.2f} ms", f"{theirs:.2f} ms", f"{ours / theirs:.2f}", "")
    answer.rows.append(row)
    answer.goals.append(Goal(f"publish → start beside {suspended:,} that sleep or wait, p50", "<=", 1.1, ours / theirs))


async def _suspends(handle: TaskHandle[Any]) -> None:
    """Wait until the task is put aside."""
    while (await handle.task()).task_state.suspended_for is None:  # noqa: ASYNC110 -- the clock of what follows is not on
        await asyncio.sleep(0.005)


async def _fill(bench: Bench, definitions: Sequence[TaskDefinition[Any, Any]], count: int) -> None:
    """Put so many suspended tasks into the database: one of each kind by itself, the others as copies of it."""
    for definition in definitions:
        handle = await definition.publish("first")
        await _suspends(handle)
        first = await bench.tasks.find_one({"_id": f"{definition.name}:first"}) or {}
        each = count // len(definitions)
        for start in range(0, each, 5_000):
            keys = [f"copy-{n}" for n in range(start, min(each, start + 5_000))]
            copies = [first | {"_id": f"{definition.name}:{key}", "key": key} for key in keys]
            await bench.tasks.insert_many(copies, ordered=False)


def _compare(
    answer: Answer, what: str, took: dict[str, list[Took]], count: int, beside: str, sense: Any, goal: float
) -> None:
    """Add a row and a goal: how long one took against the other; `>=`: how much of the other's throughput it reaches."""
    ours, theirs = (median([one.wall for one in took[side]]) for side in ("durable", "bare"))
    cpu = median([one.cpu for one in took["durable"]]) / median([one.cpu for one in took["bare"]])
    ratio = ours / theirs if sense == "<=" else theirs / ours
    cpu = cpu if sense == "<=" else 1 / cpu
    each = [f"{1e6 * wall / count:,.0f} µs" for wall in (ours, theirs)]
    answer.rows.append((what, each[0], f"{each[1]} ({beside})", cut(ratio, down=sense == ">="), f"{cpu:.2f}"))
    answer.figures[what] = {side: [vars(one) for one in found] for side, found in took.items()}
    answer.goals.append(Goal(f"{what} against {beside}", sense, goal, ratio, note=f"by processor time {cpu:.2f}"))
