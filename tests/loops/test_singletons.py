"""Of a singleton exactly one instance lives in the fleet: real worker processes, killed, suspended and stopped."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from tests.loops.handlers import LEASE_MS
from tests.processes.fleet import Fleet, Worker
from tests.processes.history import Run, end_of, most_at_once
from tests.waiting import wait_until

_PATIENCE_S = 30.0


def of(fleet: Fleet, name: str) -> list[Run]:
    return [run for run in fleet.runs if run.start.name == name]


def last(fleet: Fleet, name: str, count: int) -> tuple[Worker, Run]:
    """Wait until it has been started so many times; return who has it then."""
    wait_until(lambda: len(of(fleet, name)) >= count, _PATIENCE_S, what=f"{name} was started {count} times")
    run = of(fleet, name)[-1]
    return next(worker for worker in fleet.workers if worker.worker_id == run.start.worker_id), run


@pytest.mark.lasting
def test_a_singleton_is_taken_over_within_its_lease_from_a_worker_that_is_killed_or_suspended(fleet: Fleet) -> None:
    fleet.start_many(3, handlers="tests.loops.handlers", names=["leader"])
    killed, first = last(fleet, "leader", 1)
    killed.kill()
    assert killed.gone is not None
    suspended, second = last(fleet, "leader", 2)
    # The lease, a look each second, and a busy machine.
    assert second.start.mono - killed.gone < LEASE_MS / 1000 + 5.0
    suspended.suspend()
    frozen = time.monotonic()
    holder, third = last(fleet, "leader", 3)
    assert third.start.mono - frozen < LEASE_MS / 1000 + 5.0
    suspended.resume()
    wait_until(lambda: of(fleet, "leader")[1].end is not None, _PATIENCE_S, what="the late one is cancelled")
    runs = of(fleet, "leader")
    assert [run.was_stopped for run in runs] == [False, True, False]
    assert holder.running
    assert most_at_once(runs, fleet.died | {suspended.pid: [frozen]}) <= 2, "the late one, until it hears of it"
    assert most_at_once([runs[0], runs[2]], fleet.died) == 1
    assert second.start.mono >= end_of(first, fleet.died)
    assert third.start.mono >= frozen + (LEASE_MS - 400) / 1000, "not before its lease was over"


@pytest.mark.lasting
@pytest.mark.parametrize("name", ["steady", "in_a_thread"])
def test_a_singleton_is_handed_over_when_its_worker_stops_gracefully(fleet: Fleet, name: str) -> None:
    fleet.start_many(2, handlers="tests.loops.handlers", names=[name])
    holder, first = last(fleet, name, 1)
    asked = time.monotonic()
    holder.terminate()
    other, second = last(fleet, name, 2)
    assert other is not holder
    assert second.start.mono - asked < 10.0, "far from the lease of two minutes, and from the grace of thirty seconds"
    assert holder.wait() == 0
    runs = of(fleet, name)
    assert runs[0].start == first.start
    assert most_at_once(runs, fleet.died) == 1


@pytest.mark.lasting
def test_a_loop_of_the_fleet_runs_once_at_a_time_and_goes_on_while_workers_are_killed(fleet: Fleet) -> None:
    fleet.start_many(3, handlers="tests.loops.handlers", names=["counted"])
    for _ in range(2):
        victim, _ = last(fleet, "counted", len(of(fleet, "counted")) + 3)
        victim.kill()
    wanted = len(of(fleet, "counted")) + 3
    last(fleet, "counted", wanted)
    runs = sorted(of(fleet, "counted"), key=lambda run: run.start.mono)
    assert most_at_once(runs, fleet.died) == 1
    for before, after in pairwise(runs):
        assert after.start.mono - end_of(before, fleet.died) >= 0.045 or before.end is None, "50 ms after its last end"
