"""A verb whose answer was lost is repeated: for the task that it was meant for, once, and for no task published after it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from taskmesh import Status, TaskMesh, TaskNotFound
from taskmesh.admin.store import undo
from taskmesh.store import audit
from tests.faults import failing_commands

NEVER_HERE_MS = 3_600_000
VERBS: dict[str, Callable[[TaskMesh], Awaitable[Any]]] = {
    "cancel": lambda mesh: mesh.cancel("job", "k"),
    "retry": lambda mesh: mesh.retry("job", "k"),
    "delete": lambda mesh: mesh.delete("job", "k"),
    "set_option": lambda mesh: mesh.set_option("job", "k", priority=7),
    "run_again": lambda mesh: mesh.publish("job", "k", {"n": 3}, run_again=True),
    "update_existing_params": lambda mesh: mesh.publish("job", "k", {"n": 3}, update_existing_params=True),
    "clean_failed": lambda mesh: mesh.publish("job", "k", {"n": 3}, clean_failed=True, update_existing_params=True),
}


def _loses_an_answer(mesh: TaskMesh, uri: str, meanwhile: Callable[[], Awaitable[Any]]) -> None:
    """Let the server do the next update of this mesh, then let others do something, and only then tell of an election."""
    real = {name: getattr(mesh.store, name) for name in ("update", "update_one")}

    def without_an_answer(name: str) -> Callable[..., Awaitable[Any]]:
        async def update(*arguments: Any, **settings: Any) -> Any:
            for each, method in real.items():
                setattr(mesh.store, each, method)
            await real[name](*arguments, **settings)
            await meanwhile()
            async with failing_commands(uri, ["update", "findAndModify"], times=1, errorCode=10107):
                return await real[name](*arguments, **settings)

        return update

    for each in real:
        setattr(mesh.store, each, without_an_answer(each))


@pytest.fixture
async def other(mongo_uri: str, database: str) -> Any:
    async with TaskMesh(mongo_uri, database=database) as mesh:
        yield mesh


async def _publish(mesh: TaskMesh, n: int) -> None:
    handle = await mesh.publish("job", "k", {"n": n}, delay_ms=NEVER_HERE_MS)
    assert handle.created


@pytest.mark.parametrize("verb", VERBS)
async def test_a_verb_whose_answer_was_lost_does_nothing_to_a_task_published_after_it(
    mesh: TaskMesh, other: TaskMesh, mongo_uri: str, verb: str
) -> None:
    await _publish(mesh, 1)
    later: dict[str, Any] = {}

    async def the_key_is_published_anew() -> None:
        with suppress(TaskNotFound):
            await other.delete("job", "k")
        await _publish(other, 2)
        later.update(await other.store.driver.collection("tasks").find_one({"_id": "job:k"}))

    _loses_an_answer(mesh, mongo_uri, the_key_is_published_anew)
    with suppress(TaskNotFound):  # the task that was meant is not there any more
        await VERBS[verb](mesh)
    assert later["params"] == {"n": 2}
    assert await mesh.store.driver.collection("tasks").find_one({"_id": "job:k"}) == later


async def test_a_deletion_whose_answers_were_lost_twice_deletes_no_task_published_after_it(
    mesh: TaskMesh, other: TaskMesh, mongo_uri: str
) -> None:
    """The word that it leaves first was answered; the removal itself was done, and said not to be confirmed."""
    await _publish(mesh, 1)
    update, calls = mesh.store.update, []

    async def update_after_a_publication(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            await _publish(other, 2)
        return await update(*arguments)

    mesh.store.update = update_after_a_publication  # type: ignore[assignment,method-assign]
    unconfirmed = {"code": 64, "errmsg": "waiting for replication timed out"}
    async with failing_commands(mongo_uri, ["delete"], times=1, writeConcernError=unconfirmed):
        assert (await mesh.delete("job", "k")).params == {"n": 1}
    assert len(calls) == 2, "it was repeated"
    assert (await mesh.get("job", "k")).params == {"n": 2}


async def test_a_cancel_is_not_repeated_after_others_have_retried_the_task(
    mesh: TaskMesh, other: TaskMesh, mongo_uri: str
) -> None:
    await _publish(mesh, 1)
    _loses_an_answer(mesh, mongo_uri, lambda: other.retry("job", "k"))
    await mesh.cancel("job", "k")
    assert (await mesh.get("job", "k")).status is Status.INIT


async def test_a_retry_is_not_repeated_after_others_have_changed_the_task_twice(
    mesh: TaskMesh, other: TaskMesh, mongo_uri: str
) -> None:
    await _publish(mesh, 1)
    await mesh.cancel("job", "k")

    async def others_publish_and_cancel() -> None:
        await other.publish("job", "k", {"n": 2}, update_existing_params=True)
        await other.cancel("job", "k")

    _loses_an_answer(mesh, mongo_uri, others_publish_and_cancel)
    await mesh.retry("job", "k")
    assert (await mesh.get("job", "k")).status is Status.CANCELLED


async def test_an_option_is_not_set_again_over_what_others_set_since(
    mesh: TaskMesh, other: TaskMesh, mongo_uri: str
) -> None:
    await _publish(mesh, 1)
    _loses_an_answer(mesh, mongo_uri, lambda: other.set_option("job", "k", priority=0))
    await mesh.set_option("job", "k", priority=7)
    assert (await mesh.get("job", "k")).task_option.priority == 0


async def test_params_are_not_set_again_over_what_others_set_since(
    mesh: TaskMesh, other: TaskMesh, mongo_uri: str
) -> None:
    await _publish(mesh, 1)

    async def others_publish_twice() -> None:
        for n in (4, 5):
            await other.publish("job", "k", {"n": n}, update_existing_params=True)

    _loses_an_answer(mesh, mongo_uri, others_publish_twice)
    handle = await mesh.publish("job", "k", {"n": 3}, update_existing_params=True)
    assert (handle.created, handle.updated) == (False, True)
    assert (await mesh.get("job", "k")).params == {"n": 5}


@pytest.mark.parametrize("action", ["delete", "cancel", "retry"])
async def test_a_bulk_action_that_looks_again_does_nothing_to_a_task_published_after_it(
    mesh: TaskMesh, other: TaskMesh, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    await _publish(mesh, 1)
    keep, rounds = undo.keep, []

    async def keep_after_a_publication(*arguments: Any) -> Any:
        rounds.append(arguments)
        if len(rounds) == 2:
            with suppress(TaskNotFound):
                await other.delete("job", "k")
            await _publish(other, 2)
        return await keep(*arguments)

    monkeypatch.setattr(undo, "keep", keep_after_a_publication)
    done = await getattr(mesh.bulk, action)("status:INIT name:job")
    assert (len(rounds), done.done) == (2, 1)
    task = await mesh.get("job", "k")
    assert (task.params, task.status) == ({"n": 2}, Status.INIT)
    assert task.task_state.start_time is not None


async def test_an_undo_does_not_put_back_over_what_was_retried_and_cancelled_since(
    mesh: TaskMesh, other: TaskMesh
) -> None:
    await _publish(mesh, 1)
    action = await mesh.bulk.cancel("status:INIT name:job")
    await other.retry("job", "k")
    await other.cancel("job", "k")
    assert action.id is not None
    result = await mesh.bulk.undo(action.id)
    assert (result.restored, result.left) == (0, 1)
    assert (await mesh.get("job", "k")).status is Status.CANCELLED


Done = Callable[[TaskMesh], Awaitable[Any]]


def _stored(collection: str, id_: str, *fields: str) -> Done:
    """Return what reads a field of a document, as it is stored; None if there is none."""

    async def read(mesh: TaskMesh) -> Any:
        found: Any = await mesh.store.driver.collection(collection).find_one({"_id": id_})
        for field in fields:
            found = None if found is None else found.get(field)
        return found

    return read


UNRELIABLE: dict[str, tuple[Done, Done, Any]] = {
    "get": (lambda mesh: mesh.get("job", "k"), _stored("tasks", "job:k", "status"), "INIT"),
    "cancel": (VERBS["cancel"], _stored("tasks", "job:k", "status"), "CANCELLED"),
    "delete": (VERBS["delete"], _stored("tasks", "job:k"), None),
    "set_option": (VERBS["set_option"], _stored("tasks", "job:k", "task_option", "priority"), 7),
    "pause": (lambda mesh: mesh.pause("default"), _stored("queues", "default", "paused"), True),
    "resume": (lambda mesh: mesh.resume("default"), _stored("queues", "default", "paused"), False),
    "set_limit": (lambda mesh: mesh.set_limit("default", running=3), _stored("limits", "default", "running"), 3),
    "set_group_limit": (
        lambda mesh: mesh.queues.set_group_limit("default", "g", running=2),
        _stored("queues", "default", "limits", "groups"),
        [{"g": "g", "n": 2}],
    ),
    "pause_on_failures": (
        lambda mesh: mesh.queues.pause_on_failures("default", 0.5),
        _stored("queues", "default", "failure_pause", "share"),
        0.5,
    ),
    "schedules.pause": (lambda mesh: mesh.schedules.pause("daily"), _stored("schedules", "daily", "paused"), True),
    "schedules.remove": (lambda mesh: mesh.schedules.remove("daily"), _stored("schedules", "daily"), None),
}
"""Verbs, what reads their effect, and what it is."""
REFUSED: dict[str, Any] = {"errorCode": 112}
UNCONFIRMED: dict[str, Any] = {"writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}}


@pytest.mark.parametrize("fault", [REFUSED, UNCONFIRMED], ids=["refused", "unconfirmed"])
@pytest.mark.parametrize("verb", UNRELIABLE)
async def test_a_verb_is_done_though_the_database_is_unreliable_for_a_moment(
    mesh: TaskMesh, mongo_uri: str, verb: str, fault: dict[str, Any]
) -> None:
    await _publish(mesh, 1)
    await mesh.schedules.put("daily", name="job", params={"n": 1}, cron="0 3 * * *")
    do, effect, expected = UNRELIABLE[verb]
    commands = ["update", "findAndModify", "delete", *(["find", "aggregate"] if fault is REFUSED else [])]
    async with failing_commands(mongo_uri, commands, times=3, **fault):
        await do(mesh)
    assert await effect(mesh) == expected


async def test_the_group_of_a_queue_is_paused_though_the_database_is_unreliable_for_a_moment(
    mesh: TaskMesh, mongo_uri: str
) -> None:
    for do, paused in ((mesh.pause, ["g"]), (mesh.resume, [])):
        async with failing_commands(mongo_uri, ["update"], times=3, **REFUSED):
            await do("default", group="g")
        document = await mesh.store.driver.collection("queues").find_one({"_id": "default"})
        assert [pause["g"] for pause in document["paused_groups"]] == paused


async def test_what_was_done_is_audited_though_the_database_is_unreliable_for_a_moment(
    mesh: TaskMesh, mongo_uri: str
) -> None:
    await _publish(mesh, 1)
    note = audit.note

    async def unreliable(*args: Any, **about: Any) -> None:
        async with failing_commands(mongo_uri, ["update"], times=3, **REFUSED):
            await note(*args, **about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "note", unreliable)
        await mesh.cancel("job", "k")
    assert [action.action for action in await mesh.audit.actions()] == ["task.cancel"]
