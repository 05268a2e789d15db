"""RESULTS.md: the newest answer to each question, with date, machine and versions, and all goals in one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.tables import GOAL_HEADER, RESULTS, Goal, markdown

ORDER = (
    "limit",
    "costs",
    "capacity",
    "latency",
    "publish",
    "fleet",
    "fairness",
    "scale",
    "durable",
    "features",
    "peers",
)
TARGET = Path(__file__).parent / "RESULTS.md"
_HEAD = """# Results

Written by `make bench` and `make bench-peers`; do not edit. Every figure is a ratio within one run or a median of
interleaved repetitions; figures are cut towards the worse side, never rounded in our favour. What the rows mean, and what
limits those that are missed, stands in [docs/performance.md](../docs/performance.md).
"""


def read() -> dict[str, dict[str, Any]]:
    """The newest answers."""
    found = {name: RESULTS / f"{name}.json" for name in ORDER}
    return {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}


def write() -> None:
    """Write RESULTS.md from the answers that there are."""
    answers = read()
    goals = [
        [*Goal(**{name: value for name, value in goal.items() if name != "verdict"}).row(), f"{name}.py"]
        for name, answer in answers.items()
        for goal in answer["goals"]
    ]
    parts = [_HEAD, *_warnings(answers), "## Goals\n", markdown((*GOAL_HEADER[:4], "note", "from"), goals)]
    for name, answer in answers.items():
        parts += [f"\n## {name}: {answer['question']}\n", markdown(answer["header"], answer["rows"]), ""]
        parts += [f"{note}\n" for note in answer["notes"]]
        parts += [f"- {fact}: {value}" for fact, value in answer["conditions"].items()]
    TARGET.write_text("\n".join(parts) + "\n")


def _warnings(answers: dict[str, dict[str, Any]]) -> list[str]:
    """What a reader must know before the figures: which are trials, and which are not there."""
    trials = [name for name, answer in answers.items() if "workload" in answer["conditions"]]
    missing = [name for name in ORDER if name not in answers]
    told = []
    if trials:
        told.append(f"**Trials, with a part of the workload, not measurements: {', '.join(trials)}.**\n")
    if missing:
        told.append(f"**Not measured: {', '.join(missing)}. Their goals are neither reached nor missed.**\n")
    return told
