"""What repeats on a terminal is a page, scrolled by keys."""

from __future__ import annotations

import asyncio
import io
import os
import sys

import pytest
from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.text import Text

from taskmesh.admin.stats import Stats
from taskmesh.cli.fleet import Sort, stats_page
from taskmesh.cli.live import Page, live
from tests.waiting import eventually


def _lines(count: int) -> list[list[Segment]]:
    return [[Segment(str(number))] for number in range(count)]


def _shown(page: Page, count: int, height: int) -> list[str]:
    return [line[0].text for line in page.of(_lines(count), height)]


def test_keys_scroll_no_further_than_there_is_something() -> None:
    page = Page()
    assert _shown(page, 5, 3) == ["0", "1", "2"]
    page.press("j\x1b[B")
    assert _shown(page, 5, 3) == ["2", "3", "4"]
    page.press("\x1b[6~")
    assert _shown(page, 5, 3) == ["2", "3", "4"]
    page.press("k")
    assert _shown(page, 5, 3) == ["1", "2", "3"]
    assert _shown(page, 2, 3) == ["0", "1"], "it has become short"
    page.press("\x1b[5~")
    assert _shown(page, 5, 3) == ["0", "1", "2"]
    assert not page.ended
    page.press("q")
    assert page.ended


async def test_a_page_is_scrolled_from_a_keyboard_and_ends_with_q(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal = os.openpty()
    screen = io.StringIO()
    with os.fdopen(terminal) as stdin, os.fdopen(keyboard, "wb", buffering=0) as typing:
        monkeypatch.setattr(sys, "stdin", stdin)
        console = Console(file=screen, width=60, height=12, force_terminal=True)
        looks = 0

        async def read() -> RenderableType:
            nonlocal looks
            looks += 1
            return Text("\n".join(f"row {number}" for number in range(50)))

        async with asyncio.timeout(30), asyncio.TaskGroup() as both:
            both.create_task(live(console, read, lambda _: 600.0))
            await eventually(lambda: "lines 1 to 10 of 50" in screen.getvalue())
            typing.write(b" ")
            await eventually(lambda: "lines 11 to 20 of 50" in screen.getvalue())
            typing.write(b"q")
    assert "row 19" in screen.getvalue()
    assert "row 20" not in screen.getvalue()
    assert looks == 1, "to scroll is no reason to ask the database"


@pytest.mark.parametrize(
    ("sort", "names"),
    [("name", ["a", "b", "c"]), ("failed", ["c", "a", "b"]), ("pending", ["b", "a", "c"])],
)
def test_tasks_stand_in_the_order_that_is_asked_for(sort: Sort, names: list[str]) -> None:
    stats = Stats(
        counts={"a": {"INIT": 1, "FAIL": 1}, "b": {"INIT": 5}, "c": {"FAIL": 9}},
        oldest_claimable_ms=None,
        started_per_s=0,
        finished_per_s=0,
    )
    console = Console(file=io.StringIO(), width=100)
    console.print(stats_page(stats, sort))
    assert isinstance(console.file, io.StringIO)
    rows = [line.split()[0] for line in console.file.getvalue().splitlines()[1:4]]
    assert rows == names
