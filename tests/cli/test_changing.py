"""`taskmesh retry`, `cancel`, `delete`: one task."""

from __future__ import annotations

from tests.cli.shell import Shell


def test_retry_makes_a_failed_task_wait_again(taskmesh: Shell) -> None:
    taskmesh.done("publish", "refuse", "k", '{"why": "no"}')
    taskmesh.done("worker", "app:mesh", "--until-idle")
    assert taskmesh.status("refuse", "k") == "FAIL"
    assert taskmesh.done("retry", "refuse", "k").out == "refuse k will run again\n"
    assert taskmesh.status("refuse", "k") == "INIT"
    assert taskmesh.done("retry", "refuse", "k", "--json").json["status"] == "INIT"


def test_retry_keeps_what_was_signalled_and_fresh_starts_over(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    taskmesh.done("signal", "add", "k", "go")
    assert len(taskmesh.done("retry", "add", "k", "--json").json["task_state"]["signals"]) == 1
    assert taskmesh.done("retry", "add", "k", "--fresh", "--json").json["task_state"]["signals"] == []
    for words in (["retry", "--where", "status:INIT", "--fresh"], ["cancel", "add", "k", "--fresh"]):
        assert taskmesh(*words).status == 2, words


def test_cancel_stops_what_runs(taskmesh: Shell) -> None:
    worker = taskmesh.worker("--grace-ms", "600000")  # it waits for whatever was not stopped
    taskmesh.done("publish", "until_open", "k")
    taskmesh.until_begun("k")
    assert taskmesh("retry", "until_open", "k").status == 1
    assert taskmesh.done("cancel", "until_open", "k", "--json").json["status"] == "CANCELLED"
    assert worker.stop() == 0


def test_cancel_leaves_a_finished_task_as_it_is_and_says_so(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    taskmesh.done("worker", "app:mesh", "--until-idle")
    assert taskmesh.done("cancel", "add", "k").out == "add k had already finished: SUCCESS\n"


def test_delete_removes_the_task_and_prints_it_as_it_was(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    assert taskmesh.done("delete", "add", "k", "--yes", "--json").json["params"] == {"a": 1, "b": 2}
    assert taskmesh("show", "add", "k").status == 1


def test_wrong_usage_ends_with_2(taskmesh: Shell) -> None:
    for words in (["retry"], ["retry", "add"], ["cancel", "add", "k", "more"], ["delete", "add", "k", "--what"]):
        assert taskmesh.here(*words).status == 2, words


def test_the_option_of_a_published_task_is_changed(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k")
    told = taskmesh.done("set-option", "add", "k", "priority=5", 'specific_worker_ids=["w1"]').out
    assert told == "add k: priority=5, specific_worker_ids=('w1',)\n"
    assert taskmesh.done("show", "add", "k", "--json").json["task_option"]["priority"] == 5
    for words, told in ((["priority"], "FIELD=VALUE"), (["priority=high"], "priority"), (["colour=red"], "colour")):
        ended = taskmesh("set-option", "add", "k", *words)
        assert (ended.status, ended.out) == (2, "")
        assert told in ended.err


def test_what_another_option_would_do_is_told_and_not_done(taskmesh: Shell) -> None:
    taskmesh.worker("--worker-id", "w1")
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}', "--option", 'specific_worker_ids=["w2"]')
    told = taskmesh.done("set-option", "add", "k", "specific_worker_ids=[]", "--dry-run").out
    assert told == "add k: w1 could claim it then\n"
    effect = taskmesh.done("set-option", "add", "k", "specific_worker_ids=[]", "--dry-run", "--json").json
    assert (effect["opens"], effect["stops"], effect["status_then"]) == (["w1"], [], "INIT")
    assert taskmesh.status("add", "k") == "INIT"
    ended = taskmesh("set-option", "add", "k", "colour=red", "--dry-run")
    assert (ended.status, ended.out) == (2, "")
