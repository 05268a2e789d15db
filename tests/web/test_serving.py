"""`taskmesh web` as a process: how it starts, how it ends, and what it says of that."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.shell import Shell, shell_in
from tests.web.serving import serve


@pytest.fixture
def taskmesh(mongo_uri: str, database: str, tmp_path: Path) -> Iterator[Shell]:
    """`taskmesh` on the session's MongoDB."""
    with shell_in(tmp_path, mongo_uri, database) as shell:
        yield shell


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_0_when_it_is_told_to_stop_whoever_watches(taskmesh: Shell, number: signal.Signals) -> None:
    started, url = serve(taskmesh)
    with httpx.stream("GET", f"{url}/live", timeout=30) as watching:
        assert next(watching.iter_raw())
        started.signal(number)
        assert started.wait() == 0
    assert "Traceback" not in started.err


def test_a_port_that_is_taken_is_told_in_a_sentence_with_the_remedy(taskmesh: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = taskmesh("web", "--port", str(taken.getsockname()[1]))
    assert (ended.status, ended.out) == (1, "")
    assert "taken" in ended.err
    assert "--port" in ended.err
    assert "Traceback" not in ended.err


def test_an_address_of_another_machine_is_told_in_a_sentence(taskmesh: Shell) -> None:
    ended = taskmesh("web", "--host", "192.0.2.1", TASKMESH_WEB_TOKEN="a-token-of-some-length")
    assert ended.status == 1
    assert "--host" in ended.err


def test_behind_a_proxy_that_strips_a_path_all_links_lead_through_it(taskmesh: Shell) -> None:
    started, url = serve(taskmesh, "--base-path", "ops/mesh/")
    page = httpx.get(f"{url}/tasks").text
    assert 'href="/ops/mesh/static/style.css' in page
    assert 'href="/ops/mesh/workers"' in page
    task = {"name": "work", "key": "k"}
    answer = httpx.post(f"{url}/do/tasks.publish", data=task, headers={"Origin": url, "X-Forwarded-For": "203.0.113.9"})
    assert answer.headers["location"] == "/ops/mesh/"
    started.says("tasks.publish by the dashboard, from 203.0.113.9: name 'work', key 'k'")
    assert started.stop() == 0
