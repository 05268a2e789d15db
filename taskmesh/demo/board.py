"""What has happened so far, and how it is shown: live on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from taskmesh.events import TaskEvent

_LINE_EVERY_S = 1.0


@dataclass
class WorkerRow:
    """One worker, as the events tell it."""

    running: set[str] = field(default_factory=set)
    done: int = 0
    lost: int = 0
    taken_over: int = 0
    state: str = "works"


@dataclass
class Board:
    """Counts, from the events of the mesh and from its statistics."""

    total: int
    done: int = 0
    workers: dict[str, WorkerRow] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    """Key → the worker that lost it, until another has it."""
    notes: list[str] = field(default_factory=list)
    started_at: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self.started_at

    def note(self, text: str) -> None:
        """Add a line to what is told below the table."""
        self.notes.append(f"{self.seconds:5.1f} s  {text}")

    def take(self, event: TaskEvent) -> None:
        """Count an event."""
        if event.worker_id is None:
            return
        row = self.workers.setdefault(event.worker_id, WorkerRow())
        if event.kind == "timed_out":
            row.running.discard(event.key)
            row.lost += 1
            self.lost[event.key] = event.worker_id
        elif event.kind == "claimed":
            row.running.add(event.key)
            loser = self.lost.pop(event.key, None)
            if loser is not None:
                row.taken_over += 1
                self.note(f"{event.key}: {loser} → {event.worker_id}")
        elif event.kind in ("succeeded", "failed", "released"):
            row.running.discard(event.key)
            row.done += event.kind == "succeeded"


class View(Protocol):
    """Shows a board."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def refresh(self) -> None:
        """Show how it stands now."""


def view_of(board: Board) -> View:
    """Return what fits where we write to."""
    return LiveView(board) if sys.stdout.isatty() else LineView(board)


class LiveView:
    """A bar, a row per worker, the rate, and the latest notes."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._live = Live(console=Console(highlight=False, markup=False), auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refresh()
        self._live.stop()

    def refresh(self) -> None:
        """Draw it anew."""
        board = self._board
        rate = board.done / max(0.001, board.seconds)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=board.total, completed=board.done, width=40),
            f"{board.done}/{board.total} files",
            f"{rate:.0f}/s",
            f"{board.seconds:.1f} s",
        )
        notes = [Text(note, style="yellow", overflow="ellipsis", no_wrap=True) for note in board.notes[-12:]]
        self._live.update(Group(bar, worker_rows(board), *notes), refresh=True)


def worker_rows(board: Board) -> RenderableType:
    """Return the table of workers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("WORKER", "STATE"):
        table.add_column(column)
    for column in ("RUNNING", "DONE", "TAKEN OVER", "LOST"):
        table.add_column(column, justify="right")
    for name, row in sorted(board.workers.items()):
        style = "red" if row.state == "killed" else ""
        numbers = (len(row.running), row.done, row.taken_over, row.lost)
        table.add_row(name, Text(row.state, style=style), *map(str, numbers))
    return table


class LineView:
    """A line a second, and each note when it comes."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._told = 0
        self._line_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line_at = float("-inf")
        self.refresh()

    def refresh(self) -> None:
        """Write what is new."""
        board = self._board
        for note in board.notes[self._told :]:
            print(note, flush=True)
        self._told = len(board.notes)
        if time.monotonic() - self._line_at < _LINE_EVERY_S:
            return
        self._line_at = time.monotonic()
        rows = "  ".join(
            f"{name}: {row.done} done, {len(row.running)} running" for name, row in sorted(board.workers.items())
        )
        rate = board.done / max(0.001, board.seconds)
        print(f"{board.seconds:5.1f} s  {board.done}/{board.total} files, {rate:.0f}/s  {rows}", flush=True)
