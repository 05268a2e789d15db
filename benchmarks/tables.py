"""Figures, goals and tables: what each question prints, writes as JSON, and hands to RESULTS.md."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Goal:
    """One row of the issue's table, with the figure that was reached."""

    what: str
    sense: Literal[">=", "<="]
    goal: float
    figure: float | None
    """None: not measured in this run."""
    unit: str = "×"
    note: str = ""

    @property
    def verdict(self) -> str:
        """Whether the goal is reached, by the figure as it is and not as it is printed."""
        if self.figure is None:
            return "not measured"
        reached = self.figure >= self.goal if self.sense == ">=" else self.figure <= self.goal
        return "reached" if reached else "MISSED"

    def row(self) -> list[str]:
        """The row as text. The figure is cut towards the worse side, so that no rounding flatters it."""
        sign = "≥" if self.sense == ">=" else "≤"
        shown = "–" if self.figure is None else cut(self.figure, down=self.sense == ">=")
        return [
            self.what,
            f"{sign} {self.goal:g} {self.unit}".rstrip(),
            f"{shown} {self.unit}",
            self.verdict,
            self.note,
        ]


@dataclass
class Answer:
    """What one question came to."""

    question: str
    header: Sequence[str]
    rows: list[Sequence[object]] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def show(self) -> None:
        """Print the tables."""
        print(f"\n== {self.question}\n")
        print(aligned(self.header, self.rows))
        for note in self.notes:
            print(f"  {note}")
        if self.goals:
            print()
            print(aligned(GOAL_HEADER, [goal.row() for goal in self.goals]))

    def write(self, name: str, conditions: dict[str, str]) -> None:
        """Write all of it as JSON."""
        RESULTS.mkdir(exist_ok=True)
        told = {
            "question": self.question,
            "conditions": conditions,
            "header": list(self.header),
            "rows": [[str(cell) for cell in row] for row in self.rows],
            "goals": [vars(goal) | {"verdict": goal.verdict} for goal in self.goals],
            "figures": self.figures,
            "notes": self.notes,
        }
        (RESULTS / f"{name}.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


GOAL_HEADER = ("what", "goal", "figure", "verdict", "")


def cut(value: float, *, down: bool, digits: int = 3) -> str:
    """Return the value with some significant digits, cut (or raised) and never rounded."""
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    scaled = value * 10**places
    return f"{(math.floor(scaled) if down else math.ceil(scaled)) / 10**places:.{places}f}"


def aligned(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table as text."""
    lines = [[str(cell) for cell in line] for line in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([shown[0], "-" * len(shown[0]), *shown[1:]])


def markdown(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table for a document."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """The least and the greatest, to show how far to trust the median."""
    return f"{min(values):,.0f} – {max(values):,.0f}"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies (nearest rank, so never better than what was seen)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
