"""Bulk actions touch exactly their filter (T43), purges only what is finished; filters read as people write them."""

from __future__ import annotations

from datetime import timedelta

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmesh import InvalidOption, Status, TaskFailed, TaskFilter, TaskMesh
from tests.waiting import eventually
from tests.working import working


async def keys(mesh: TaskMesh, status: Status) -> set[str]:
    return {task.key async for task in mesh.find("work", status, limit=0)}


async def some_tasks(mesh: TaskMesh) -> None:
    """Two that wait, two that failed by a timeout, two that failed otherwise, two that succeeded."""

    @mesh.task
    async def work(fail: str | None = None) -> str:
        if fail is not None:
            raise TaskFailed(fail)
        return "done"

    params = {
        f"{kind}{n}": fail for n in "12" for kind, fail in (("slow", "a TimeOut (500)"), ("bad", "no"), ("good", None))
    }
    await work.publish_many({key: {"fail": fail} for key, fail in params.items()})
    async with working(mesh) as consumer:
        await eventually(lambda: consumer.finished == 6)
    await work.publish_many({"wait1": {}, "wait2": {}})


async def test_t43_a_bulk_retry_touches_exactly_the_filter(mesh: TaskMesh) -> None:
    await some_tasks(mesh)
    counted = await mesh.bulk.retry('status:FAIL error:"timeout (500)"', dry_run=True)
    assert (counted.matched, counted.done) == (2, 0)
    assert await keys(mesh, Status.FAIL) == {"slow1", "slow2", "bad1", "bad2"}
    done = await mesh.bulk.retry('status:FAIL error:"timeout (500)"')
    assert (done.matched, done.done) == (2, 2)
    assert await keys(mesh, Status.FAIL) == {"bad1", "bad2"}
    assert await keys(mesh, Status.INIT) == {"slow1", "slow2", "wait1", "wait2"}
    assert await keys(mesh, Status.SUCCESS) == {"good1", "good2"}


async def test_cancel_and_delete_by_filter(mesh: TaskMesh) -> None:
    await some_tasks(mesh)
    assert (await mesh.bulk.cancel("name:work", dry_run=True)).matched == 2, "finished ones stay as they are"
    cancelled = await mesh.bulk.cancel("name:work")
    assert (cancelled.matched, cancelled.done) == (2, 2)
    with pytest.raises(InvalidOption, match="only unfinished tasks can be cancelled, got SUCCESS"):
        await mesh.bulk.cancel("name:work status:SUCCESS")
    assert await keys(mesh, Status.CANCELLED) == {"wait1", "wait2"}
    assert (await mesh.bulk.delete("name:work key:bad")).done == 2
    assert await mesh.listing.count("name:work") == 6
    assert await mesh.listing.count("name:work", at_most=4) == 4
    assert await mesh.listing.count("worker:nobody") == 0


async def test_a_purge_deletes_what_is_finished_and_nothing_else(mesh: TaskMesh) -> None:
    await some_tasks(mesh)
    soon = mesh.clock.now() + timedelta(milliseconds=50)
    await mesh.publish("work", "late", {}, expire_time=soon)
    await eventually(lambda: mesh.clock.now() > soon)
    assert (await mesh.bulk.purge(dry_run=True)).matched == 7
    assert (await mesh.bulk.purge("age>1h")).done == 0
    told: list[int] = []
    assert (await mesh.bulk.purge(progress=told.append)).done == 7, "also what expired by time alone"
    assert told == [7]
    assert await keys(mesh, Status.INIT) == {"wait1", "wait2"}
    with pytest.raises(InvalidOption, match="finished"):
        await mesh.bulk.purge("status:INIT")


async def test_running_tasks_are_not_retried_and_are_stopped_when_deleted(mesh: TaskMesh) -> None:
    stopped = anyio.Event()

    @mesh.task
    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            stopped.set()

    await work.publish("k")
    async with working(mesh) as consumer:
        await eventually(lambda: consumer.running == ["k"])
        assert (await mesh.bulk.retry("name:work")).done == 0
        assert (await mesh.bulk.delete("status:RUNNING")).done == 1
        with anyio.fail_after(10):
            await stopped.wait()


@pytest.mark.parametrize(
    "where", ["", "colour:red", "status:DONE", "age>soon", "name:'", "name:a name:b", "status:FAIL,"]
)
async def test_a_filter_that_makes_no_sense_is_refused_and_touches_nothing(mesh: TaskMesh, where: str) -> None:
    await mesh.publish("work", "k")
    with pytest.raises(InvalidOption):
        await mesh.bulk.delete(where)
    assert await mesh.listing.count() == 1


def test_a_filter_reads_as_people_write_it() -> None:
    where = TaskFilter.parse("status:fail,expired name:resize 'error:timed out' age>1.5h age<2d img-")
    assert where == TaskFilter(
        status=(Status.FAIL, Status.EXPIRED),
        name="resize",
        error="timed out",
        older_than_ms=5_400_000,
        younger_than_ms=2 * 86_400_000,
        key_prefix="img-",
    )


# NUL stands in no name, key or id, and no filter takes it.
texts = st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)


@given(
    where=st.builds(
        TaskFilter,
        name=texts,
        queue=texts,
        group=texts,
        key_prefix=texts,
        error=texts,
        worker=texts,
        status=st.lists(st.sampled_from(Status), unique=True).map(tuple),
        older_than_ms=st.none() | st.integers(0, 10**10),
        younger_than_ms=st.none() | st.integers(0, 10**10),
    )
)
def test_a_filter_says_what_it_is_in_its_own_language(where: TaskFilter) -> None:
    assert TaskFilter.parse(str(where)) == where
