"""A worker costs the same however many queues and names there are, and what is due in any of them starts on time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from taskmesh import TaskMesh
from taskmesh.client.definition import TaskDefinition
from tests.consumer.sampling import starts_of
from tests.waiting import eventually, slowness_of_the_machine
from tests.working import parts_of, working

QUEUES = 1_000
NAMES = 60
MORE_THAN_ONE_LOOK_SHOWS = 300
_SCANS = 6


class Commands(CommandListener):
    """How many commands were sent, by name and collection."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.names_looked_at: list[int] = []
        """How many names each look for waiting tasks was at."""

    def started(self, event: CommandStartedEvent) -> None:
        self.sent[f"{event.command_name} {event.command.get(event.command_name)}"] += 1
        if event.command.get("hint") == "taskmesh_waiting_in_order":
            self.names_looked_at.append(len(event.command["filter"]["name"]["$in"]))

    def failed(self, event: CommandFailedEvent) -> None: ...
    def succeeded(self, event: CommandSucceededEvent) -> None: ...


@asynccontextmanager
async def counted(uri: str, database: str) -> AsyncIterator[tuple[TaskDefinition[[], None], TaskMesh, Commands]]:
    """A mesh whose commands are counted, and a task of it."""
    commands = Commands()
    async with (
        AsyncMongoClient[dict[str, Any]](uri, event_listeners=[commands]) as client,
        TaskMesh(client, database=database) as mesh,
    ):

        @mesh.task
        async def job() -> None: ...

        yield job, mesh, commands


async def _in_queues(job: TaskDefinition[[], None], queues: int, each: int = 1, **configuration: Any) -> None:
    for start in range(0, queues, 50):
        some = range(start, min(start + 50, queues))
        publishing = [
            job.configure(queue=f"q{n:04}", **configuration).publish_many({f"{n} {m}": {} for m in range(each)})
            for n in some
        ]
        await asyncio.gather(*publishing)


async def _sent_while_idle(mesh: TaskMesh, commands: Commands, **settings: Any) -> tuple[Counter[str], float]:
    """Count what a worker sends in some passes, from its second on, and in how many seconds that was."""
    async with working(mesh, "w", **settings) as consumer:
        scanner = parts_of(consumer).scanner
        await eventually(lambda: scanner.scans >= 2, 60.0)
        before, scans, began = commands.sent.copy(), scanner.scans, time.monotonic()
        await eventually(lambda: scanner.scans >= scans + _SCANS, 60.0)
        return commands.sent - before, time.monotonic() - began


@pytest.mark.parametrize("queues", [1, QUEUES])
async def test_an_idle_worker_sends_as_little_with_many_queues_as_with_one(
    mongo_uri: str, database: str, queues: int
) -> None:
    async with counted(mongo_uri, database) as (job, mesh, commands):
        await _in_queues(job, queues, delay_ms=3_600_000)
        sent, seconds = await _sent_while_idle(mesh, commands)
    assert sent["find tasks"] <= 3 * (_SCANS + 1), (
        sent
    )  # what waits, runs out, others wait for; a pass more may have begun
    # The stream is read, signs of life are given, and so on, in their own time: where passes take longer, more of that is sent.
    assert sent.total() <= 12 * max(_SCANS, seconds), (seconds, sent)


async def test_an_idle_worker_of_many_queues_by_name_sends_as_little(mongo_uri: str, database: str) -> None:
    async with counted(mongo_uri, database) as (job, mesh, commands):
        await _in_queues(job, 20, delay_ms=3_600_000)
        sent, _ = await _sent_while_idle(mesh, commands, queues=[f"q{n:04}" for n in range(QUEUES)])
    assert sent["find tasks"] <= 3 * (_SCANS + 1), (
        sent
    )  # what waits, runs out, others wait for; a pass more may have begun


async def test_statistics_of_many_queues_and_one_name_take_few_looks(mongo_uri: str, database: str) -> None:
    async with counted(mongo_uri, database) as (job, mesh, commands):
        await _in_queues(job, 100)
        before = commands.sent["distinct tasks"]
        stats = await mesh.stats()
    assert stats.counts == {"job": {"INIT": 100}}
    assert commands.sent["distinct tasks"] - before < 20


@pytest.mark.timed
async def test_what_is_delayed_starts_on_time_in_each_of_many_queues(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    await _in_queues(job, QUEUES, delay_ms=3_600_000)
    async with working(mesh, "w") as consumer, slowness_of_the_machine(mesh) as slowness:
        await eventually(lambda: parts_of(consumer).scanner.scans >= 2, 60.0)
        due = mesh.clock.now() + timedelta(seconds=4)
        chosen = range(0, QUEUES, 100)
        for n in chosen:
            await job.configure(queue=f"q{n:04}", start_time=due).publish(f"delayed {n}")
        await eventually(lambda: consumer.finished == len(chosen), 60.0)
    late = [start - due for start, _ in await starts_of(mesh, "job")]
    assert len(late) == len(chosen)
    assert timedelta(0) <= min(late)
    assert max(late) < timedelta(seconds=1) + slowness.allows


@pytest.mark.timed
async def test_a_queue_that_nobody_names_is_found_by_its_first_delayed_task_in_time(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    async with working(mesh, "w", listen=False) as consumer, slowness_of_the_machine(mesh) as slowness:
        scanner = parts_of(consumer).scanner
        for n in range(5):  # wherever in its rounds the scanner is
            scans = scanner.scans
            await eventually(lambda: scanner.scans > scans, 60.0)  # noqa: B023 -- awaited here
            handle = await job.configure(queue=f"new-{n}", delay_ms=2_000).publish(f"k{n}")
            due = (await handle.task()).task_state.start_time
            await handle.result(timeout=60)
            started = (await handle.task()).successes[0].start_time
            assert due is not None
            assert started is not None
            assert timedelta(0) <= started - due < timedelta(seconds=1) + slowness.allows


async def test_behind_a_backlog_that_it_may_not_have_every_queue_is_looked_at(mesh: TaskMesh) -> None:
    """More is due than one look shows."""

    @mesh.task
    async def job() -> None: ...

    others = job.configure(specific_worker_ids=["another"], queue="crowded")
    await others.publish_many({f"k{n}": {} for n in range(1_000)})
    async with working(mesh, "w", listen=False) as consumer:
        scanner = parts_of(consumer).scanner
        await eventually(lambda: scanner.scans >= 2)
        handles = [await job.configure(queue=f"quiet-{n}").publish(f"q{n}") for n in range(3)]
        for handle in handles:
            await handle.result(timeout=60)


async def test_names_of_which_nothing_waits_are_not_looked_at_however_much_waits_of_another(
    mongo_uri: str, database: str
) -> None:
    """To see that nothing waits of a name, the server passes over all that was claimed lately of the names behind it."""
    async with counted(mongo_uri, database) as (job, mesh, commands):
        for n in range(NAMES):
            mesh.task(name=f"other-{n}")(lambda: None)
        await job.publish_many({f"k{n}": {} for n in range(MORE_THAN_ONE_LOOK_SHOWS)})
        async with working(mesh, "w", on_claim=lambda _: None) as consumer:
            scanner = parts_of(consumer).scanner
            await eventually(lambda: scanner.scans >= 2)
            del commands.names_looked_at[:]
            await eventually(lambda: len(commands.names_looked_at) >= 3)
            assert set(commands.names_looked_at) == {1}
            await mesh.publish("other-7", "k")
            await eventually(lambda: commands.names_looked_at[-1] == 2, what="it is looked at, too")


async def test_where_each_of_many_names_has_its_queue_few_looks_are_enough(mongo_uri: str, database: str) -> None:
    async with counted(mongo_uri, database) as (_, mesh, commands):
        for n in range(NAMES):
            task = mesh.task(name=f"job-{n}", queue=f"q{n:04}")(lambda: None)
            await task.publish_many({f"k{m}": {} for m in range(MORE_THAN_ONE_LOOK_SHOWS // NAMES + 1)})
        async with working(mesh, "w", on_claim=lambda _: None) as consumer:
            scanner = parts_of(consumer).scanner
            await eventually(lambda: scanner.scans >= 2)
            before, scans = commands.sent["find tasks"], scanner.scans
            await eventually(lambda: scanner.scans >= scans + _SCANS, 60.0)
        sent = commands.sent["find tasks"] - before
    assert sent < 40 * (_SCANS + 1), "all combinations would be 24 parts of four looks each"


@pytest.mark.parametrize("listen", [True, False])
async def test_behind_a_backlog_that_it_may_not_have_every_name_is_looked_at(mesh: TaskMesh, listen: bool) -> None:
    async def nothing() -> None: ...

    first, *others = [mesh.task(name=f"job-{n}")(nothing) for n in range(NAMES)]
    await first.publish_many({f"k{n}": {} for n in range(MORE_THAN_ONE_LOOK_SHOWS)})
    async with working(mesh, "w", listen=listen, on_claim=lambda _: {"name": {"$ne": first.name}}) as consumer:
        scanner = parts_of(consumer).scanner
        await eventually(lambda: scanner.scans >= 2)
        for task in others[::20]:
            await (await task.publish("k")).result(timeout=60)
