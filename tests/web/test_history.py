"""What the charts show: three windows, each of few numbers, whatever went in."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from html import unescape

import httpx

from taskmesh import TaskMesh
from taskmesh.web import create_app
from taskmesh.web.history import WINDOWS, History, Sample
from tests.waiting import eventually
from tests.web.conftest import ORIGIN

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


def sample(seconds: float, waiting: float, wait_ms: float | None = None) -> Sample:
    return Sample(NOON + timedelta(seconds=seconds), waiting, 1, 2.0, wait_ms, wait_ms, None, None)


def test_samples_of_one_step_are_one_point_with_their_average() -> None:
    history = History()
    for seconds, waiting, wait_ms in ((0, 10, None), (2, 20, 100), (4, 30, 200), (6, 40, None)):
        history.add(sample(seconds, waiting, wait_ms))
    first, second = history.points("15m")
    assert first == [round((NOON.timestamp() + 4) * 1000), 20, 1, 2.0, 150, 150, None, None]
    assert second[1] == 40
    [whole] = history.points("6h")
    assert whole[1] == 25


def test_a_week_is_kept_in_a_few_hundred_numbers() -> None:
    history = History()
    for minute in range(8 * 24 * 60):
        history.add(sample(minute * 60, minute))
    for window, (_, length, step) in WINDOWS.items():
        points = history.points(window)
        assert len(points) <= length // step + 1
        assert points[-1][0] - points[0][0] <= length * 1000
        assert points[-1][0] - points[0][0] >= length * 1000 - max(step, 60) * 1000


def test_what_was_before_a_gap_longer_than_a_window_is_not_in_it() -> None:
    history = History()
    history.add(sample(0, 1))
    history.add(sample(3_600, 2))
    assert [point[1] for point in history.points("15m")] == [2]
    assert [point[1] for point in history.points("6h")] == [1, 2]
    assert History().points("7d") == []


async def test_the_dashboard_keeps_what_charts_show_though_nobody_watches(mesh: TaskMesh) -> None:
    await mesh.publish("work", "k")
    app = create_app(mesh)
    history: History = app.state.pulse.history
    async with app.router.lifespan_context(app):
        await eventually(lambda: history.points("7d"))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as client:
            page = (await client.get("/?window=7d")).text
    found = re.search(r'data-points="([^"]*)" data-seconds="604800"', page)
    assert found is not None
    assert json.loads(unescape(found[1]))[-1][1] == 1, "one task waits"
