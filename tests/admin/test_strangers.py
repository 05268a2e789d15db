"""Documents that are no tasks, or are tasks that somebody has spoilt: what people look at and do goes on around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from bson import ObjectId

from taskmesh import IncompatibleCollection, Status, TaskMesh, TaskNotFound
from tests.web.conftest import browser

KEYS = ["k0", "k1", "k2"]


async def put(mesh: TaskMesh, *strangers: dict[str, Any]) -> None:
    """Publish three tasks, and put documents beside them that are like the first one but for these fields."""
    for key in KEYS:
        await mesh.publish("work", key)
    tasks = mesh.store.driver.collection(mesh.store.tasks)
    [like] = await tasks.find({"_id": "work:k0"}).to_list(None)
    for number, fields in enumerate(strangers):
        spoilt = like | {"_id": f"work:stranger{number}", "key": f"stranger{number}"} | fields
        if fields.get("task_state"):
            spoilt["task_state"] = like["task_state"] | fields["task_state"]
        await tasks.insert_one(spoilt)


def failed(**entry: Any) -> dict[str, Any]:
    """Return the fields of a task that has failed, with this entry."""
    entries = [{"running_id": "r", "worker_id": "w", "state": "FAIL", **entry}]
    return {"status": "FAIL", "task_state": {"worker_states": entries}}


async def test_a_reason_that_is_no_text_hides_no_page(mesh: TaskMesh) -> None:
    await put(mesh, failed(fail_reason={"code": 5}), failed(fail_reason="it rained"))
    page = await mesh.listing.page("name:work")
    reasons = {task.key: task.reason for task in page.tasks}
    assert reasons == dict.fromkeys([*KEYS, "stranger0"], "") | {"stranger1": "it rained"}


@pytest.mark.parametrize("newest", [True, False])
async def test_a_page_that_ends_at_a_stranger_is_not_the_last(mesh: TaskMesh, newest: bool) -> None:
    odd_ids: list[Any] = [7, ObjectId(), {"a": 1}, b"bytes"]
    odd_times = [{"task_state": {"create_time": value}} for value in ("yesterday", None, ObjectId(), True)]
    await put(mesh, *({"_id": id_} for id_ in odd_ids), *odd_times)
    seen: list[str] = []
    after = None
    while True:
        page = await mesh.listing.page(newest_first=newest, after=after, limit=1)
        seen += [task.key for task in page.tasks if task.key in KEYS]
        if (after := page.following) is None:
            break
    assert seen == (KEYS[::-1] if newest else KEYS)


async def test_the_groups_of_errors_are_told_around_them(mesh: TaskMesh) -> None:
    reason = "RuntimeError: it rained"
    odd_names: list[Any] = [None, "", "x" * 600, 5]
    await put(
        mesh,
        failed(fail_reason=reason, fail_time="yesterday"),
        failed(fail_reason=reason) | {"key": 5},
        *({**failed(fail_reason=reason), "name": name} for name in odd_names),
    )
    report = await mesh.inspect.errors()
    assert [(group.name, group.message, group.example_key) for group in report.groups] == [
        ("work", reason, "stranger0")
    ]
    assert report.groups[0].last_time is None


SPOILT: list[dict[str, Any]] = [
    {"task_state": None},
    {"task_state": {"worker_states": None}},
    {"task_option": 5},
    {"queue": {"$gt": ""}},
    {"queue": None},
    failed(fail_time="2026-01-01"),
]


async def test_a_delete_that_met_them_is_undone(mesh: TaskMesh) -> None:
    await put(mesh, *SPOILT)
    tasks = mesh.store.driver.collection(mesh.store.tasks)
    spoilt = {"key": {"$regex": "^stranger"}}

    async def as_stored() -> list[dict[str, Any]]:
        return [each | {"bulk_id": None} for each in await tasks.find(spoilt).sort("_id", 1).to_list(None)]

    before = await as_stored()
    deleted = await mesh.bulk.delete("name:work")
    assert await tasks.find({}).to_list(None) == []
    assert deleted.id is not None
    await mesh.publish("work", "k1", {"new": True})
    undone = await mesh.bulk.undo(deleted.id)
    assert (undone.restored, undone.left) == (deleted.done - 1, 1)
    assert await as_stored() == before
    assert (await mesh.get("work", "k0")).status is Status.INIT
    assert (await mesh.get("work", "k1")).params == {"new": True}


@pytest.mark.parametrize("fields", SPOILT, ids=str)
async def test_what_cannot_be_explained_is_said_to_be_no_task(mesh: TaskMesh, fields: dict[str, Any]) -> None:
    await put(mesh, fields)
    with pytest.raises(IncompatibleCollection, match="'work:stranger0' is not a taskmesh task: repair or delete it"):
        await mesh.explain("work", "stranger0")
    assert sum(group.tasks for group in await mesh.inspect.explain_worker("w")) == len(KEYS)
    assert (await mesh.explain("work", "k0"))[0].claimable


async def test_the_dashboard_says_that_it_is_no_task_and_not_that_the_database_is_away(mesh: TaskMesh) -> None:
    await put(mesh, {"task_option": 5})
    async with browser(mesh) as client:
        page = await client.get("/task", params={"name": "work", "key": "stranger0"})
        told = await client.get("/api/v1/tasks/work/stranger0")
    assert (page.status_code, told.status_code) == (422, 422)
    assert "does not answer" not in page.text
    assert "is not a taskmesh task: repair or delete it" in page.text
    assert told.json()["error"] == "IncompatibleCollection"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"queue": None}, "queue must be a text, got None"),
        ({"task_option": 5}, "task_option must be a document, got 5"),
        ({"task_state": {"create_time": "yesterday"}}, "task_state.create_time must be a time, got 'yesterday'"),
        ({"queue": None, "tags": 5}, "queue must be a text, got None; tags must be a list, got 5"),
        (
            {"task_state": {"worker_states": [{"state": "FAIL"}] * 9}},
            "task_state.worker_states.0.running_id is missing; .* and 13 more",
        ),
    ],
    ids=str,
)
async def test_what_is_wrong_with_it_is_said_in_plain_words(mesh: TaskMesh, fields: dict[str, Any], told: str) -> None:
    await put(mesh, fields)
    with pytest.raises(IncompatibleCollection, match=rf"\({told}\)$") as error:
        await mesh.get("work", "stranger0")
    assert "\n" not in str(error.value)
    assert "pydantic" not in str(error.value)


INSERTED: list[dict[str, Any]] = [
    {"name": "work", "key": "other"},  # without a status
    {"name": "work", "key": "other", "status": "init"},
    {"name": "work", "key": "another", "status": "INIT"},
    {"name": "walk", "key": "other", "status": "INIT"},
    {"name": "work", "status": "INIT"},
]
"""Under `work:other`, and unlike what the protocol asks for."""


@pytest.mark.parametrize("fields", INSERTED, ids=str)
async def test_what_was_inserted_wrongly_is_said_to_be_no_task_whatever_is_asked(
    mesh: TaskMesh, fields: dict[str, Any]
) -> None:
    await mesh.store.driver.collection(mesh.store.tasks).insert_one({"_id": "work:other", **fields})
    handle = await mesh.publish("work", "other")
    assert not handle.created
    asked: dict[str, Callable[[], Awaitable[object]]] = {
        "get": lambda: mesh.get("work", "other"),
        "explain": lambda: mesh.explain("work", "other"),
        "cancel": lambda: mesh.cancel("work", "other"),
        "retry": lambda: mesh.retry("work", "other"),
        "signal": lambda: mesh.signal("work", "other", "go"),
        "set_option": lambda: mesh.set_option("work", "other", priority=3),
        "publish": lambda: mesh.publish("work", "other", run_again=True),
        "publish params": lambda: mesh.publish("work", "other", update_existing_params=True),
        "result": lambda: handle.result(60),
        "result, at once": lambda: handle.result(0),
    }
    for verb, ask in asked.items():
        with pytest.raises(IncompatibleCollection, match="'work:other' is not a taskmesh task: repair or delete it"):
            assert await ask() is None, verb


async def test_the_doctor_names_what_was_inserted_and_is_never_accepted(mesh: TaskMesh) -> None:
    tasks = mesh.store.driver.collection(mesh.store.tasks)
    await tasks.insert_one({"_id": "work:good", "name": "work", "key": "good", "status": "INIT"})
    assert "inserted" not in {finding.subject for finding in await mesh.inspect.doctor()}
    await tasks.insert_one({"_id": "work:other", "name": "work", "key": "another", "status": "INIT"})
    await tasks.insert_one({"_id": "work:bare", "name": "work", "key": "bare"})
    [finding] = [finding for finding in await mesh.inspect.doctor() if finding.subject == "inserted"]
    assert finding.level == "warning"
    assert "'work:other'" in finding.found
    assert "'work:bare'" in finding.found
    assert "good" not in finding.found


ODD: list[dict[str, Any]] = [
    {"task_state": {"worker_states": "none", "leaving": 3}},
    {"task_option": [], "params": [1]},
    {"task_state": {"create_time": "yesterday", "after": 7}},
    {"status": {"$gt": ""}, "queue": "mail", "name": 7, "mine": "kept"},
    {"task_option": None, "publish_id": 7, "change_ids": 8},
]


@pytest.mark.parametrize("fields", [*SPOILT, *ODD], ids=str)
async def test_a_spoilt_one_can_be_deleted_like_any_other(mesh: TaskMesh, fields: dict[str, Any]) -> None:
    await put(mesh, fields)
    deleted = await mesh.delete("work", "stranger0")
    assert (deleted.name, deleted.key) == ("work", "stranger0")
    assert deleted.extra == {name: value for name, value in fields.items() if name == "mine"}
    with pytest.raises(TaskNotFound):
        await mesh.get("work", "stranger0")
    assert (await mesh.publish("work", "stranger0")).created
    assert [task.key async for task in mesh.find()] == [*KEYS, "stranger0"]


@pytest.mark.parametrize("fields", INSERTED, ids=str)
async def test_what_was_inserted_wrongly_can_be_deleted(mesh: TaskMesh, fields: dict[str, Any]) -> None:
    await mesh.store.driver.collection(mesh.store.tasks).insert_one({"_id": "work:other", **fields})
    assert (await mesh.delete("work", "other")).key == "other"
    assert (await mesh.publish("work", "other")).created
