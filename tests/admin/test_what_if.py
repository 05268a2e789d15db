"""What if: the forecast is what comes to pass, and asking for it changes nothing."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from taskmesh import InvalidOption, Status, TaskMesh, TaskNotFound, TaskOption
from taskmesh.testing import advance
from tests.waiting import eventually
from tests.working import all_working, status_is, working


async def stored(mesh: TaskMesh) -> list[dict[str, Any]]:
    """Return all that is written down about tasks and queues. What workers book in `limits` moves by itself."""
    found: list[dict[str, Any]] = []
    for name in ("tasks", "queues"):
        found += await mesh.store.driver.collection(name).find({}).sort("_id", 1).to_list(None)
    return found


async def test_an_option_that_names_other_workers_would_stop_one_and_let_another_claim(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> None:
        await asyncio.sleep(600)

    handle = await work.configure(specific_worker_ids=["w1"]).publish("k")
    async with all_working(mesh, ["w1", "w2"]):
        await status_is(mesh, "work", "k", Status.RUNNING)
        before = await stored(mesh)
        effect = await mesh.what_if.option("work", "k", specific_worker_ids=["w2"])
        assert await stored(mesh) == before
        assert (effect.status_now, effect.status_then) == (Status.RUNNING, Status.INIT)
        assert (effect.opens, effect.shuts, effect.stops) == (["w2"], [], ["w1"])
        assert effect.sentence == (
            "it would be INIT instead of RUNNING; w2 could claim it then; its execution on w1 would be stopped"
        )
        await mesh.set_option("work", "k", specific_worker_ids=["w2"])

        async def moved() -> bool:
            entries = (await handle.task()).task_state.worker_states
            return [entry.worker_id for entry in entries] == ["w2"]

        await eventually(moved)


async def test_more_retries_would_open_a_failed_task_and_fewer_shut_one(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(max_unexpected_retries=0, unexpected_retry_delay_ms=0))
    async def work() -> None:
        raise ValueError("no")

    await work.publish("k")
    async with working(mesh, "w1") as consumer:
        await status_is(mesh, "work", "k", Status.FAIL)
        consumer.pause()  # else it would be claimed while we look

        async def paused() -> bool:
            return all(worker.paused for worker in await mesh.workers())

        await eventually(paused)
        more = await mesh.what_if.option("work", "k", max_unexpected_retries=1)
        assert (more.status_now, more.status_then) == (Status.FAIL, Status.INIT)
        await mesh.set_option("work", "k", max_unexpected_retries=1)
        assert (await mesh.get("work", "k")).status == Status.INIT
        fewer = await mesh.what_if.option("work", "k", max_unexpected_retries=0)
        assert (fewer.status_now, fewer.status_then) == (Status.INIT, Status.FAIL)
        nothing = await mesh.what_if.option("work", "k", priority=7)
        assert nothing.sentence == "nothing would change about who can claim it now"
    with pytest.raises(InvalidOption):
        await mesh.what_if.option("work", "k", max_unexpected_retries=-1)
    with pytest.raises(TaskNotFound):
        await mesh.what_if.option("work", "nobody", priority=1)


async def test_a_limit_says_how_many_could_start_now_and_then(mesh: TaskMesh) -> None:
    @mesh.task(queue="mail")
    async def send() -> None:
        await asyncio.sleep(600)

    await mesh.set_limit("mail", running=4)
    for group, count in (("a", 5), ("b", 3)):
        await send.configure(group=group).publish_many({f"{group}{n}": {} for n in range(count)})
    await send.publish_many({"c0": {}, "c1": {}})
    async with working(mesh, "w1"):

        async def running() -> bool:
            return (await mesh.queues.all())[0].running == 4

        await eventually(running)
        before = await stored(mesh)
        wider = await mesh.what_if.limit("mail", running=7)
        assert (wider.running, wider.waiting, wider.claimable_now, wider.claimable_then) == (4, 6, 0, 3)
        none = await mesh.what_if.limit("mail", running=None)
        assert (none.claimable_then, none.too_many) == (6, 0)
        narrower = await mesh.what_if.limit("mail", running=1)
        assert (narrower.claimable_then, narrower.too_many) == (0, 3)
        assert "3 of those that run have to end" in narrower.sentence
        slow = await mesh.what_if.limit("mail", running=None, rate=2, per_ms=60_000)
        assert slow.claimable_then == 2
        closed = await mesh.what_if.group_limit("mail", "a", 0)
        assert closed.limits_then.groups == {"a": 0}
        assert closed.claimable_then == 0  # the queue's own limit stands
        assert await stored(mesh) == before
        await mesh.set_limit("mail", running=7)

        async def seven() -> bool:
            return (await mesh.queues.all())[0].running == 7

        await eventually(seven)


async def test_groups_and_pauses_count(mesh: TaskMesh) -> None:
    @mesh.task(queue="mail")
    async def send() -> None: ...

    for group, count in (("a", 5), ("b", 1)):
        await send.configure(group=group).publish_many({f"{group}{n}": {} for n in range(count)})
    await send.publish("alone")
    each = await mesh.what_if.limit("mail", group_running=2)
    assert (each.claimable_now, each.claimable_then) == (7, 4)
    own = await mesh.what_if.group_limit("mail", "a", 1)
    assert (own.claimable_now, own.claimable_then) == (7, 3)
    rated = await mesh.what_if.limit("mail", group_rate=3)
    assert (rated.claimable_now, rated.claimable_then) == (7, 5)
    await mesh.pause("mail", group="a")
    assert (await mesh.what_if.limit("mail", group_rate=3)).claimable_then == 2
    await mesh.pause("mail")
    assert (await mesh.what_if.limit("mail", running=3)).claimable_then == 0
    for wrong in ({"per_ms": 5}, {"running": -1}):
        with pytest.raises(InvalidOption):
            await mesh.what_if.limit("mail", **wrong)
    with pytest.raises(InvalidOption):
        await mesh.what_if.group_limit("mail", "", 1)


@pytest.mark.parametrize(("rate", "window"), [("rate", "per_ms"), ("group_rate", "group_per_ms")])
async def test_a_shorter_window_counts_fewer_of_the_starts_that_there_were(
    mesh: TaskMesh, rate: str, window: str
) -> None:
    @mesh.task(queue="mail")
    async def send() -> None: ...

    async def two_left() -> bool:
        return (await mesh.stats()).counts["send"].get("INIT") == 2

    async def forecast(**limits: Any) -> int:
        return (await mesh.what_if.limit("mail", **limits)).claimable_then

    await mesh.set_limit("mail", **{rate: 3, window: 3_600_000})  # type: ignore[arg-type]  # no `by` is among them
    await send.configure(group="a").publish_many({str(n): {} for n in range(5)})
    async with working(mesh):
        await eventually(two_left)
    assert await forecast(**{rate: 4}) == 1
    assert await forecast(**{window: 7_200_000}) == 0, "what is counted stays so for longer"
    now_over = {window: 1}

    async def two_could() -> bool:
        return await forecast(**now_over) == 2

    await eventually(two_could)
    await mesh.set_limit("mail", **now_over)  # type: ignore[arg-type]
    await mesh.consumer().run(until_idle=True)
    assert (await mesh.stats()).counts["send"] == {"SUCCESS": 5}


async def test_a_schedule_is_told_in_words_and_times_across_a_change_of_the_clock(mesh: TaskMesh) -> None:
    told = await mesh.what_if.schedule(cron="30 6 * * 1-5", timezone="Europe/Berlin", count=100)
    assert told.words == "At 06:30 on Monday through Friday (Europe/Berlin)"
    assert len(told.times) == 100
    assert {(time.hour, time.minute) for time in told.times} == {(6, 30)}, "in its own zone"
    assert len({time.utcoffset() for time in told.times}) == 2, "a hundred working days see summer and winter"
    every = await mesh.what_if.schedule(interval_ms=90_000, count=2)
    assert every.words == "Every 1 min 30 s"
    assert (every.times[1] - every.times[0]).total_seconds() == 90
    with pytest.raises(InvalidOption, match="cron='whenever' cannot be read"):
        await mesh.what_if.schedule(cron="whenever")
    assert await mesh.schedules.all() == []


async def test_what_is_not_said_of_a_schedule_is_as_it_stands(mesh: TaskMesh) -> None:
    await mesh.schedules.put("s", name="report", cron="0 3 * * *", timezone="Europe/Berlin")
    assert (await mesh.what_if.schedule("s")).words == "At 03:00 every day (Europe/Berlin)"
    moved = await mesh.what_if.schedule("s", cron="30 4 * * *")
    assert moved.words == "At 04:30 every day (Europe/Berlin)"
    assert {(time.hour, time.minute) for time in moved.times} == {(4, 30)}
    assert (await mesh.what_if.schedule("s", interval_ms=60_000)).words == "Every 1 min"
    assert (await mesh.what_if.schedule("new", cron="30 4 * * *")).words == "At 04:30 every day (UTC)"
    [stored] = await mesh.schedules.all()
    assert stored.cron == "0 3 * * *"


async def test_an_interval_that_stays_is_told_as_it_will_run(mesh: TaskMesh) -> None:
    stored = await mesh.schedules.put("s", name="report", interval_ms=3_600_000)
    assert stored.next_time is not None
    await advance(mesh, minutes=20)
    for interval_ms in (None, 3_600_000):
        told = await mesh.what_if.schedule("s", interval_ms=interval_ms, count=2)
        assert told.times == [stored.next_time, stored.next_time + timedelta(hours=1)]
    other = await mesh.what_if.schedule("s", interval_ms=7_200_000, count=1)
    assert other.times[0] > stored.next_time, "that would be counted from now"
