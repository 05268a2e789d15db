"""A server that is slow with everything is given time: cutting sets into parts would only give it more to do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from taskmesh import TaskMesh
from taskmesh.consumer.write_times import WriteTimes
from tests.faults import another_mesh, failing_commands
from tests.waiting import eventually
from tests.working import finished, parts_of, working

COUNT = 200


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
            # The first two sets are late, and tried once more in parts. By one deadline for all, each task is tried three times.
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
