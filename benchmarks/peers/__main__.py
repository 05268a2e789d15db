"""`python -m benchmarks.peers`: the same workloads on other task engines and on taskmesh, interleaved.

`install` puts the peers' packages into `benchmarks/peers/.environment` first. What is not installed is skipped with a word.
"""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import dataclass, field

from benchmarks import latency as own_latency
from benchmarks import limit, plots, results
from benchmarks.backlog import Backlogs
from benchmarks.machine import conditions, server
from benchmarks.peers.brokers import Brokers, NotInstalled
from benchmarks.peers.catalogue import PEERS, Peer
from benchmarks.peers.install import install
from benchmarks.peers.run import latency, rate
from benchmarks.tables import Answer, Goal, cut, median, percentile, spread

PROMISE = "tasks on disk, written with majority before publish returns; leases renewed and fenced; unique keys"


@dataclass
class Found:
    """What one engine came to."""

    rates: dict[int, list[float]] = field(default_factory=dict)
    delays: tuple[float, float] | None = None
    remark: str = ""

    def middle(self, processes: int) -> float | None:
        """The median rate with so many processes."""
        return median(self.rates[processes]) if self.rates.get(processes) else None


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("measure", "install"), default="measure")
    parser.add_argument("--only", help="which peers, separated by commas")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    chosen = parser.parse_args()
    # As Ctrl-C does, so that servers and workers end with it and do not slow down whatever is measured next.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if chosen.what == "install":
        install()
        return
    wanted = [peer for peer in PEERS if chosen.only is None or peer.name in chosen.only.split(",")]
    brokers = Brokers()
    try:
        with server() as mongod:
            facts = conditions(mongod.uri)
            backlogs = Backlogs(mongod.uri)
            answer = _measure(wanted, brokers, backlogs, chosen.repetitions, chosen.share)
            backlogs.close()
    finally:
        brokers.close()
    answer.show()
    if not chosen.dry:
        answer.write("peers", facts)
        results.write()
        plots.draw()


def _measure(wanted: list[Peer], brokers: Brokers, backlogs: Backlogs, repetitions: int, share: float) -> Answer:
    found: dict[str, Found] = {"taskmesh": Found()}
    skipped: list[str] = []
    peers = []
    for peer in wanted:
        try:
            brokers.url(peer.broker)
        except NotInstalled as error:
            skipped.append(f"{peer.name}: skipped, {error}")
        else:
            if peer.needs.exists():
                peers.append(peer)
                found[peer.name] = Found()
            else:
                skipped.append(f"{peer.name}: skipped, it is not installed (python -m benchmarks.peers install)")
    engines = {processes: limit.engine_variant(processes, 1_000, answers=False) for processes in (1, 2)}
    for repetition in range(repetitions):
        for processes, engine in engines.items():
            found["taskmesh"].rates.setdefault(processes, []).append(engine.run(backlogs, share))
        for peer in peers:
            for processes in (1, 2):
                _one(peer, found[peer.name], brokers, processes, share)
        shown = {
            name: [f"{rate:,.0f}" for rates in f.rates.values() for rate in rates[-1:]] for name, f in found.items()
        }
        print(f"  peers {repetition + 1}/{repetitions}: {shown}", flush=True)
    own = own_latency.loads()[0]
    own_latency.measure_one(backlogs, own, 0.75)
    found["taskmesh"].delays = (percentile(own.starts[0], 0.5), percentile(own.starts[0], 0.99))
    for peer in peers:
        try:
            found[peer.name].delays = latency(peer, brokers)
        except Exception as error:  # noqa: BLE001 -- a peer that fails is reported, and the others go on
            found[peer.name].remark += f" latency: {error}"
    return _answer(found, {peer.name: peer for peer in peers}, skipped)


def _one(peer: Peer, found: Found, brokers: Brokers, processes: int, share: float) -> None:
    try:
        reached, remark = rate(peer, brokers, processes, share)
    except Exception as error:  # noqa: BLE001 -- a peer that fails is reported, and the others go on
        found.remark = f"{processes} processes: {type(error).__name__}: {error}"[:200]
    else:
        found.rates.setdefault(processes, []).append(reached)
        found.remark = remark or found.remark


def _answer(found: dict[str, Found], peers: dict[str, Peer], skipped: list[str]) -> Answer:
    answer = Answer(
        "How fast are others on the same machine? (no-op tasks/s on a backlog; publish → start on an idle worker)",
        ("engine", "1 process", "2 processes", "least – greatest", "start p50 / p99 ms", "on", "promises"),
        notes=skipped,
    )
    for name, one in sorted(found.items(), key=lambda item: -(item[1].middle(1) or 0)):
        peer = peers.get(name)
        both = [rate for rates in one.rates.values() for rate in rates]
        delays = "–" if one.delays is None else " / ".join(cut(delay, down=False) for delay in one.delays)
        version = peer.version() if peer else "taskmesh"
        promise = peer.promise if peer else PROMISE
        shown = [f"{rate:,.0f}" if (rate := one.middle(processes)) else "–" for processes in (1, 2)]
        on = f"{peer.broker}, {peer.language}" if peer else "mongo, Python"
        answer.rows.append((version, *shown, spread(both) if both else "–", delays, on, promise))
        if one.remark:
            answer.notes.append(f"{name}: {one.remark}")
    answer.figures = {name: {str(n): rates for n, rates in one.rates.items()} for name, one in found.items()}
    answer.goals = _goals({name: {n: one.middle(n) for n in (1, 2)} for name, one in found.items()})
    mine, rivers = found["taskmesh"].delays, found["river"].delays if "river" in found else None
    for at, what in enumerate(("p50", "p99")):
        ratio = mine[at] / rivers[at] if mine and rivers else None
        answer.goals.append(Goal(f"idle, publish → start: {what} against River's", "<=", 1.0, ratio))
    return answer


def _goals(rates: dict[str, dict[int, float | None]]) -> list[Goal]:
    own = rates["taskmesh"]
    own_best = max(rate for rate in own.values() if rate)
    alone, both = (rates.get("dramatiq", {}).get(processes) for processes in (1, 2))
    goals = [
        Goal("one process against one of dramatiq", ">=", 2.2, own[1] / alone if own[1] and alone else None),
        Goal("the best number of processes against two of dramatiq", ">=", 1.3, own_best / both if both else None),
    ]
    for name, least in (("bullmq", 0.6), ("river", 0.6), ("agenda", 10.0), ("mscheduler", 5.0)):
        best = max((rate for rate in rates.get(name, {}).values() if rate), default=None)
        goals.append(Goal(f"best setting against best setting: {name}", ">=", least, own_best / best if best else None))
    return goals


if __name__ == "__main__":
    main()
