"""Tags by which tasks are found, and fields of the publisher's own at the top of the document."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from taskmesh import Consumer, InvalidOption, Status, Task, TaskMesh, current_task
from taskmesh.model.task import Task as TaskModel
from tests.cli.shell import Shell
from tests.consumer import process_handlers
from tests.waiting import eventually
from tests.working import working


async def keys(mesh: TaskMesh, **which: Any) -> list[str]:
    return [task.key async for task in mesh.find(limit=0, **which)]


@pytest.mark.usefixtures("never_used")
async def test_tasks_are_found_by_all_of_their_tags(mesh: TaskMesh) -> None:
    await mesh.publish("job", "a", tags=["red", "big", "red"])
    await mesh.publish("job", "b", tags={"red"}, queue="other")
    await mesh.publish("job", "c")
    assert (await mesh.get("job", "a")).tags == ["red", "big"]
    assert (await mesh.get("job", "c")).tags == []
    assert await keys(mesh, tags="red") == ["a", "b"]
    assert await keys(mesh, tags=["big", "red"]) == ["a"]
    assert await keys(mesh, tags=["red"], queue="other", status="INIT", sort="newest") == ["b"]
    assert await keys(mesh, where="tag:red tag:big") == ["a"]
    assert await mesh.listing.count("tag:red") == 2
    cursor = await mesh.store.driver.aggregate(mesh.store.tasks, [{"$indexStats": {}}])
    used = {row["name"]: row["accesses"]["ops"] for row in await cursor.to_list(None)}
    assert used["taskmesh_tags"] > 0
    stats = await mesh.store.driver.command({"validate": mesh.store.tasks})
    assert stats["keysPerIndex"]["taskmesh_tags"] == 3, "tasks without tags cost the index nothing"


async def test_fields_reach_hooks_handlers_and_claim_filters(mesh: TaskMesh) -> None:
    seen: list[Any] = []

    @mesh.task
    async def job() -> dict[str, Any]:
        return dict(current_task().extra)

    @mesh.task(projection=["n"])
    async def some(n: int = 0, text: str = "left out") -> dict[str, Any]:
        assert (n, text) == (0, "left out")
        return dict(current_task().extra)

    mesh.task(process_handlers.extra_of_it, run="process")

    def before(task: Task) -> None:
        seen.append((task.name, task.extra, task.tags))

    def on_claim(_: Consumer) -> dict[str, Any]:
        return {"repo_id": 7}

    fields: dict[str, Any] = {"repo_id": 7, "price": Decimal("2.50"), "note": {"$set": "$$NOW"}}
    names = ["extra_of_it", "job", "some"]
    handles = [await mesh.publish(name, "k", fields=fields, tags=["t"]) for name in names]
    await mesh.publish("job", "another", fields={"repo_id": 8})
    tasks = mesh.store.driver.collection(mesh.store.tasks)
    await tasks.update_many({"repo_id": 7}, {"$set": {"of others": [1]}})
    expected = fields | {"of others": [1]}
    async with working(mesh, "w", before=before, on_claim=on_claim):
        assert [await handle.result(60) for handle in handles] == [expected] * 3
    assert sorted(seen, key=str) == [(name, expected, ["t"]) for name in names]
    assert (await mesh.get("job", "k")).extra == expected
    assert (await mesh.get("job", "another")).status is Status.INIT
    async with working(mesh, "w"):  # without hooks, as most are, and claimed alone
        assert await (await mesh.publish("job", "one", fields=fields)).result(60) == fields


async def test_an_existing_task_gets_new_ones_only_with_its_params(mesh: TaskMesh) -> None:
    await mesh.publish("job", "k", tags=["a"], fields={"n": {"deep": 1}})
    await mesh.publish("job", "k", tags=["b"], fields={"n": 2})
    task = await mesh.get("job", "k")
    assert (task.tags, task.extra) == (["a"], {"n": {"deep": 1}})
    changed = await mesh.publish("job", "k", tags=["b"], fields={"n": {"flat": "$key"}}, update_existing_params=True)
    assert changed.updated
    again = await mesh.publish("job", "k", tags=["b"], fields={"n": {"flat": "$key"}}, update_existing_params=True)
    assert not again.updated
    task = await mesh.get("job", "k")
    assert (task.tags, task.extra) == (["b"], {"n": {"flat": "$key"}})
    await mesh.publish("job", "k", update_existing_params=True)
    assert (await mesh.get("job", "k")).tags == ["b"], "what is not given stays"
    await mesh.publish("job", "k", tags=[], run_again=True)
    assert (await mesh.get("job", "k")).tags == []


BAD: list[Any] = [
    {"tags": "red"},
    {"tags": [7]},
    {"tags": [""]},
    {"tags": {"a": 1}},
    {"fields": [1]},
    {"fields": {"a": object()}},
    *({"fields": {name: 1}} for name in [*sorted(TaskModel.OWN_FIELDS), "_private", "$set", "a.b", "", 7, "a\0b"]),
]


async def test_bad_tags_and_fields_are_refused(mesh: TaskMesh) -> None:
    for settings in BAD:
        with pytest.raises(InvalidOption, match=r"tag|field"):
            await mesh.publish("job", "k", **settings)
    await mesh.publish("job", "first")
    [task] = await mesh.store.find({}, {})
    assert set(task) <= TaskModel.OWN_FIELDS, "whatever is stored at the top is ours"


async def test_what_finds_nothing_by_its_type_is_refused(mesh: TaskMesh) -> None:
    for which in ({"tags": 5}, {"tags": {"$ne": "a"}}, {"status": 5}, {"status": {"$ne": "FAIL"}}):
        with pytest.raises(InvalidOption, match=r"(tags|status) must be a str or a list of them, got "):
            await keys(mesh, **which)


async def test_a_schedule_keeps_them(mesh: TaskMesh) -> None:
    await mesh.every("job", cron="0 3 * * *", tags=["nightly"], fields={"repo_id": 7})
    await mesh.schedules.trigger("job")
    [task] = [task async for task in mesh.find(tags="nightly")]
    assert task.extra == {"repo_id": 7}


def test_the_command_line_publishes_and_lists_by_tag(taskmesh: Shell) -> None:
    taskmesh("publish", "job", "a", "--tag", "red", "--tag", "big")
    taskmesh("publish", "job", "b", "--tag", "red")
    assert [task["key"] for task in taskmesh("ls", "--tag", "red", "--tag", "big", "--json").json] == ["a"]
    assert "red, big" in taskmesh("show", "job", "a").out


async def test_a_worker_hears_at_once_that_a_document_is_gone(mesh: TaskMesh) -> None:
    """Removed past taskmesh: long before the next ping, which comes after half a minute."""
    stopped: list[str] = []

    @mesh.task
    async def job() -> None:
        try:
            await eventually(lambda: False, 600)
        finally:
            stopped.append("stopped")

    async with working(mesh) as consumer:
        await job.publish("k")
        await eventually(lambda: consumer.running)
        await mesh.store.driver.collection(mesh.store.tasks).delete_one({"_id": "job:k"})
        await eventually(lambda: stopped, 20)
