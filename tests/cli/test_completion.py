"""Tab: names, keys, workers, queues and schedules as the database has them; silence where it cannot be asked."""

from __future__ import annotations

import pytest

from tests.cli.shell import Shell


def offered(taskmesh: Shell, words: str, **environment: str) -> list[str]:
    """Return what bash is offered for the word after these."""
    asked = {"_TASKMESH_COMPLETE": "complete_bash", "COMP_WORDS": f"taskmesh {words}", "COMP_CWORD": ""}
    asked["COMP_CWORD"] = str(len(asked["COMP_WORDS"].split(" ")) - 1)
    return taskmesh.done(**asked | environment).out.split()


@pytest.fixture
def known(taskmesh: Shell) -> Shell:
    """Three tasks in two queues, and a worker that knows more names."""
    taskmesh.done("publish", "add", "one", "--queue", "urgent")
    taskmesh.done("publish", "add", "once")
    taskmesh.done("publish", "other", "k")
    return taskmesh


def test_words_come_from_the_database(known: Shell) -> None:
    assert offered(known, "show ") == ["add", "other"]
    assert offered(known, "explain o") == ["other"]
    assert offered(known, "retry add on") == ["once", "one"]
    assert offered(known, "pause u") == ["urgent"]
    assert offered(known, "ls --status F") == ["FAIL"]


def test_workers_and_what_they_know_are_offered(known: Shell) -> None:
    known.worker("--worker-id", "w7")
    assert offered(known, "stop-worker ") == ["w7"]
    assert offered(known, "publish n") == ["nap"]


def test_where_there_is_no_database_nothing_is_offered_and_nothing_is_said(taskmesh: Shell) -> None:
    for uri in ("mongodb://127.0.0.1:1/", "nonsense", ""):  # "": no embedded MongoDB is started for this
        assert offered(taskmesh, "show ", TASKMESH_URI=uri) == []
    assert not (taskmesh.directory / ".taskmesh").exists()
