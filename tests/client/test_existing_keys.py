"""What a publish does to a key that exists already: nothing, unless it was configured to."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from taskmesh import InvalidOption, Status, TaskFailed, TaskMesh, TaskOption, TaskRunning, current_task
from taskmesh.store.publish import Existing
from tests.faults import another_mesh, failing_commands
from tests.waiting import eventually
from tests.working import finished, status_is, working

NO_RETRIES = TaskOption(max_unexpected_retries=0)


async def test_an_existing_task_is_left_as_it_is(mesh: TaskMesh) -> None:
    await mesh.publish("job", "k", {"n": 1}, priority=1, delay_ms=60_000)
    before = await mesh.get("job", "k")
    handle = await mesh.publish("job", "k", {"n": 2}, priority=9, queue="other", worker_timeout_ms=40_000)
    assert (handle.created, handle.updated) == (False, False)
    assert await mesh.get("job", "k") == before


async def test_m9_new_params_options_and_times_take_effect_together(mesh: TaskMesh) -> None:
    await mesh.publish("job", "k", {"n": 1}, priority=1, max_timeouts=7, delay_ms=60_000)
    first = await mesh.get("job", "k")
    assert (first.task_option.priority, first.task_option.max_timeouts) == (1, 7)

    handle = await mesh.publish("job", "k", {"n": 2}, update_existing_params=True, priority=9, delay_ms=5_000)

    assert (handle.created, handle.updated) == (False, True)
    task = await mesh.get("job", "k")
    assert task.params == {"n": 2}
    assert (task.task_option.priority, task.task_option.max_timeouts) == (9, 7), "what was not set is not changed"
    assert task.task_state.start_time is not None
    assert first.task_state.start_time is not None
    assert task.task_state.start_time < first.task_state.start_time
    assert task.next_claim_time == task.task_state.start_time


async def test_m9_every_option_can_be_set_at_publish_and_changed_later(mesh: TaskMesh) -> None:
    options: dict[str, Any] = {
        "priority": -5,
        "concurrent_worker_cnt": 3,
        "specific_worker_ids": ("a", "$b"),
        "ping_interval_ms": 500,
        "worker_timeout_ms": 90_000,
        "max_unexpected_retries": 0,
        "unexpected_retry_delay_ms": 0,
        "unexpected_retry_delay_scope": "worker",
        "unexpected_retry_backoff": 2.5,
        "unexpected_retry_jitter": 0.0,
        "max_timeouts": 0,
        "run_timeout_ms": 1_000,
        "retain_success_ms": None,
        "retain_failed_ms": 0,
        "on_fail": "dead",
    }
    assert set(options) == set(TaskOption.model_fields)
    for field, value in options.items():
        await mesh.publish("job", f"{field} at publish", {}, **{field: value})
        assert getattr((await mesh.get("job", f"{field} at publish")).task_option, field) == value
        await mesh.publish("job", f"{field} later", {})
        assert getattr((await mesh.set_option("job", f"{field} later", **{field: value})).task_option, field) == value
        await mesh.publish("job", f"{field} again", {})
        await mesh.publish("job", f"{field} again", {}, update_existing_params=True, **{field: value})
        assert getattr((await mesh.get("job", f"{field} again")).task_option, field) == value


async def test_m38_a_running_execution_keeps_its_params_and_the_entry_tells_which_it_had(mesh: TaskMesh) -> None:
    go_on = asyncio.Event()

    @mesh.task
    async def job(n: int) -> int:
        await go_on.wait()
        return n

    handle = await job.publish("k", n=1)
    async with working(mesh):
        await status_is(mesh, "job", "k", Status.RUNNING)
        assert (await job.configure(update_existing_params=True).publish("k", n=2)).updated
        assert (await handle.task()).params == {"n": 2}
        assert (await handle.task()).status is Status.RUNNING, "it is not disturbed"
        go_on.set()
        assert await handle.result(timeout=60) == 1

    task = await handle.task()
    assert task.task_state.params_version == 1
    assert [entry.params_version for entry in task.task_state.worker_states] == [0]


async def test_m38_run_again_during_a_run_gives_exactly_one_more_with_the_newest_params(mesh: TaskMesh) -> None:
    ran: list[int] = []
    go_on = asyncio.Event()

    @mesh.task
    async def job(n: int) -> int:
        ran.append(n)
        await go_on.wait()
        return n

    handle = await job.publish("k", n=0)
    async with working(mesh):
        await eventually(lambda: ran == [0], what="the first run")
        for n in range(1, 6):
            assert (await job.configure(run_again=True).publish("k", n=n)).updated
        go_on.set()
        await eventually(lambda: ran == [0, 5], what="the second run")
        assert await handle.result(timeout=60) == 5
    assert ran == [0, 5]


async def test_t36_a_change_at_the_end_of_a_run_is_seen_by_that_run_or_by_another(mesh: TaskMesh) -> None:
    """Publish with changed params at many moments around the end of runs."""
    seen: dict[str, list[int]] = {}

    @mesh.task
    async def job(n: int) -> None:
        seen.setdefault(current_task().key, []).append(n)

    async def publish_changes(key: str, pause_s: float) -> None:
        for n in range(1, 9):
            await asyncio.sleep(pause_s)
            await job.configure(run_again=True).publish(key, n=n)

    await job.publish_many({f"k{i}": {"n": 0} for i in range(40)})
    async with working(mesh):
        await asyncio.gather(*(publish_changes(f"k{i}", i * 0.0007) for i in range(40)))
        await eventually(
            lambda: len(seen) == 40 and all(runs[-1] == 8 for runs in seen.values()),
            what="every key ran with its last params",
        )
        for key, runs in list(seen.items()):
            task = await finished(mesh, "job", key)
            assert task.status is Status.SUCCESS
            assert len(runs) <= 9, "no wish is served twice"
            assert runs == sorted(runs)


@pytest.mark.parametrize("ending", ["success", "fail"])
async def test_m28_a_finished_task_runs_again_when_its_entries_are_dropped(mesh: TaskMesh, ending: str) -> None:
    ran = 0

    @mesh.task(option=NO_RETRIES)
    async def job() -> int:
        nonlocal ran
        ran += 1
        if ending == "fail" and ran == 1:
            raise TaskFailed("the first time")
        return ran

    other, own = {"success": ("clean_failed", "clean_success"), "fail": ("clean_success", "clean_failed")}[ending]
    await job.publish("k")
    async with working(mesh):
        first = await finished(mesh, "job", "k")
        assert first.status is (Status.SUCCESS if ending == "success" else Status.FAIL)
        assert not (await job.configure(**_on(other)).publish("k")).updated
        assert await mesh.get("job", "k") == first

        handle = await job.configure(**_on(own)).publish("k")
        assert (handle.created, handle.updated) == (False, True)
        assert await handle.result(timeout=60) == 2


async def test_m27_not_update_running_raises_on_a_running_task_and_leaves_it_unchanged(mesh: TaskMesh) -> None:
    go_on = asyncio.Event()

    @mesh.task
    async def job(n: int) -> int:
        await go_on.wait()
        return n

    careful = job.configure(update_existing_params=True, not_update_running=True)
    assert (await careful.publish("k", n=1)).created
    assert (await careful.publish("k", n=2)).updated
    async with working(mesh):
        before = await status_is(mesh, "job", "k", Status.RUNNING)
        with pytest.raises(TaskRunning, match="'job' 'k' is running, and not_update_running was asked for"):
            await careful.publish("k", n=3)
        assert await mesh.get("job", "k") == before
        go_on.set()
        await finished(mesh, "job", "k")

    assert (await careful.publish("k", n=4)).updated, "a finished task is no running one"
    task = await mesh.get("job", "k")
    assert (task.params, task.status) == ({"n": 4}, Status.SUCCESS)
    untouched = await job.configure(not_update_running=True).publish("k", n=5)
    assert (untouched.created, untouched.updated) == (False, False)


@pytest.mark.parametrize("again", [False, True])
async def test_forgotten_keys_are_published_afresh_before_the_ttl_monitor_came_round(
    mesh: TaskMesh, again: bool
) -> None:
    @mesh.task(option=TaskOption(retain_success_ms=0))
    async def job(n: int) -> int:
        return n

    await job.publish_many({key: {"n": 1} for key in "ab"})
    await mesh.consumer().run(until_idle=True)
    for handle in await job.configure(run_again=again).publish_many({key: {"n": 2} for key in "ab"}):
        assert handle.created
        assert (await handle.task()).params == {"n": 2}
        assert (await handle.task()).status is Status.INIT


async def test_unknown_settings_are_refused(mesh: TaskMesh) -> None:
    with pytest.raises(InvalidOption, match="unknown setting update_params"):
        await mesh.publish("job", "k", update_params=True)  # type: ignore[call-arg]  # that is the point


@pytest.mark.parametrize("flag", ["update_existing_params", "run_again"])
async def test_a_waiting_task_moves_to_the_queue_and_group_of_its_newest_publication(mesh: TaskMesh, flag: str) -> None:
    """Only as far as they were set; and a worker of the new queue hears of it."""

    @mesh.task(queue="mail")
    async def job() -> str:
        return str(current_task().worker_id)

    await job.configure(group="a").publish("k")
    moved = await job.configure(queue="bulk", **_on(flag)).publish("k")
    assert moved.updated
    task = await mesh.get("job", "k")
    assert (task.queue, task.group) == ("bulk", "a"), "what was not set is not changed"
    await job.configure(**_on(flag)).publish("k")
    assert (await mesh.get("job", "k")).queue == "bulk", "the definition's own queue was not asked for"
    await job.configure(group=None, **_on(flag)).publish("k")
    assert (await mesh.get("job", "k")).group is None
    async with working(mesh, "m", queues=["mail"]), working(mesh, "b", queues=["bulk"]):
        assert await moved.result(timeout=20) == "b"


async def test_a_move_to_where_the_task_is_changes_nothing(mesh: TaskMesh) -> None:
    await mesh.publish("job", "k", {}, queue="mail", group="a")
    again = await mesh.publish("job", "k", {}, queue="mail", group="a", update_existing_params=True)
    assert not again.updated


async def test_a_running_task_moves_when_its_execution_has_ended(mesh: TaskMesh) -> None:
    """Limits count it where it runs; the run that was wished for is the new queue's."""
    go_on = asyncio.Event()
    ran: list[str] = []

    @mesh.task(queue="mail")
    async def job() -> None:
        ran.append(current_task().worker_id)
        await go_on.wait()

    handle = await job.publish("k")
    async with working(mesh, "m", queues=["mail"]), working(mesh, "b", queues=["bulk"]):
        await status_is(mesh, "job", "k", Status.RUNNING)
        await job.configure(queue="bulk", run_again=True).publish("k")
        assert (await mesh.get("job", "k")).queue == "mail"
        go_on.set()
        await eventually(lambda: len(ran) == 2, what="the second run")
        await handle.result(timeout=20)
    assert ran == ["m", "b"]
    assert (await mesh.get("job", "k")).queue == "bulk"


async def test_a_task_that_fails_meanwhile_is_tried_again_in_its_new_queue(mesh: TaskMesh) -> None:
    go_on = asyncio.Event()

    @mesh.task(queue="mail", option=TaskOption(unexpected_retry_delay_ms=0))
    async def job() -> str:
        if current_task().attempt == 1:
            await go_on.wait()
            raise RuntimeError
        return str(current_task().worker_id)

    handle = await job.publish("k")
    async with working(mesh, "m", queues=["mail"]), working(mesh, "b", queues=["bulk"]):
        await status_is(mesh, "job", "k", Status.RUNNING)
        await job.configure(queue="bulk", update_existing_params=True).publish("k")
        go_on.set()
        assert await handle.result(timeout=20) == "b"


def _on(setting: str) -> dict[str, Any]:
    return {setting: True}


async def test_the_ping_interval_follows_from_the_timeout_alone(mesh: TaskMesh) -> None:
    assert TaskOption().ping_interval_ms == TaskOption(worker_timeout_ms=600_000).ping_interval_ms == 30_000
    short = TaskOption(worker_timeout_ms=5_000)
    assert (short.ping_interval_ms, short.changed(worker_timeout_ms=3_000).ping_interval_ms) == (2_500, 1_500)
    assert TaskOption(worker_timeout_ms=2).ping_interval_ms == 1
    await mesh.publish("job", "k")
    await mesh.publish("job", "k", worker_timeout_ms=5_000, update_existing_params=True)
    option = (await mesh.get("job", "k")).task_option
    assert (option.worker_timeout_ms, option.ping_interval_ms) == (5_000, 2_500)


@pytest.mark.parametrize("anew", [False, True], ids=["to the same tasks", "to tasks published since"])
async def test_a_change_of_many_that_arrives_a_second_time_does_nothing(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    @mesh.task
    async def job(n: int) -> None: ...

    keys = ["a", "b", "c"]
    await job.publish_many({key: {"n": 1} for key in keys})
    sent: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    update = mesh.store.update

    async def noted(*arguments: Any, **options: Any) -> Any:
        sent.append((arguments, options))
        return await update(*arguments, **options)

    with monkeypatch.context() as while_changed:
        while_changed.setattr(mesh.store, "update", noted)
        again = await job.configure(run_again=True).publish_many({key: {"n": 2} for key in keys})
    assert all(handle.updated for handle in again)
    [(arguments, options)] = sent
    if anew:
        for key in keys:
            await mesh.delete("job", key)
        assert all(handle.created for handle in await job.publish_many({key: {"n": 3} for key in keys}))
    reply = await update(*arguments, **options)
    assert reply["n"] == 0
    wanted = {task["params"]["n"]: task["task_state"].get("wanted") for task in await mesh.store.find({}, {})}
    assert wanted == ({3: None} if anew else {2: 1})


async def test_a_change_of_many_is_made_to_a_task_that_was_published_anew_just_before_it(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    @mesh.task
    async def job(n: int) -> None: ...

    keys = ["a", "b", "c"]
    await job.publish_many({key: {"n": 1} for key in keys})
    update = mesh.store.update

    async def after_another(*arguments: Any, **options: Any) -> Any:
        while_changed.undo()
        await mesh.delete("job", "b")
        await job.publish("b", n=2)
        return await update(*arguments, **options)

    with monkeypatch.context() as while_changed:
        while_changed.setattr(mesh.store, "update", after_another)
        again = await job.configure(run_again=True).publish_many({key: {"n": 3} for key in keys})
    assert [(handle.created, handle.updated) for handle in again] == [(False, True)] * 3
    stored = {task.key: (task.params or {})["n"] async for task in mesh.find("job", params=True)}
    assert stored == dict.fromkeys(keys, 3)


@pytest.mark.parametrize("keys", ["a", "abc"], ids=["one", "several"])
@pytest.mark.parametrize("setting", ["run_again", "update_existing_params", "clean_failed"])
async def test_a_change_reaches_what_stands_there_however_outdated_what_was_read_of_it(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, keys: str, setting: str
) -> None:
    @mesh.task
    async def job(n: int) -> None: ...

    how: Any = {setting: True, "update_existing_params": True}
    read = Existing.read
    for meanwhile in ("deleted", "anew", "changed", "created"):
        if meanwhile != "created":
            await job.publish_many({key: {"n": 1} for key in keys})

        async def outdated(existing: Existing, ids: Any, meanwhile: str = meanwhile) -> Any:
            while_changed.undo()
            found = await read(existing, ids)
            if meanwhile in ("deleted", "anew"):
                await mesh.delete("job", "a")
            if meanwhile != "deleted":
                await job.configure(update_existing_params=True).publish("a", n=2)
            return found

        with monkeypatch.context() as while_changed:
            while_changed.setattr(Existing, "read", outdated)
            handles = await job.configure(**how).publish_many({key: {"n": 3} for key in keys})
        new = {"deleted": "a", "created": keys[1:]}.get(meanwhile, "")
        assert {handle.key: (handle.created, handle.updated) for handle in handles} == {
            key: (key in new, key not in new) for key in keys
        }
        stored = {task.key: task.params async for task in mesh.find("job", params=True)}
        assert stored == {key: {"n": 3} for key in keys}
        for key in keys:
            await mesh.delete("job", key)


async def test_what_is_equal_to_python_alone_is_stored_as_each_publisher_of_one_moment_says(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    marks = {"true": True, "whole": 1, "float": 1.0}
    await job.publish_many({key: {} for key in marks})
    changing = job.configure(run_again=True)
    await asyncio.gather(*(changing.configure(fields={"mark": mark}).publish(key) for key, mark in marks.items()))
    stored = {task["key"]: task["mark"] for task in await mesh.store.find({}, {"key": 1, "mark": 1})}
    assert {key: type(mark) for key, mark in stored.items()} == {"true": bool, "whole": int, "float": float}


@pytest.mark.parametrize(
    "how",
    [
        {"writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}},
        {"closeConnection": True},
        {"errorCode": 50},
    ],
    ids=["not confirmed", "cut off", "too late"],
)
@pytest.mark.parametrize("in_one_call", [True, False], ids=["one call", "calls of one moment"])
async def test_many_that_run_again_do_so_once_though_the_server_fails(
    mesh: TaskMesh, mongo_uri: str, database: str, how: dict[str, Any], in_one_call: bool
) -> None:
    runs: Counter[tuple[str, int]] = Counter()

    @mesh.task
    async def job(n: int) -> None:
        runs[current_task().key, n] += 1

    keys = [str(n) for n in range(120)]
    await job.publish_many({key: {"n": 1} for key in keys})
    async with working(mesh, concurrency=50), another_mesh(mongo_uri, database, "the publisher") as publisher:
        for key in keys:
            await finished(mesh, "job", key)
        async with failing_commands(mongo_uri, ["update"], times=2, appname="the publisher", **how) as have_failed:
            if in_one_call:
                again = {key: {"n": 2} for key in keys}
                handles = await publisher.publisher.publish_many("job", again, run_again=True)
            else:
                handles = await asyncio.gather(
                    *(publisher.publish("job", key, {"n": 2}, run_again=True) for key in keys)
                )
            await have_failed(2)
        assert all(handle.updated for handle in handles)
        for handle in handles:
            await handle.result(60)
    assert runs == {(key, n): 1 for key in keys for n in (1, 2)}
