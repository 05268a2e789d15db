"""`python -m benchmarks`: ask all questions, print each table with goals and verdicts, write JSON and RESULTS.md.

`--only limit,latency` asks some of them; `--share 0.1` makes the workloads smaller (to try the scripts, not to measure);
`--long` adds what takes long. RESULTS.md is made of the newest answer to each question, each with its own date.
"""

from __future__ import annotations

import argparse
import inspect
import signal
import sys
import time
from collections.abc import Callable

from benchmarks import (
    capacity,
    costs,
    durable,
    fairness,
    features,
    fleet,
    latency,
    limit,
    plots,
    publish,
    results,
    scale,
)
from benchmarks.backlog import Backlogs
from benchmarks.machine import conditions, server
from benchmarks.tables import Answer

QUESTIONS: dict[str, Callable[..., Answer]] = {
    "limit": limit.measure,
    "costs": costs.measure,
    "capacity": capacity.measure,
    "latency": latency.measure,
    "publish": publish.measure,
    "fleet": fleet.measure,
    "fairness": fairness.measure,
    "scale": scale.measure,
    "durable": durable.measure,
    "features": features.measure,
}


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default=",".join(QUESTIONS), help="which questions, separated by commas")
    parser.add_argument("--share", type=float, default=1.0, help="share of the full workload")
    parser.add_argument("--repetitions", type=int, help="how often each way is measured")
    parser.add_argument("--long", action="store_true", help="also ten million tasks and 100 000 executions at once")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    chosen = parser.parse_args()
    # As Ctrl-C does, so that servers and workers end with it and do not slow down whatever is measured next.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begun = time.monotonic()
    for name in chosen.only.split(","):
        with server() as mongod:
            facts = conditions(mongod.uri)
            if chosen.share != 1.0:
                facts["workload"] = f"{chosen.share:g} of the full one: a trial, not a measurement"
            backlogs = Backlogs(mongod.uri)
            options = {"repetitions": chosen.repetitions} if chosen.repetitions else {}
            if "long" in inspect.signature(QUESTIONS[name]).parameters:
                options["long"] = chosen.long
            answer = QUESTIONS[name](backlogs, share=chosen.share, **options)
            backlogs.close()
        answer.show()
        if not chosen.dry:
            answer.write(name, facts)
    if not chosen.dry:
        results.write()
        plots.draw()
    print(f"\nIn {(time.monotonic() - begun) / 60:.0f} minutes.")


if __name__ == "__main__":
    main()
