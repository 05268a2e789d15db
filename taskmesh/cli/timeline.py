"""`show --timeline`: a task's executions as bars over time, and what happened in order."""

from __future__ import annotations

from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskmesh.admin.timeline import Bar, bars_of, happenings
from taskmesh.cli import output
from taskmesh.model.task import Task

_WIDTH = 48
_STYLES = {**output.STYLES, "LOST": "red"}
_FILLED = {"RUNNING": "▒"}


def timeline(task: Task, now: datetime) -> RenderableType:
    """Return both."""
    bars = bars_of(task, now)
    rows = [
        [
            happening.time.isoformat(" ", "milliseconds"),
            happening.worker_id,
            Text(output.printable(happening.what), style=_style(happening.what)),
        ]
        for happening in happenings(task, now)
    ]
    parts: list[RenderableType] = [_drawn(bars), Text("")] if bars else []
    return Group(*parts, output.table(["WHEN", "WORKER", "WHAT"], rows))


def _style(what: str) -> str:
    return _STYLES.get(what.partition(":")[0].removeprefix("finished").upper(), "")


def _drawn(bars: list[Bar]) -> RenderableType:
    drawn = Table.grid(padding=(0, 1))
    for bar in bars:
        style = _STYLES.get(bar.state, "")
        took = f"{(bar.end - bar.start).total_seconds():.3f} s" if bar.end is not None else "so far"
        drawn.add_row(
            Text(output.printable(bar.worker_id)), Text(line_of(bar), style=style), Text(bar.state, style=style), took
        )
    return drawn


def line_of(bar: Bar, width: int = _WIDTH) -> str:
    """Return a bar as a line of so many characters, one of them filled at least."""
    begin = min(width - 1, int(bar.begins * width))
    end = min(width, max(begin + 1, round((bar.begins + bar.lasts) * width)))
    return "·" * begin + _FILLED.get(bar.state, "█") * (end - begin) + "·" * (width - end)
