"""Periodic tasks: every tick is published exactly once, whoever races and dies (T44). Time is moved, not waited for."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import anyio
import pytest
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from taskmesh import InvalidOption, InvalidParams, TaskMesh, TaskNotFound, TaskOption, current_task
from taskmesh.consumer.ticker import Ticker
from taskmesh.model.schedule import key_of
from taskmesh.store.triggers import schedules
from taskmesh.store.triggers.schedules import OUTAGE_MS
from tests.processes.fleet import Fleet
from tests.processes.handlers import define
from tests.waiting import eventually
from tests.working import all_working, finished, lanes_of, parts_of, seen_by_others, working

# In a year to come: what lies in the past by the real clock, the server's TTL monitor removes.
START = datetime(2036, 6, 1, 12, 0, 30, tzinfo=UTC)


def set_time(mesh: TaskMesh, moment: datetime) -> None:
    """Let the store take this for the server's time."""
    mesh.store.now = moment


def ticker(mesh: TaskMesh, worker_id: str = "one", fleet: Iterable[str] = ()) -> Ticker:
    """Return the ticker of a worker: of one that knows of no other, or of one in a fleet."""
    return Ticker(mesh.store, mesh.schedules, lanes_of(worker_id, [seen_by_others(each) for each in fleet]))


async def keys(mesh: TaskMesh, name: str) -> list[str]:
    return [task.key async for task in mesh.find(name, limit=0)]


async def test_one_worker_publishes_a_tick_and_others_take_over_a_moment_later(mesh: TaskMesh) -> None:
    set_time(mesh, START)
    await mesh.every("report", cron="* * * * *")
    ids = [f"w{n}" for n in range(20)]
    tickers = {each: ticker(mesh, each, ids) for each in ids}
    at = {each: lanes_of(each, [seen_by_others(other) for other in ids]).place_in_fleet("report") for each in ids}
    in_order = sorted(ids, key=at.__getitem__)
    first = datetime(2036, 6, 1, 12, 1, tzinfo=UTC)

    def published() -> dict[int, int]:
        return {place: tickers[each].published for place, each in enumerate(in_order) if tickers[each].published}

    async def pauses_before(tick: datetime) -> list[float]:
        set_time(mesh, tick - timedelta(milliseconds=500))
        return [await tickers[each].run_once() for each in in_order]

    # Six wake for it, one after the other. The others look when they look anyway: before that would be an outage.
    pauses = await pauses_before(first)
    assert pauses[:6] == pytest.approx([0.501 + 0.05 * place for place in range(6)])
    assert all(1.7 < pause < OUTAGE_MS / 1000 for pause in pauses[6:])
    set_time(mesh, first)
    for each in reversed(in_order):
        await tickers[each].run_once()
    assert published() == {0: 1}

    # The first is dead: the second does it.
    second = first + timedelta(minutes=1)
    await pauses_before(second)
    set_time(mesh, second + timedelta(milliseconds=50))
    for each in reversed(in_order[1:]):
        await tickers[each].run_once()
    assert published() == {0: 1, 1: 1}

    # All of the first six are dead: whoever looks does it.
    third = second + timedelta(minutes=1)
    await pauses_before(third)
    set_time(mesh, third + timedelta(milliseconds=250))
    await tickers[in_order[19]].run_once()
    assert published() == {0: 1, 1: 1, 19: 1}
    assert await keys(mesh, "report") == [f"report@2036-06-01T12:0{n}:00Z" for n in (1, 2, 3)]


async def test_a_large_fleet_looks_for_schedules_no_more_often_than_a_small_one(mesh: TaskMesh) -> None:
    ids = [f"w{n}" for n in range(16)]
    assert 0.9 <= await ticker(mesh).run_once() <= 1.1
    assert 3.6 <= await ticker(mesh, "w0", ids).run_once() <= 4.4


async def look_at(mesh: TaskMesh, moment: datetime, *tickers: Ticker) -> None:
    """Let the tickers look at this moment, all at once, until none has anything left to do."""
    set_time(mesh, moment)
    for _ in range(20):
        pauses: list[float] = []

        async def look(one: Ticker, pauses: list[float] = pauses) -> None:
            pauses.append(await one.run_once())

        async with anyio.create_task_group() as racing:
            for one in tickers:
                racing.start_soon(look, one)
        if min(pauses) > 0.05:
            return
    raise AssertionError("the tickers do not come to rest")


async def test_t44_every_tick_is_published_once_however_many_race(mesh: TaskMesh) -> None:
    set_time(mesh, START)
    await mesh.every("report", cron="* * * * *")
    racing = [ticker(mesh) for _ in range(5)]
    for minute in range(6):
        await look_at(mesh, START + timedelta(minutes=minute, milliseconds=minute * 3), *racing)
    assert await keys(mesh, "report") == [f"report@2036-06-01T12:0{n}:00Z" for n in range(1, 6)]
    assert sum(one.published for one in racing) == 5


async def test_t44_of_many_schedules_that_tick_together_each_tick_is_published_once_and_none_waits_for_all_others(
    mongo_uri: str, database: str
) -> None:
    in_flight = _InFlight()
    client: Any = AsyncMongoClient(mongo_uri, event_listeners=[in_flight], tz_aware=True)
    async with client, TaskMesh(client, database=database) as mesh:
        set_time(mesh, START)
        for n in range(150):
            await mesh.every("report", schedule_id=f"s{n}", cron="* * * * *")
        in_flight.most = 0
        one = ticker(mesh)
        await look_at(mesh, START + timedelta(minutes=1), one)
        assert one.published == 150
        assert in_flight.most >= 10, "their writes wait for a majority side by side"
        racing = [ticker(mesh) for _ in range(3)]
        await look_at(mesh, START + timedelta(minutes=2), *racing)
        assert sum(each.published for each in racing) == 150
        assert set(Counter(key.partition("@")[2] for key in await keys(mesh, "report")).values()) == {150}


async def test_schedules_that_a_worker_cannot_look_after_hold_up_no_others(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_time(mesh, START)
    for n in range(150):
        await mesh.every("strange", schedule_id=f"s{n}", cron="* * * * *")
    await mesh.every("known", interval_ms=90_000)
    monkeypatch.setitem(sys.modules, "cronsim", None)  # as where the extra is not installed
    set_time(mesh, START + timedelta(minutes=2))
    one = ticker(mesh)
    for _ in range(30):
        await one.run_once()
    assert len(await keys(mesh, "known")) == 1
    assert await keys(mesh, "strange") == []


class _InFlight(CommandListener):
    """Counts the updates that wait for their answer."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def started(self, event: CommandStartedEvent) -> None:
        if event.command_name == "update":
            self.now += 1
            self.most = max(self.most, self.now)

    def succeeded(self, event: CommandSucceededEvent) -> None:
        self.now -= event.command_name == "update"

    def failed(self, event: CommandFailedEvent) -> None:
        self.now -= event.command_name == "update"


@pytest.mark.parametrize(
    ("zone", "hour", "night"),
    [
        ("Europe/Berlin", 2, "2026-03-28"),
        ("Europe/Berlin", 2, "2026-10-24"),
        ("America/New_York", 1, "2026-03-07"),
        ("America/New_York", 1, "2026-10-31"),
    ],
)
async def test_t44_in_the_nights_when_the_clock_changes_no_hour_runs_twice_or_not_at_all(
    mesh: TaskMesh, zone: str, hour: int, night: str
) -> None:
    start = datetime.fromisoformat(f"{night}T18:00:00").replace(tzinfo=UTC)
    set_time(mesh, start)
    await mesh.every("hourly", cron="0 * * * *", timezone=zone)
    await mesh.every("nightly", cron=f"30 {hour} * * *", timezone=zone)
    racing = [ticker(mesh), ticker(mesh)]
    for half_hour in range(1, 24 * 2 + 1):
        await look_at(mesh, start + timedelta(minutes=30 * half_hour), *racing)
    hourly = sorted(await keys(mesh, "hourly"))
    assert hourly == [f"hourly@{start + timedelta(hours=n):%Y-%m-%dT%H}:00:00Z" for n in range(1, 25)]
    nightly = await keys(mesh, "nightly")
    assert len(nightly) == 1, f"in the night of {night} it ran at {nightly}"
    moment = datetime.fromisoformat(nightly[0].partition("@")[2]).astimezone(ZoneInfo(zone))
    assert (moment.hour, moment.minute) in {(hour, 30), (hour + 1, 0)}


@pytest.mark.parametrize(
    ("missed", "expected"), [("skip", []), ("latest", ["12:10:00"]), ("all", [f"12:{n:02}:00" for n in range(2, 11)])]
)
async def test_t44_after_an_outage_happens_what_the_policy_says(
    mesh: TaskMesh, missed: Any, expected: list[str]
) -> None:
    set_time(mesh, START)
    await mesh.every("report", cron="* * * * *", missed=missed)
    await look_at(mesh, START, ticker(mesh))
    await look_at(mesh, START + timedelta(seconds=1), ticker(mesh))
    for second in range(2, 61, 2):
        await look_at(mesh, START + timedelta(seconds=second), ticker(mesh))
    before = await keys(mesh, "report")
    assert before == ["report@2036-06-01T12:01:00Z"]
    back = START + timedelta(minutes=10, seconds=1)
    await look_at(mesh, back, ticker(mesh), ticker(mesh))
    assert [key[-9:-1] for key in await keys(mesh, "report") if key not in before] == expected
    for second in range(2, 33, 2):
        await look_at(mesh, back + timedelta(seconds=second), ticker(mesh))
    assert (await keys(mesh, "report"))[-1] == "report@2036-06-01T12:11:00Z", "and then it goes on as ever"


async def test_t44_a_short_gap_between_two_workers_misses_nothing(mesh: TaskMesh) -> None:
    set_time(mesh, START)
    await mesh.every("beat", interval_ms=500, missed="skip")
    await look_at(mesh, START + timedelta(milliseconds=10), ticker(mesh))
    await look_at(mesh, START + timedelta(milliseconds=2_700), ticker(mesh))
    assert len(await keys(mesh, "beat")) == 5


@pytest.mark.parametrize(
    ("missed", "expected"), [("skip", []), ("latest", ["12:20:00"]), ("all", [f"12:{n:02}:00" for n in range(1, 21)])]
)
async def test_t44_who_looks_in_during_an_outage_does_not_make_forget_what_was_missed(
    mesh: TaskMesh, missed: Any, expected: list[str]
) -> None:
    set_time(mesh, START)
    await mesh.every("report", cron="* * * * *", missed=missed)
    await look_at(mesh, START, ticker(mesh))
    set_time(mesh, START + timedelta(minutes=10))
    await mesh.every("other", cron="0 0 1 1 *")  # a program that is no worker
    set_time(mesh, START + timedelta(minutes=15))
    await schedules.attend(mesh.store)  # a worker that is killed before it has published anything
    await look_at(mesh, START + timedelta(minutes=20), ticker(mesh))
    assert [key[-9:-1] for key in await keys(mesh, "report")] == expected


@pytest.mark.parametrize(("missed", "expected"), [("skip", ["12:01:00"]), ("latest", ["12:01:00", "12:20:00"])])
async def test_t44_what_a_worker_could_not_publish_before_it_was_killed_does_not_bring_back_what_was_missed(
    mesh: TaskMesh, missed: Any, expected: list[str]
) -> None:
    set_time(mesh, START)
    await mesh.every("report", cron="* * * * *", missed=missed)
    for second in range(0, 30, 2):
        await look_at(mesh, START + timedelta(seconds=second), ticker(mesh))
    set_time(mesh, START + timedelta(seconds=31))
    await schedules.attend(mesh.store)  # at 12:01:01 it looks, and is killed before it has published the tick of 12:01
    await look_at(mesh, START + timedelta(minutes=20), ticker(mesh))
    assert [key[-9:-1] for key in await keys(mesh, "report")] == expected


async def test_t44_a_long_outage_of_a_quick_schedule_is_caught_up_in_no_time(mesh: TaskMesh) -> None:
    set_time(mesh, START)
    await mesh.every("quick", interval_ms=100)
    await mesh.every("cron", cron="* * * * * *")
    await look_at(mesh, START + timedelta(milliseconds=1), ticker(mesh))
    await look_at(mesh, START + timedelta(days=400), ticker(mesh))
    assert len(await keys(mesh, "quick")) == 1
    assert len(await keys(mesh, "cron")) == 1


@pytest.mark.slow
async def test_t44_each_tick_once_while_five_workers_are_killed(mesh: TaskMesh, fleet: Fleet) -> None:
    define(mesh)
    workers = await anyio.to_thread.run_sync(lambda: fleet.start_many(5))
    await mesh.every("work", interval_ms=250, params={"ms": 1}, missed="all", retain_success_ms=60_000)
    chance = random.Random(44)
    for _ in range(6):
        await anyio.sleep(chance.uniform(0.5, 1.5))
        place = chance.randrange(len(workers))
        await anyio.to_thread.run_sync(workers[place].kill)
        workers[place] = fleet.start()
    found = sorted(datetime.fromisoformat(key.partition("@")[2]) for key in await keys(mesh, "work"))
    assert len(found) > 12
    assert {b - a for a, b in pairwise(found)} == {timedelta(milliseconds=250)}
    for tick in found[:-2]:
        task = await finished(
            mesh, "work", f"work@{tick:%Y-%m-%dT%H:%M:%S}.{tick.microsecond // 1000:03}Z".replace(".000Z", "Z")
        )
        assert task.status == "SUCCESS"


async def test_t44_a_worker_that_was_frozen_since_it_read_the_schedule_publishes_nothing(mesh: TaskMesh) -> None:
    """Else it would publish the tick again when the task of the others is done and forgotten."""
    set_time(mesh, START)
    await mesh.every("report", cron="* * * * *", retain_success_ms=0, retain_failed_ms=0)
    tick = START + timedelta(minutes=1)
    set_time(mesh, tick)
    (seen,) = await schedules.due(mesh.store)
    await look_at(mesh, tick, ticker(mesh))
    await mesh.cancel("report", key_of("report", seen["next_time"]))
    set_time(mesh, tick + timedelta(seconds=9))
    assert len(await keys(mesh, "report")) == 1, "its key is kept as long as anybody could publish it"
    set_time(mesh, tick + timedelta(hours=1))
    assert await keys(mesh, "report") == [], "forgotten"
    late = [await mesh.schedules.publication_of_tick(seen, key_of("report", seen["next_time"]), None)]
    assert await schedules.publish_ticks(mesh.store, seen, late, [], None) == (0, False)
    assert await keys(mesh, "report") == []


async def test_a_quick_schedule_runs_as_often_as_it_ticks(mesh: TaskMesh) -> None:
    runs: list[str] = []

    @mesh.task(option=TaskOption(retain_success_ms=0))
    async def beat() -> None:
        runs.append(current_task().key)

    await mesh.every(beat, interval_ms=100)
    async with all_working(mesh, ["w1", "w2", "w3"]) as consumers:

        def published() -> int:
            return sum(parts_of(consumer).ticker.published for consumer in consumers)

        await eventually(lambda: len(runs) >= 15)
        await mesh.schedules.pause("beat")
        await eventually(lambda: published() == len(runs), what="each tick has run")
    assert len(runs) == len(set(runs))


async def test_schedules_declared_before_the_mesh_connects_are_stored_when_it_does(
    mongo_uri: str, database: str
) -> None:
    mesh = TaskMesh(mongo_uri, database=database)

    @mesh.task(cron="0 6 * * *", timezone="Europe/Berlin")
    async def report() -> None:
        return None

    mesh.every("sweep", interval_ms=60_000, params={"deep": True}, schedule_id="sweep-deep")
    with pytest.raises(InvalidOption, match="declared already"):
        mesh.every("report", interval_ms=5_000)
    async with mesh:
        found = {schedule.schedule_id: schedule for schedule in await mesh.schedules.all()}
        assert found.keys() == {"report", "sweep-deep"}
        assert found["report"].timing == "0 6 * * * (Europe/Berlin)"
        assert found["sweep-deep"].params == {"deep": True}
        mesh.every("report", cron="0 7 * * *")  # while connected, also without await

        async def changed() -> bool:
            return {s.schedule_id: s.cron for s in await mesh.schedules.all()}["report"] == "0 7 * * *"

        await eventually(changed)


async def test_to_declare_a_schedule_again_leaves_it_as_it_is(mesh: TaskMesh) -> None:
    first = await mesh.every("report", interval_ms=60_000)
    await mesh.schedules.pause("report", reason="holidays", by="ann")
    again = await mesh.every("report", interval_ms=60_000)
    assert again.next_time == first.next_time
    assert again.paused
    assert (again.paused_reason, again.paused_by) == ("holidays", "ann")
    changed = await mesh.every("report", interval_ms=30_000)
    assert changed.paused
    assert changed.next_time is not None
    assert first.next_time is not None
    assert changed.next_time < first.next_time


async def test_a_schedule_that_a_plain_handler_declares_is_stored(mesh: TaskMesh) -> None:
    @mesh.task
    def install(cron: str) -> None:
        mesh.every("report", cron=cron)

    async with working(mesh):
        for cron in ("0 3 * * *", "0 4 * * *"):
            await (await install.publish(cron, cron=cron)).result(timeout=60)

            async def stored_so(cron: str = cron) -> bool:
                return [each.cron for each in await mesh.schedules.all()] == [cron]

            await eventually(stored_so)


async def test_a_time_zone_does_not_move_an_interval(mesh: TaskMesh) -> None:
    set_time(mesh, START)
    declared = await mesh.schedules.put("report", name="report", interval_ms=3_600_000)
    set_time(mesh, START + timedelta(minutes=50))
    changed = await mesh.schedules.put("report", timezone="Europe/Berlin")
    assert changed.timezone == "Europe/Berlin"
    assert changed.next_time == declared.next_time
    daily = await mesh.schedules.put("report", cron="0 3 * * *")
    assert daily.next_time == datetime(2036, 6, 2, 1, tzinfo=UTC)
    assert (await mesh.schedules.put("report", timezone="UTC")).next_time == datetime(2036, 6, 2, 3, tzinfo=UTC)


async def test_changes_of_one_schedule_at_the_same_time_are_all_made(mesh: TaskMesh) -> None:
    async with anyio.create_task_group() as at_once:
        for given in ({"params": {"n": 5}}, {"timezone": "Europe/Berlin"}, {"missed": "all"}, {"priority": 3}):
            at_once.start_soon(partial(mesh.schedules.put, "report", name="report", cron="0 3 * * *", **given))
    [stored] = await mesh.schedules.all()
    assert stored.params == {"n": 5}
    assert (stored.timezone, stored.missed, stored.settings) == ("Europe/Berlin", "all", {"priority": 3})


async def test_a_paused_schedule_does_not_tick_and_goes_on_from_now(mesh: TaskMesh) -> None:
    set_time(mesh, START)
    await mesh.every("report", cron="* * * * *", missed="all")
    await mesh.schedules.pause("report")
    await look_at(mesh, START + timedelta(minutes=5), ticker(mesh))
    assert await keys(mesh, "report") == []
    await mesh.schedules.resume("report")
    await look_at(mesh, START + timedelta(minutes=6), ticker(mesh))
    assert await keys(mesh, "report") == ["report@2036-06-01T12:06:00Z"]


async def test_overlap_skip_leaves_out_a_tick_while_the_task_before_is_not_finished(mesh: TaskMesh) -> None:
    set_time(mesh, START)
    await mesh.every("report", cron="* * * * *", overlap="skip")
    for minute in range(4):
        await look_at(mesh, START + timedelta(minutes=minute), ticker(mesh))
    assert await keys(mesh, "report") == ["report@2036-06-01T12:01:00Z"]
    await mesh.cancel("report", "report@2036-06-01T12:01:00Z")
    await look_at(mesh, START + timedelta(minutes=4), ticker(mesh))
    assert len(await keys(mesh, "report")) == 2
    (schedule,) = await mesh.schedules.all()
    assert [tick.kind for tick in schedule.ticks] == ["published", "overlapped", "overlapped", "published"]


async def test_jitter_delays_the_start_of_each_task_but_not_its_tick(mesh: TaskMesh) -> None:
    set_time(mesh, START)
    await mesh.every("report", cron="* * * * *", jitter_ms=20_000)
    for minute in range(1, 9):
        await look_at(mesh, START + timedelta(minutes=minute), ticker(mesh))
    delays = []
    async for task in mesh.find("report"):
        tick = datetime.fromisoformat(task.key.partition("@")[2])
        assert task.task_state.start_time is not None
        delays.append((task.task_state.start_time - tick).total_seconds())
    assert len(delays) == 8
    assert all(0 <= delay <= 20 for delay in delays)
    assert len(set(delays)) > 4


async def test_a_schedule_is_triggered_by_hand_and_removed(mesh: TaskMesh) -> None:
    @mesh.task(queue="reports")
    async def report(day: str = "today") -> str:
        return day

    await mesh.every(report, cron="0 0 1 1 *", params={"day": "new year"}, priority=7)
    handle = await mesh.schedules.trigger("report")
    task = await handle.task()
    assert (task.queue, task.task_option.priority) == ("reports", 7)
    async with working(mesh):
        assert await handle.result(timeout=60) == "new year"
    (schedule,) = await mesh.schedules.all()
    assert [(tick.kind, tick.key) for tick in schedule.ticks] == [("triggered", handle.key)]
    assert (await mesh.schedules.remove("report")).name == "report"
    assert await mesh.schedules.all() == []
    for call in (mesh.schedules.trigger, mesh.schedules.pause, mesh.schedules.resume, mesh.schedules.remove):
        with pytest.raises(TaskNotFound):
            await call("report")


async def test_a_worker_without_the_code_publishes_ticks_as_their_code_says(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    @mesh.task(queue="reports")
    async def report(n: int) -> int:
        return n

    set_time(mesh, START)
    await mesh.every(report.configure(), cron="* * * * *", params={"n": 3})
    async with TaskMesh(mongo_uri, database=database) as other:
        await look_at(other, START + timedelta(minutes=1), ticker(other))
        task = await other.get("report", "report@2036-06-01T12:01:00Z")
    assert (task.queue, task.params) == ("reports", {"n": 3})


async def test_params_that_do_not_fit_the_handler_are_refused(mesh: TaskMesh) -> None:
    @mesh.task
    async def report(n: int) -> int:
        return n

    with pytest.raises(InvalidParams):
        await mesh.every(report, interval_ms=1_000, params={"n": "many"})
    assert await mesh.schedules.all() == []


@pytest.mark.parametrize(
    "settings",
    [
        {"missed": "perhaps"},
        {"overlap": "queue up"},
        {"jitter_ms": -1},
        {"start_time": START},
        {"no_such": 1},
        {"params": [1]},
        {"schedule_id": "x" * 500},
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        TaskMesh("mongodb://nowhere").every("report", **{"interval_ms": 1_000, **settings})
