"""What every command has in common: where it connects, and how it ends."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
import typer

from taskmesh.cli.app import app
from taskmesh.cli.connected import patient_for
from taskmesh.model import distribution
from tests.cli.shell import Shell
from tests.mongod import Mongod


def test_the_place_can_be_given_after_the_command_before_it_and_by_environment(taskmesh: Shell) -> None:
    there = ["--uri", taskmesh.uri, "--database", taskmesh.database]
    nothing = {"TASKMESH_URI": "", "TASKMESH_DATABASE": ""}
    taskmesh.done("publish", "add", "k")
    for words in (["ls", "--json", *there], [*there, "ls", "--json"]):
        assert [task["key"] for task in taskmesh.done(*words, **nothing).json] == ["k"]
    assert [task["key"] for task in taskmesh.done("ls", "--json").json] == ["k"]


def test_every_command_takes_both() -> None:
    commands: dict[str, click.Command] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert {"uri", "database"} <= {parameter.name for parameter in command.params}, name


def test_what_starts_a_server_cannot_be_told_its_uri(taskmesh: Shell) -> None:
    ended = taskmesh("dev", "--uri", taskmesh.uri)
    assert (ended.status, ended.out) == (2, "")
    assert "starts a MongoDB of its own" in ended.err


def test_an_option_counts_more_than_the_environment(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k")
    assert taskmesh.done("ls", "--json", "--database", f"{taskmesh.database}_other").json == []


def test_another_collection(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k", "--collection", "jobs")
    assert taskmesh.done("ls", "--json").json == []
    assert len(taskmesh.done("ls", "--json", "--collection", "jobs").json) == 1


WRONG: list[list[str]] = [
    ["nothing"],
    ["ls", "--nothing"],
    ["ls", "--limit", "x"],
    ["ls", "--status", "x"],
    ["publish", "add", "k", "{}", "--option", "key=other"],
    ["publish", "add", "k", "{}", "--option", "self=1"],
    ["set-option", "add", "k", "priority=1", "priority=2"],
    ["call", "bulk.delete", "where=name:add", "where=status:FAIL", "dry_run=true"],
    ["publish", "add", "k", "[" * 5_000],
    ["publish", "add", "k", "{}", "--option", "priority=" + "[" * 5_000],
    ["signal", "add", "k", "go", "[" * 5_000],
    ["call", "tasks.publish", "name=add", "key=k", "params=" + '{"a":' * 5_000],
    ["pause", "default", "--for-ms", "99999999999999999"],
    ["set-option", "add", "k", "name=other"],
    ["set-option", "add", "k", "by=somebody else"],
    ["set-option", "add", "k", "key=other", "--dry-run"],
    ["schedule", "s", "add", "--interval-ms", "60000", "--option", "schedule_id=other"],
]


def test_wrong_usage_ends_with_2(taskmesh: Shell, subtests: pytest.Subtests) -> None:
    for words in WRONG:
        with subtests.test(words=words):
            ended = taskmesh.here(*words)
            assert (ended.status, ended.out) == (2, "")
            assert "Traceback" not in ended.err


def test_help_and_version_end_with_0(taskmesh: Shell) -> None:
    assert "worker" in taskmesh.done("--help").out
    assert taskmesh.done("--version").out.startswith("taskmesh ")
    for command in ("worker", "demo", "dev", "publish", "ls", "explain", "web"):
        assert "Usage" in taskmesh.done(command, "--help").out


def test_the_package_can_be_run_as_a_module() -> None:
    command = [sys.executable, "-m", "taskmesh", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, f"taskmesh {distribution.VERSION}\n")


UNREACHABLE: list[tuple[str, str]] = [
    ("mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=200", "no MongoDB answers at 127.0.0.1:1"),
    ("mongodb://127.0.0.1:x/", "the MongoDB URI cannot be used: "),
    ("mongodb://[/", "the MongoDB URI cannot be used: "),
    ("nonsense", "not a MongoDB URI"),
]


def test_a_database_that_cannot_be_reached_is_told_in_a_sentence(taskmesh: Shell, subtests: pytest.Subtests) -> None:
    for uri, told in UNREACHABLE:
        with subtests.test(uri=uri, told=told):
            ended = taskmesh.here("ls", "--uri", uri)
            assert (ended.status, ended.out) == (1, "")
            assert ended.err.startswith(f"taskmesh: {told}")
            assert len(ended.err.splitlines()) == 1


def test_t23_a_standalone_server_is_refused_with_the_remedy(taskmesh: Shell, standalone_mongod: Mongod) -> None:
    for words in (["ls"], ["worker", "app:mesh"]):
        ended = taskmesh(*words, "--uri", standalone_mongod.uri)
        assert ended.status == 1
        assert "--replSet" in ended.err.splitlines()[-1]
        assert "Traceback" not in ended.err


def test_without_the_extra_it_says_what_to_install() -> None:
    script = "import sys; sys.modules['typer'] = None; from taskmesh.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == f"taskmesh: the command line needs typer: {distribution.install('cli')}\n"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("mongodb://h", "mongodb://h/?serverSelectionTimeoutMS=5"),
        (
            "mongodb://u:p%40@a:1,b:2/?replicaSet=rs0",
            "mongodb://u:p%40@a:1,b:2/?replicaSet=rs0&serverSelectionTimeoutMS=5",
        ),
        ("mongodb://h/?serverselectiontimeoutms=9", "mongodb://h/?serverselectiontimeoutms=9"),
        ("mongodb+srv://h/db", "mongodb+srv://h/db?serverSelectionTimeoutMS=5"),
    ],
)
def test_a_command_is_less_patient_than_a_service(uri: str, expected: str) -> None:
    assert patient_for(uri, 5) == expected
