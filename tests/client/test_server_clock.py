"""Who publishes knows the server's time, however long ago it connected and whatever its own machine did meanwhile."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from taskmesh import TaskMesh
from taskmesh.store.clock import ServerClock

_HOUR_S = 3_600.0


async def test_a_publisher_whose_machine_was_suspended_asks_for_the_time_again(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    _suspended(mesh.clock, _HOUR_S)
    before = datetime.now(UTC)
    handle = await job.configure(delay_ms=600_000).publish("1")

    task = await handle.task()
    created, start_time = task.task_state.create_time, task.task_state.start_time
    assert abs(created - before) < timedelta(seconds=30), "not an hour ago"
    assert start_time is not None
    assert start_time - created == timedelta(minutes=10)


async def test_so_does_a_publish_in_a_transaction(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    _suspended(mesh.clock, _HOUR_S)
    async with mesh.store.driver.session() as session, await session.start_transaction():
        handle = await job.configure(session=session).publish("1")
    assert abs((await handle.task()).task_state.create_time - datetime.now(UTC)) < timedelta(seconds=30)


def test_a_sample_that_contradicts_the_estimate_is_believed_though_it_is_a_rough_one() -> None:
    clock, now = ServerClock(), time.monotonic()
    clock.observe(datetime(2030, 1, 1, tzinfo=UTC), now - 0.001, now)
    clock.observe(datetime(2030, 1, 1, 1, tzinfo=UTC), now - 1.0, now)
    assert clock.now() >= datetime(2030, 1, 1, 1, tzinfo=UTC)


def test_a_rough_sample_that_agrees_does_not_spoil_a_good_one() -> None:
    clock, now = ServerClock(), time.monotonic()
    clock.observe(datetime(2030, 1, 1, tzinfo=UTC), now - 0.001, now)
    good = clock.monotonic(datetime(2030, 1, 1, tzinfo=UTC))
    clock.observe(datetime(2029, 12, 31, 23, 59, 59, 700_000, tzinfo=UTC), now - 1.0, now)
    assert clock.monotonic(datetime(2030, 1, 1, tzinfo=UTC)) == good


def _suspended(clock: ServerClock, seconds: float) -> None:
    """Leave the clock as a suspension does: monotonic time stood still, and the wall clocks went on."""
    clock._offset -= seconds
    clock._jumps._wall -= seconds
    clock._jumps._awake -= seconds
