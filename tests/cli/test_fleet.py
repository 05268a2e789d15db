"""Workers, counts and probes."""

from __future__ import annotations

import os
from datetime import datetime

from tests.cli.shell import Shell
from tests.waiting import wait_until


def test_workers_are_listed(taskmesh: Shell) -> None:
    assert taskmesh.done("workers", "--json").json == []
    worker = taskmesh.worker("--worker-id", "w1", "--concurrency", "7", "--queues", "a,b")
    [info] = taskmesh.done("workers", "--json").json
    assert (info["worker_id"], info["pid"], info["concurrency"], info["state"]) == ("w1", worker.pid, 7, "running")
    assert info["queues"] == ["a", "b"]
    assert datetime.fromisoformat(info["last_seen"]).tzinfo is not None
    assert "w1" in taskmesh.done("workers").out
    assert worker.stop() == 0
    assert taskmesh.done("workers", "--json").json[0]["state"] == "stopped"
    assert taskmesh.done("workers", "--live", "--json").json == []


def test_a_worker_is_stopped_from_afar(taskmesh: Shell) -> None:
    worker = taskmesh.worker("--worker-id", "w1")
    assert taskmesh.done("stop-worker", "w1", "--wait").out == "worker w1 has stopped\n"
    assert worker.wait() == 0


def test_a_worker_is_paused_resumed_and_resized_from_afar(taskmesh: Shell) -> None:
    taskmesh.worker("--worker-id", "w1")
    taskmesh.done("pause-worker", "w1")
    wait_until(lambda: taskmesh.done("workers", "--json").json[0]["paused"])
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    assert taskmesh.status("add", "k") == "INIT"
    taskmesh.done("set-concurrency", "w1", "3")
    taskmesh.done("resume-worker", "w1")
    taskmesh.until("SUCCESS", "add", "k")
    wait_until(lambda: taskmesh.done("workers", "--json").json[0]["concurrency"] == 3)


def test_orders_to_a_worker_that_is_not_there_fail(taskmesh: Shell) -> None:
    for words in (["stop-worker", "w1"], ["pause-worker", "w1"], ["set-concurrency", "w1", "2"]):
        ended = taskmesh(*words)
        assert ended.status == 1
        assert ended.err.startswith("taskmesh: no worker 'w1'")
    for number in ("0", "1000001"):
        assert taskmesh("set-concurrency", "w1", number).status == 2


def test_stats(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    stats = taskmesh.done("stats", "--json").json
    assert stats["counts"] == {"add": {"INIT": 1}}
    assert stats["oldest_claimable_ms"] >= 0
    assert "add" in taskmesh.done("stats").out


def test_health_tells_whether_the_database_answers_and_a_worker_lives(taskmesh: Shell) -> None:
    assert taskmesh("health", "--worker-id", "w1", "--json").json["healthy"] is False
    worker = taskmesh.worker("--worker-id", "w1")
    assert taskmesh.done("health", "--worker-id", "w1", "--json").json == {"healthy": True, "problem": None}
    assert worker.stop() == 0
    stopped = taskmesh("health", "--worker-id", "w1")
    assert stopped.status == 1
    assert "stopped" in stopped.err
    nowhere = taskmesh("health", "--timeout-ms", "500", "--uri", "mongodb://127.0.0.1:1/")
    assert nowhere.status == 1
    assert nowhere.err.startswith("taskmesh: ")


def test_commands_do_not_ask_a_script(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k")
    assert taskmesh.done("cancel", "add", "k").out == "add k is cancelled\n"
    assert taskmesh.done("delete", "add", "k").out == "add k is deleted\n"
    assert os.environ.get("TASKMESH_URI") is None, "the tests themselves must not depend on it"
