"""`taskmesh dev`, and commands without any URI: the embedded MongoDB of the directory."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pymongo import MongoClient

from tests.cli.shell import DEADLINE_S, Shell, shell_in
from tests.embedded.users import servers_in
from tests.waiting import wait_until


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Shell]:
    """`taskmesh` in a directory where nothing runs before, or may run after the test."""
    with shell_in(tmp_path, "", "") as shell:
        yield shell
    wait_until(lambda: not servers_in(tmp_path / ".taskmesh"), DEADLINE_S, what="the embedded MongoDB has gone")


def test_it_prints_the_uri_and_runs_until_it_is_told_to_stop(alone: Shell) -> None:
    dev = alone.start("dev", "--database", "app")
    dev.says("stop   Ctrl-C")
    assert "' TASKMESH_DATABASE=app\n" in dev.out
    [uri] = set(re.findall(r"mongodb://[^\s']+", dev.out))
    with MongoClient[dict[str, object]](uri) as client:
        assert client.admin.command("ping")["ok"] == 1
    alone.done("publish", "add", "k", '{"a": 1, "b": 2}')
    alone.done("worker", "app:mesh", "--until-idle", APP_DATABASE="taskmesh")
    assert alone.done("show", "add", "k", "--json").json["status"] == "SUCCESS"
    dev.signal(signal.SIGINT)
    assert dev.wait() == 0


def test_as_json_it_tells_the_same(alone: Shell) -> None:
    dev = alone.start("dev", "--json", "--directory", "here")
    dev.says("}")
    told = json.loads(dev.out)
    assert told["uri"].startswith("mongodb://127.0.0.1:")
    assert told["directory"] == str(alone.directory / "here")
    assert dev.stop() == 0
    wait_until(lambda: not servers_in(alone.directory / "here"), DEADLINE_S)


def test_it_says_when_the_server_dies(alone: Shell) -> None:
    dev = alone.start("dev", "--json")
    dev.says("}")
    os.kill(json.loads(dev.out)["pid"], signal.SIGKILL)
    assert dev.wait() == 1
    assert "ended unexpectedly" in dev.err


def test_a_listing_without_any_server_starts_one_and_takes_it_down_again(alone: Shell) -> None:
    assert alone.done("ls", "--json").json == []
