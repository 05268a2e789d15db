"""Bulk actions can be undone for a while: exactly what they changed, and nothing that has moved on since."""

from __future__ import annotations

import anyio
import pytest

from taskmesh import InvalidOption, Status, Task, TaskFailed, TaskMesh, TaskNotFound, current_task
from tests.waiting import eventually
from tests.working import working


@pytest.fixture
async def failed(mesh: TaskMesh) -> TaskMesh:
    """Tasks `k0` to `k9` that failed, each with its reason and its log."""

    @mesh.task
    async def work(n: int) -> None:
        raise TaskFailed(f"reason {n}")

    await work.publish_many({f"k{n}": {"n": n} for n in range(10)})
    async with working(mesh) as consumer:
        await eventually(lambda: consumer.finished == 10)
    return mesh


async def everything(mesh: TaskMesh) -> list[Task]:
    return [task async for task in mesh.find("work", limit=0, params=True)]


@pytest.mark.parametrize("action", ["retry", "delete"])
async def test_what_was_retried_or_deleted_by_mistake_is_as_it_was(failed: TaskMesh, action: str) -> None:
    before = await everything(failed)
    act = {"retry": failed.bulk.retry, "delete": failed.bulk.delete}[action]
    done = await act("status:FAIL", by="ada")
    assert done.done == 10
    assert done.id is not None
    assert await everything(failed) != before
    undone = await failed.bulk.undo(done.id)
    assert (undone.action, undone.restored, undone.left) == (action, 10, 0)
    assert await everything(failed) == before


async def test_cancelled_tasks_wait_again_and_are_run(mesh: TaskMesh) -> None:
    stopped, go_on = anyio.Event(), anyio.Event()

    @mesh.task
    async def work(hangs: bool = False) -> str:
        if hangs and not go_on.is_set():
            try:
                await anyio.sleep_forever()
            finally:
                stopped.set()
        return "done"

    async with working(mesh) as consumer:
        running = await work.publish("running", hangs=True)
        await eventually(lambda: consumer.running == ["running"])
        waiting = await work.configure(delay_ms=3_600_000).publish("waiting")
        done = await mesh.bulk.cancel("name:work")
        assert (done.done, await running.status(), await waiting.status()) == (2, Status.CANCELLED, Status.CANCELLED)
        with anyio.fail_after(20):
            await stopped.wait()
        go_on.set()
        assert done.id is not None
        assert (await mesh.bulk.undo(done.id)).restored == 2
        assert await running.result(timeout=60) == "done"
        assert await waiting.status() is Status.INIT
        task = await running.task()
        assert task.task_state.timeout_cnt == 0, "the execution that was stopped is charged to nobody"


async def test_what_has_moved_on_since_is_left_alone(failed: TaskMesh) -> None:
    done = await failed.bulk.retry("status:FAIL")
    some = {"key": {"$in": ["k1", "k4", "k7"]}}
    async with working(failed, on_claim=lambda _: some) as consumer:
        await eventually(lambda: consumer.finished == 3)
    assert done.id is not None
    undone = await failed.bulk.undo(done.id)
    assert (undone.restored, undone.left) == (7, 3)
    assert all(task.status is Status.FAIL for task in await everything(failed))


async def test_a_key_that_was_published_again_stays_the_new_task(failed: TaskMesh) -> None:
    done = await failed.bulk.delete("name:work")
    await failed.publish("work", "k3", {"n": 33})
    assert done.id is not None
    undone = await failed.bulk.undo(done.id)
    assert (undone.restored, undone.left) == (9, 1)
    assert (await failed.get("work", "k3")).params == {"n": 33}


async def test_a_running_task_that_is_deleted_comes_back_waiting(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> None:
        await anyio.sleep_forever()

    await work.publish("k")
    async with working(mesh) as consumer:
        await eventually(lambda: consumer.running == ["k"])
        done = await mesh.bulk.delete("status:RUNNING")
        assert done.done == 1
        with pytest.raises(TaskNotFound):
            await mesh.get("work", "k")
        await eventually(lambda: consumer.running == [])
    assert done.id is not None
    await mesh.bulk.undo(done.id)
    task = await mesh.get("work", "k")
    assert (task.status, task.task_state.worker_states) == (Status.INIT, [])


async def test_it_is_known_who_did_what_and_for_how_long_it_can_be_undone(failed: TaskMesh) -> None:
    first = await failed.bulk.retry("key:k1", by="ada")
    await failed.bulk.cancel("key:k1", by="bob", undo_ms=0)
    await failed.bulk.purge("key:k2", by="eve")
    found = await failed.bulk.actions()
    assert [(each.action, each.by, each.done, each.undoable) for each in found] == [
        ("purge", "eve", 1, False),
        ("cancel", "bob", 1, False),
        ("retry", "ada", 1, True),
    ]
    assert first.id == found[2].id
    for each in found[:2]:
        with pytest.raises(InvalidOption, match="cannot be undone"):
            await failed.bulk.undo(each.id)
    assert found[2].undo_until is not None
    await failed.bulk.undo(found[2].id)
    with pytest.raises(InvalidOption, match="already"):
        await failed.bulk.undo(found[2].id)
    with pytest.raises(InvalidOption, match="taskmesh undo"):
        await failed.bulk.undo("nothing")


async def test_the_copies_go_with_the_undo_and_by_themselves(failed: TaskMesh) -> None:
    stored = failed.store.driver.database
    done = await failed.bulk.retry("status:FAIL")
    assert await stored["undo"].count_documents({"delete_time": {"$exists": True}}) == 10
    indexes = await stored["undo"].index_information()
    assert indexes["taskmesh_delete"]["expireAfterSeconds"] == 0
    assert done.id is not None
    await failed.bulk.undo(done.id)
    assert await stored["undo"].count_documents({}) == 0


async def test_tasks_that_change_all_the_time_are_changed_as_they_were_copied(mesh: TaskMesh) -> None:
    """A task whose progress is written between the copy and the action is copied again."""

    @mesh.task
    async def work() -> None:
        for n in range(100_000):
            await current_task().progress(n % 100 / 100)
            await anyio.sleep(0.001)

    await work.publish_many({f"k{n}": {} for n in range(50)})
    async with working(mesh) as consumer:
        await eventually(lambda: len(consumer.running) == 50)
        done = await mesh.bulk.cancel("name:work")
        assert (done.matched, done.done) == (50, 50)
        await eventually(lambda: consumer.running == [])
    assert done.id is not None
    assert (await mesh.bulk.undo(done.id)).restored == 50
    tasks = [task async for task in mesh.find("work", limit=0)]
    assert {(task.status, len(task.task_state.worker_states)) for task in tasks} == {(Status.INIT, 0)}
