"""What handlers did, written by themselves to files of their own: not through taskmesh, so it can bear witness about it.

Each process appends to one file, a line per mark, each by a single write: what is there survives SIGKILL. The times are
monotonic ones, which on Linux all processes of a machine share.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pymongo.errors import PyMongoError

from taskmesh import Task, current_task

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mark:
    """One line: at `mono`, this execution did `what`."""

    what: str
    name: str
    key: str
    worker_id: str
    running_id: str
    attempt: int
    pid: int
    mono: float
    wall: float
    more: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a handler, from its first line to its last. A process that died left no last line."""

    start: Mark
    end: Mark | None
    beat: Mark | None = None
    """The last sign of life of a handler in a child process: nobody notes when that was killed."""

    @property
    def task(self) -> str:
        """The `_id` of the task."""
        return f"{self.start.name}:{self.start.key}"

    @property
    def returned(self) -> bool:
        """Whether the handler came to its end by itself and without an error."""
        return self.end is not None and self.end.what == "returned"

    @property
    def was_stopped(self) -> bool:
        """Whether it ended because it was told to, or killed."""
        if self.end is None:
            return self.beat is not None
        return self.end.more.get("error") == "CancelledError" or bool(self.end.more.get("told"))


class Notebook:
    """The file of this process."""

    def __init__(self, directory: Path) -> None:
        path = directory / f"{os.getpid()}-{time.monotonic_ns()}.history"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, what: str, **more: Any) -> None:
        """Append a line about the running execution."""
        task = current_task()
        line = {
            "what": what,
            "name": task.name,
            "key": task.key,
            "worker_id": task.worker_id,
            "running_id": task.running_id,
            "attempt": task.attempt,
            "pid": os.getpid(),
            "mono": time.monotonic(),
            "wall": time.time(),
            "more": more,
        }
        os.write(self._file, (json.dumps(line) + "\n").encode())

    @contextmanager
    def run(self, *, beats: bool = False) -> Iterator[Returning]:
        """Note the beginning and the end of a handler's run. `beats`: and on the way, now and then, that it `beats`."""
        self.note("started", **({"beats": True} if beats else {}))
        returning = Returning()
        try:
            yield returning
        except BaseException as error:
            self.note("raised", error=type(error).__name__, conflict=_is_conflict(error))
            raise
        self.note("returned", value=returning.value, told=returning.told)

    def note_hook(self, task: Task, what: str) -> None:
        """Append a line about what a hook did: it knows its execution as one of those that run now."""
        running = [entry.running_id for entry in task.task_state.worker_states if entry.state == "RUNNING"]
        now = {"pid": os.getpid(), "mono": time.monotonic(), "wall": time.time()}
        nobody = {"worker_id": "", "running_id": "", "attempt": 0}
        line = {"what": what, "name": task.name, "key": task.key, **nobody, **now, "more": {"running_ids": running}}
        os.write(self._file, (json.dumps(line) + "\n").encode())


@functools.cache
def notebook_of(directory: Path) -> Notebook:
    """Return the file of this process, the same for all handlers that run in it."""
    return Notebook(directory)


def _is_conflict(error: BaseException | None) -> bool:
    """Whether MongoDB asks to run a transaction again, by this error or one behind it."""
    if isinstance(error, PyMongoError) and error.has_error_label("TransientTransactionError"):
        return True
    return error is not None and _is_conflict(error.__cause__ or error.__context__)


class Returning:
    """What a handler is about to return."""

    def __init__(self) -> None:
        self.value: Any = None
        self.told = False
        """Whether it returns early since it was told to stop."""

    def returns(self, value: T) -> T:
        """Note the value, and return it."""
        self.value = value
        return value

    def obeys(self, value: T) -> T:
        """Note the same of a handler that returns early, since it was told to stop."""
        self.told = True
        return self.returns(value)


def read_history(directory: Path) -> list[Mark]:
    """Return what all processes have noted so far, in the order of time."""
    marks = [
        Mark(**json.loads(line))
        for path in directory.glob("*.history")
        for line in path.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]
    return sorted(marks, key=lambda mark: mark.mono)


def runs_in(marks: Iterable[Mark]) -> list[Run]:
    """Pair the first and last lines of each run."""
    started: dict[tuple[str, str, str], Mark] = {}
    ended: dict[tuple[str, str, str], Mark] = {}
    beats: dict[tuple[str, str, str], Mark] = {}
    for mark in marks:
        place = (mark.running_id, mark.name, mark.key)
        if mark.what == "started":
            assert place not in started, f"the handler ran twice under one running_id: {mark}"
            started[place] = mark
            if mark.more.get("beats"):  # in one line with the first beat: it may be killed before it writes another
                beats[place] = mark
        elif mark.what in ("returned", "raised"):
            ended[place] = mark
        elif mark.what == "beats":
            beats[place] = mark
    return [Run(start, ended.get(place), beats.get(place)) for place, start in started.items()]


def runs_by_task(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Sort runs by the `_id` of their tasks."""
    by_task: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_task[run.task].append(run)
    return dict(by_task)


def end_of(run: Run, died: Mapping[int, Iterable[float]]) -> float:
    """Return when a run was over: its last line, or else the death of its process, the first of that id since the run began.

    Of a child process, whose death nobody notes: when it was at work still.
    """
    if run.end is not None:
        return run.end.mono
    if run.beat is not None:
        return run.beat.mono
    return min((gone for gone in died.get(run.start.pid, ()) if gone >= run.start.mono), default=float("inf"))


def most_at_once(runs: Iterable[Run], died: Mapping[int, Iterable[float]]) -> int:
    """Return how many of the runs were under way at the same time, at most.

    `died`: when processes were gone, by process id, for the runs that have no end.
    """
    steps: list[tuple[float, int]] = []
    for run in runs:
        steps += [(run.start.mono, 1), (end_of(run, died), -1)]
    now = most = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most
