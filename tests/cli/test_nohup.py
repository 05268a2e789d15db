"""`nohup taskmesh …`: what was started to go on when the terminal closes goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.shell import DEADLINE_S, Shell, shell_in
from tests.embedded.users import servers_in
from tests.waiting import wait_until


def test_a_worker_goes_on_when_the_terminal_closes(taskmesh: Shell) -> None:
    worker = taskmesh.start_by_nohup("worker", "app:mesh", "--worker-id", "w1")
    worker.says("at once\n", times=2)
    worker.signal(signal.SIGHUP)
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    taskmesh.until("SUCCESS", "add", "k")
    assert "SIGHUP" not in worker.err
    assert worker.stop() == 0
    assert "stops gracefully" in worker.err


@pytest.mark.slow
def test_several_processes_go_on_and_are_not_replaced(taskmesh: Shell) -> None:
    supervisor = taskmesh.start_by_nohup("worker", "app:mesh", "--processes", "2", "--worker-id", "w")
    supervisor.says("all 2 workers are ready")
    before = sorted(child.pid for child in supervisor.children)
    supervisor.signal(signal.SIGHUP)
    for child in supervisor.children:
        child.send_signal(signal.SIGHUP)
    for key in ("a", "b"):
        taskmesh.done("publish", "add", key, '{"a": 1, "b": 2}')
        taskmesh.until("SUCCESS", "add", key)
    assert sorted(child.pid for child in supervisor.children) == before
    assert "replacing" not in supervisor.err
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_the_embedded_mongodb_goes_on(tmp_path: Path) -> None:
    with shell_in(tmp_path, "", "") as shell:
        dev = shell.start_by_nohup("dev", "--json", PYTHONUNBUFFERED="1")
        dev.says("}")
        dev.signal(signal.SIGHUP)
        for key in ("a", "b"):
            shell.done("publish", "add", key)
        assert dev.process.poll() is None
        assert dev.stop() == 0
    wait_until(lambda: not servers_in(tmp_path / ".taskmesh"), DEADLINE_S, what="the embedded MongoDB has gone")
