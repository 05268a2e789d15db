"""`taskmesh call`: any operation of the REST API, on the database itself."""

from __future__ import annotations

import json

from taskmesh.operations.table import OPERATIONS
from tests.cli.shell import Shell


def test_each_operation_is_listed_without_a_database(taskmesh: Shell) -> None:
    listed = taskmesh.here("call", "--uri", "mongodb://127.0.0.1:1")
    assert listed.status == 0
    assert [line.split()[0] for line in listed.out.splitlines()[1:]] == list(OPERATIONS)


def test_a_text_is_taken_as_it_is_and_whatever_else_is_json(taskmesh: Shell) -> None:
    for key in ("007", "null", '{"a": 1}'):
        made = taskmesh.done("call", "tasks.publish", "name=add", f"key={key}", 'params={"a": 1, "b": 2}')
        assert (made.json["key"], made.json["created"]) == (key, True)
        assert taskmesh.done("call", "task.get", "name=add", f"key={key}").json["params"] == {"a": 1, "b": 2}
    assert taskmesh.done("call", "tasks.count", "where=name:add", "at_most=2").json == {"count": 2}
    taskmesh.done("call", "task.signal", "name=add", "key=007", "event=go", 'payload={"n": 1}', "signal_id=1")
    (signal,) = taskmesh.done("show", "add", "007", "--json").json["task_state"]["signals"]
    assert (signal["id"], signal["payload"]) == ("1", {"n": 1})


def test_who_did_it_is_written_down(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k", json.dumps({"a": 1, "b": 2}))
    assert taskmesh.done("call", "bulk.delete", "where=name:add", "dry_run=true").json["matched"] == 1
    assert taskmesh.done("call", "bulk.delete", "where=name:add", "by=Ada").json["done"] == 1
    assert taskmesh.done("audit", "--json").json[0]["by"] == "Ada"


def test_what_does_not_fit_is_refused_by_name(taskmesh: Shell) -> None:
    for words, told in (
        (["task.gte"], "no operation 'task.gte'"),
        (["task.get", "name=add"], "key: Field required"),
        (["task.get", "name=add", "key=k", "colour=red"], "task.get takes no colour; it takes: name, key"),
        (["tasks.count", "at_most=many"], "at_most"),
        (["tasks.count", "many"], "FIELD=VALUE"),
    ):
        ended = taskmesh("call", *words)
        assert ended.status == 2, words
        assert told in " ".join(ended.err.split()), ended.err
    missing = taskmesh("call", "task.get", "name=add", "key=nobody")
    assert missing.status == 1
    assert "nobody" in missing.err
