"""What is wrong is said in one sentence: the value, and what to do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from taskmesh import InvalidName, InvalidOption, NotAReplicaSet, TaskFilter, TaskMesh, TaskMeshError
from taskmesh.model.task import Status
from tests.cli.shell import Shell
from tests.mongod import Mongod


async def refusal(mesh: TaskMesh, kind: type[TaskMeshError] = TaskMeshError) -> str:
    """Why it cannot connect: as a text, which keeps no frame and so no socket alive."""
    with pytest.raises(kind) as caught:
        await mesh.connect()
    return str(caught.value)


async def test_another_replica_set_is_named_at_once(mongo_uri: str) -> None:
    began = time.monotonic()
    said = await refusal(TaskMesh(mongo_uri.replace("replicaSet=rs0", "replicaSet=rs9")))
    seed = mongo_uri.partition("//")[2].partition("/")[0]
    assert said == f"the MongoDB at {seed} is a member of replica set 'rs0', not 'rs9': write replicaSet=rs0 in the URI"
    assert time.monotonic() - began < 8, "the driver looks for 30 s"


async def test_a_standalone_server_is_told_from_none_though_a_replica_set_was_asked_for(
    standalone_mongod: Mongod,
) -> None:
    said = await refusal(
        TaskMesh(f"{standalone_mongod.uri.partition('?')[0].rstrip('/')}/?replicaSet=rs0"), NotAReplicaSet
    )
    assert "is a standalone server, not a member of replica set 'rs0': start it with --replSet rs0" in said


async def test_a_set_of_which_nobody_answers_is_named_by_its_address() -> None:
    said = await refusal(TaskMesh("mongodb://127.0.0.1:1/?replicaSet=rs0&serverSelectionTimeoutMS=300"))
    assert said.startswith("no MongoDB answers at 127.0.0.1:1: start one")


async def test_a_host_that_cannot_be_resolved_is_named() -> None:
    said = await refusal(TaskMesh("mongodb+srv://u:secret@x.invalid/?serverSelectionTimeoutMS=300"))
    assert said.startswith("the host 'x.invalid' of the mongodb+srv:// URI cannot be resolved: correct its name")
    assert "secret" not in said
    assert "None" not in said


@pytest.mark.parametrize("name", ["a b", "a/b", "", "a.b", "$x", 7])
async def test_a_name_that_mongodb_refuses_is_our_error(mongo_uri: str, name: str) -> None:
    said = await refusal(TaskMesh(mongo_uri, database=name), InvalidName)
    assert said.startswith(f"database must be a name that MongoDB allows, got {name!r}: ")


async def test_a_collection_that_mongodb_refuses_is_our_error(mongo_uri: str, database: str) -> None:
    for name in ("a$b", "", "a..b"):
        said = await refusal(TaskMesh(mongo_uri, database=database, collection=name), InvalidName)
        assert said.startswith(f"collection must be a name that MongoDB allows, got {name!r}: ")


def test_the_command_line_ends_with_2_for_such_a_name(taskmesh: Shell) -> None:
    taskmesh.refuses("ls", "--database", "a b", told="database must be a name that MongoDB allows, got 'a b'")


def test_a_task_is_given_a_function() -> None:
    mesh = TaskMesh()
    with pytest.raises(InvalidOption, match=r"got 'resize': write @mesh.task\(name='resize'\)"):
        mesh.task("resize")  # type: ignore[call-overload]  # that is the mistake


FILTERS: list[tuple[str, str]] = [
    ("name:x AND status:FAIL", "AND is not part of a filter: all conditions have to hold"),
    ("status:FAIL or status:INIT", "or is not part of a filter: "),
    ("not status:FAIL", "not is not part of a filter: "),
    (
        "status:RED",
        f"the status in a filter must be one of {', '.join(Status)}, ready, scheduled, retrying, got 'RED'",
    ),
    ("name:", "the name in a filter must be a text of 1 to 512 characters, got ''"),
    ("age>9999d", "the age in a filter must be from 0 to 3660d"),
    ("age>soon", "a duration must be a number with its unit"),
    ("lost:maybe", "lost: must be yes or no, got 'maybe'"),
    ("colour:red", "a filter has no field colour:"),
]


def test_what_a_filter_cannot_say_is_told_in_words(taskmesh: Shell, subtests: pytest.Subtests) -> None:
    for text, told in FILTERS:
        with subtests.test(text=text):
            with pytest.raises(InvalidOption) as caught:
                TaskFilter.parse(text)
            assert str(caught.value).startswith(told)
            assert "Input should" not in str(caught.value)
            taskmesh.refuses("ls", "--where", text, told=told)
    assert TaskFilter.parse("key:and").key_prefix == "and"
    with pytest.raises(InvalidOption, match=r"a filter has no field 'colour': there are status, lost.*, got 'red'"):
        TaskFilter.checked(colour="red")
    with pytest.raises(InvalidOption, match=r"the queue in a filter must be a text .*, got 7"):
        TaskFilter.checked(queue=7)


def test_what_the_command_line_says_names_no_calls_of_python(taskmesh: Shell) -> None:
    for words in (["trigger", "s"], ["unschedule", "s", "--yes"], ["undo", "nothing"], ["stop-worker", "w"]):
        ended = taskmesh.here(*words)
        assert ended.status in (1, 2)
        assert "await" not in ended.err
        assert "mesh." not in ended.err


def test_output_that_the_terminal_cannot_show_is_escaped(taskmesh: Shell) -> None:
    key = "Straße–7"
    taskmesh.done("publish", "add", key, '{"a": 1, "b": 2}')
    ascii_alone = {"PYTHONIOENCODING": "ascii"}
    commands = (["ls"], ["show", "add", key], ["explain", "add", key], ["workers"], ["ls", "--json"], ["--help"])
    ended = {" ".join(words): taskmesh.done(*words, **ascii_alone) for words in commands}
    assert all("Traceback" not in each.err and each.out.isascii() for each in ended.values())
    assert r"Stra\xdfe\u20137" in ended["ls"].out
    assert [task["key"] for task in ended["ls --json"].json] == [key]
    assert taskmesh("show", "add", "ß", **ascii_alone).status == 1


def test_an_error_of_ours_in_the_users_module_is_one_sentence_and_one_line(tmp_path: Path, taskmesh: Shell) -> None:
    (tmp_path / "broken.py").write_text(
        "import sys\n"
        "sys.modules['cronsim'] = None\n"
        "from taskmesh import TaskMesh\n"
        "mesh = TaskMesh()\n"
        "@mesh.task(cron='* * * * *')\n"
        "async def nightly() -> None: ...\n"
    )
    for words in (["worker", "broken:mesh"], ["ls", "--app", "broken:mesh"]):
        ended = taskmesh(*words)
        assert ended.status == 1
        [line] = ended.err.splitlines()
        assert line.startswith("taskmesh: importing 'broken' failed: cron needs the package cronsim: pip install ")
        assert line.endswith("broken.py, line 5)")
