"""`taskmesh publish`."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import Shell


def test_a_task_is_published_once(taskmesh: Shell) -> None:
    first = taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    again = taskmesh.done("publish", "add", "k", '{"a": 5, "b": 5}')
    assert first.out == "add k is published\n"
    assert again.out == "add k was there already: left as it is\n"
    assert taskmesh.done("show", "add", "k", "--json").json["params"] == {"a": 1, "b": 2}


def test_it_tells_on_standard_error_that_nobody_could_run_it(taskmesh: Shell) -> None:
    published = taskmesh.done("publish", "add", "k", "--json")
    assert "no worker is alive" in published.err
    assert published.json == {
        "name": "add",
        "key": "k",
        "created": True,
        "updated": False,
        "warnings": ["no worker is alive: start one with `taskmesh worker MODULE:MESH`"],
    }


def test_its_settings_reach_the_task(taskmesh: Shell) -> None:
    settings = ["--queue", "q", "--priority", "7", "--delay-ms", "60000", "--group", "g"]
    options = ["--option", "max_timeouts=2", "--option", 'specific_worker_ids=["w1", "w2"]']
    taskmesh.done("publish", "add", "k", *settings, *options, "--expire-time", "2999-01-01T00:00:00+01:00")
    task = taskmesh.done("show", "add", "k", "--json").json
    assert (task["queue"], task["group"]) == ("q", "g")
    option, state = task["task_option"], task["task_state"]
    assert (option["priority"], option["max_timeouts"], option["specific_worker_ids"]) == (7, 2, ["w1", "w2"])
    assert state["expire_time"] == "2998-12-31T23:00:00+00:00"
    delay = datetime.fromisoformat(state["start_time"]) - datetime.fromisoformat(state["create_time"])
    assert 55 <= delay.total_seconds() <= 65


def test_an_existing_key_gets_new_params_when_told_so(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    updated = taskmesh.done("publish", "add", "k", '{"a": 3, "b": 4}', "--update-existing-params", "--json")
    assert updated.json["updated"] is True
    assert taskmesh.done("show", "add", "k", "--json").json["params"] == {"a": 3, "b": 4}


def test_a_finished_task_runs_again_when_told_so(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    taskmesh.done("worker", "app:mesh", "--until-idle")
    assert taskmesh.status("add", "k") == "SUCCESS"
    taskmesh.done("publish", "add", "k", '{"a": 3, "b": 4}', "--run-again")
    assert taskmesh.status("add", "k") == "INIT"


def test_a_file_of_tasks_is_published(taskmesh: Shell, tmp_path: Path) -> None:
    lines = [json.dumps({"key": f"k{number}", "params": {"a": number, "b": 1}}) for number in range(2_500)]
    (tmp_path / "tasks.jsonl").write_text("\n".join([*lines, "", ""]))
    published = taskmesh.done("publish", "add", "--from-file", "tasks.jsonl", "--queue", "many")
    assert published.out == "2500 tasks: 2500 created, 0 updated, 0 left\n"
    assert len(taskmesh.done("ls", "--queue", "many", "--limit", "0", "--json").json) == 2_500
    again = taskmesh.done("publish", "add", "--from-file", "tasks.jsonl", "--json")
    assert len(again.json) == 2_500
    assert not any(task["created"] for task in again.json)


def test_tasks_are_read_from_standard_input(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "--from-file", "-", typed='{"key": "a"}\n{"key": "b", "params": {"a": 1}}\n')
    assert [task["key"] for task in taskmesh.done("ls", "--by-key", "--json").json] == ["a", "b"]


MISTAKES: list[str] = [
    "{",
    '"text"',
    '{"params": {}}',
    '{"key": 1}',
    '{"key": "x", "prams": {}}',
    '{"key": "first"}',
    '{"key": ""}',
    '{"key": "x", "params": []}',
    '{"key": "x", "params": false}',
]


def test_a_mistake_in_a_file_is_named_and_nothing_is_written(taskmesh: Shell, subtests: pytest.Subtests) -> None:
    for line in MISTAKES:
        with subtests.test(line=line):
            ended = taskmesh("publish", "add", "--from-file", "-", typed=f'{{"key": "first"}}\n{line}\n')
            assert ended.status == 2
            assert "line 2" in ended.err
            assert taskmesh.done("ls", "--json").json == []


@pytest.mark.parametrize("last", [{"key": "x" * 513}, {"key": "x", "params": [1]}], ids=["key", "params"])
def test_a_mistake_in_the_last_of_many_lines_costs_nothing(taskmesh: Shell, last: dict[str, Any]) -> None:
    tasks = [*({"key": f"k{number}"} for number in range(1_500)), last]
    ended = taskmesh("publish", "add", "--from-file", "-", typed="\n".join(map(json.dumps, tasks)))
    assert ended.status == 2
    assert "line 1501" in ended.err
    assert taskmesh.done("ls", "--json").json == []


@pytest.mark.parametrize("by", ["app", "name"])
def test_params_that_do_not_fit_in_the_last_of_many_lines_cost_nothing(taskmesh: Shell, by: str) -> None:
    if by == "name":
        taskmesh.done("worker", "app:mesh", "--until-idle")  # it registers what the handler takes
    tasks = [{"key": f"k{number}", "params": {"a": number, "b": 1}} for number in range(1_500)]
    tasks.append({"key": "last", "params": {"a": "one", "b": 1}})
    app = ["--app", "app:mesh"] if by == "app" else []
    ended = taskmesh("publish", "add", "--from-file", "-", *app, typed="\n".join(map(json.dumps, tasks)))
    assert ended.status == 2
    assert "'last'" in ended.err
    assert taskmesh.done("ls", "--json").json == []


def test_what_json_does_not_take_for_the_end_of_a_line_is_none(taskmesh: Shell) -> None:
    texts = ["a\u2028b", "a\u2029b", "a\x85b"]
    lines = [json.dumps({"key": text, "params": {"a": text}}, ensure_ascii=False) for text in texts]
    taskmesh.done("publish", "add", "--from-file", "-", typed="\r\n".join(lines))
    found = taskmesh.done("ls", "--params", "--json").json
    assert {task["key"]: task["params"] for task in found} == {text: {"a": text} for text in texts}


WRONG: list[tuple[list[str], str]] = [
    (["publish"], "NAME"),
    (["publish", "add"], "KEY is missing"),
    (["publish", "add", "k", "--from-file", "f"], "give either KEY or --from-file"),
    (["publish", "add", "k", "{"], "must be JSON"),
    (["publish", "add", "k", "[1]"], "JSON object"),
    (["publish", "add", ""], "key must have 1 to 512 bytes"),
    (["publish", "a:b", "k"], "a task's name must be 1 to 100 characters"),
    (["publish", "add", "k", "--queue", "a b"], "queue's name"),
    (["publish", "add", "k", "--delay-ms", "soon"], "--delay-ms"),
    (["publish", "add", "k", "--start-time", "soon"], "not a time like"),
    (["publish", "add", "k", "--option", "priority"], "FIELD=VALUE"),
    (["publish", "add", "k", "--option", "prio=1"], "unknown"),
    (["publish", "add", "k", "--option", "worker_timeout_ms=1"], "worker_timeout_ms"),
    (["publish", "add", "--from-file", "not-there"], "cannot be read"),
]


def test_wrong_usage_is_told_and_ends_with_2(taskmesh: Shell, subtests: pytest.Subtests) -> None:
    for words, told in WRONG:
        with subtests.test(words=words, told=told):
            taskmesh.refuses(*words, told=told)


def test_a_running_task_is_not_touched_when_told_so(taskmesh: Shell) -> None:
    taskmesh.done("publish", "nap", "k", '{"ms": 60000}')
    taskmesh.worker()
    taskmesh.until("RUNNING", "nap", "k")
    ended = taskmesh("publish", "nap", "k", '{"ms": 1}', "--update-existing-params", "--not-update-running")
    assert ended.status == 1
    assert ended.err.startswith("taskmesh: ")
    assert len(ended.err.splitlines()) == 1


def test_with_the_application_its_handlers_check_the_params_and_give_the_options(taskmesh: Shell) -> None:
    wrong = taskmesh("publish", "add", "k", '{"a": 1}', "--app", "app:mesh")
    assert wrong.status == 2
    assert "'b' is missing" in wrong.err
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": "2"}', "--app", "app:mesh", "--priority", "1")
    task = taskmesh.done("show", "add", "k", "--json").json
    assert task["params"] == {"a": 1, "b": 2}
    assert (task["task_option"]["worker_timeout_ms"], task["task_option"]["priority"]) == (2_000, 1)
    assert taskmesh("publish", "add", "k", "--app", "app").status == 2
    assert taskmesh("publish", "add", "k", "--app", "nowhere:mesh").status == 1
