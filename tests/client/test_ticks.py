"""T44, without a database: when periodic tasks tick, also in the two nights a year in which the clock changes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise, takewhile
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmesh import InvalidOption
from taskmesh.model.recurrence import checked_timing

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
SPRING = {BERLIN: datetime(2026, 3, 28, 22, tzinfo=UTC), NEW_YORK: datetime(2026, 3, 8, 4, tzinfo=UTC)}
AUTUMN = {BERLIN: datetime(2026, 10, 24, 21, tzinfo=UTC), NEW_YORK: datetime(2026, 11, 1, 3, tzinfo=UTC)}
ZONES = pytest.mark.parametrize("zone", [BERLIN, NEW_YORK])


def ticks(cron: str, zone: str, start: datetime, hours: float = 10) -> list[datetime]:
    timing = checked_timing(cron, None, zone)
    return list(takewhile(lambda tick: tick < start + timedelta(hours=hours), timing.ticks_after(start, start)))


def wall(moments: list[datetime], zone: str) -> list[str]:
    return [moment.astimezone(ZoneInfo(zone)).strftime("%H:%M") for moment in moments]


@ZONES
def test_t44_a_daily_task_in_the_hour_that_is_skipped_runs_once_right_after_it(zone: str) -> None:
    assert wall(ticks("30 2 * * *", zone, SPRING[zone]), zone) == ["03:00"]


@ZONES
def test_t44_a_daily_task_in_the_hour_that_comes_twice_runs_once(zone: str) -> None:
    hour = 2 if zone == BERLIN else 1
    assert wall(ticks(f"30 {hour} * * *", zone, AUTUMN[zone]), zone) == [f"0{hour}:30"]
    assert wall(ticks(f"0 30 {hour} * * *", zone, AUTUMN[zone]), zone) == [f"0{hour}:30"], "the same with seconds"


@ZONES
@pytest.mark.parametrize("cron", ["0 * * * *", "*/15 * * * *", "*/5 * * * *"])
@pytest.mark.parametrize("night", ["spring", "autumn"])
def test_t44_what_runs_every_hour_or_more_often_leaves_nothing_out_and_repeats_nothing(
    zone: str, cron: str, night: str
) -> None:
    found = ticks(cron, zone, (SPRING if night == "spring" else AUTUMN)[zone])
    distances = {b - a for a, b in pairwise(found)}
    assert len(distances) == 1


@ZONES
def test_t44_seconds_change_nothing_about_these_nights(zone: str) -> None:
    hour = 2 if zone == BERLIN else 1
    [spring] = ticks("15 30 2 * * *", zone, SPRING[zone])
    assert f"{spring.astimezone(ZoneInfo(zone)):%H:%M:%S}" == "03:00:15", "right after the hour that is skipped"
    autumn = ticks(f"45,15 30 {hour} * * *", zone, AUTUMN[zone])
    assert [f"{tick.astimezone(ZoneInfo(zone)):%H:%M:%S%z}"[:8] for tick in autumn] == [
        f"0{hour}:30:15",
        f"0{hour}:30:45",
    ]
    assert autumn[1] - autumn[0] == timedelta(seconds=30)
    timing = checked_timing(f"15 30 {hour} * * *", None, zone)
    assert timing.before(autumn[0], autumn[0]) == autumn[0] - timedelta(days=1), "seconds before it in the same minute"


def test_ticks_at_other_times_of_these_days_are_as_ever() -> None:
    days = ticks("0 9 * * *", BERLIN, datetime(2026, 3, 27, tzinfo=UTC), hours=24 * 5)
    assert wall(days, BERLIN) == ["09:00"] * 5
    assert [tick.hour for tick in days] == [8, 8, 7, 7, 7], "in UTC they move with the clock"


@given(
    start=st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 30), timezones=st.just(UTC)),  # noqa: DTZ001 — hypothesis adds the zone
    cron=st.sampled_from(
        ["30 2 * * *", "0 * * * *", "*/20 * * * *", "15,45 1-3 * * *", "0 0 1 * *", "30 1 * * 0", "50,10 30 2 * * *"]
    ),
    zone=st.sampled_from([BERLIN, NEW_YORK, "UTC", "Australia/Lord_Howe"]),
)
def test_whoever_goes_on_from_any_tick_sees_the_same_ticks_that_follow(start: datetime, cron: str, zone: str) -> None:
    timing = checked_timing(cron, None, zone)
    first = [tick for _, tick in zip(range(6), timing.ticks_after(start, start), strict=False)]
    again = [start]
    for _ in first:
        following = timing.after(again[-1], start)
        assert following is not None
        again.append(following)
    assert again[1:] == first
    assert timing.before(first[3], start) == first[2]


@given(
    interval_ms=st.integers(10, 10**9),
    age_ms=st.integers(1, 10**12),
)
def test_intervals_are_counted_from_the_anchor_whoever_looks_when(interval_ms: int, age_ms: int) -> None:
    anchor = datetime(2026, 1, 1, tzinfo=UTC)
    timing = checked_timing(None, interval_ms, "UTC")
    tick = timing.after(anchor + timedelta(milliseconds=age_ms), anchor)
    assert tick is not None
    assert (tick - anchor) % timedelta(milliseconds=interval_ms) == timedelta(0)
    assert timedelta(0) < tick - (anchor + timedelta(milliseconds=age_ms)) <= timedelta(milliseconds=interval_ms)
    before = timing.before(tick, anchor)
    assert before is None or tick - before == timedelta(milliseconds=interval_ms)


@pytest.mark.parametrize(
    ("cron", "interval_ms", "zone"),
    [
        (None, None, "UTC"),
        ("* * * * *", 1000, "UTC"),
        ("* * * *", None, "UTC"),
        ("61 * * * *", None, "UTC"),
        ("", None, "UTC"),
        (5, None, "UTC"),
        ("* * * * *", None, "Europe/Atlantis"),
        ("* * * * *", None, "../../etc/passwd"),
        ("* * * * *", None, None),
        (None, 5, "UTC"),
        (None, 1.5, "UTC"),
        (None, True, "UTC"),
    ],
)
def test_a_timing_that_cannot_be_is_refused(cron: object, interval_ms: object, zone: object) -> None:
    with pytest.raises(InvalidOption):
        checked_timing(cron, interval_ms, zone)
