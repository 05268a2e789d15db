"""The plots of docs/performance.md, drawn from the newest results: `python -m benchmarks.plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.results import read

TARGET = Path(__file__).parent.parent / "docs" / "performance"
OURS, BARE, OTHERS = "#1f6f5c", "#c9a227", "#9aa5b1"


def draw() -> None:
    """Draw whatever there are figures for."""
    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "taskmesh", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    TARGET.mkdir(exist_ok=True)
    answers = read()
    for name, plot in (
        ("limit", _limit),
        ("latency", _latency),
        ("fleet", _fleet),
        ("scale", _scale),
        ("peers", _peers),
    ):
        if name in answers:
            figure = plot(answers[name]["figures"])
            figure.suptitle(f"{answers[name]['conditions']['date']}", fontsize=7, x=0.99, ha="right", color="#777777")
            figure.tight_layout()
            figure.savefig(TARGET / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)


def _limit(rates: Mapping[str, float]) -> Any:
    """Rates of the engine beside the bare loops."""
    figure, axes = plt.subplots(figsize=(8, 3.4))
    bars = [
        ("bare one by one,\n64 in flight", rates["single 1"], BARE),
        ("bare set,\n1 × 200", rates["set 1 200 1"], BARE),
        ("bare sets,\nbest of 2–4 × 500", max(rates[f"set 1 500 {n}"] for n in (2, 3, 4)), BARE),
    ]
    for processes in (1, 2, 4):
        bars += [
            (
                f"{processes} process{'es' * (processes > 1)},\nconcurrency {c}",
                rates[f"engine {processes} {c} False"],
                OURS,
            )
            for c in (20, 200, 1000)
        ]
    axes.bar([label for label, _, _ in bars], [rate for _, rate, _ in bars], color=[colour for _, _, colour in bars])
    for place, (_, rate, _) in enumerate(bars):
        axes.annotate(f"{rate:,.0f}", (place, rate), ha="center", va="bottom", fontsize=7)
    axes.tick_params(axis="x", labelrotation=60, labelsize=7)
    axes.set_ylabel("tasks/s")
    axes.set_title("No-op tasks per second: bare driver (gold), taskmesh (green)", fontsize=10)
    return figure


def _latency(loads: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Any:
    """Percentiles of publish → start and publish → result."""
    figure, both = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    for axes, what in zip(both, ("start", "result"), strict=True):
        for label, load in loads.items():
            shares = list(load[what])
            colour = BARE if "floor" in label else None
            axes.plot(
                [f"p{100 * float(s):g}" for s in shares], list(load[what].values()), "o-", label=label, color=colour
            )
        axes.set_yscale("log")
        axes.set_title(f"publish → {what}", fontsize=10)
        axes.grid(axis="y", alpha=0.3)
    both[0].set_ylabel("ms")
    both[0].legend(fontsize=7)
    return figure


def _fleet(sizes: Mapping[str, Mapping[str, float]]) -> Any:
    """What many consumers do together, and what they cost."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9, 3))
    names = list(sizes)
    left.bar(names, [sizes[n]["rates"] for n in names], color=OURS)
    left.set_title("one backlog: tasks/s", fontsize=10)
    middle.bar(names, [100 * sizes[n]["wasted"] for n in names], color=OTHERS)
    middle.axhline(10, color=BARE, lw=1)
    middle.set_title("one backlog: wasted claims, %", fontsize=10)
    right.bar(names, [sizes[n]["trickle_ops"] for n in names], color=OTHERS)
    right.axhline(3 * sizes[names[0]]["trickle_ops"], color=BARE, lw=1)
    right.set_title("100/s: server operations per task", fontsize=10)
    for axes in (left, middle, right):
        axes.set_xlabel("consumers")
    return figure


def _scale(figures: Mapping[str, Any]) -> Any:
    """Throughput beside other tasks; memory of a worker before a long backlog."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    others = figures["others"]
    left.bar([f"{int(size):,}" for size in others], list(others.values()), color=OURS)
    left.set_title("tasks/s, by other tasks in the collection", fontsize=10)
    memory: Sequence[float] = figures["memory_mb"]
    right.plot([n / 4 for n in range(len(memory))], memory, color=OURS)
    right.axhline(150, color=BARE, lw=1)
    right.set_ylim(0, 170)
    right.set_xlabel("s")
    right.set_title("MB of a worker before a backlog of 1 000 000", fontsize=10)
    return figure


def _peers(rates: Mapping[str, Mapping[str, Sequence[float]]]) -> Any:
    """Everybody's rate with one process, and with two."""
    figure, axes = plt.subplots(figsize=(8, 3.4))
    middle = {
        name: [sorted(found)[len(found) // 2] if found else 0.0 for found in (one.get("1", []), one.get("2", []))]
        for name, one in rates.items()
    }
    names = sorted(middle, key=lambda name: -max(middle[name]))
    for shift, processes in ((-0.2, 0), (0.2, 1)):
        colours = [OURS if name == "taskmesh" else OTHERS for name in names]
        places = [n + shift for n in range(len(names))]
        axes.bar(places, [middle[name][processes] for name in names], 0.4, color=colours, alpha=1 - 0.35 * processes)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_ylabel("tasks/s")
    axes.set_title("No-op tasks per second with one process, and (lighter) two", fontsize=10)
    return figure


if __name__ == "__main__":
    draw()
