"""`taskmesh ls`, `show` and `explain`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from datetime import datetime

import pytest
from pymongo import MongoClient

from taskmesh import TaskMesh
from taskmesh.model.task import Status
from tests.cli.shell import Shell, defined, shell_in


@pytest.fixture(scope="module")
def three(mongo_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A finished task, a failed one, and one that waits in another queue; for tests that only look."""
    with shell_in(tmp_path_factory.mktemp("three"), mongo_uri, f"test_{uuid.uuid4().hex[:16]}") as shell:
        _fill(shell)
        yield shell
        with MongoClient[dict[str, object]](mongo_uri) as client:
            client.drop_database(shell.database)


def _fill(taskmesh: Shell) -> None:
    asyncio.run(_filled(TaskMesh(taskmesh.uri, database=taskmesh.database)))


async def _filled(mesh: TaskMesh) -> None:
    async with defined(mesh):
        await mesh.publish("add", "sum", {"a": 1, "b": 2})
        await mesh.publish("refuse", "no", {"why": "it rained"})
        await mesh.publish("nap", "later", {"ms": 1}, queue="slow", priority=3)
        await mesh.consumer(worker_id="w1", queues=["default"]).run(until_idle=True)


@pytest.mark.parametrize(
    ("filters", "keys"),
    [
        ([], ["later", "no", "sum"]),
        (["--by-key"], ["sum", "later", "no"]),
        (["--name", "add"], ["sum"]),
        (["--status", "FAIL"], ["no"]),
        (["--status", "fail", "--status", "success"], ["no", "sum"]),
        (["--queue", "slow"], ["later"]),
        (["--key-prefix", "la"], ["later"]),
        (["--name", "nap", "--status", "SUCCESS"], []),
        (["--limit", "1"], ["later"]),
        (["--by-key", "--limit", "1"], ["sum"]),
    ],
)
def test_filters(three: Shell, filters: list[str], keys: list[str]) -> None:
    assert [task["key"] for task in three.done("ls", "--json", *filters).json] == keys


def test_tasks_as_a_table(three: Shell) -> None:
    header, *rows = three.done("ls", "--by-key").out.splitlines()
    assert header.split() == ["NAME", "KEY", "STATUS", "QUEUE", "PRIO", "FAILED", "LOST", "WORKERS", "NEXT", "CREATED"]
    assert [row.split()[:8] for row in rows] == [
        ["add", "sum", "SUCCESS", "default", "0", "0", "0", "w1"],
        ["nap", "later", "ready", "slow", "3", "0", "0", "–"],
        ["refuse", "no", "FAIL", "default", "0", "1", "0", "w1"],
    ]


def test_params_are_listed_only_when_asked_for(three: Shell) -> None:
    assert "params" not in three.done("ls", "--json", "--name", "add").json[0]
    assert three.done("ls", "--json", "--name", "add", "--params").json[0]["params"] == {"a": 1, "b": 2}
    assert '{"a": 1, "b": 2}' in three.done("ls", "--params").out


def test_a_full_page_says_that_there_may_be_more(three: Shell) -> None:
    assert "the newest 2; --limit 0 lists all" in three.done("ls", "--limit", "2").out
    assert "the first 2; --limit 0 lists all" in three.done("ls", "--by-key", "--limit", "2").out
    assert "--limit 0" not in three.done("ls", "--limit", "4").out


def test_no_tasks_at_all(taskmesh: Shell) -> None:
    assert taskmesh.done("ls").out.startswith("no tasks; looked at ")
    assert taskmesh.done("ls", "--json").json == []


def test_one_task_as_json(three: Shell) -> None:
    task = three.done("show", "add", "sum", "--json").json
    assert (task["name"], task["key"], task["status"], task["queue"]) == ("add", "sum", "SUCCESS", "default")
    [entry] = task["task_state"]["worker_states"]
    assert (entry["worker_id"], entry["state"], entry["returns"]) == ("w1", "SUCCESS", 3)
    for moment in (task["task_state"]["create_time"], entry["start_time"], entry["success_time"]):
        assert datetime.fromisoformat(moment).tzinfo is not None


def test_one_task_for_people(three: Shell) -> None:
    shown = three.done("show", "refuse", "no").out
    assert '{"why": "it rained"}' in shown
    assert "FAIL" in shown
    assert "it rained" in shown.splitlines()[-1]


def test_a_tasks_life_as_bars_over_time_and_in_order(three: Shell) -> None:
    shown = three.done("show", "refuse", "no", "--timeline").out
    bar = next(line for line in shown.splitlines() if "█" in line)
    assert bar.startswith("w1")
    assert "FAIL" in bar
    happened = three.done("show", "refuse", "no", "--timeline", "--json").json["timeline"]
    assert [each["what"] for each in happened] == ["published", "claimed", "FAIL: it rained", "finished: FAIL"]
    assert [each["worker_id"] for each in happened] == [None, "w1", "w1", None]
    times = [datetime.fromisoformat(each["time"]) for each in happened]
    assert times == sorted(times)
    assert "█" not in three.done("show", "nap", "later", "--timeline").out


def test_what_fails_is_told_with_how_to_see_it_and_to_retry_it(three: Shell) -> None:
    told = three.done("errors").out
    for part in (
        "refuse  it rained  1 failed",
        "one of them: taskmesh show refuse no\n",
        "these and others like them (1 task): taskmesh retry --where \"name:refuse status:FAIL error:'it rained'\"\n",
        "2 tasks were looked at",
    ):
        assert part in told
    [group] = three.done("errors", "--json").json
    assert (group["name"], group["error"], group["failed"], group["retrying"]) == ("refuse", "it rained", 1, 0)
    assert (group["fits"], group["looked_at"], group["complete"]) == (1, 2, True)
    assert [task["key"] for task in three.done("ls", "--where", group["where"], "--json").json] == ["no"]
    assert three.done("errors", "--name", "add").out.startswith("nothing fails")
    assert three.done("errors", "--name", "add", "--json").json == []


def test_a_sample_of_what_fails_is_not_taken_for_all(taskmesh: Shell) -> None:
    tasks = "\n".join(
        f'{{"key": "k{n:02}", "params": {{"why": "it {"snowed" if n else "rained"}"}}}}' for n in range(30)
    )
    taskmesh.done("publish", "refuse", "--from-file", "-", typed=tasks)
    taskmesh.done("worker", "app:mesh", "--until-idle")
    sample = taskmesh.done("errors", "--at-most", "1", "--json")
    assert sample.err == f"warning: {sample.json[0]['looked_at']} tasks were looked at; there are more\n"
    assert not sample.json[0]["complete"]
    assert (sample.json[0]["failed"], sample.json[0]["fits"]) == (sample.json[0]["looked_at"], 29)
    told = taskmesh.done("errors", "--at-most", "1").out
    assert "these and others like them (29 tasks): " in told
    assert "there are more, --at-most N looks at more of them" in told
    assert all(group["complete"] for group in taskmesh.done("errors", "--json").json)


def test_a_task_that_is_not_there(taskmesh: Shell) -> None:
    for command in ("show", "explain", "retry", "cancel", "delete"):
        ended = taskmesh(command, "add", "nobody")
        assert (ended.status, ended.out) == (1, ""), command
        assert ended.err.startswith("taskmesh: there is no task"), command
        assert len(ended.err.splitlines()) == 1


def test_explain_begins_with_a_sentence(three: Shell) -> None:
    three.done("pause", "slow", "--reason", "maintenance")
    assert "finished: SUCCESS" in three.done("explain", "add", "sum").out.splitlines()[0]
    told = three.done("explain", "nap", "later").out
    assert "Nobody can claim it" in told.splitlines()[0]
    assert told.splitlines()[0].endswith("No worker is alive.")
    first_gate = told.splitlines()[4].split()
    assert first_gate[:2] == ["SHUT", "queue"]
    three.done("resume", "slow")
    assert "It can be claimed now" in three.done("explain", "nap", "later").out.splitlines()[0]


def test_explain_for_one_worker_as_json(three: Shell) -> None:
    [explanation] = three.done("explain", "nap", "later", "--worker-id", "w9", "--json").json
    assert explanation["worker_id"] == "w9"
    assert explanation["claimable"] is True
    assert {"name", "open", "reason"} <= explanation["gates"][0].keys()
    assert all(gate["open"] for gate in explanation["gates"])


def test_explain_tells_what_keeps_a_worker_from_what_waits(taskmesh: Shell) -> None:
    taskmesh.worker("--worker-id", "w1", "--names", "add", "--concurrency", "1")
    for key in ("a", "b", "c"):
        taskmesh.done("publish", "nap", key, '{"ms": 1}')
    taskmesh.done("publish", "add", "theirs", '{"a": 1, "b": 2}', "--option", 'specific_worker_ids=["w2"]')
    taskmesh.done("publish", "add", "later", '{"a": 1, "b": 2}', "--delay-ms", "3600000")
    naps, *adds = taskmesh.done("explain", "--worker-id", "w1", "--json").json
    assert (naps["name"], naps["tasks"], naps["example_key"]) == ("nap", 3, "a")
    assert naps["shut"] == ["worker runs such tasks"]
    assert naps["reasons"] == ["does not run tasks named 'nap' from queue 'default'"]
    assert {group["example_key"]: group["shut"] for group in adds} == {
        "theirs": ["worker allowed"],
        "later": ["started"],
    }
    told = taskmesh.done("explain", "--worker", "w1").out
    assert told.startswith("w1 could claim 0 of the 5 tasks that wait now.\n")
    assert len(taskmesh.done("explain", "add", "--worker-id", "w1", "--json").json) == 2
    assert "no task waits; looked at " in taskmesh.done("explain", "refuse", "--worker-id", "w1").out
    assert taskmesh.done("explain", "--worker-id", "w2").out.splitlines()[0] == (
        "w2 could claim 4 of the 5 tasks that wait now. But no worker with the id 'w2' is registered."
    )
    assert taskmesh("explain", "add").status == 2


def test_explain_says_if_nobody_has_the_id_that_it_is_asked_about(three: Shell) -> None:
    told = three.done("explain", "nap", "later", "--worker-id", "typo").out.splitlines()[0]
    assert (
        told == "nap later: A worker with this id could claim it now, but no worker with the id 'typo' is registered."
    )
    three.done("pause", "slow")
    told = three.done("explain", "nap", "later", "--worker-id", "typo").out.splitlines()[0]
    assert told.endswith("And no worker with the id 'typo' is registered.")
    three.done("resume", "slow")
    as_json = three.done("explain", "nap", "later", "--worker-id", "typo", "--json")
    assert as_json.err == "warning: no worker with the id 'typo' is registered\n"
    assert three.done("explain", "nap", "later", "--worker-id", "w1", "--json").err == ""


def test_what_users_put_into_keys_cannot_move_the_terminals_cursor(taskmesh: Shell) -> None:
    key = "\x1b[31mred\x1b[2J [bold]b[/bold] \u202ex"
    taskmesh.done("publish", "add", key)
    for shown in (taskmesh.done("ls").out, taskmesh.done("show", "add", key).out):
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "\\x1b[31mred\\x1b[2J [bold]b[/bold] \\u202ex" in shown
    assert taskmesh.done("ls", "--json").json[0]["key"] == key


def test_a_pipe_gets_no_colours_and_every_row_whole(taskmesh: Shell) -> None:
    key = "k" * 400
    taskmesh.done("publish", "add", key)
    assert f"add   {key}  ready" in taskmesh.done("ls", COLUMNS="40").out


async def test_a_listing_goes_on_while_somebody_else_creates_the_indexes(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    await mesh.publish("add", "k")
    with MongoClient[dict[str, object]](mongo_uri) as client:
        client[database].tasks.drop_indexes()  # as a first publication leaves it for a moment
    for found in (mesh.find(sort="newest"), mesh.find(status=Status.INIT), mesh.find(queue="default")):
        assert [task.key async for task in found] == ["k"]


@pytest.mark.parametrize("columns", [80, 40])
def test_a_narrow_terminal_shows_key_and_status_whole(taskmesh: Shell, columns: int) -> None:
    key = "2026/11/22/order-4711-of-customer-0815"
    taskmesh.done("publish", "add", key)
    shown = taskmesh.on_a_screen(columns, "ls")
    header, *rows = shown.splitlines()
    assert max(map(len, shown.splitlines())) <= columns
    assert header.split()[:3] == ["NAME", "KEY", "STATUS"]
    assert rows[0].split()[0] == "add"
    assert rows[0].split()[2] == "ready"
    begin, end = header.index("KEY"), header.index("STATUS")
    folded = rows[
        : next(
            at for at, row in enumerate([*rows, ""]) if (at and not row[begin:end].strip()) or "hidden for lack" in row
        )
    ]
    assert "".join(row[begin:end].strip() for row in folded) == key
    assert "hidden for lack of space: " in shown
    for column in ("QUEUE", "WORKERS", "CREATED"):
        assert column in shown


def test_odd_values_become_json(taskmesh: Shell, mongo_uri: str, database: str) -> None:
    taskmesh.done("publish", "add", "k")
    with MongoClient[dict[str, object]](mongo_uri) as client:
        odd = {"nan": float("nan"), "bytes": b"\x00\xff", "time": datetime(2026, 1, 2, 3, 4), "deep": [{"x": b""}]}  # noqa: DTZ001  # as MongoDB stores it
        client[database].tasks.update_one({"_id": "add:k"}, {"$set": {"params": odd, "mine": {"a": 1}}})
    task = taskmesh.done("show", "add", "k", "--json").json
    assert task["params"] == {
        "nan": "nan",
        "bytes": "AP8=",
        "time": "2026-01-02T03:04:00+00:00",
        "deep": [{"x": ""}],
    }
    assert task["extra"] == {"mine": {"a": 1}}
    assert "AP8=" in taskmesh.done("show", "add", "k").out


@pytest.mark.slow
def test_watch_shows_it_again_until_ctrl_c(taskmesh: Shell) -> None:
    watching = taskmesh.start("ls", "--watch", "0.1", "--json")
    watching.says("[]\n", times=3)
    taskmesh.done("publish", "add", "k")
    watching.says('"key": "k"')
    watching.signal(2)
    assert watching.wait() == 0
    assert "Traceback" not in watching.err


def test_a_traceback_that_retries_repeat_is_shown_once(taskmesh: Shell) -> None:
    options = ["--option", "max_unexpected_retries=2", "--option", "unexpected_retry_delay_ms=0"]
    (taskmesh.directory / "failing.py").write_text(
        "from taskmesh import TaskMesh\n"
        "mesh = TaskMesh()\n"
        "@mesh.task\n"
        "async def lookup() -> None:\n"
        "    raise KeyError('which?')\n"
    )
    taskmesh.done("publish", "lookup", "k", "{}", *options)
    started = taskmesh.start("worker", "failing:mesh", "--worker-id", "w1")
    taskmesh.until("FAIL", "lookup", "k")
    assert started.stop() == 0
    shown = taskmesh.done("show", "lookup", "k").out
    assert shown.count("raise KeyError") == 1
    assert "w1 (3 times) failed: KeyError: 'which?'" in shown


def test_what_init_holds_is_shown_and_asked_for(taskmesh: Shell) -> None:
    async def publish() -> None:
        async with TaskMesh(taskmesh.uri, database=taskmesh.database) as mesh:
            await mesh.publish("work", "now")
            await mesh.publish("work", "later", delay_ms=600_000)
            await mesh.publish("work", "ended")
            await mesh.cancel("work", "ended")

    asyncio.run(publish())
    listed = taskmesh.done("ls", "--json").json
    assert {task["key"]: (task["status"], task["standing"]) for task in listed} == {
        "now": ("INIT", "ready"),
        "later": ("INIT", "scheduled"),
        "ended": ("CANCELLED", None),
    }
    rows = [row.split()[1:3] for row in taskmesh.done("ls", "--by-key").out.splitlines()[1:]]
    assert rows == [["ended", "CANCELLED"], ["later", "scheduled"], ["now", "ready"]]
    for word, keys in (("ready", ["now"]), ("Scheduled", ["later"]), ("retrying", []), ("init", ["later", "now"])):
        assert [task["key"] for task in taskmesh.done("ls", "--by-key", "--json", "--status", word).json] == keys, word
    both = taskmesh.done("ls", "--by-key", "--json", "--status", "ready", "--status", "cancelled").json
    assert [task["key"] for task in both] == ["ended", "now"]
    assert "INIT, scheduled" in taskmesh.done("show", "work", "later").out
    assert taskmesh.done("show", "work", "now", "--json").json["standing"] == "ready"
    header, row, *_ = taskmesh.done("stats").out.splitlines()
    assert dict(zip(header.split(), row.split(), strict=True)) == {
        "TASKS": "work",
        "INIT": "2",
        "ready": "1",
        "scheduled": "1",
        "RUNNING": "0",
        "SUCCESS": "0",
        "FAIL": "0",
        "CANCELLED": "1",
        "EXPIRED": "0",
    }
    taskmesh.refuses("ls", "--status", "waiting", told="ready, scheduled, retrying, got 'WAITING'")
