"""How near the database's own limit is the engine? Bare loops and the engine, interleaved, on the same backlogs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.backlog import Backlogs
from benchmarks.crew import crew, work_off
from benchmarks.tables import Answer, Goal, median, spread

PROCESSES = (1, 2, 4)
CONCURRENCIES = (20, 200, 1_000)


@dataclass
class Variant:
    """One way to work off a backlog."""

    label: str
    role: str
    processes: int
    count: int
    setting: dict[str, Any] = field(default_factory=dict)
    name: str = "noop"
    indexes: bool = True
    """Whether the collection has taskmesh's indexes; else none but that on `_id`."""
    rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tasks per second, the median of the repetitions."""
        return median(self.rates)

    def run(self, backlogs: Backlogs, share: float) -> float:
        """Work off one backlog, and return the rate."""
        count = max(500, int(self.count * share))
        with backlogs.database(self.name, count, indexes=self.indexes) as database:
            each = {"uri": backlogs.uri, "database": database, **self.setting}
            settings = [
                each | {"first": i, "step": self.processes, "count": count, "worker_id": f"w{i}"}
                for i in range(self.processes)
            ]
            # Several consumers divide the work when each has read who else is there: until then the queue is closed.
            together = self.role == "consume" and self.processes > 1
            if together:
                backlogs.let_claim(database, allowed=False)
                settings = [setting | {"at_once": True, "settle_s": 1.5} for setting in settings]
            with crew(self.role, settings) as members:
                if together:
                    time.sleep(1.0)
                    backlogs.let_claim(database, allowed=True)
                rate = work_off(members, count)
                for member in members:
                    member.end()
        self.rates.append(rate)
        return rate


def engine_variant(processes: int, concurrency: int, *, answers: bool) -> Variant:
    """The engine, one consumer in each process."""
    name = "answer" if answers else "noop"
    return Variant(
        f"engine, {processes} process{'es' * (processes > 1)}, concurrency {concurrency}{', results' * answers}",
        "consume",
        processes,
        {20: 6_000, 200: 20_000, 1_000: 30_000}[concurrency],
        {"concurrency": concurrency, "names": [name]},
        name,
    )


def bare_set_variant(processes: int, batch: int, in_flight: int) -> Variant:
    """The bare set-based loop."""
    return Variant(
        f"bare sets, {processes} process{'es' * (processes > 1)}, {in_flight} × {batch} in flight",
        "bare_set",
        processes,
        30_000,
        {"batch": batch, "in_flight": in_flight},
    )


def bare_floor_variant() -> Variant:
    """The least that MongoDB can do for a task: a claim and a SUCCESS in large sets, with no index to write and nothing read."""
    setting = {"batch": 500, "in_flight": 3, "reads": False}
    return Variant(
        "bare sets, 3 × 500 in flight, no index, nothing read", "bare_set", 1, 30_000, setting, indexes=False
    )


def variants() -> dict[Any, Variant]:
    """All that is compared."""
    found: dict[Any, Variant] = {
        ("single", 1): Variant(
            "bare find_one_and_update + update_one, 1 process, 64 in flight", "bare_single", 1, 4_000, {"in_flight": 64}
        )
    }
    found["single", 2] = Variant(
        "bare find_one_and_update + update_one, 2 processes, 32 in flight each",
        "bare_single",
        2,
        4_000,
        {"in_flight": 32},
    )
    for batch, in_flight in ((200, 1), (500, 1), (500, 2), (500, 3), (500, 4)):
        found["set", 1, batch, in_flight] = bare_set_variant(1, batch, in_flight)
    for processes in (2, 4):
        found["set", processes, 500, 2] = bare_set_variant(processes, 500, 2)
    for processes in PROCESSES:
        for concurrency in CONCURRENCIES:
            for answers in (False, True):
                found["engine", processes, concurrency, answers] = engine_variant(
                    processes, concurrency, answers=answers
                )
    return found


def measure(backlogs: Backlogs, *, repetitions: int = 2, share: float = 1.0) -> Answer:
    """Run all variants in turn, again and again."""
    measured = variants()
    for repetition in range(repetitions):
        for variant in measured.values():
            rate = variant.run(backlogs, share)
            print(f"  limit {repetition + 1}/{repetitions}: {variant.label}: {rate:,.0f}/s", flush=True)
    answer = Answer(
        "How near the database's own limit is the engine? (tasks/s, median of interleaved repetitions)",
        ("variant", "tasks/s", "least – greatest"),
        [(variant.label, f"{variant.rate:,.0f}", spread(variant.rates)) for variant in measured.values()],
    )
    rates = {key: variant.rate for key, variant in measured.items()}
    answer.figures = {" ".join(map(str, key)): rate for key, rate in rates.items()}
    answer.goals = goals(rates)
    return answer


def goals(rates: dict[Any, float]) -> list[Goal]:
    """The rows of the issue's table that follow."""
    best_bare = max(rate for key, rate in rates.items() if key[:3] == ("set", 1, 500) and key[3] >= 2)
    engine = {key[1:]: rate for key, rate in rates.items() if key[0] == "engine"}
    with_results = min(engine[1, c, True] / engine[1, c, False] for c in (200, 1_000))
    two = min(engine[2, c, False] / engine[1, c, False] for c in (200, 1_000))
    four = min(engine[4, c, False] / engine[1, c, False] for c in (200, 1_000))
    single = max(rates["single", 1], rates["single", 2])
    return [
        Goal(
            "one process, concurrency 200, against one bare batch of 200 in flight",
            ">=",
            0.75,
            engine[1, 200, False] / rates["set", 1, 200, 1],
        ),
        Goal(
            "one process, concurrency 1 000, against the bare loop at its best",
            ">=",
            0.5,
            engine[1, 1_000, False] / best_bare,
        ),
        Goal("a small result per task, against none", ">=", 0.85, with_results, note="worse of concurrency 200, 1 000"),
        Goal("2 processes against 1", ">=", 1.0, two, note="worse of concurrency 200, 1 000"),
        Goal("4 processes against 1", ">=", 0.9, four, note="worse of concurrency 200, 1 000"),
        Goal(
            "one process, concurrency 200, against the bare find_one_and_update loop",
            ">=",
            5.0,
            engine[1, 200, False] / single,
            note="its better of 1 and 2 processes",
        ),
    ]
