"""A server that is slow with everything is given time: cutting sets into parts would only give it more to do."""

from __future__ import annotations

from taskmesh import TaskMesh
from taskmesh.consumer.adaptive_deadline import AdaptiveDeadline
from tests.faults import another_mesh, failing_commands
from tests.waiting import eventually
from tests.working import parts_of, working

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


def test_a_deadline_follows_the_time_that_writes_take() -> None:
    deadline = AdaptiveDeadline(300, 3_000)
    assert deadline.ms(50) == 350
    deadline.met(0.02)
    assert deadline.ms(50) == 350
    for missed in (350, 350, 350):  # three that were sent together
        deadline.missed(missed)
    assert deadline.ms(50) == 700
    deadline.missed(700)
    assert deadline.ms(1) == 1_400
    for _ in range(20):
        deadline.met(2.0)
    assert deadline.ms(1) == 3_000
    assert deadline.ms(5_000) == 5_300
    for _ in range(20):
        deadline.met(0.02)
    assert deadline.ms(50) == 350
