"""A seeded random run: `CHAOS_SECONDS=1800 SEED=7 python -m tests.chaos`. It prints a table; its exit status tells.

Real workers and producers on a replica set of three, faults one after the other, and all promises checked on every
committed write and in the end. See docs/reliability.md. BROKEN="events: obeyed unseen": with parts of the engine taken out, by
their names in tests/processes/broken.py, `;` between them; the run should then find something.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.cluster import cluster
from tests.chaos.faults import FAULTS, Chaos
from tests.chaos.findings import Findings
from tests.chaos.invariants import INVARIANTS
from tests.chaos.producer import read_notes
from tests.chaos.world import World
from tests.processes.broken import BROKEN
from tests.processes.wrong_clock import FAKETIME

_SHOWN = 5
"""Violations of each invariant that are printed."""
_CLOCKS_S = (0.0, 3_600.0, -3_600.0)


def main() -> int:
    """Run, and return the exit status."""
    argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__).parse_args()
    seconds = float(os.environ.get("CHAOS_SECONDS") or 1_800)
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    broken = [part.strip() for part in os.environ.get("BROKEN", "").split(";") if part.strip()]
    if unknown := sorted(set(broken) - set(BROKEN)):
        sys.exit(f"BROKEN: there is no {unknown[0]!r}; there are: {'; '.join(BROKEN)}")
    directory = Path(tempfile.mkdtemp(prefix="taskmesh-chaos-"))
    say(f"chaos for {seconds:g} s, SEED={seed}, logs and history below {directory}")
    if broken:
        say(f"taken out of the engine: {'; '.join(broken)}")
    clock_s = random.Random(seed).choice(_CLOCKS_S) if FAKETIME.exists() else 0.0
    say(f"the servers' clocks are {clock_s:+g} s off")
    # The witnesses keep millions of objects: looking through them all, again and again, would hold up every thread for seconds.
    gc.disable()
    with cluster(directory / "cluster", clocks_s=[clock_s] * 3) as servers:
        world = World(servers.uri, directory, seed, broken=broken)
        with world:
            injected = _inject(Chaos(world, servers), seconds)
            say("healing, and waiting for everything to end")
            servers.heal()
            world.wind_down()
            findings = world.check()
    _report(seconds, seed, injected, world, directory, findings)
    return 1 if findings.violations else 0


def _inject(chaos: Chaos, seconds: float) -> Counter[str]:
    """Inject faults until the time is over; each is healed before the next, but for what it leaves behind."""
    end = time.monotonic() + seconds
    injected: Counter[str] = Counter()
    names = list(FAULTS)
    chance = chaos.world.chance
    chaos.seconds(1.0, 2.0)
    while time.monotonic() < end:
        name = chance.choices(names, [often for often, _ in FAULTS.values()])[0]
        say(f"{seconds - (end - time.monotonic()):6.1f} s  {name}")
        FAULTS[name][1](chaos)
        injected[name] += 1
        chaos.seconds(0.5, 4.0)
    return injected


def _report(
    seconds: float, seed: int, injected: Counter[str], world: World, directory: Path, findings: Findings
) -> None:
    published, _ = read_notes(directory)
    say("\n| fault | times |\n| --- | ---: |")
    for name, times in sorted(injected.items()):
        say(f"| {name} | {times} |")
    say("\n| what | number |\n| --- | ---: |")
    for what, number in (
        ("seconds of faults", round(seconds)),
        ("seed", seed),
        ("faults", injected.total()),
        ("workers started again", world.started_again),
        ("tasks published", len({publish.id for publish in published})),
        ("publishes tried", len(published)),
        ("publishes that were told an error", sum(publish.created is None for publish in published)),
        ("handlers run", len(world.fleet.runs)),
        ("committed writes checked", world.witnesses.versions.seen),
        ("events told to a reader", len(world.witnesses.reader.told)),
        ("violations", len(findings.violations)),
    ):
        say(f"| {what} | {number} |")
    say("\n| invariant | decided | violated |\n| --- | ---: | ---: |")
    violated = Counter(violation.invariant for violation in findings.violations)
    for name, sentence in INVARIANTS.items():
        say(f"| [{name}] {sentence} | {findings.checked[name]} | {violated[name]} |")
    for name, count in violated.items():
        of_it = [violation for violation in findings.violations if violation.invariant == name]
        for violation in of_it[:_SHOWN]:
            say(f"\n{str(violation)[:2_000]}")
        if count > _SHOWN:
            say(f"\n… and {count - _SHOWN} more of [{name}]")


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)  # noqa: T201 -- the table is what this is for


if __name__ == "__main__":
    sys.exit(main())
