"""`/livez` and `/readyz`, of one worker and of a supervisor; and what a supervisor does with a child that hangs."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
from typing import Any

import pytest

from tests.cli.shell import DEADLINE_S, Shell, Started
from tests.mongod import Mongod
from tests.waiting import wait_until


def port_of(started: Started) -> int:
    """Return where the probes answer."""
    started.says("probes answer at http://127.0.0.1:")
    return int(re.findall(r"probes answer at http://127\.0\.0\.1:(\d+)", started.err)[0])


def ask(port: int, path: str, method: str = "GET", timeout_s: float = 10.0) -> tuple[int, Any]:
    """Return status and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    return answer.status, json.loads(body) if body else None


def status(port: int, path: str) -> int:
    return ask(port, path)[0]


def test_a_worker_is_live_and_ready(taskmesh: Shell) -> None:
    worker = taskmesh.worker("--worker-id", "w1", "--health-port", "0")
    port = port_of(worker)
    wait_until(lambda: status(port, "/readyz") == 200, DEADLINE_S)
    answered, told = ask(port, "/livez")
    assert (answered, told.pop("stream_silent_ms") >= 0) == (200, True)
    assert told == {"live": True, "ready": True, "worker_id": "w1", "state": "running", "running": 0}
    assert ask(port, "/livez", "HEAD") == (200, None)
    assert status(port, "/livez?verbose") == 200
    assert status(port, "/other") == 404
    assert ask(port, "/livez", "POST")[0] == 405
    assert worker.stop() == 0


def test_a_worker_that_stops_is_live_but_not_ready(taskmesh: Shell) -> None:
    worker = taskmesh.worker("--health-port", "0")
    port = port_of(worker)
    taskmesh.done("publish", "until_open", "k")
    taskmesh.until_begun("k")
    worker.signal(signal.SIGTERM)
    worker.says("stops gracefully")
    assert (status(port, "/livez"), status(port, "/readyz")) == (200, 503)
    taskmesh.open("k")
    assert worker.wait() == 0


@pytest.mark.slow
def test_a_worker_without_its_database_is_live_but_not_ready_until_it_is_back(
    taskmesh: Shell, own_mongod: Mongod
) -> None:
    worker = taskmesh.worker("--health-port", "0", "--uri", own_mongod.uri)
    port = port_of(worker)
    wait_until(lambda: status(port, "/readyz") == 200, DEADLINE_S)
    own_mongod.suspend()
    wait_until(lambda: status(port, "/readyz") == 503, DEADLINE_S)
    assert status(port, "/livez") == 200
    own_mongod.resume()
    wait_until(lambda: status(port, "/readyz") == 200, DEADLINE_S)
    assert worker.stop() == 0


def test_t3_a_worker_whose_loop_stands_still_does_not_answer(taskmesh: Shell) -> None:
    worker = taskmesh.worker("--health-port", "0")
    port = port_of(worker)
    taskmesh.done("publish", "hang", "k", '{"ms": 600000}')

    def silent() -> bool:
        try:
            ask(port, "/livez", timeout_s=1.0)
        except OSError:
            return True
        return False

    wait_until(silent, DEADLINE_S)
    assert worker.process.poll() is None


def test_a_port_that_is_taken_is_told(taskmesh: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for more in ([], ["--processes", "2"]):
            ended = taskmesh("worker", "app:mesh", "--health-port", str(taken.getsockname()[1]), *more)
            assert ended.status == 1
            assert "cannot listen on 127.0.0.1" in ended.err
            assert "Traceback" not in ended.err


@pytest.mark.slow
def test_a_supervisor_answers_for_its_children(taskmesh: Shell) -> None:
    supervisor = taskmesh.start(
        "worker", "app:mesh", "--processes", "2", "--worker-id", "w", "--health-port", "0", "--grace-ms", "1000"
    )
    port = port_of(supervisor)
    wait_until(lambda: status(port, "/readyz") == 200, DEADLINE_S)
    assert ask(port, "/livez") == (200, {"live": True, "ready": True, "workers": {"w-1": "ready", "w-2": "ready"}})
    supervisor.children[0].kill()
    wait_until(lambda: status(port, "/readyz") == 503, DEADLINE_S)
    wait_until(lambda: status(port, "/readyz") == 200, DEADLINE_S)
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_t3_a_child_whose_loop_stands_still_is_dumped_and_replaced(taskmesh: Shell) -> None:
    supervisor = taskmesh.start(
        *["worker", "app:mesh", "--processes", "1", "--worker-id", "w"],
        *["--hang-timeout-ms", "4000", "--reload"],  # --reload: supervised, though it is one process
    )
    supervisor.says("all 1 workers are ready")
    [before] = supervisor.children
    taskmesh.done("publish", "hang", "k", '{"ms": 600000}', "--app", "app:mesh", "--option", "max_timeouts=0")
    supervisor.says("has not responded for")
    wait_until(lambda: not before.is_running(), DEADLINE_S)
    assert "in hang" in supervisor.err, "the dump shows where"
    taskmesh.until("FAIL", "hang", "k")
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    taskmesh.until("SUCCESS", "add", "k")
    assert supervisor.stop() == 0
