"""Who changed what, whether by the command line, the dashboard or a program, is listed for a month."""

from __future__ import annotations

import getpass
import socket

from tests.cli.shell import Shell


def test_what_the_command_line_changes_is_listed_with_who_did_it(taskmesh: Shell) -> None:
    assert taskmesh.done("audit", "--json").json == []
    for key in ("k1", "k2", "k3"):
        taskmesh.done("publish", "add", key, '{"a": 1, "b": 2}')
    taskmesh.done("set-option", "add", "k1", "priority=5")
    taskmesh.done("cancel", "add", "k1", "--yes")
    taskmesh.done("retry", "add", "k1")
    taskmesh.done("delete", "add", "k1", "--yes")
    taskmesh.done("cancel", "--where", "name:add", "--yes")
    taskmesh.done("pause", "default", "--reason", "a secret reason")
    taskmesh.done("resume", "default")
    taskmesh.done("limit", "default", "--running", "3")
    taskmesh.done("limit", "default", "--group", "acme", "--running", "1")
    taskmesh.worker("--worker-id", "w1")
    taskmesh.done("pause-worker", "w1")
    taskmesh.done("resume-worker", "w1")
    taskmesh.done("set-concurrency", "w1", "3")
    taskmesh.done("stop-worker", "w1", "--wait")
    listed = taskmesh.done("audit", "--json").json
    assert [(each["action"], each.get("about", each.get("where"))) for each in reversed(listed)] == [
        ("task.set_option", "name 'add', key 'k1', changes {'priority': 5}"),
        ("task.cancel", "name 'add', key 'k1'"),
        ("task.retry", "name 'add', key 'k1'"),
        ("task.delete", "name 'add', key 'k1'"),
        ("cancel", "name:add status:INIT,RUNNING"),
        ("queue.pause", "queue 'default'"),
        ("queue.resume", "queue 'default'"),
        ("queue.set_limit", "queue 'default', running 3"),
        ("queue.set_group_limit", "queue 'default', group 'acme', running 1"),
        ("worker.pause", "worker_id 'w1'"),
        ("worker.resume", "worker_id 'w1'"),
        ("worker.set_concurrency", "worker_id 'w1', concurrency 3"),
        ("worker.stop", "worker_id 'w1'"),
    ]
    assert {each["by"] for each in listed} == {f"{getpass.getuser()}@{socket.gethostname()}"}
    shown = taskmesh.done("audit", "--limit", "2").out
    assert "worker.stop" in shown
    assert "2 of 2 tasks" in shown
    assert "task.delete" not in shown


def test_what_was_refused_is_not_listed(taskmesh: Shell) -> None:
    assert taskmesh("cancel", "add", "nothing", "--yes").status == 1
    assert taskmesh("stop-worker", "nobody").status == 1
    assert taskmesh.done("audit", "--json").json == []
