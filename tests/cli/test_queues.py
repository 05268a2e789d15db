"""Queues, limits and schedules from the command line."""

from __future__ import annotations

from datetime import datetime

import pytest

from tests.cli.shell import Shell
from tests.waiting import wait_until


def test_a_paused_queue_rests_until_it_is_resumed(taskmesh: Shell) -> None:
    taskmesh.worker()
    assert taskmesh.done("pause", "default", "--reason", "a leak").out == "queue default is paused\n"
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    assert "a leak" in taskmesh.done("explain", "add", "k").out
    assert taskmesh.status("add", "k") == "INIT"
    taskmesh.done("resume", "default")
    taskmesh.until("SUCCESS", "add", "k")


def test_a_queue_that_nobody_has_seen_may_be_a_slip(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k", "--queue", "email")
    paused = taskmesh.done("pause", "emial")
    assert paused.out == "queue emial is paused\n"
    assert paused.err == ("warning: no task, worker or setting names a queue emial: did you mean email?\n")
    assert taskmesh.done("limit", "nothing-like-it", "--running", "1").err.endswith("names a queue nothing-like-it\n")
    taskmesh.worker("--worker-id", "w1", "--queues", "mail")
    for queue in ("email", "emial", "mail", "default"):
        assert taskmesh.done("resume", queue).err == "", queue
    taskmesh.done("publish", "add", "done", '{"a": 1, "b": 2}', "--queue", "old")
    taskmesh.done("cancel", "add", "done")
    assert taskmesh.done("pause", "old").err == "", "a finished task was in it"


def test_a_pause_can_end_by_itself(taskmesh: Shell) -> None:
    taskmesh.worker()
    taskmesh.done("pause", "default", "--for-ms", "6000", "--reason", "a short rest")
    [queue] = taskmesh.done("queues", "--json").json
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    taskmesh.until("SUCCESS", "add", "k")
    [entry] = taskmesh.done("show", "add", "k", "--json").json["task_state"]["worker_states"]
    assert datetime.fromisoformat(entry["start_time"]) >= datetime.fromisoformat(queue["paused_until"])


def test_queues_are_listed_with_their_pauses_and_limits(taskmesh: Shell) -> None:
    assert taskmesh.done("queues", "--json").json == []
    assert taskmesh.done("queues").out.startswith("no queues; looked at ")
    taskmesh.done("publish", "add", "k", "--queue", "busy")
    taskmesh.done("pause", "shut", "--reason", "maintenance")
    limited = taskmesh.done("limit", "busy", "--rate", "5", "--per-ms", "2000", "--running", "3")
    assert limited.out == "queue busy: 5 starts in 2000 ms, 3 at a time\n"
    told = taskmesh.done("limit", "busy", "--running", "3", "--json").json
    assert (told["queue"], told["limits"]["rate"], told["limits"]["running"]) == ("busy", 5, 3)
    busy, shut = taskmesh.done("queues", "--json").json
    assert (busy["queue"], busy["waiting"], busy["limits"]["rate"], busy["limits"]["running"]) == ("busy", 1, 5, 3)
    assert (shut["queue"], shut["paused"], shut["paused_reason"]) == ("shut", True, "maintenance")
    assert "maintenance" in taskmesh.done("queues").out


def test_a_limit_holds_for_workers_and_can_be_lifted(taskmesh: Shell) -> None:
    taskmesh.done("limit", "default", "--running", "1")
    for key in ("a", "b"):
        taskmesh.done("publish", "nap", key, '{"ms": 600000}')
    taskmesh.worker()

    def running() -> int:
        return len(taskmesh.done("ls", "--status", "RUNNING", "--json").json)

    wait_until(lambda: running() == 1)
    assert "1/1" in taskmesh.done("queues").out
    assert taskmesh.done("limit", "default", "--none").out == "queue default: no limit\n"
    wait_until(lambda: running() == 2)


def test_one_group_has_a_limit_of_its_own(taskmesh: Shell) -> None:
    taskmesh.done("limit", "default", "--group-running", "2")
    assert taskmesh.done("limit", "default", "--group", "vip", "--running", "9").out == (
        "queue default, group vip: 9 at a time\n"
    )
    [queue] = taskmesh.done("queues", "--json").json
    assert queue["limits"]["group_running"] == 2
    assert queue["limits"]["groups"] == {"vip": 9}


def test_a_limit_that_is_not_named_stays_as_it_is(taskmesh: Shell) -> None:
    taskmesh.done("limit", "default", "--running", "3", "--rate", "5")
    limited = taskmesh.done("limit", "default", "--group-rate", "2", "--group-per-ms", "500", "--without", "rate")
    assert limited.out == "queue default: 3 at a time, 2 starts in 500 ms of each group\n"
    assert taskmesh.done("limit", "default", "--none").out == "queue default: no limit\n"


def test_one_group_is_paused_by_itself(taskmesh: Shell) -> None:
    paused = taskmesh.done("pause", "default", "--group", "acme", "--reason", "unpaid")
    assert paused.out == "group acme of queue default is paused\n"
    published = taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}', "--group", "acme")
    assert "group 'acme' of queue 'default' is paused" in published.out + published.err
    assert "unpaid" in taskmesh.done("explain", "add", "k").out
    assert "paused: acme" in taskmesh.done("queues").out
    taskmesh.worker()
    taskmesh.done("publish", "add", "other", '{"a": 1, "b": 2}', "--group", "other")
    taskmesh.until("SUCCESS", "add", "other")
    assert taskmesh.status("add", "k") == "INIT"
    assert taskmesh.done("resume", "default", "--group", "acme").out == "group acme of queue default is open\n"
    taskmesh.until("SUCCESS", "add", "k")


WRONG: list[list[str]] = [
    ["limit", "q"],
    ["limit", "q", "--none", "--rate", "1"],
    ["limit", "q", "--rate", "-1"],
    ["limit", "q", "--running", "1", "--without", "running"],
    ["limit", "q", "--group-running", "-1"],
    ["limit", "q", "--group", "g", "--rate", "1"],
    ["limit", "a b", "--rate", "1"],
    ["pause", "a b"],
    ["pause"],
]


def test_wrong_usage_ends_with_2(taskmesh: Shell, subtests: pytest.Subtests) -> None:
    for words in WRONG:
        with subtests.test(words=words):
            assert taskmesh.here(*words).status == 2


def test_schedules_are_listed_paused_triggered_and_removed(taskmesh: Shell) -> None:
    assert taskmesh.done("schedules", "--json").json == []
    app = taskmesh.directory / "app.py"
    app.write_text(app.read_text() + '\nmesh.every("add", cron="0 3 * * *", params={"a": 1, "b": 1})\n')
    taskmesh.done("worker", "app:mesh", "--until-idle")
    [schedule] = taskmesh.done("schedules", "--json").json
    assert (schedule["schedule_id"], schedule["cron"], schedule["paused"]) == ("add", "0 3 * * *", False)
    assert "0 3 * * * (UTC)" in taskmesh.done("schedules").out
    taskmesh.done("pause-schedule", "add", "--reason", "holidays")
    assert taskmesh.done("schedules", "--json").json[0]["paused"] is True
    assert taskmesh.done("resume-schedule", "add").out.startswith("schedule add is active again")
    triggered = taskmesh.done("trigger", "add", "--json").json
    assert triggered["key"].startswith("add@by-hand-")
    assert taskmesh.status("add", triggered["key"]) == "INIT"
    assert taskmesh.done("unschedule", "add").out == "schedule add is removed\n"
    assert taskmesh.done("schedules", "--json").json == []
    assert taskmesh("trigger", "add").status == 1


def test_what_a_limit_would_do_is_told_and_not_done(taskmesh: Shell) -> None:
    for key in ("a", "b", "c"):
        taskmesh.done("publish", "add", key)
    told = taskmesh.done("limit", "default", "--running", "2", "--dry-run").out
    assert told == "queue default: 0 run and 3 wait, of which 3 could start now and 2 then\n"
    effect = taskmesh.done("limit", "default", "--rate", "1", "--dry-run", "--json").json
    assert (effect["claimable_now"], effect["claimable_then"], effect["limits_then"]["per_ms"]) == (3, 1, 1_000)
    assert taskmesh.done("limit", "default", "--group", "g", "--running", "0", "--dry-run").status == 0
    [queue] = taskmesh.done("queues", "--json").json
    assert (queue["limits"]["running"], queue["limits"]["rate"], queue["limits"]["groups"]) == (None, None, {})
    assert taskmesh("limit", "default", "--dry-run").status == 2


def test_a_schedule_is_created_and_changed(taskmesh: Shell) -> None:
    created = taskmesh.done(
        "schedule", "nightly", "add", '{"a": 1, "b": 2}', "--cron", "0 3 * * *", "--option", "priority=5"
    )
    assert created.out.startswith("schedule nightly publishes add: At 03:00 every day (UTC); next 20")
    assert created.out.count(" 03:00:00") == 5
    changed = taskmesh.done("schedule", "nightly", "--interval-ms", "60000", "--overlap", "skip", "--json").json
    assert (changed["cron"], changed["interval_ms"], changed["overlap"]) == (None, 60_000, "skip")
    assert (changed["name"], changed["params"], changed["settings"]) == ("add", {"a": 1, "b": 2}, {"priority": 5})
    tried = taskmesh.done("schedule", "nightly", "--cron", "*/5 * * * *", "--dry-run", "--json").json
    assert (tried["words"], len(tried["times"])) == ("Every fifth minute of every hour (UTC)", 5)
    assert taskmesh.done("schedules", "--json").json[0]["interval_ms"] == 60_000, "a dry run changes nothing"
    refused = taskmesh("schedule", "new", "--cron", "0 3 * * *")
    assert (refused.status, "to create it, name the task" in refused.err) == (2, True)


def test_a_paused_queue_that_was_a_typo_is_forgotten(taskmesh: Shell) -> None:
    taskmesh.done("pause", "mial", "--reason", "typo")
    assert taskmesh.done("forget-queue", "mial", "--yes").out == "the settings of queue mial are removed\n"
    assert taskmesh.done("queues", "--json").json == []
    assert "nothing is set for a queue 'mial'" in taskmesh("forget-queue", "mial", "--yes").err
