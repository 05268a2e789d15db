"""What the charts of the overview show: how the fleet fared over 15 minutes, 6 hours and 7 days.

Kept in the dashboard's process, a few hundred numbers for each window, whoever watches; it begins anew with that process.
What is to be kept for longer belongs into Prometheus.
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
"""Of each window its name, and in seconds its length and what one point of a curve stands for."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at one moment, or on average over a step."""

    time: datetime
    waiting: float
    running: float
    finished_per_s: float
    wait_ms: float | None
    """From publish to claim, of what was seen lately: the median. Seen only while somebody watches."""
    wait_95_ms: float | None
    run_ms: float | None
    """From claim to finish, of what was seen lately: the median. Seen only while somebody watches."""
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
        """Return the time in ms, and the average of each value; None for one that nobody has seen."""
        means = [round(self._sums[name] / n, 3) if (n := self._counts[name]) else None for name in _VALUES]
        return [round(self.time.timestamp() * 1000), *means]


class History:
    """The steps of each window, the oldest first."""

    def __init__(self) -> None:
        self._steps: dict[Window, deque[_Step]] = {
            window: deque(maxlen=length // step + 1) for window, (_, length, step) in WINDOWS.items()
        }

    def add(self, sample: Sample) -> None:
        """Take a sample into each window."""
        for window, (_, _, step) in WINDOWS.items():
            steps, number = self._steps[window], int(sample.time.timestamp() // step)
            if not steps or steps[-1].number != number:
                steps.append(_Step(number, sample.time))
            steps[-1].add(sample)

    def points(self, window: Window) -> list[list[Any]]:
        """Return what to draw: each point begins with its time in ms, and has the values of a `Sample` behind it."""
        steps = self._steps[window]
        if not steps:
            return []
        _, length, step = WINDOWS[window]
        first = steps[-1].number - length // step
        return [each.point() for each in steps if each.number >= first]


def window_named(text: str) -> Window:
    """Return the window of this name, or the shortest."""
    return next((window for window in get_args(Window) if window == text), "15m")
