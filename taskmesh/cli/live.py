"""A live view on a terminal: one screen at a time, scrolled by the arrow keys, until q or Ctrl-C."""

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
"""How many lines each key scrolls."""


class Page:
    """The part of a text that fits on the screen."""

    def __init__(self) -> None:
        self.top = 0
        self.ended = False

    def press(self, keys: str) -> None:
        """Handle the keys that were typed."""
        for key, lines in KEYS.items():
            self.top += lines * keys.count(key)
            keys = keys.replace(key, "")
        self.top = max(0, self.top)
        self.ended = self.ended or "q" in keys

    def of(self, lines: list[list[Segment]], height: int) -> list[list[Segment]]:
        """Return the lines to show. Scrolling stops at the last page."""
        self.top = min(self.top, max(0, len(lines) - height))
        return lines[self.top : self.top + height]


class Keyboard:
    """The keyboard, if standard input is a terminal: while it is open, each key is read at once."""

    def __init__(self) -> None:
        self._terminal = sys.stdin.fileno() if sys.stdin.isatty() else None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Read single keys inside the block, and whole lines again afterwards."""
        if self._terminal is None:
            yield
            return
        import termios  # noqa: PLC0415 — not on every system that has the rest
        import tty  # noqa: PLC0415

        before = termios.tcgetattr(self._terminal)
        try:
            tty.setcbreak(self._terminal)
            yield
        finally:
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, before)

    async def typed(self) -> str:
        """Wait until something is typed, and return it; wait for ever if there is no terminal (any more)."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        if (terminal := self._terminal) is None:
            await ready
            return ""
        loop.add_reader(terminal, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_reader(terminal)
        keys = await asyncio.to_thread(os.read, terminal, 1024)
        if not keys:  # the terminal is gone
            self._terminal = None
        return keys.decode(errors="ignore")


async def live(
    console: Console, read: Callable[[], Awaitable[RenderableType]], rest_s: Callable[[float], float]
) -> None:
    """Show what `read` returns, repeatedly. `rest_s` returns the pause after a look that took this many seconds."""
    page, keyboard = Page(), Keyboard()
    with console.screen(hide_cursor=True), keyboard.opened():
        while not page.ended:
            began = time.monotonic()
            lines = console.render_lines(await read(), pad=False, new_lines=True)
            until = time.monotonic() + rest_s(time.monotonic() - began)
            while not page.ended:
                _draw(console, page, lines)
                try:
                    page.press(await asyncio.wait_for(keyboard.typed(), max(0.0, until - time.monotonic())))
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
