"""Celery's calls, on a mesh: they give what Celery gave, and what has no counterpart is refused with a way out."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from taskmesh import InvalidOption, Status, TaskCancelled, TaskError, TaskMesh, current_blocking_task
from taskmesh.integrations.celery_compat import Celery, chain, chord, group
from taskmesh.integrations.encryption import AESCodec
from taskmesh.testing import kill_at
from tests.integrations.celery_calls import answers, define
from tests.waiting import eventually
from tests.working import working

CELERY_GAVE = json.loads((Path(__file__).parent / "peers/celery-5.7.0.json").read_text())
in_a_thread = anyio.to_thread.run_sync


@pytest.fixture
def app(mesh: TaskMesh) -> Iterator[Celery]:
    app = Celery(mesh)
    yield app
    app.close()


async def test_old_calls_give_what_celery_gave(mesh: TaskMesh, app: Celery) -> None:
    tasks = define(app)
    async with working(mesh, concurrency=20):
        found = await in_a_thread(lambda: answers(tasks, chain, chord, group))
    assert found == CELERY_GAVE


async def test_a_task_of_celerys_is_one_of_the_mesh(mesh: TaskMesh, app: Celery) -> None:
    @app.task(name="shop.add", queue="sums", time_limit=30, max_retries=None)
    def add(x: int, y: int = 1) -> int:
        return x + y

    eta = datetime(2100, 1, 1)  # noqa: DTZ001 -- Celery takes it as UTC
    options: dict[str, Any] = {"eta": eta, "expires": eta + timedelta(days=1), "queue": "late", "priority": 7}
    await in_a_thread(lambda: add.apply_async((2,), task_id="k", **options))
    task = await mesh.get("shop.add", "k")
    assert (task.params, task.queue, task.task_option.priority) == ({"x": 2, "y": 1}, "late", 7)
    assert task.task_state.start_time == eta.replace(tzinfo=UTC)
    assert task.task_state.expire_time == eta.replace(tzinfo=UTC) + timedelta(days=1)
    assert task.task_option.run_timeout_ms == 30_000
    async with working(mesh):
        handle = await add.definition.publish("new", x=4)  # as new code does
        assert await handle.result(60) == 5
        assert (await handle.task()).queue == "sums"


async def test_a_handler_applies_tasks(mesh: TaskMesh, app: Celery) -> None:
    @app.task
    def inner(n: int) -> int:
        return n + 1

    @app.task
    def outer(n: int) -> Any:
        return [inner.delay(n).id, (inner.s(n) | inner.s()).apply_async().get(60)]

    async with working(mesh):
        key, value = await in_a_thread(lambda: outer.delay(1).get(60))
        assert value == 3
        assert (await eventually(lambda: _succeeded(mesh, inner.name, key))).successes[0].returns == 2
    assert inner.name == f"{__name__}.inner", "as Celery names it"


async def _succeeded(mesh: TaskMesh, name: str, key: str) -> Any:
    task = await mesh.get(name, key)
    return task if task.status is Status.SUCCESS else None


async def test_an_encrypted_mesh_has_its_old_calls_encrypted_too(mongo_uri: str, database: str) -> None:
    codec = AESCodec({"2026": AESCodec.new_key()}, current="2026")
    async with TaskMesh(mongo_uri, database=database, codec=codec, payload_threshold=100_000) as mesh:
        app = Celery(mesh)

        @app.task(name="shop.echo")
        def echo(text: str) -> str:
            return text

        waits = await in_a_thread(lambda: echo.apply_async(("4111",), countdown=3600))
        stored = await mesh.store.find({"_id": f"shop.echo:{waits.id}"}, {"params": 1})
        assert stored[0]["params"]["text"] != "4111"
        large = "4111" * 100_000
        async with working(mesh):
            assert await in_a_thread(lambda: chain(echo.s("4111"), echo.s())().get(60)) == "4111"
            assert await in_a_thread(lambda: echo.delay(large).get(60)) == large
        await in_a_thread(app.close)


async def test_what_fails_in_a_chain_is_told_at_its_end(mesh: TaskMesh, app: Celery) -> None:
    @app.task(name="shop.fail")
    def fail() -> int:
        raise ValueError("out of paper")

    @app.task(name="shop.double")
    def double(x: int) -> int:
        return 2 * x

    async with working(mesh):
        last = await in_a_thread(chain(fail.s(), double.s()))
        with pytest.raises(TaskError, match=r"shop\.fail"):
            await in_a_thread(lambda: last.get(60))
        waits = await in_a_thread(lambda: double.apply_async((1,), countdown=3600))
        assert await in_a_thread(lambda: waits.state) == "PENDING"
        await in_a_thread(waits.revoke)
        assert await in_a_thread(lambda: waits.state) == "REVOKED"
        with pytest.raises(TaskCancelled):
            await in_a_thread(waits.get)
        await in_a_thread(waits.forget)


async def test_a_chain_is_published_as_a_whole_or_not_at_all(mesh: TaskMesh, app: Celery) -> None:
    @app.task
    def double(x: int) -> int:
        return 2 * x

    with pytest.raises(InvalidOption, match="link"):
        await in_a_thread(chain(double.s(1), double.s(), double.s().set(link="x")))
    assert [task async for task in mesh.find()] == []


async def test_what_has_no_counterpart_is_refused_and_the_loop_is_not_blocked(app: Celery) -> None:
    with pytest.raises(InvalidOption, match=r"rate_limit.*docs/migrating\.md"):
        app.task(rate_limit="10/m")

    @app.task
    def job() -> None: ...

    with pytest.raises(InvalidOption, match="no task 'unheard of'"):
        app.send_task("unheard of")
    with pytest.raises(RuntimeError, match="would block the running event loop"):
        job.delay()


async def test_a_group_is_waited_for_no_longer_than_its_timeout_altogether(mesh: TaskMesh, app: Celery) -> None:
    ends = [threading.Event() for _ in range(3)]

    @app.task(name="shop.wait")
    def wait(number: int) -> int:
        assert ends[number].wait(60)
        return number

    async with working(mesh):
        waiting = group(wait.s(number) for number in range(3))
        many = await in_a_thread(waiting)
        timeout_s = 1.0

        def get_while_they_end() -> None:
            # Each of them ends within the timeout of a wait of its own, but not all of them within one.
            for number, end in enumerate(ends, 1):
                threading.Timer(0.8 * timeout_s * number, end.set).start()
            many.get(timeout=timeout_s)

        with pytest.raises(TimeoutError):
            await in_a_thread(get_while_they_end)
        assert await in_a_thread(lambda: many.get(timeout=60)) == [0, 1, 2]
        assert await in_a_thread(lambda: many.get(timeout=0)) == [0, 1, 2]


async def test_a_signature_takes_what_celerys_takes(mesh: TaskMesh, app: Celery) -> None:
    @app.task(name="shop.total")
    def total(values: list[int], extra: int = 0) -> int:
        return sum(values) + extra

    waits = await in_a_thread(
        lambda: total.signature(([1, 2],), {"extra": 4}, queue="late", countdown=3600).apply_async(priority=2)
    )
    task = await mesh.get("shop.total", waits.id)
    assert (task.params, task.queue, task.task_option.priority) == ({"values": [1, 2], "extra": 4}, "late", 2)
    async with working(mesh):
        piped = chain(total.s([1]), total.signature(([5],), immutable=True))
        assert await in_a_thread(lambda: piped().get(60)) == 5


async def test_a_retry_says_itself_how_many_there_may_be_and_why(mesh: TaskMesh, app: Celery) -> None:
    @app.task(name="shop.flaky", bind=True, max_retries=1)
    def flaky(task: Any, most: int | None, succeeds_at: int) -> int:
        if task.request.retries < succeeds_at:
            raise task.retry(exc=ValueError("out of paper"), countdown=0, max_retries=most)
        return int(task.request.retries)

    async with working(mesh):
        assert await in_a_thread(lambda: flaky.delay(3, 3).get(60)) == 3
        for most, tries in ((3, 4), (None, 2), (0, 1)):
            failed = await in_a_thread(flaky.delay, most, 9)
            with pytest.raises(TaskError, match="out of paper") as error:
                await in_a_thread(failed.get, 60)
            assert len(error.value.reasons) == tries


async def test_what_was_revoked_is_told_and_not_raised_where_that_is_asked_for(mesh: TaskMesh, app: Celery) -> None:
    @app.task(name="shop.double")
    def double(x: int) -> int:
        return 2 * x

    async with working(mesh):
        both = await in_a_thread(group(double.s(1), double.s(2).set(countdown=3600)))
        await in_a_thread(both.results[1].revoke)
        one, error = await in_a_thread(lambda: both.get(60, propagate=False))
    assert (one, type(error)) == (2, TaskCancelled)


async def test_an_async_function_is_refused_where_it_is_decorated(app: Celery) -> None:
    with pytest.raises(InvalidOption, match=r"'shop\.fetch'.*async.*mesh\.task"):

        @app.task(name="shop.fetch", bind=True)
        async def fetch(task: Any, url: str) -> str:
            return f"{task.name} {url}"


async def test_what_nobody_has_published_is_pending_as_in_celery(mesh: TaskMesh, app: Celery) -> None:
    @app.task(name="shop.double")
    def double(x: int) -> int:
        return 2 * x

    unknown = double.AsyncResult("never published")
    assert await in_a_thread(lambda: [unknown.state, unknown.ready(), unknown.failed()]) == ["PENDING", False, False]
    async with working(mesh):
        done = await in_a_thread(double.delay, 1)
        assert await in_a_thread(done.get, 60) == 2
    await in_a_thread(done.forget)
    assert await in_a_thread(lambda: done.state) == "PENDING"


async def test_an_execution_whose_worker_is_lost_is_no_retry(mesh: TaskMesh, app: Celery) -> None:
    @app.task(name="shop.pay", bind=True)
    def pay(task: Any) -> list[int]:
        before = task.request.retries
        current_blocking_task().step("charge", int)
        if before == 0:
            raise task.retry(countdown=0)
        return [before, current_blocking_task().attempt]

    async with working(mesh):
        with kill_at("charge"):
            assert await in_a_thread(lambda: pay.delay().get(60)) == [1, 3]


async def test_several_apps_share_a_mesh(mesh: TaskMesh, app: Celery) -> None:
    other = Celery(mesh)
    try:

        @app.task(name="shop.add")
        def add(x: int, y: int) -> int:
            return x + y

        @other.task(name="bank.total")
        def total(values: list[int]) -> int:
            return sum(values)

        async with working(mesh):
            assert await in_a_thread(lambda: chord([add.s(n, n) for n in range(3)])(total.s()).get(60)) == 6
            joined = group(total.s([n]) for n in range(3)) | total.s()
            assert await in_a_thread(lambda: joined.apply_async().get(60)) == 3
    finally:
        await in_a_thread(other.close)
