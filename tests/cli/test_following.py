"""`taskmesh result`, `publish --wait` and `events`: waiting for what happens."""

from __future__ import annotations

import json
import signal

import pytest

from tests.cli.shell import Shell


def test_a_result_is_waited_for_and_printed_as_json(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    waiting = taskmesh.start("result", "add", "k")
    taskmesh.done("worker", "app:mesh", "--until-idle")
    assert waiting.wait() == 0
    assert (json.loads(waiting.out), waiting.err) == (3, "")
    assert taskmesh.done("result", "add", "k", "--timeout", "30").out == "3\n", "also of one that is finished"


def test_a_task_without_a_result_ends_with_1_and_the_reason(taskmesh: Shell) -> None:
    taskmesh.done("publish", "refuse", "failed", '{"why": "it rained"}')
    taskmesh.done("worker", "app:mesh", "--until-idle", "--worker-id", "w1")
    taskmesh.done("publish", "add", "cancelled", '{"a": 1, "b": 2}')
    taskmesh.done("cancel", "add", "cancelled")
    taskmesh.done("publish", "add", "waiting", '{"a": 1, "b": 2}')
    for words, told in (
        (["refuse", "failed"], "taskmesh: task 'refuse' 'failed' failed: w1: it rained"),
        (["add", "cancelled"], "taskmesh: task 'add' 'cancelled' was cancelled"),
        (["add", "nobody"], "taskmesh: there is no task"),
        (["add", "waiting", "--timeout", "0.2"], "taskmesh: task 'add' 'waiting' has not finished within 0.2 s"),
    ):
        ended = taskmesh("result", *words)
        assert (ended.status, ended.out) == (1, ""), words
        assert ended.err.startswith(told)
        assert len(ended.err.splitlines()) == 1


def test_publishing_can_wait_for_the_result(taskmesh: Shell) -> None:
    taskmesh.worker("--worker-id", "w1")
    published = taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}', "--wait")
    assert (published.out, published.err) == ("3\n", "add k is published\n")
    failed = taskmesh("publish", "refuse", "k", '{"why": "it rained"}', "--wait", "--timeout", "100")
    assert (failed.status, failed.out) == (1, "")
    assert failed.err.endswith("failed: w1: it rained\n")


@pytest.mark.parametrize("words", [["--wait", "--json"], ["--timeout", "3"], ["--wait", "--timeout", "0"]])
def test_wrong_usage_publishes_nothing(taskmesh: Shell, words: list[str]) -> None:
    assert taskmesh("publish", "add", "k", *words).status == 2
    assert taskmesh.done("ls", "--json").json == []


def test_events_are_told_a_line_each_until_ctrl_c(taskmesh: Shell) -> None:
    people = taskmesh.start("events")
    program = taskmesh.start("events", "--name", "add", "--key", "k", "--json")
    for listening in (people, program):
        listening.says("listening")
    taskmesh.done("publish", "add", "another", '{"a": 1, "b": 2}')
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    taskmesh.done("worker", "app:mesh", "--until-idle", "--worker-id", "w1")
    for listening in (people, program):
        listening.says("finished", times=1 if listening is program else 2)
        listening.signal(signal.SIGINT)
        assert listening.wait() == 0
        assert "Traceback" not in listening.err
    told = [json.loads(line) for line in program.out.splitlines()]
    assert [each["kind"] for each in told] == ["published", "claimed", "succeeded", "finished"]
    assert {(each["name"], each["key"]) for each in told} == {("add", "k")}
    assert (told[1]["worker_id"], told[3]["status"]) == ("w1", "SUCCESS")
    [line] = [line.split()[2:] for line in people.out.splitlines() if "finished" in line and " another " in line]
    assert line == ["finished", "add", "another", "w1", "SUCCESS"]
    again = taskmesh.start("events", "--key", "k", "--json", "--after", told[1]["token"])
    again.says("finished")
    assert [json.loads(line)["kind"] for line in again.out.splitlines()] == ["succeeded", "finished"]
