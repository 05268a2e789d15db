"""Workers that are full leave each other's tasks alone; one that has room does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from taskmesh import Status, TaskMesh
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import all_working, finished, parts_of

WORKERS = ("w1", "w2")


async def test_two_full_workers_lose_few_claims_to_each_other(mesh: TaskMesh) -> None:
    """Both hear of what is published bit by bit: half of all claims were lost, until who comes second first looked for room."""
    count = 0

    @mesh.task
    async def nap(s: float) -> None:
        await asyncio.sleep(s)

    async with all_working(mesh, WORKERS, concurrency=4) as consumers:
        parts = [parts_of(consumer) for consumer in consumers]
        await eventually(lambda: not any(part.partitions.alone for part in parts), what="each knows of the other")
        for _ in range(40):
            await nap.publish_many({f"k{count + n}": {"s": 0.02 + (count + n) % 7 * 0.02} for n in range(6)})
            count += 6
        await eventually(lambda: sum(consumer.finished for consumer in consumers) == count)
        tried, won = (sum(getattr(part.claimer, what) for part in parts) for what in ("tried", "won"))
        assert won == count
        assert all(part.claimer.won > count / 5 for part in parts), "both took their share"
        # A tenth where nothing else is at work; on a machine that is busy elsewhere, the first is at times later than the second.
        assert (tried - won) / tried < 0.35


class _Cursors(CommandListener):
    """How often somebody began to read behind tasks that were refused."""

    def __init__(self) -> None:
        self.opened = 0

    def started(self, event: CommandStartedEvent) -> None:
        if event.command_name == "find" and event.command["find"] == "tasks" and "batchSize" in event.command:
            self.opened += "$and" in event.command["filter"] and "hint" in event.command

    def failed(self, event: CommandFailedEvent) -> None: ...
    def succeeded(self, event: CommandSucceededEvent) -> None: ...


async def test_what_is_found_again_while_claims_are_under_way_is_not_taken_for_refused(
    mongo_uri: str, database: str
) -> None:
    """Else all that stands behind it is read, in both workers' lanes, and tried when it has long been taken."""
    count, cursors, appname = 6_000, _Cursors(), "the slowed-down workers"
    async with (
        AsyncMongoClient[dict[str, Any]](mongo_uri, appname=appname, event_listeners=[cursors]) as client,
        TaskMesh(client, database=database) as mesh,
    ):

        @mesh.task
        async def job() -> None: ...

        async with all_working(mesh, WORKERS, concurrency=100) as consumers:
            parts = [parts_of(consumer) for consumer in consumers]
            await eventually(lambda: not any(part.partitions.alone for part in parts), what="each knows of the other")
            await mesh.pause("default")
            await job.publish_many({f"k{n}": {} for n in range(count)})
            slowly: dict[str, Any] = {
                "appname": appname,
                "blockConnection": True,
                "blockTimeMS": 250,
            }  # within the deadline
            await mesh.resume("default")
            async with failing_commands(mongo_uri, ["update"], times=12, **slowly) as have_failed:
                await have_failed(12)
            async with failing_commands(mongo_uri, ["update"], times=12, **slowly):
                await eventually(lambda: sum(consumer.finished for consumer in consumers) == count)
        assert cursors.opened == 0


@pytest.mark.parametrize("many", [3, 30])
async def test_what_waits_for_a_full_worker_is_taken_by_the_one_that_has_room(mesh: TaskMesh, many: int) -> None:
    go_on = asyncio.Event()

    @mesh.task
    async def long() -> None:
        await go_on.wait()

    @mesh.task
    async def short() -> None: ...

    async with all_working(mesh, WORKERS, concurrency=2) as consumers:
        parts = [parts_of(consumer) for consumer in consumers]
        await eventually(lambda: not any(part.partitions.alone for part in parts), what="each knows of the other")
        full = parts[0]
        mine = [key for key in (f"k{n}" for n in range(200)) if full.partitions.place(f"long:{key}", "default") == 0]
        consumers[1].pause()  # if the first is slow to claim its own, the second would
        await long.publish_many({key: {} for key in mine[:2]})
        await eventually(lambda: len(full.executions) == 2, what="the first worker is full")
        consumers[1].resume()
        await short.publish_many({f"k{n}": {} for n in range(many)})
        tasks = [await finished(mesh, "short", f"k{n}") for n in range(many)]
        assert {task.status for task in tasks} == {Status.SUCCESS}
        assert {entry.worker_id for task in tasks for entry in task.task_state.worker_states} == {WORKERS[1]}
        go_on.set()
