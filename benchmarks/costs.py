"""Where does the time go? Processor time per task of server and client, and what the server did for it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import psutil

from benchmarks.backlog import Backlogs
from benchmarks.crew import crew, wait_for
from benchmarks.limit import Variant, bare_set_variant, engine_variant
from benchmarks.tables import Answer, median

COUNT = 40_000
_CLAIM, _FINISH, _SCAN, _WON = "claims", "outcomes", "scans", "reading what was won"


def measure(backlogs: Backlogs, *, repetitions: int = 3, share: float = 1.0) -> Answer:
    """Measure processor times of the bare loop and the engine in turn; then profile one run of the engine."""
    ways = {
        "bare sets, 1 × 200": bare_set_variant(1, 200, 1),
        "bare sets, 2 × 500": bare_set_variant(1, 500, 2),
        "engine, concurrency 200": engine_variant(1, 200, answers=False),
        "engine, concurrency 1 000": engine_variant(1, 1_000, answers=False),
        "engine, concurrency 1 000, results": engine_variant(1, 1_000, answers=True),
    }
    costs: dict[str, list[tuple[float, float]]] = {label: [] for label in ways}
    count = max(3_000, int(COUNT * share))
    for repetition in range(repetitions):
        for label, way in ways.items():
            costs[label].append(_processor_time(backlogs, way, count))
        print(f"  costs {repetition + 1}/{repetitions}", flush=True)
    answer = Answer(
        "Where does the time go? (µs of processor time per task; for operations, µs on the clock by the profiler)",
        ("what", "server", "client", "operations per 1 000 tasks", "documents examined per task"),
    )
    for label, found in costs.items():
        server, client = (median([one[side] for one in found]) for side in (0, 1))
        answer.rows.append((label, f"{server:.1f}", f"{client:.1f}", "", ""))
        answer.figures[label] = {"server_us": server, "client_us": client}
    for label, (operations, documents, micros) in _profile(backlogs, ways["engine, concurrency 1 000"], count).items():
        row = (f"of these, {label} (clock)", f"{micros:.1f}", "", f"{1_000 * operations:.2f}", f"{documents:.2f}")
        answer.rows.append(row)
        answer.figures[f"profile {label}"] = micros
    answer.notes = ["the profiler counts whole milliseconds on the clock, and two operations of a kind overlap"]
    return answer


def _processor_time(backlogs: Backlogs, way: Variant, count: int) -> tuple[float, float]:
    """Server's and client's µs per task between 10 % and 90 % of a backlog."""
    server = psutil.Process(backlogs.client.admin.command("serverStatus")["pid"])

    def used() -> float:
        times = server.cpu_times()
        return float(times.user + times.system)

    with backlogs.database(way.name, count) as database:
        setting = {"uri": backlogs.uri, "database": database, **way.setting, "first": 0, "step": 1, "count": count}
        with crew(way.role, [setting]) as members:
            worker = members[0]
            worker.tell("go")
            wait_for(lambda: worker.done >= 0.1 * count, 60, members)
            done, own, servers = worker.done, worker.cpu_s(), used()
            wait_for(lambda: worker.done >= 0.9 * count, 120, members)
            done, own, servers = worker.done - done, worker.cpu_s() - own, used() - servers
            worker.end()
    return 1e6 * servers / done, 1e6 * own / done


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
        status = command.get("q", {}).get("status")
        return _CLAIM if status == {"$in": ["INIT", "RUNNING"]} else _FINISH if status == "RUNNING" else "others"
    query = command.get("filter") or command.get("originatingCommand", operation.get("originatingCommand", {})).get(
        "filter", {}
    )
    if "task_state.worker_states.running_id" in query:
        return _WON
    return _SCAN if "next_claim_time" in query or operation["op"] == "getmore" else "others"
