"""The wrong database looks like an empty one: an empty answer says where it looked, and looking creates nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from pymongo import MongoClient

from taskmesh.cli.app import app
from taskmesh.embedded import attach, running_in
from tests.cli.shell import Ended, Shell, shell_in
from tests.mongod import Mongod

EMPTY: list[list[str]] = [
    ["ls"],
    ["ls", "--where", "status:FAIL"],
    ["queues"],
    ["workers"],
    ["schedules"],
    ["stats"],
    ["errors"],
    ["undo"],
    ["audit"],
    ["explain", "--worker-id", "w1"],
    ["retry", "--where", "name:add", "--yes"],
    ["retry", "--where", "name:add", "--dry-run"],
    ["cancel", "--where", "name:add", "--yes"],
    ["purge", "--all", "--yes"],
    ["redrive", "dead", "--yes"],
]


def collections(taskmesh: Shell, database: str) -> list[str]:
    with MongoClient[dict[str, Any]](taskmesh.uri) as client:
        return client[database].list_collection_names()


def test_an_empty_answer_says_where_it_looked_and_creates_nothing(taskmesh: Shell, subtests: pytest.Subtests) -> None:
    typo = f"{taskmesh.database}_typo"
    for words in EMPTY:
        with subtests.test(words=words):
            told = taskmesh.here(*words, "--database", typo)
            assert told.status == 0, told
            assert f"database {typo!r}" in told.out
            assert taskmesh.uri.partition("//")[2].partition("/")[0] in told.out
            assert len(told.out.splitlines()) == 1
            assert collections(taskmesh, typo) == []


def test_what_is_not_there_says_where_it_looked_and_creates_nothing(taskmesh: Shell, subtests: pytest.Subtests) -> None:
    typo = f"{taskmesh.database}_typo"
    for words in (
        ["show", "add", "k"],
        ["explain", "add", "k"],
        ["result", "add", "k"],
        ["retry", "add", "k"],
        ["cancel", "add", "k"],
        ["delete", "add", "k", "--yes"],
        ["set-option", "add", "k", "priority=1"],
        ["stop-worker", "w1"],
        ["pause-schedule", "s"],
        ["trigger", "s"],
        ["unschedule", "s", "--yes"],
    ):
        with subtests.test(words=words):
            told = taskmesh.here(*words, "--database", typo)
            assert (told.status, told.out) == (1, "")
            assert f"database {typo!r}" in told.err
            assert "await" not in told.err
            assert collections(taskmesh, typo) == []


def test_json_stays_json_and_standard_error_says_where_it_looked(taskmesh: Shell) -> None:
    told = taskmesh.here("ls", "--json")
    assert (told.status, told.out) == (0, "[]\n")
    assert f"database {taskmesh.database!r}" in told.err


def test_the_doctor_tells_a_database_without_tasks_from_a_broken_one(taskmesh: Shell) -> None:
    typo = f"{taskmesh.database}_typo"
    told = taskmesh.here("doctor", "--database", typo)
    assert told.status == 0, told
    assert f"no collection 'tasks' in database {typo!r}" in told.out
    assert collections(taskmesh, typo) == []


def test_a_publication_creates_all_that_tasks_need(taskmesh: Shell) -> None:
    new = f"{taskmesh.database}_new"
    taskmesh.done("publish", "add", "k", "--database", new)
    with MongoClient[dict[str, Any]](taskmesh.uri) as client:
        try:
            assert "taskmesh_waiting_in_order" in client[new]["tasks"].index_information()
            assert client[new]["meta"].find_one({"_id": "schema"}) is not None
        finally:
            client.drop_database(new)


def test_a_strangers_collection_is_left_alone_and_told(taskmesh: Shell) -> None:
    with MongoClient[dict[str, Any]](taskmesh.uri) as client:
        theirs = f"{taskmesh.database}_theirs"
        client[theirs]["tasks"].insert_one({"_id": 1})
        try:
            told = taskmesh.here("ls", "--database", theirs)
            assert (told.status, told.out) == (1, "")
            assert f"the collection {theirs}.tasks lacks taskmesh_" in told.err
            assert "name another database" in told.err
            assert client[theirs].list_collection_names() == ["tasks"]
            assert set(client[theirs]["tasks"].index_information()) == {"_id_"}
        finally:
            client.drop_database(theirs)


def test_every_command_that_reads_or_acts_takes_a_mesh_to_look_where_that_one_does() -> None:
    commands: dict[str, click.Command] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    own = {"worker", "dev", "demo", "web"}  # these have a mesh by argument, none, or one for many
    lacking = [
        name for name, command in commands.items() if "app" not in {p.name for p in command.params} and name not in own
    ]
    assert not lacking


def test_app_looks_where_the_mesh_of_the_code_does(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    there = {"APP_URI": taskmesh.uri, "APP_DATABASE": taskmesh.database, "TASKMESH_URI": "", "TASKMESH_DATABASE": ""}
    for words in (["ls"], ["stats"], ["retry", "--where", "name:add", "--dry-run"]):
        assert taskmesh.done(*words, "--app", "app:mesh", "--json", **there).json


def test_a_bulk_action_that_nobody_can_be_asked_about_needs_yes(taskmesh: Shell) -> None:
    for n in range(3):
        taskmesh.done("publish", "add", f"k{n}", '{"a": 1, "b": 2}')
    for words in (["retry"], ["cancel"], ["delete"], ["purge"]):
        refused = taskmesh(*words, "--where", "name:add")
        assert (refused.status, refused.out) == (2, ""), words
        assert "--yes" in refused.err
        assert taskmesh.done(*words, "--where", "name:add", "--dry-run").status == 0
    assert taskmesh.done("stats", "--json").json["counts"] == {"add": {"INIT": 3}}
    assert taskmesh.done("cancel", "--where", "name:add", "--yes").out == "cancel: 3 of 3 tasks\n"


def test_redrive_counts_asks_and_sends_dead_letters_back(taskmesh: Shell) -> None:
    for n in range(2):
        taskmesh.done("publish", "refuse", f"k{n}", '{"why": "it rained"}', "--option", "on_fail=dead")
    assert taskmesh.worker("--until-idle").wait() == 0
    shown = taskmesh.done("show", "refuse", "k0").out
    assert "dead letter from" in shown
    assert "default" in shown
    refused = taskmesh("redrive", "dead")
    assert (refused.status, refused.out) == (2, "")
    assert "--yes" in refused.err
    assert taskmesh.done("redrive", "dead", "--dry-run").out == "2 tasks match 'status:FAIL queue:dead'\n"
    assert taskmesh.done("redrive", "dead", "--yes").out == "redrive: 2 of 2 tasks\n"
    assert taskmesh.done("stats", "--json").json["counts"] == {"refuse": {"INIT": 2}}


def test_purge_needs_a_filter_or_all(taskmesh: Shell) -> None:
    for words in (
        ["purge"],
        ["purge", "--yes"],
        ["purge", "--all", "--where", "age>1h", "--yes"],
        ["purge", "--where", ""],
    ):
        taskmesh.refuses(*words, told="--all")


def test_health_asks_for_a_worker_that_is_alive(taskmesh: Shell) -> None:
    nobody = taskmesh("health")
    assert (nobody.status, nobody.out) == (1, "")
    assert "no worker is alive" in nobody.err
    assert f"database {taskmesh.database!r}" in nobody.err
    assert collections(taskmesh, f"{taskmesh.database}_typo") == []
    worker = taskmesh.worker("--worker-id", "w1")
    assert taskmesh.done("health").out == "healthy\n"
    assert taskmesh.done("health", "--app", "app:mesh", APP_URI=taskmesh.uri).out == "healthy\n"
    assert worker.stop() == 0
    assert taskmesh("health", "--json").json["healthy"] is False


def timed_health(directory: Path, *words: str) -> tuple[float, Ended]:
    """Ask by a process that has imported everything: a start on a busy machine takes longer than what is measured."""
    with shell_in(directory, "", "") as shell:
        began = time.monotonic()
        ended = shell("health", *words)
        return time.monotonic() - began, ended


@pytest.mark.lasting
def test_health_is_bounded_though_the_server_is_frozen(own_mongod: Mongod, tmp_path: Path) -> None:
    own_mongod.suspend()
    try:
        took, ended = timed_health(tmp_path, "--uri", own_mongod.uri, "--timeout-ms", "2000")
    finally:
        own_mongod.resume()
    assert (ended.status, ended.out) == (1, "")
    assert "did not answer within 2000 ms" in ended.err or "no MongoDB answers" in ended.err
    assert took < 12  # on a machine that is busy


@pytest.mark.lasting
def test_health_is_bounded_though_the_embedded_server_is_frozen_and_starts_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TASKMESH_URI", raising=False)
    _, none = timed_health(tmp_path)
    assert (none.status, none.out) == (1, "")
    assert "no embedded MongoDB answers in this directory" in none.err
    assert not (tmp_path / ".taskmesh").exists()
    with attach(tmp_path / ".taskmesh") as server:
        assert running_in(tmp_path / ".taskmesh") == server.uri
        _, alone = timed_health(tmp_path)
        assert "no worker is alive" in alone.err
        os.kill(server.pid, signal.SIGSTOP)
        try:
            took, ended = timed_health(tmp_path)
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert (ended.status, ended.out) == (1, "")
    assert took < 15


NOWHERE = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=300"


@pytest.mark.parametrize("words", [[], ["--processes", "1", "--max-rss-mb", "4000"]], ids=["alone", "supervised"])
def test_a_uri_in_the_code_wins_over_the_environment_and_the_worker_says_so(taskmesh: Shell, words: list[str]) -> None:
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    own = {"APP_URI": taskmesh.uri, "TASKMESH_URI": NOWHERE.replace("//", "//ann:s3cret@")}
    ended = taskmesh.done("worker", "app:mesh", "--until-idle", *words, **own)
    assert taskmesh.status("add", "k") == "SUCCESS"
    hosts = taskmesh.uri.partition("//")[2].partition("/")[0]
    told = f"connects to {hosts}, as given in the code, and not to 127.0.0.1:1, which TASKMESH_URI names"
    assert (ended.out + ended.err).count(told) == 1
    assert "s3cret" not in ended.out + ended.err


@pytest.mark.parametrize("before", [True, False], ids=["before the command", "after it"])
@pytest.mark.parametrize("words", [[], ["--processes", "1", "--max-rss-mb", "4000"]], ids=["alone", "supervised"])
def test_uri_on_the_command_line_wins_over_the_code_and_the_environment(
    taskmesh: Shell, words: list[str], before: bool
) -> None:
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    own = {"APP_URI": NOWHERE, "TASKMESH_URI": NOWHERE}
    given = ["--uri", taskmesh.uri]
    command = ["worker", "app:mesh", "--until-idle", *words]
    ended = taskmesh.done(*([*given, *command] if before else [*command, *given]), **own)
    assert taskmesh.status("add", "k") == "SUCCESS"
    assert (ended.out + ended.err).count("which TASKMESH_URI names") == 1


def test_app_looks_where_the_code_says_though_the_environment_says_otherwise(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    assert taskmesh.done("ls", "--app", "app:mesh", "--json", APP_URI=taskmesh.uri, TASKMESH_URI=NOWHERE).json
    given = ["--uri", taskmesh.uri]
    assert taskmesh.done("ls", "--app", "app:mesh", "--json", *given, APP_URI=NOWHERE, TASKMESH_URI=NOWHERE).json
    assert taskmesh.done("ls", "--app", "app:mesh", "--json").json, "else where the environment does"
