"""Where does the time go? Processor time per task of worker and server, and what the server did for it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.backlog import Backlogs
from benchmarks.commands import is_claim
from benchmarks.crew import crew, wait_for
from benchmarks.limit import Variant, bare_floor_variant, engine_variant
from benchmarks.tables import Answer, Goal, median

COUNT = 40_000
_CLAIM, _FINISH, _SCAN, _WON = "claims", "outcomes", "scans", "reading what was won"
_BARE = "bare: claim and SUCCESS, 3 × 500 in flight, no index but `_id`"
_AT_1000, _AT_200 = "engine, concurrency 1 000", "engine, concurrency 200"


@dataclass(frozen=True)
class Cost:
    """Processor time for one task, in µs."""

    worker: float
    server: float

    @property
    def sum(self) -> float:
        """Both together."""
        return self.worker + self.server


def measure(backlogs: Backlogs, *, repetitions: int = 5, share: float = 1.0) -> Answer:
    """Measure processor times of the bare loop and the engine in turn; then profile one run of the engine."""
    ways = {
        _BARE: bare_floor_variant(),
        _AT_200: engine_variant(1, 200, answers=False),
        _AT_1000: engine_variant(1, 1_000, answers=False),
        f"{_AT_1000}, results": engine_variant(1, 1_000, answers=True),
    }
    costs: dict[str, list[Cost]] = {label: [] for label in ways}
    count = max(3_000, int(COUNT * share))
    for repetition in range(repetitions):
        for label, way in ways.items():
            cost = _processor_time(backlogs, way, count)
            costs[label].append(cost)
            told = f"worker {cost.worker:.0f} + server {cost.server:.0f} = {cost.sum:.0f} µs"
            print(f"  costs {repetition + 1}/{repetitions}: {label}: {told}", flush=True)
    answer = Answer(
        "Where does the time go? (processor time per task: median, and in brackets the least, of interleaved repetitions, µs; "
        "the ratio is to what the bare loop takes of the server)",
        (
            "what",
            "worker",
            "server",
            "sum",
            "ratio to bare",
            "operations per 1 000 tasks",
            "documents examined per task",
        ),
    )
    floors = [cost.server for cost in costs[_BARE]]
    for label, found in costs.items():
        sides = [[one.worker for one in found], [one.server for one in found], [one.sum for one in found]]
        ratio = (
            "–" if label == _BARE else f"{median(sides[2]) / median(floors):.2f} ({min(sides[2]) / min(floors):.2f})"
        )
        answer.rows.append((label, *(f"{median(side):.0f} ({min(side):.0f})" for side in sides), ratio, "", ""))
        answer.figures[label] = {"worker_us": sides[0], "server_us": sides[1]}
    for label, (operations, documents, micros) in _profile(backlogs, ways[_AT_1000], count).items():
        clock = f"{micros:.0f} on the clock"
        row = (f"of these, {label}", "", clock, "", "", f"{1_000 * operations:.2f}", f"{documents:.2f}")
        answer.rows.append(row)
        answer.figures[f"profile {label}"] = micros
    answer.notes = ["the profiler counts whole milliseconds on the clock, and two operations of a kind overlap"]
    answer.goals = goals(costs)
    return answer


def goals(costs: dict[str, list[Cost]]) -> list[Goal]:
    """The rows of the issue's table that follow."""
    floor = median([cost.server for cost in costs[_BARE]])
    workers = [cost.worker for cost in costs[_AT_1000]]
    at_1000, at_200 = ([cost.sum for cost in costs[label]] for label in (_AT_1000, _AT_200))
    return [
        Goal("processor time per task, concurrency 1 000, against bare", "<=", 3.0, median(at_1000) / floor),
        Goal("… the worker's alone", "<=", 0.6, median(workers) / floor),
        Goal("processor time per task, concurrency 200, against bare", "<=", 4.0, median(at_200) / floor),
    ]


def _processor_time(backlogs: Backlogs, way: Variant, count: int) -> Cost:
    """What a task costs between 10 % and 90 % of a backlog."""
    server = psutil.Process(backlogs.client.admin.command("serverStatus")["pid"])

    def used() -> float:
        times = server.cpu_times()
        return float(times.user + times.system)

    with backlogs.database(way.name, count, indexes=way.indexes) as database:
        setting = {"uri": backlogs.uri, "database": database, **way.setting, "first": 0, "step": 1, "count": count}
        with crew(way.role, [setting]) as members:
            worker = members[0]
            worker.tell("go")
            wait_for(lambda: worker.done >= 0.1 * count, 60, members)
            done, own, servers = worker.done, worker.cpu_s(), used()
            wait_for(lambda: worker.done >= 0.9 * count, 120, members)
            done, own, servers = worker.done - done, worker.cpu_s() - own, used() - servers
            worker.end()
    return Cost(worker=1e6 * own / done, server=1e6 * servers / done)


def _profile(backlogs: Backlogs, way: Variant, count: int) -> dict[str, tuple[float, float, float]]:
    """By kind: operations, documents examined and µs on the clock, per task."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    with backlogs.database(way.name, count) as database:
        server = backlogs.client[database]
        server.create_collection("system.profile", capped=True, size=100_000_000)
        server.command("profile", 2)
        with crew(way.role, [{"uri": backlogs.uri, "database": database, **way.setting}]) as members:
            members[0].tell("go")
            wait_for(lambda: members[0].done >= count, 120, members)
            members[0].end()
        server.command("profile", 0)
        for operation in server["system.profile"].find({"ns": f"{database}.tasks"}):
            one = found[_kind(operation)]
            for i, value in enumerate((1, operation.get("docsExamined", 0), 1_000 * operation.get("millis", 0))):
                one[i] += value / count
    ordered = sorted(found.items(), key=lambda item: -item[1][2])
    return {kind: (values[0], values[1], values[2]) for kind, values in ordered}


def _kind(operation: dict[str, Any]) -> str:
    command = operation.get("command", {})
    if operation["op"] == "update":
        if is_claim({"updates": [command]}):
            return _CLAIM
        query = command.get("q", {})
        return _FINISH if query.get("$and", [query])[0].get("status") == "RUNNING" else "others"
    query = command.get("filter") or command.get("originatingCommand", operation.get("originatingCommand", {})).get(
        "filter", {}
    )
    if "task_state.worker_states.running_id" in query:
        return _WON
    return _SCAN if "next_claim_time" in query or operation["op"] == "getmore" else "others"
