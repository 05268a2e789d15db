"""How long from publishing to the handler's start, and to the result's arrival? Beside it the bare floor.

Publisher and worker are processes of their own; the monotonic clock is one for both. The floor is what any engine on this
database has to do: an insert, a change event that another process hears of, one update, and for the result a second
update and a second event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.backlog import Backlogs
from benchmarks.crew import Member, crew, wait_for
from benchmarks.tables import Answer, Goal, cut, median, percentile

SHARES = (0.5, 0.95, 0.99, 0.999)


@dataclass
class Load:
    """A rate of publishing."""

    label: str
    tick_s: float
    per_tick: int
    seconds: float
    one_by_one: bool = False
    starts: list[list[float]] = field(default_factory=list)
    """Publish → start in ms, of each repetition."""
    results: list[list[float]] = field(default_factory=list)

    def middle(self, runs: Sequence[Sequence[float]], share: float) -> float:
        """The median over the repetitions of one percentile."""
        return median([percentile(run, share) for run in runs])

    def row(self, what: str, runs: Sequence[Sequence[float]]) -> list[str]:
        """One line of the table."""
        shown = [cut(self.middle(runs, share), down=False) for share in SHARES]
        return [self.label, what, *shown, f"{sum(map(len, runs)):,}"]


def loads() -> list[Load]:
    """The rates of the issue. From 1 000/s on a publisher cannot go one by one: it publishes each tick's tasks together."""
    return [
        Load("idle, one at a time", 0.02, 1, 8.0, one_by_one=True),
        Load("100/s", 0.01, 1, 8.0),
        Load("1 000/s", 0.01, 10, 5.0),
        Load("3 000/s", 0.01, 30, 5.0),
    ]


def measure(backlogs: Backlogs, *, repetitions: int = 3, share: float = 1.0) -> Answer:
    """Measure the floor and all rates in turn, again and again."""
    floor = Load("bare floor, one at a time", 0.02, 1, 8.0, one_by_one=True)
    measured = loads()
    for repetition in range(repetitions):
        for load in (floor, *measured):
            (_measure_floor if load is floor else measure_one)(backlogs, load, share)
            print(
                f"  latency {repetition + 1}/{repetitions}: {load.label}: publish → start "
                f"p50 {percentile(load.starts[-1], 0.5):.2f} ms, p99 {percentile(load.starts[-1], 0.99):.2f} ms",
                flush=True,
            )
    answer = Answer(
        "How long from publishing to start, and to the result? (ms; median over repetitions of each percentile)",
        ("load", "from publish to", "p50", "p95", "p99", "p99.9", "tasks"),
        [
            row
            for load in (floor, *measured)
            for row in (load.row("start", load.starts), load.row("result", load.results))
        ],
    )
    idle = measured[0]
    base = floor.middle(floor.starts, 0.5)
    answer.figures = {
        load.label: {
            what: {str(part): load.middle(runs, part) for part in SHARES}
            for what, runs in (("start", load.starts), ("result", load.results))
        }
        for load in (floor, *measured)
    }
    answer.goals = [
        Goal("idle, publish → start: p50 against the floor's p50", "<=", 1.3, idle.middle(idle.starts, 0.5) / base),
        Goal("idle, publish → start: p99 against the floor's p50", "<=", 4.0, idle.middle(idle.starts, 0.99) / base),
    ]
    answer.notes = [
        "1 000/s and 3 000/s: published in ticks of 10 ms, 10 and 30 together; their results are waited for once a tick."
    ]
    return answer


def measure_one(backlogs: Backlogs, load: Load, share: float) -> None:
    """One run of one load, added to its figures."""
    with backlogs.database() as database:
        setting: dict[str, Any] = {"uri": backlogs.uri, "database": database}
        consumer = setting | {"worker_id": "w", "concurrency": 100, "names": ["stamp"], "at_once": True}
        with crew("consume", [consumer]) as workers:
            publisher = setting | _ticks(load, share) | {"results": True}
            with crew("publish", [publisher]) as publishers:
                _let_publish(publishers[0], 120)
                results = publishers[0].end()["results_ms"]
            starts = workers[0].end()["delays_ms"][1:]  # the first warms up
    load.starts.append(starts)
    load.results.append(results)


def _measure_floor(backlogs: Backlogs, load: Load, share: float) -> None:
    with backlogs.database("noop", 1) as database:
        template = backlogs.tasks(database).find_one({}, {"_id": 0, "publish_id": 0, "next_claim_time": 0}) or {}
        template["task_state"] = {"timeout_cnt": 0, "worker_states": []}
        setting: dict[str, Any] = {"uri": backlogs.uri, "database": database}
        with crew("bare_floor_worker", [setting]) as workers:
            publisher = setting | _ticks(load, share) | {"template": template}
            with crew("bare_floor_publisher", [publisher]) as publishers:
                _let_publish(publishers[0], 120)
                results = publishers[0].end()["results_ms"]
            starts = workers[0].end()["delays_ms"][1:]
    load.starts.append(starts)
    load.results.append(results)


def _ticks(load: Load, share: float) -> dict[str, Any]:
    # One at a time, a tick lasts its pause and the task's own few milliseconds.
    ticks = max(20, int(load.seconds * share / load.tick_s))
    ticks = ticks // 2 if load.one_by_one else ticks
    return {
        "prefix": "t",
        "tick_s": load.tick_s,
        "per_tick": load.per_tick,
        "ticks": ticks,
        "one_by_one": load.one_by_one,
    }


def _let_publish(publisher: Member, deadline_s: float) -> None:
    publisher.tell("go")
    wait_for(lambda: publisher.done > 0, deadline_s, [publisher])
