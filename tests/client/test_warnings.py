"""What a handle warns of, and what of a document is not ours: `handle.warnings` and `Task.extra`."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskmesh import TaskMesh
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import finished, working

WARNINGS: list[tuple[str, dict[str, Any], str | None]] = [
    ("job", {}, None),
    ("unknown", {}, "no live worker runs tasks named 'unknown' from queue 'default'"),
    ("job", {"queue": "elsewhere"}, "no live worker runs tasks named 'job' from queue 'elsewhere'"),
    ("job", {"specific_worker_ids": ("w", "x")}, None),
    ("job", {"specific_worker_ids": ("x",)}, "none of specific_worker_ids (x) is a live worker that runs 'job'"),
    ("job", {"specific_worker_ids": ("w", "w"), "concurrent_worker_cnt": 2}, "it can never finish"),
    ("job", {"queue": "shut"}, "queue 'shut' is paused"),
    ("job", {"expire_time": datetime(2020, 1, 1, tzinfo=UTC)}, "it expires at 2020-01-01T00:00:00+00:00"),
    ("job", {"delay_ms": 60_000, "expire_time": "soon"}, "before it can start"),
    ("job", {"delay_ms": 100, "expire_time": "soon"}, None),
]


async def test_a_handle_says_why_nobody_could_run_the_task_now(mesh: TaskMesh, subtests: pytest.Subtests) -> None:
    @mesh.task
    async def job() -> None: ...

    async def is_live() -> bool:
        return any(worker.live for worker in await mesh.workers())

    async with working(mesh, "w", queues=["default", "shut"]):
        await mesh.pause("shut")
        await eventually(is_live)
        for number, (name, settings, warning) in enumerate(WARNINGS):
            with subtests.test(name=name, **settings):
                soon = {"expire_time": datetime.now(UTC) + timedelta(seconds=30)}
                given = settings | (soon if settings.get("expire_time") == "soon" else {})
                warnings = (await mesh.publish(name, str(number), **given)).warnings
                assert [text for text in warnings if warning is None or warning not in text] == []
                assert len(warnings) == (warning is not None)


async def test_a_worker_has_to_be_allowed_and_to_have_the_labels(mesh: TaskMesh) -> None:
    @mesh.task(needs={"gpu": True})
    async def train() -> None: ...

    async def both_live() -> bool:
        return sum(worker.live for worker in await mesh.workers()) == 2

    async with working(mesh, "plain"), working(mesh, "gpu", labels={"gpu": True}):
        await eventually(both_live)
        [warning] = (await train.configure(specific_worker_ids=["plain"]).publish("nowhere")).warnings
        assert warning == "none of specific_worker_ids (plain) that is live has the labels that it needs: gpu=true"
        assert (await train.configure(specific_worker_ids=["plain", "gpu"]).publish("somewhere")).warnings == []


async def test_a_group_that_is_limited_to_nothing_is_told_at_publish(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    await mesh.set_limit("slots", group_running=0)
    await mesh.queues.set_group_limit("slots", "free", 1)
    await mesh.set_limit("starts", group_rate=0)
    await mesh.queues.set_group_limit("one", "g", 0)
    async with working(mesh):
        for queue in ("slots", "starts", "one"):
            [warning] = (await job.configure(queue=queue, group="g").publish(queue)).warnings
            said = f"group 'g' of queue '{queue}' is limited to 0: nothing of it starts until that is changed"
            assert warning == said
        open_to: list[dict[str, Any]] = [
            {"queue": "slots"},
            {"queue": "slots", "group": "free"},
            {"queue": "one", "group": "h"},
        ]
        for number, where in enumerate(open_to):
            assert (await job.configure(**where).publish(str(number))).warnings == []


async def test_a_worker_of_this_mesh_counts_from_its_start_to_its_end(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    [warning] = (await job.publish("before")).warnings
    assert "no worker is alive" in warning
    async with working(mesh):
        assert (await job.publish("meanwhile")).warnings == []
    [warning] = (await job.publish("after")).warnings
    assert "no worker is alive" in warning


async def test_what_this_mesh_has_changed_is_warned_of_at_once(mesh: TaskMesh) -> None:
    @mesh.task(queue="mail")
    async def job() -> None: ...

    async with working(mesh, "w"):
        assert (await job.publish("open")).warnings == []
        await mesh.pause("mail")
        assert (await job.publish("paused")).warnings == ["queue 'mail' is paused"]
        await mesh.resume("mail")
        assert (await job.publish("resumed")).warnings == []
        await mesh.set_limit("mail", running=0)
        assert "is limited to 0" in (await job.publish("limited")).warnings[0]


async def test_of_a_task_that_is_there_already_its_own_queue_and_group_count(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    async def warned(key: str, **settings: Any) -> list[str]:
        (handle,) = await mesh.publisher.publish_many("job", {key: {}}, **settings)
        assert not handle.created
        return handle.warnings

    # Registered, so that it can be asked for warnings; nothing of what is published may run.
    async with working(mesh, "w", queues=["default", "shut", "slow"]) as consumer:
        consumer.pause()
        await job.configure(queue="shut").publish("in shut")
        await job.configure(queue="slow", group="g").publish("in a group")
        await job.publish("in default")
        await job.configure(queue="elsewhere").publish("elsewhere")
        await mesh.pause("shut")
        await mesh.pause("slow", group="g")
        await eventually(lambda: _is_warned_of(mesh, "shut"))
        assert await warned("in shut") == ["queue 'shut' is paused"]
        assert await warned("in shut", update_existing_params=True) == ["queue 'shut' is paused"]
        assert await warned("in a group") == ["group 'g' of queue 'slow' is paused"]
        assert await warned("in default", queue="shut") == []
        assert await warned("elsewhere") == ["no live worker runs tasks named 'job' from queue 'elsewhere'"]
        both = await mesh.publisher.publish_many("job", {"in default": {}, "in shut": {}, "new": {}})
        assert [handle.warnings for handle in both] == [[], ["queue 'shut' is paused"], []]


async def _is_warned_of(mesh: TaskMesh, queue: str) -> bool:
    """Publish there once more; what is known of the queues may be two seconds old."""
    handle = await mesh.publish("job", str(time.monotonic()), queue=queue, expire_time=datetime.now(UTC))
    return f"queue {queue!r} is paused" in handle.warnings


async def test_what_is_published_is_so_though_the_warnings_cannot_be_found(mongo_uri: str, database: str) -> None:
    mesh = TaskMesh(mongo_uri, database=database)
    async with mesh:
        async with failing_commands(mongo_uri, ["aggregate"], errorCode=13):
            handle = await mesh.publish("job", "k")
        assert handle.created
        assert handle.warnings == ["could not be checked against the workers that there are (OperationFailure)"]
        assert (await handle.task()).key == "k"


async def test_fields_of_others_at_the_top_of_the_document_are_kept_and_shown(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> int:
        return 1

    handle = await job.publish("k")
    theirs = {"tenant": "acme", "nested": {"a": [1, {"b": None}]}}
    tasks = mesh.store.driver.collection(mesh.store.tasks)
    await tasks.update_one({"_id": "job:k"}, {"$set": theirs})
    assert (await handle.task()).extra == theirs
    async with working(mesh):
        await finished(mesh, "job", "k")
    await job.configure(run_again=True).publish("k")
    await mesh.set_option("job", "k", priority=3)
    assert (await mesh.cancel("job", "k")).extra == theirs
    assert [task.extra async for task in mesh.find()] == [theirs]
    assert (await mesh.retry("job", "k")).extra == theirs
