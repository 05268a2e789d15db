"""Run one peer: its rate on a backlog, and its idle latency. Its handlers count into files (`tally`)."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.crew import rate_between
from benchmarks.peers.brokers import Brokers
from benchmarks.peers.catalogue import Peer
from benchmarks.tables import percentile

_BEGINS_WITHIN_S = 30.0
"""Two processes of Agenda, on a backlog, lock against each other for 20 s before the first job runs."""
_STALLED_S = 4.0
_LONGEST_S = 60.0
_LATENCIES = 150
_PAUSE_S = 0.02


@contextmanager
def _workers(commands: Sequence[Sequence[str]], directory: Path, environment: dict[str, str]) -> Iterator[None]:
    started = [
        subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=None if os.environ.get("BENCH_SHOW") else subprocess.DEVNULL,
            start_new_session=True,  # so that its own children end with it
        )
        for command in commands
    ]
    try:
        yield
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def _environment(url: str, tally: str, directory: Path) -> dict[str, str]:
    peers = {"dramatiq_queue_prefetch": "500"}  # how dramatiq is told
    return os.environ | {"BROKER_URL": url, "TALLY_DIR": tally, "PYTHONPATH": str(directory)} | peers


def _done(tally: str) -> int:
    return sum(int.from_bytes(path.read_bytes()[:8], "little") for path in Path(tally).glob("*.count"))


def rate(peer: Peer, brokers: Brokers, processes: int, share: float) -> tuple[float, str]:
    """Tasks per second on a backlog, between 10 % and 90 % of what it did; and a remark if it did not do all."""
    count = max(300, int(peer.count * share))
    url = brokers.url(peer.broker)
    brokers.clear(peer.broker)
    with tempfile.TemporaryDirectory(prefix="bench-tally-") as tally:
        environment = _environment(url, tally, peer.directory)
        publish = [*peer.publisher, str(count), "0"]
        if peer.publish_first:
            subprocess.run(publish, check=True, cwd=peer.directory, env=environment, timeout=120)
        with _workers(peer.workers(processes), peer.directory, environment):
            if not peer.publish_first:
                time.sleep(2.0)  # its workers must be listening
                subprocess.Popen(publish, cwd=peer.directory, env=environment)
            samples = _sampled(tally, count)
    done = samples[-1][1] if samples else 0
    if done < 100:
        raise RuntimeError(f"{peer.name} did only {done} tasks")
    remark = "" if done >= count else f"stalled after {done} of {count}"
    return rate_between([samples], 0.1 * done, 0.9 * done), remark


def _sampled(tally: str, count: int) -> list[tuple[float, int]]:
    samples: list[tuple[float, int]] = []
    end = time.monotonic() + _LONGEST_S
    moved = time.monotonic() + _BEGINS_WITHIN_S
    while time.monotonic() < end:
        now, done = time.monotonic(), _done(tally)
        if not samples or done > samples[-1][1]:
            samples.append((now, done))
            moved = max(moved, now)
        if done >= count or now > moved + _STALLED_S:
            break
        time.sleep(0.01)
    return samples


def latency(peer: Peer, brokers: Brokers) -> tuple[float, float]:
    """Publish → start on one idle worker: p50 and p99 in ms."""
    url = brokers.url(peer.broker)
    brokers.clear(peer.broker)
    with tempfile.TemporaryDirectory(prefix="bench-tally-") as tally:
        environment = _environment(url, tally, peer.directory)
        subprocess.run([*peer.publisher, "1", "0"], check=True, cwd=peer.directory, env=environment, timeout=60)
        with _workers(peer.workers(1), peer.directory, environment):
            end = time.monotonic() + 10
            while not _done(tally) and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(1.0)
            publish = [*peer.publisher, str(_LATENCIES), str(_PAUSE_S)]
            subprocess.run(publish, check=True, cwd=peer.directory, env=environment, timeout=60)
            end = time.monotonic() + 5
            while len(found := _delays(tally)) < _LATENCIES and time.monotonic() < end:
                time.sleep(0.05)
    if len(found) < _LATENCIES // 2:
        raise RuntimeError(f"{peer.name}: only {len(found)} delays")
    return percentile(found, 0.5), percentile(found, 0.99)


def _delays(tally: str) -> list[float]:
    return [float(line) for path in Path(tally).glob("*.delays") for line in path.read_text().splitlines()]
