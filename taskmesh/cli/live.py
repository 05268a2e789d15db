"""What repeats on a terminal: a page of it, which the arrow keys scroll, until q or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator

from rich.console import Console, RenderableType
from rich.control import Control
from rich.segment import Segment, SegmentLines
from rich.text import Text

KEYS = {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1, "\x1b[5~": -10, "\x1b[6~": 10, " ": 10, "g": -1_000_000}
"""By how many lines each key scrolls."""


class Page:
    """The part of a text that a terminal has room for."""

    def __init__(self) -> None:
        self.top = 0
        self.ended = False

    def press(self, keys: str) -> None:
        """Take what was typed."""
        for key, lines in KEYS.items():
            self.top += lines * keys.count(key)
            keys = keys.replace(key, "")
        self.top = max(0, self.top)
        self.ended = self.ended or "q" in keys

    def of(self, lines: list[list[Segment]], height: int) -> list[list[Segment]]:
        """Return the lines to show; those behind the last page are not scrolled to."""
        self.top = min(self.top, max(0, len(lines) - height))
        return lines[self.top : self.top + height]


async def live(
    console: Console, read: Callable[[], Awaitable[RenderableType]], rest_s: Callable[[float], float]
) -> None:
    """Show what `read` returns, again and again. `rest_s`: how long to wait after a look that took so many seconds."""
    page = Page()
    pressed = asyncio.Event()
    with console.screen(hide_cursor=True), _keys(page, pressed):
        while not page.ended:
            began = time.monotonic()
            lines = console.render_lines(await read(), pad=False, new_lines=True)
            until = time.monotonic() + rest_s(time.monotonic() - began)
            while not page.ended:
                _draw(console, page, lines)
                pressed.clear()
                try:
                    await asyncio.wait_for(pressed.wait(), max(0.0, until - time.monotonic()))
                except TimeoutError:
                    break


def _draw(console: Console, page: Page, lines: list[list[Segment]]) -> None:
    height = max(1, console.size.height - 2)
    shown = page.of(lines, height)
    part = (
        f"lines {page.top + 1} to {page.top + len(shown)} of {len(lines)}, arrow keys · "
        if len(shown) < len(lines)
        else ""
    )
    console.control(Control.home(), Control.clear())
    console.print(SegmentLines(shown), end="")
    console.print(Text(f"\n{part}q ends", style="dim"), end="", no_wrap=True, overflow="crop")


@contextlib.contextmanager
def _keys(page: Page, pressed: asyncio.Event) -> Iterator[None]:
    """Hear each key at once, where there is a keyboard."""
    if not sys.stdin.isatty():
        yield
        return
    import termios  # noqa: PLC0415 — not on every system that has the rest
    import tty  # noqa: PLC0415

    stdin = sys.stdin.fileno()

    def hear() -> None:
        keys = os.read(stdin, 1024)
        if not keys:  # the terminal is gone
            loop.remove_reader(stdin)
        page.press(keys.decode(errors="ignore"))
        pressed.set()

    before = termios.tcgetattr(stdin)
    loop = asyncio.get_running_loop()
    try:
        tty.setcbreak(stdin)
        loop.add_reader(stdin, hear)
        yield
    finally:
        loop.remove_reader(stdin)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
