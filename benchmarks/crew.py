"""Real processes that do the measured work, and the rate at which they do it together.

A member is `python -m benchmarks.worker ROLE SETTING`. It tells, one JSON object per line: `ready`; then, while it works, how
much it has done at which time (`t`, `n`; the monotonic clock is one for all processes of a machine); at last a `report`.
It is told `go` and `end`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import psutil

_READY_WITHIN_S = 240.0
_END_WITHIN_S = 60.0


class Member:
    """One process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.samples: list[tuple[float, int]] = []
        self.report: dict[str, Any] = {}
        self.ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = json.loads(line)
            if "n" in told:
                self.samples.append((told["t"], told["n"]))
            self.report |= told.get("report", {})
            if "ready" in told:
                self.ready.set()
        self.ready.set()

    @property
    def done(self) -> int:
        """How much it has done so far."""
        return self.samples[-1][1] if self.samples else 0

    def wait_ready(self) -> None:
        """Wait until it could begin."""
        if not self.ready.wait(_READY_WITHIN_S) or self.process.poll() is not None:
            raise RuntimeError(f"a member of the crew is not there (exit status {self.process.poll()})")

    def tell(self, word: str) -> None:
        """Say `go` or `end`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError("a member of the crew has died") from None

    def rss_mb(self) -> float:
        """Its resident memory."""
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20

    def cpu_s(self) -> float:
        """The processor time that it has used."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def end(self) -> dict[str, Any]:
        """Let it end, and return its report."""
        self.tell("end")
        self.process.wait(_END_WITHIN_S)
        self._reader.join(_END_WITHIN_S)
        return self.report

    def kill(self) -> None:
        """End it if it is still there."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def crew(role: str, settings: Sequence[Mapping[str, Any]]) -> Iterator[list[Member]]:
    """One member for each setting, all ready. What is left at the end is killed."""
    members = [
        Member([sys.executable, "-m", "benchmarks.worker", role, json.dumps(dict(setting))]) for setting in settings
    ]
    try:
        for member in members:
            member.wait_ready()
        yield members
    finally:
        for member in members:
            member.kill()


def work_off(members: Sequence[Member], count: int, *, deadline_s: float = 120.0) -> float:
    """Let them work until `count` is done; return how much they did per second between 10 % and 90 % of it.

    So neither the start nor the dregs count. Raises `TimeoutError`.
    """
    for member in members:
        member.tell("go")
    wait_for(lambda: sum(member.done for member in members) >= 0.93 * count, deadline_s, members)
    return rate_between([member.samples for member in members], 0.1 * count, 0.9 * count)


def wait_for(condition: Callable[[], bool], deadline_s: float, members: Sequence[Member] = ()) -> None:
    """Wait for something observable. Raises `TimeoutError`, or `RuntimeError` if a member died."""
    end = time.monotonic() + deadline_s
    while not condition():
        if any(member.process.poll() for member in members):
            raise RuntimeError("a member of the crew has died")
        if time.monotonic() > end:
            raise TimeoutError(f"not within {deadline_s:g} s; done: {[member.done for member in members]}")
        time.sleep(0.01)


def rate_between(samples: Sequence[Sequence[tuple[float, int]]], low: float, high: float) -> float:
    """Work per second between the moments when the members had done `low` and `high` together."""
    moments = sorted({t for own in samples for t, _ in own})
    totals = [(t, sum(_at(list(own), t) for own in samples)) for t in moments]
    begun, ended = _crossing(totals, low), _crossing(totals, high)
    return (high - low) / (ended - begun)


def _at(own: list[tuple[float, int]], moment: float) -> float:
    """How much one had done at a moment, on the straight line between its samples."""
    before: tuple[float, int] | None = None
    for t, n in own:
        if t >= moment:
            if before is None or t == before[0]:
                return float(n)
            return before[1] + (n - before[1]) * (moment - before[0]) / (t - before[0])
        before = (t, n)
    return float(before[1]) if before else 0.0


def _crossing(totals: Sequence[tuple[float, float]], level: float) -> float:
    for (t0, n0), (t1, n1) in pairwise(totals):
        if n1 >= level > n0 or (n1 > level >= n0):
            return t0 + (level - n0) * (t1 - t0) / (n1 - n0)
    raise RuntimeError(f"the level {level:g} was never crossed: {totals[:2]} … {totals[-2:]}")
