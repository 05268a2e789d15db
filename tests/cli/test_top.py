"""`taskmesh top` and `doctor`."""

from __future__ import annotations

import signal
from collections import deque

import pytest

from taskmesh.cli.fleet import sparkline
from tests.cli.shell import Shell


def test_top_shows_tasks_queues_and_workers_once(taskmesh: Shell) -> None:
    taskmesh.worker("--worker-id", "w1")
    taskmesh.done("publish", "nap", "k", '{"ms": 600000}', "--queue", "q")
    taskmesh.until("RUNNING", "nap", "k")
    shown = taskmesh.done("top", "--once").out
    for part in (
        "nap",
        "oldest claimable",
        "finished/s",
        "w1",
        "QUEUE",
        "CLAIMS LOST",
        "LEASE LEFT",
        taskmesh.database,
    ):
        assert part in shown
    [told] = taskmesh.done("top", "--once", "--json").json
    assert told["stats"]["counts"] == {"nap": {"RUNNING": 1}}
    assert [worker["worker_id"] for worker in told["workers"]] == ["w1"]
    assert {"claims_tried", "claims_won", "lease_left"} <= told["workers"][0].keys()
    assert [queue["queue"] for queue in told["queues"]] == ["q"]


@pytest.mark.slow
def test_top_goes_on_until_ctrl_c(taskmesh: Shell) -> None:
    top = taskmesh.start("top", "--every", "0.2")
    top.says("oldest claimable", times=3)
    top.signal(signal.SIGINT)
    assert top.wait() == 0
    assert "Traceback" not in top.err


@pytest.mark.parametrize(
    ("values", "bars"), [([], ""), ([0.0, 0.0], "  "), ([0.0, 4.0, 8.0], " ▄█"), ([3.0, 3.0], "██")]
)
def test_the_curve_is_as_high_as_its_highest_value(values: list[float], bars: str) -> None:
    assert sparkline(deque(values)) == bars


def test_doctor_ends_with_0_while_nothing_hurts_and_with_1_when_something_does(taskmesh: Shell) -> None:
    well = taskmesh.done("doctor")
    assert "all is well" in well.out
    taskmesh.done("publish", "add", "k")
    hurt = taskmesh("doctor")
    assert hurt.status == 1
    assert "→ taskmesh worker MODULE:MESH" in hurt.out
    findings = taskmesh("doctor", "--json").json
    assert {"level", "subject", "found", "remedy"} == set(findings[0])
