"""A server that is slow with everything is given time: cutting sets into parts would only give it more to do."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from taskmesh import Status, TaskMesh, TaskOption
from taskmesh.consumer.write_times import WriteTimes
from tests.faults import another_mesh, failing_commands
from tests.waiting import eventually
from tests.working import finished, parts_of, working

COUNT = 400


async def test_sets_stay_whole_where_every_write_is_slow(mesh: TaskMesh, mongo_uri: str, database: str) -> None:
    async with another_mesh(mongo_uri, database, "the slowed-down worker") as slow:

        @slow.task
        async def job() -> None: ...

        async with working(slow, "w1", concurrency=100) as consumer:
            await mesh.pause("default")
            claimer = parts_of(consumer).claimer
            await mesh.publisher.publish_many("job", {str(n): {} for n in range(COUNT)})
            # Longer than a set of fifty has at first.
            writes = ["update", "findAndModify"]
            async with failing_commands(
                mongo_uri, writes, appname="the slowed-down worker", blockConnection=True, blockTimeMS=600
            ):
                await mesh.resume("default")
                await eventually(lambda: consumer.finished == COUNT, what="all are done")
            # The first two sets are late, and tried once more in parts; on a busy machine maybe another set. By one deadline
            # for all, each task is tried three times.
            assert COUNT <= claimer.tried <= 2 * COUNT


async def test_what_has_expired_is_written_down_where_every_write_is_slow(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    async with another_mesh(mongo_uri, database, "the slowed-down worker") as slow:

        @slow.task
        async def job() -> None: ...

        writes = ["update", "findAndModify"]
        async with (
            failing_commands(
                mongo_uri, writes, appname="the slowed-down worker", blockConnection=True, blockTimeMS=600
            ),
            working(slow, "w1"),
        ):
            await mesh.publish("job", "claimed")
            await finished(mesh, "job", "claimed")
            expires = datetime.now(UTC) + timedelta(seconds=1)
            await mesh.publish("job", "expired", delay_ms=3_600_000, expire_time=expires)

            async def is_written_down() -> bool:
                task = await mesh.store.driver.collection("tasks").find_one({"_id": "job:expired"})
                return task is not None and task["status"] == "EXPIRED"

            await eventually(is_written_down)


@pytest.mark.parametrize("count", [1, 30])
async def test_no_lease_is_lost_where_every_write_becomes_slow(
    mesh: TaskMesh, mongo_uri: str, database: str, count: int
) -> None:
    """An eighth of the lease is what a ping is given at first."""
    async with another_mesh(mongo_uri, database, "the slowed-down worker") as slow:
        may_end = asyncio.Event()

        @slow.task(option=TaskOption(worker_timeout_ms=8_000, ping_interval_ms=2_000))
        async def job() -> None:
            await may_end.wait()

        await job.publish_many({str(n): {} for n in range(count)})

        async def leases() -> list[datetime]:
            entries = [entry async for task in mesh.find(status="RUNNING") for entry in task.task_state.worker_states]
            return [entry.ping_expire_time for entry in entries if entry.ping_expire_time is not None]

        async with working(slow, "w1", concurrency=count) as consumer:
            await eventually(lambda: len(consumer.running) == count)
            first = max(await leases())
            async with failing_commands(
                mongo_uri, ["update"], appname="the slowed-down worker", blockConnection=True, blockTimeMS=1_200
            ):

                async def all_were_renewed() -> bool:
                    assert len(consumer.running) == count, "none is lost"
                    return min(await leases()) > first + timedelta(seconds=8)

                await eventually(all_were_renewed)
            may_end.set()
            await eventually(lambda: consumer.finished == count)
        async for task in mesh.find(name="job"):
            assert (task.status, task.task_state.lost_cnt) == (Status.SUCCESS, 0)


def test_deadlines_follow_the_time_that_writes_take() -> None:
    times = WriteTimes()
    assert times.deadline_ms(350, 3_000) == 350
    times.met(0.02)
    assert times.deadline_ms(350, 3_000) == 350
    for missed in (350, 350, 350):  # three that were sent together
        times.missed(missed)
    assert times.deadline_ms(350, 3_000) == 700
    times.missed(700)
    assert times.deadline_ms(350, 3_000) == 1_400
    for _ in range(20):
        times.met(2.0)
    assert times.deadline_ms(350, 3_000) == 3_000
    assert times.deadline_ms(5_300, 3_000) == 5_300
    for _ in range(20):
        times.met(0.02)
    assert times.deadline_ms(350, 3_000) == 350
