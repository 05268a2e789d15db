"""What do limits cost, and who waits for whom? Limited queues beside what they allow, tenants beside a large backlog."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pymongo import AsyncMongoClient

from benchmarks.backlog import Backlogs
from benchmarks.commands import Commands
from benchmarks.tables import Answer, Goal, median
from taskmesh import TaskDefinition, TaskMesh

NAP_S = 0.02
LONG_NAP_S = 2.0
TENANTS = 10
GROUPS = 1_000


@dataclass
class Way:
    """One load, and what is set for its queue."""

    label: str
    count: int
    limits: dict[str, Any]
    group_of: Callable[[int], str | None]
    nap_s: float
    concurrency: int
    spread: bool = False
    """Whether tasks take from half as long to half as long again, and not all the same."""
    bound: bool = False
    """Whether the limits are what it waits for."""

    def nap_of(self, n: int) -> float:
        """How long a task takes."""
        return self.nap_s * (0.5 + n * 7919 % 101 / 100) if self.spread else self.nap_s

    @property
    def rate(self) -> tuple[int, float] | None:
        """How many may start within how many seconds, of a group or of the whole queue."""
        for rate, window in (("rate", "per_ms"), ("group_rate", "group_per_ms")):
            if rate in self.limits:
                return self.limits[rate], self.limits[window] / 1000
        return None

    @property
    def least_s(self) -> float:
        """How long it takes at least, as the limits allow: each slot of a group takes the next task in their order.

        Under a rate the tasks of a window start at once, and those of the next when it is over.
        """
        if self.rate is not None:
            rate, window_s = self.rate
            return (self.count - 1) // rate * window_s
        limit = self.limits.get("group_running") or self.limits["running"]
        slots: dict[str | None, list[float]] = {}
        for n in range(self.count):
            ends = slots.setdefault(self.group_of(n), [0.0] * limit)
            heapq.heapreplace(ends, ends[0] + self.nap_of(n))
        return max(map(max, slots.values()))


def ways(share: float) -> list[Way]:
    """What is measured."""
    few, many, turns = max(40, int(300 * share)), max(GROUPS, int(5 * GROUPS * share)), max(2, int(4 * share))
    two: dict[str, Any] = {"nap_s": NAP_S, "concurrency": 10, "bound": True}
    at_once: dict[str, Any] = {"nap_s": 0.0, "concurrency": 50, "bound": True}
    least = max(0.5, share)
    hundred: dict[str, Any] = {"nap_s": 0.0, "concurrency": 100}
    at_limits: dict[str, Any] = {"nap_s": LONG_NAP_S, "concurrency": 2 * GROUPS, "bound": True}
    label, twice = f"{GROUPS} groups at their limits, group_running=2", {"group_running": 2}
    return [
        Way("group_running=2, one group", few, twice, lambda _: "a", **two),
        Way("running=2", few, {"running": 2}, lambda _: None, **two),
        Way("rate=1 in 50 ms", max(40, few // 3), {"rate": 1, "per_ms": 50}, lambda _: None, **at_once),
        Way("rate=500 in a second", int(2_500 * least), {"rate": 500, "per_ms": 1_000}, lambda _: None, **at_once),
        Way(
            "group_rate=100 in a second, one group",
            int(500 * least),
            {"group_rate": 100, "group_per_ms": 1_000},
            lambda _: "a",
            **at_once,
        ),
        Way(
            f"{label}, tasks of 1 to 3 s",
            turns * 2 * GROUPS,
            twice,
            lambda n: f"g{n % GROUPS}",
            spread=True,
            **at_limits,
        ),
        Way(
            f"{label}, tasks of 2 s that end together",
            turns * 2 * GROUPS,
            twice,
            lambda n: f"g{n % GROUPS}",
            **at_limits,
        ),
        Way(f"{GROUPS} groups, no limit", many, {}, lambda n: f"g{n % GROUPS}", **hundred),
        Way(f"{GROUPS} groups, group_running=2", many, {"group_running": 2}, lambda n: f"g{n % GROUPS}", **hundred),
        Way("no groups, no limit", many, {}, lambda _: None, **hundred),
        Way("no groups, running=1000", many, {"running": 1_000}, lambda _: None, **hundred),
    ]


def measure(backlogs: Backlogs, *, repetitions: int = 3, share: float = 1.0) -> Answer:
    """Run all loads in turn, again and again."""
    found: dict[str, list[tuple[float, float]]] = {}
    delays: list[tuple[float, float]] = []
    for repetition in range(repetitions):
        for number, way in enumerate(ways(share)):
            with backlogs.database("noop", 1) as database:
                found.setdefault(way.label, []).append(
                    asyncio.run(_work_off(backlogs.uri, f"{database}_{number}", way))
                )
        with backlogs.database("noop", 1) as database:
            delays.append(asyncio.run(_beside_a_backlog(backlogs.uri, f"{database}_t", int(100_000 * share))))
        print(f"  fairness {repetition + 1}/{repetitions}", flush=True)
    rates = {way.label: median([way.count / took for took, _ in found[way.label]]) for way in ways(share)}
    commands = {label: median([each for _, each in runs]) for label, runs in found.items()}
    answer = Answer(
        "What do limits cost, and who waits for whom? (medians of interleaved repetitions)",
        ("load", "tasks/s", "commands per task"),
        [(label, f"{rate:,.0f}", f"{commands[label]:.2f}") for label, rate in rates.items()],
        figures={"rates": rates, "commands": commands, "delays_ms": delays},
    )
    free, unlimited = f"{GROUPS} groups, no limit", "no groups, no limit"
    for way in ways(share):
        if way.bound:
            of_allowed = rates[way.label] / (way.count / way.least_s)
            answer.goals.append(Goal(f"{way.label}: of what the limit allows", ">=", 0.8, of_allowed))
        if way.limits and way.rate is None:  # each start under a rate is booked and confirmed, beside claim and outcome
            answer.goals.append(Goal(f"{way.label}: commands per task", "<=", 3, commands[way.label], unit=""))
    for label, without in ((f"{GROUPS} groups, group_running=2", free), ("no groups, running=1000", unlimited)):
        answer.goals.append(Goal(f"{label}: of the same without", ">=", 0.7, rates[label] / rates[without]))
    idle_ms, late_ms = median([idle for idle, _ in delays]), median([late for _, late in delays])
    answer.notes.append(
        f"A tenant's first task starts {late_ms:.0f} ms after it was published beside {int(100_000 * share)} tasks of another; "
        f"{idle_ms:.0f} ms where nothing else waits; a task takes {NAP_S * 1000:.0f} ms."
    )
    turn_ms = 3 * idle_ms + NAP_S * 1_000
    answer.goals.append(Goal("start of a tenant's first task: of one turn", "<=", 1, late_ms / turn_ms))
    return answer


@asynccontextmanager
async def _mesh(uri: str, database: str, commands: Commands | None = None) -> AsyncIterator[TaskMesh]:
    listeners = [] if commands is None else [commands]
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(uri, event_listeners=listeners, tz_aware=True)
    async with client, TaskMesh(client, database=database) as mesh:
        yield mesh
        await client.drop_database(database)


def _nap(mesh: TaskMesh, starts: dict[str, float]) -> TaskDefinition[..., Any]:
    async def nap(key: str, seconds: float) -> None:
        starts[key] = time.monotonic()
        if seconds:
            await asyncio.sleep(seconds)

    return mesh.task(nap, name="nap", queue="limited")


async def _work_off(uri: str, database: str, way: Way) -> tuple[float, float]:
    """Return how long it took from the first start to the last end, and the commands for each task."""
    commands, starts = Commands(), dict[str, float]()
    async with _mesh(uri, database) as publishing:
        nap = _nap(publishing, {})
        if way.limits:
            await publishing.set_limit("limited", **way.limits)
        by_group: dict[str | None, dict[str, dict[str, Any]]] = {}
        for n in range(way.count):
            by_group.setdefault(way.group_of(n), {})[f"k{n}"] = {"key": f"k{n}", "seconds": way.nap_of(n)}
        for group, params in by_group.items():
            await nap.configure(group=group).publish_many(params)
        async with _mesh(uri, database, commands) as mesh:
            _nap(mesh, starts)
            consumer = mesh.consumer(worker_id="w1", concurrency=way.concurrency)
            running = asyncio.create_task(consumer.run())
            while consumer.finished < way.count:  # noqa: ASYNC110 -- the consumer has no event for it
                await asyncio.sleep(0.005)
            took = time.monotonic() - min(starts.values())
            asked = commands.total
            await consumer.stop(grace_ms=0)
            await running
    return took, asked / way.count


async def _beside_a_backlog(uri: str, database: str, backlog: int) -> tuple[float, float]:
    """Return how long after its publication a task starts in milliseconds: where nothing waits, and beside a backlog."""
    starts: dict[str, float] = {}
    async with _mesh(uri, database) as publishing, _mesh(uri, database) as mesh:
        nap, _ = _nap(publishing, {}), _nap(mesh, starts)
        consumer = mesh.consumer(worker_id="w1", concurrency=10)
        running = asyncio.create_task(consumer.run())

        async def late(key: str, group: str) -> float:
            sent = time.monotonic()
            await nap.configure(group=group).publish(key, key=key, seconds=NAP_S)
            while key not in starts:  # noqa: ASYNC110 -- the handler has no event for it
                await asyncio.sleep(0.001)
            return (starts[key] - sent) * 1000

        idle = []
        for n in range(10):
            idle.append(await late(f"idle-{n}", "a"))
            await asyncio.sleep(2 * NAP_S)
        many = {f"big-{n}": {"key": f"big-{n}", "seconds": NAP_S} for n in range(backlog)}
        await nap.configure(group="big").publish_many(many)
        done = consumer.finished
        # Until it is worked on, and its announcements are through: it waits, as it would for hours.
        heard = -1
        while consumer.finished < done + 50 or mesh.feed.delivered > heard:
            heard = mesh.feed.delivered
            await asyncio.sleep(5 * NAP_S)
        delays = await asyncio.gather(*(late(f"small-{n}", f"tenant-{n}") for n in range(TENANTS - 1)))
        await consumer.stop(grace_ms=0)
        await running
    return median(idle), max(delays)
