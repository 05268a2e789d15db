"""`retry cancel delete --where`, and `purge`: many tasks at once, and nothing beside them."""

from __future__ import annotations

import asyncio

import pytest

from taskmesh import TaskMesh
from tests.cli.shell import Shell, defined


@pytest.fixture
def many(taskmesh: Shell) -> Shell:
    """600 failed tasks, five that succeeded, five that wait."""
    asyncio.run(_filled(TaskMesh(taskmesh.uri, database=taskmesh.database)))
    return taskmesh


async def _filled(mesh: TaskMesh) -> None:
    async with defined(mesh):
        await mesh.definitions["refuse"].publish("f0", why="it rained")
        await mesh.definitions["add"].publish_many({f"a{n}": {"a": n, "b": 1} for n in range(5)})
        await mesh.consumer().run(until_idle=True)
        # More than one batch of a bulk action: one has really failed, and the others are its likes.
        tasks = mesh.store.driver.collection("tasks")
        failed = await tasks.find_one({"_id": "refuse:f0"})
        await tasks.insert_many([failed | {"_id": f"refuse:f{n}", "key": f"f{n}"} for n in range(1, 600)])
        await (
            mesh.definitions["add"].configure(queue="slow").publish_many({f"w{n}": {"a": n, "b": 1} for n in range(5)})
        )


def counts(taskmesh: Shell) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = taskmesh.done("stats", "--json").json["counts"]
    return found


def test_a_filter_is_counted_first_and_then_nothing_else_is_touched(many: Shell) -> None:
    before = counts(many)
    assert before == {"refuse": {"FAIL": 600}, "add": {"SUCCESS": 5, "INIT": 5}}
    where = ["--where", "status:FAIL error:RAINED"]
    assert many.done("retry", *where, "--dry-run").out == "600 tasks match 'status:FAIL error:RAINED'\n"
    assert counts(many) == before
    assert many.done("retry", *where, "--yes").out == "retry: 600 of 600 tasks\n"
    assert counts(many) == {"refuse": {"INIT": 600}, "add": {"SUCCESS": 5, "INIT": 5}}
    cancelled = many.done("cancel", "--where", "name:refuse key:f1", "--yes", "--json").json
    assert (cancelled["action"], cancelled["matched"], cancelled["done"], cancelled["dry_run"]) == (
        "cancel",
        111,
        111,
        False,
    )
    assert many.done("delete", "--where", "name:refuse status:INIT", "--yes").out == "delete: 489 of 489 tasks\n"
    assert counts(many) == {"refuse": {"CANCELLED": 111}, "add": {"SUCCESS": 5, "INIT": 5}}
    listed = many.done("ls", "--where", "queue:slow age<1h", "--json").json
    assert [task["key"] for task in listed] == ["w4", "w3", "w2", "w1", "w0"], "newest first"
    assert many.done("purge", "--where", "age>1h", "--yes").out.startswith("no tasks match")
    assert many.done("purge", "--all", "--dry-run").out == "116 tasks match 'status:SUCCESS,FAIL,CANCELLED,EXPIRED'\n"
    assert many.done("purge", "--all", "--yes", "--json").json["done"] == 116
    assert counts(many) == {"add": {"INIT": 5}}


WRONG: list[tuple[list[str], str]] = [
    (["retry"], "NAME KEY, or --where"),
    (["retry", "add"], "NAME KEY, or --where"),
    (["retry", "add", "k", "--where", "status:FAIL"], "NAME KEY, or --where"),
    (["retry", "add", "k", "--dry-run"], "--dry-run needs"),
    (["cancel", "--where", "", "--yes"], "an empty filter means every task"),
    (["delete", "--where", "colour:red"], "a filter has no field colour:"),
    (["delete", "--where", "status:RED"], "status"),
    (["purge", "--where", "status:INIT", "--yes"], "only finished tasks can be purged"),
    (["cancel", "--where", "status:FAIL", "--yes"], "only unfinished tasks can be cancelled"),
    (["ls", "--where", "name:a", "--queue", "q"], "leave name, status, queue"),
]


def test_wrong_usage_ends_with_2(taskmesh: Shell, subtests: pytest.Subtests) -> None:
    for words, told in WRONG:
        with subtests.test(words=words, told=told):
            taskmesh.refuses(*words, told=told)


def test_a_question_is_asked_where_a_script_does_not_read(many: Shell) -> None:
    """`taskmesh delete … --json > out.json` in front of a terminal."""
    left = many.at_a_terminal("delete", "--where", "name:add", "--json", typed="n\n")
    assert (left.status, left.out) == (1, "")
    assert "delete 10 tasks that match 'name:add'?" in left.err
    deleted = many.at_a_terminal("delete", "--where", "name:add", "--json", typed="y\n")
    assert deleted.out.startswith("{")
    assert (deleted.status, deleted.json["done"]) == (0, 10)
    assert "delete 10 tasks that match 'name:add'?" in deleted.err
    one = many.at_a_terminal("cancel", "refuse", "f1", typed="y\n")
    assert one.out == "refuse f1 had already finished: FAIL\n"
    assert "cancel refuse f1?" in one.err


def test_only_what_can_be_cancelled_is_counted_and_asked_about(many: Shell) -> None:
    assert many.done("cancel", "--where", "name:add", "--dry-run").out == (
        "5 tasks match 'name:add status:INIT,RUNNING'\n"
    )
    assert many.done("cancel", "--where", "name:add", "--yes").out == "cancel: 5 of 5 tasks\n"
    assert counts(many) == {"refuse": {"FAIL": 600}, "add": {"SUCCESS": 5, "CANCELLED": 5}}


def test_a_bulk_action_is_taken_back_within_an_hour(many: Shell) -> None:
    before = counts(many)
    done = many.done("delete", "--where", "status:FAIL", "--yes")
    assert "taskmesh undo " in done.err
    listed = many.done("undo", "--json").json
    assert [(each["action"], each["done"], each["undoable"]) for each in listed] == [("delete", 600, True)]
    assert "status:FAIL" in many.done("undo").out
    assert many.done("undo", listed[0]["id"]).out == "undone: delete, 600 tasks restored\n"
    assert counts(many) == before
    ended = many("undo", listed[0]["id"])
    assert (ended.status, ended.out) == (2, "")
    assert "was undone already" in ended.err
    assert many.done("retry", "--where", "key:f59", "--no-undo", "--yes", "--json").json["id"] is None
