"""Asks how many consumers share one backlog, and what it costs that they are there.

Real processes, one consumer each. Claims are counted by PyMongo's monitoring: tasks named in claims, and tasks won.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.backlog import Backlogs
from benchmarks.crew import crew, wait_for, work_off
from benchmarks.tables import Answer, Goal, cut, median, percentile

SIZES = (1, 2, 4, 8, 16)
BACKLOG = 30_000
TRICKLE_S = 5.0
_COUNTED = ("insert", "query", "update", "delete", "getmore", "command")


@dataclass
class Fleet:
    """So many consumers."""

    size: int
    rates: list[float] = field(default_factory=list)
    wasted: list[float] = field(default_factory=list)
    fairness: list[float] = field(default_factory=list)
    commands: list[float] = field(default_factory=list)
    trickle_ops: list[float] = field(default_factory=list)
    idle_ops: list[float] = field(default_factory=list)
    trickle_p50: list[float] = field(default_factory=list)
    trickle_p99: list[float] = field(default_factory=list)
    trickle_wasted: list[float] = field(default_factory=list)

    def row(self) -> list[str]:
        """One line of the table."""
        return [
            str(self.size),
            f"{median(self.rates):,.0f}",
            f"{100 * median(self.wasted):.1f} %",
            f"{median(self.fairness):.2f}",
            f"{median(self.commands):.3f}",
            f"{median(self.trickle_ops):.1f}",
            f"{median(self.idle_ops):.1f}",
            f"{100 * median(self.trickle_wasted):.1f} %",
            f"{cut(median(self.trickle_p50), down=False)} / {cut(median(self.trickle_p99), down=False)}",
        ]


def measure(backlogs: Backlogs, *, repetitions: int = 2, share: float = 1.0) -> Answer:
    """Measure all sizes in turn, again and again."""
    fleets = [Fleet(size) for size in SIZES]
    for repetition in range(repetitions):
        for fleet in fleets:
            _backlog(backlogs, fleet, share)
            _trickle(backlogs, fleet, share)
            print(f"  fleet {repetition + 1}/{repetitions}: {' | '.join(fleet.row())}", flush=True)
    answer = Answer(
        "How do many consumers share one backlog, and a trickle? (medians)",
        (
            "consumers",
            "tasks/s",
            "wasted claims",
            "least/most",
            "commands/task",
            "trickle: server ops/task",
            "idle: server ops/s",
            "trickle: wasted",
            "trickle: start p50/p99 ms",
        ),
        [fleet.row() for fleet in fleets],
        figures={
            str(fleet.size): {
                name: median(values) for name, values in vars(fleet).items() if isinstance(values, list) and values
            }
            for fleet in fleets
        },
    )
    one, eight, sixteen = (next(f for f in fleets if f.size == size) for size in (1, 8, 16))
    answer.goals = [
        Goal("wasted claims, 8 consumers on one backlog", "<=", 10.0, 100 * median(eight.wasted), "%"),
        Goal(
            "a trickle (100/s): server operations per task, 16 consumers against 1",
            "<=",
            3.0,
            median(sixteen.trickle_ops) / median(one.trickle_ops),
        ),
        Goal("wasted claims, 16 consumers on one backlog", "<=", 10.0, 100 * median(sixteen.wasted), "%"),
        Goal("throughput, 16 consumers against 1", ">=", 0.6, median(sixteen.rates) / median(one.rates)),
        Goal(
            "a trickle (100/s): publish → start, p99 with 16 consumers against 1",
            "<=",
            5.0,
            median(sixteen.trickle_p99) / median(one.trickle_p99),
        ),
    ]
    answer.notes = [
        "least/most: tasks done by the least and by the most busy consumer, as a ratio (1: all alike)",
        "server ops: serverStatus.opcounters, so publishing, registrations, scans and getMores are in it",
    ]
    return answer


def _settings(backlogs: Backlogs, database: str, size: int, name: str) -> list[dict[str, Any]]:
    common = {
        "uri": backlogs.uri,
        "database": database,
        "concurrency": 100,
        "names": [name],
        "counted": True,
        "at_once": True,
        "settle_s": 1.5 if size > 1 else 0.2,
    }
    return [common | {"worker_id": f"w{i}"} for i in range(size)]


def _backlog(backlogs: Backlogs, fleet: Fleet, share: float) -> None:
    """A backlog behind a paused queue, which is opened when every consumer has read who else is there."""
    count = max(2_000, int(BACKLOG * share))
    with backlogs.database("noop", count) as database:
        backlogs.let_claim(database, allowed=False)
        with crew("consume", _settings(backlogs, database, fleet.size, "noop")) as members:
            time.sleep(3.0)  # they read the registry each second or so
            backlogs.let_claim(database, allowed=True)
            fleet.rates.append(work_off(members, count))
            wait_for(lambda: sum(member.done for member in members) >= count, 60, members)
            reports = [member.end() for member in members]
    fleet.wasted.append(_wasted(reports))
    done = [report["finished"] for report in reports]
    fleet.fairness.append(min(done) / max(done))
    fleet.commands.append(sum(sum(report["commands"].values()) for report in reports) / count)


def _wasted(reports: list[dict[str, Any]]) -> float:
    tried = sum(int(report["claims_tried"]) for report in reports)
    return (tried - sum(int(report["claims_won"]) for report in reports)) / max(1, tried)


def _trickle(backlogs: Backlogs, fleet: Fleet, share: float) -> None:
    """A hundred tasks per second for consumers that are otherwise idle."""
    seconds = max(2.0, TRICKLE_S * share)
    with (
        backlogs.database() as database,
        crew("consume", _settings(backlogs, database, fleet.size, "stamp")) as members,
    ):
        time.sleep(2.5)
        before, begun = _operations(backlogs), time.monotonic()
        time.sleep(2.0)
        fleet.idle_ops.append((_operations(backlogs) - before) / (time.monotonic() - begun))
        setting: dict[str, Any] = {
            "uri": backlogs.uri,
            "database": database,
            "prefix": "t",
            "tick_s": 0.01,
            "per_tick": 1,
            "ticks": int(100 * seconds),
        }
        with crew("publish", [setting]) as publishers:
            before = _operations(backlogs)
            publishers[0].tell("go")
            wait_for(lambda: publishers[0].done > 0, 60, publishers)
            wait_for(lambda: sum(member.done for member in members) > setting["ticks"], 60, members)
            fleet.trickle_ops.append((_operations(backlogs) - before) / setting["ticks"])
            publishers[0].end()
        reports = [member.end() for member in members]
    delays = [delay for report in reports for delay in report["delays_ms"]]
    fleet.trickle_p50.append(percentile(delays, 0.5))
    fleet.trickle_p99.append(percentile(delays, 0.99))
    fleet.trickle_wasted.append(_wasted(reports))


def _operations(backlogs: Backlogs) -> int:
    counters = backlogs.client.admin.command("serverStatus")["opcounters"]
    return sum(int(counters[name]) for name in _COUNTED)
