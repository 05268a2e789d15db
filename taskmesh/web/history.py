"""What the charts of the overview show: the fleet over 15 minutes, 6 hours and 7 days.

Kept in the dashboard's process, a few hundred numbers for each window, and lost when it ends. Use Prometheus to keep more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal, get_args

Window = Literal["15m", "6h", "7d"]
WINDOWS: dict[Window, tuple[str, int, int]] = {
    "15m": ("15 minutes", 900, 5),
    "6h": ("6 hours", 21_600, 120),
    "7d": ("7 days", 604_800, 3_600),
}
"""The name of each window, its length and the length of one step of its curve, in seconds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at one moment, or on average over a step."""

    time: datetime
    waiting: float
    running: float
    finished_per_s: float
    wait_ms: float | None
    """The median time from publish to claim, of recent events. Known only while somebody watches."""
    wait_95_ms: float | None
    run_ms: float | None
    """The median time from claim to finish, of recent events. Known only while somebody watches."""
    run_95_ms: float | None


_VALUES = [field.name for field in fields(Sample)][1:]


class _Step:
    """All samples of one step of a window."""

    def __init__(self, number: int, time: datetime) -> None:
        self.number = number
        self.time = time
        self._sums = dict.fromkeys(_VALUES, 0.0)
        self._counts = dict.fromkeys(_VALUES, 0)

    def add(self, sample: Sample) -> None:
        self.time = sample.time
        for name in _VALUES:
            if (value := getattr(sample, name)) is not None:
                self._sums[name] += value
                self._counts[name] += 1

    def point(self) -> list[Any]:
        """Return the time in ms, and the average of each value; None for one that is unknown."""
        means = [round(self._sums[name] / n, 3) if (n := self._counts[name]) else None for name in _VALUES]
        return [round(self.time.timestamp() * 1000), *means]


class History:
    """The steps of each window, the oldest first."""

    def __init__(self) -> None:
        self._steps: dict[Window, deque[_Step]] = {
            window: deque(maxlen=length // step + 1) for window, (_, length, step) in WINDOWS.items()
        }

    def add(self, sample: Sample) -> None:
        """Add a sample to each window."""
        for window, (_, _, step) in WINDOWS.items():
            steps, number = self._steps[window], int(sample.time.timestamp() // step)
            if not steps or steps[-1].number != number:
                steps.append(_Step(number, sample.time))
            steps[-1].add(sample)

    def points(self, window: Window) -> list[list[Any]]:
        """Return the points to draw: each is its time in ms, followed by the values of a `Sample`."""
        steps = self._steps[window]
        if not steps:
            return []
        _, length, step = WINDOWS[window]
        first = steps[-1].number - length // step
        return [each.point() for each in steps if each.number >= first]


def window_named(text: str) -> Window:
    """Return the window of this name, or the shortest."""
    return next((window for window in get_args(Window) if window == text), "15m")
