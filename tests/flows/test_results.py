"""What a task has waited for, it can use: by `dependencies()`, or as params."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from taskmesh import (
    FromDependency,
    InvalidOption,
    InvalidParams,
    Status,
    TaskError,
    TaskMesh,
    TaskNotFound,
    TaskOption,
    current_blocking_task,
    current_task,
)
from tests.flows.process_handlers import book as book_elsewhere
from tests.flows.process_handlers import joined_elsewhere, publishes_what_is_fed, starts_what_is_fed
from tests.waiting import eventually
from tests.working import working


@dataclass
class Page:
    number: int


async def drained(mesh: TaskMesh) -> None:
    await mesh.consumer(worker_id="w1").run(until_idle=True)


async def is_claimable(mesh: TaskMesh, name: str, key: str) -> bool:
    return (await mesh.get(name, key)).next_claim_time is not None


async def test_dependencies_gives_each_result_by_name_and_key_in_the_type_of_its_handler(mesh: TaskMesh) -> None:
    seen: list[Any] = []

    @mesh.task
    async def page(n: int) -> Page:
        return Page(n)

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def broken() -> None:
        raise ValueError("no")

    @mesh.task
    async def book() -> int:
        seen.append(await current_task().dependencies())
        return len(seen[0])

    @mesh.task
    def blocking_book() -> int:
        return len(current_blocking_task().dependencies())

    in_a_process = mesh.task(joined_elsewhere, run="process")
    pages = await page.publish_many({str(n): {"n": n} for n in range(3)})
    after: Any = [*pages, await broken.publish("b")]
    books = [
        await each.configure(after=after, on_dependency_failure="run").publish("k")
        for each in (book, blocking_book, in_a_process)
    ]
    await drained(mesh)
    assert [await each.result(5) for each in books] == [4, 4, 4]
    [found] = seen
    assert list(found) == [("page", "0"), ("page", "1"), ("page", "2"), ("broken", "b")]
    assert found["page", "1"] == Page(1)
    assert isinstance(found["broken", "b"], TaskError)
    assert "ValueError: no" in str(found["broken", "b"])


async def test_what_several_get_of_one_dependency_is_not_shared(mesh: TaskMesh) -> None:
    together = asyncio.Barrier(5)

    @mesh.task
    async def part() -> Any:
        return [1]

    @mesh.task
    async def whole() -> Any:
        await together.wait()
        [value] = (await current_task().dependencies()).values()
        value.append(2)
        return value

    await part.publish("p")
    handles = [await whole.configure(after=[("part", "p")]).publish(str(n)) for n in range(5)]
    async with working(mesh):
        assert [await handle.result(60) for handle in handles] == 5 * [[1, 2]]


async def test_params_come_from_dependencies_validated(mesh: TaskMesh) -> None:
    @mesh.task
    async def page(n: int) -> Page:
        return Page(n)

    @mesh.task
    async def only(text: Annotated[Page, FromDependency], times: int = 1) -> int:
        return text.number * times

    @mesh.task
    async def two(a: Annotated[Page, FromDependency("page", "1")], b: Page) -> list[int]:
        return [a.number, b.number]

    @mesh.task
    def elsewhere(b: Page | None = None) -> int:
        return b.number if b is not None else -1

    one, three = await page.publish("1", n=1), await page.publish("3", n=3)
    first = await mesh.publish("only", "f", {"times": 2}, after=[three])
    fourth = await elsewhere.configure(after={"b": three}).publish("e")
    fifth = await elsewhere.publish("e5")
    sixth = await mesh.publish("two", "both", after={"b": three, "a": one})
    await drained(mesh)
    assert await first.result(5) == 6
    assert await fourth.result(5) == 3
    assert await fifth.result(5) == -1
    assert await sixth.result(5) == [1, 3]


async def test_what_cannot_be_fed_is_refused(mesh: TaskMesh) -> None:
    @mesh.task
    async def page(n: int) -> Page:
        return Page(n)

    @mesh.task
    async def only(text: Annotated[Page, FromDependency]) -> int:
        return text.number

    @mesh.task
    async def named(a: Annotated[Page, FromDependency("page", "1")], b: Page) -> int:
        return a.number + b.number

    one = await page.publish("1", n=1)
    two = await page.publish("2", n=2)
    unclear: list[tuple[Any, Any, str]] = [
        (only, {}, "its only dependency, and after names 0"),
        (only, {"after": [one, two]}, "its only dependency, and after names 2: pass"),
        (named, {"after": {"b": two}}, "'a' is the result of 'page' '1', which after does not name"),
    ]
    for definition, settings, said in unclear:
        with pytest.raises(InvalidParams, match=said):
            await definition.configure(**settings).publish("unclear")
    await mesh.publish("only", "clear", after={"text": two})
    await mesh.publish("only", "clear", run_again=True)  # what it waits for is known
    with pytest.raises(InvalidParams, match="text comes from a dependency"):
        await only.configure(after=[one]).publish("k", text=Page(2))
    with pytest.raises(InvalidParams, match="after names nothing, which is no parameter"):
        await page.configure(after={"nothing": one}).publish("k", n=1)
    with pytest.raises(InvalidOption, match="takes a name and a key"):
        FromDependency("page")
    both = await mesh.publish("late", "both", after=[one, two])

    @mesh.task(name="late")  # so that nobody could check it
    async def late(text: Annotated[Page, FromDependency]) -> None: ...

    async with working(mesh, "w1"):

        async def reason() -> str:
            return "".join((await both.task()).fail_reasons)

        await eventually(reason)
    assert "its only dependency, and it has 2" in await reason()
    assert (await both.status()) in (Status.INIT, Status.FAIL)


def fed(mesh: TaskMesh) -> tuple[Any, Any]:
    """Something to wait for, and what has a param that may come from there."""

    @mesh.task
    async def page(n: int) -> int:
        return n

    return page, mesh.task(book_elsewhere.fn)


CHANGES = ["update_existing_params", "run_again", "clean_success"]


async def test_whoever_changes_a_task_need_not_give_what_comes_from_a_dependency_and_may_not(mesh: TaskMesh) -> None:
    page, book = fed(mesh)

    @mesh.task
    async def annotated(x: Annotated[int, FromDependency]) -> int:
        return x

    only: Any = annotated
    seven = await page.publish("7", n=7)
    handle = await book.configure(after={"x": seven}).publish("b")
    for change in CHANGES:
        changing: Any = book.configure(**{change: True})
        with pytest.raises(InvalidParams, match="x comes from a dependency: leave it out"):
            await changing.publish_many({"new": {"x": 1}, "b": {"x": 5, "times": 3}})
        with pytest.raises(InvalidParams, match="'x' is missing"):
            await changing.publish("new", times=3)  # for which nothing comes from anywhere
        with pytest.raises(InvalidParams, match="after names 0"):
            await only.configure(**{change: True}).publish("new")
        await changing.publish("b", times=2)
    with pytest.raises(TaskNotFound):
        await mesh.get("book", "new")
    await drained(mesh)
    assert (await handle.result(5), (await handle.task()).params) == (14, {"times": 2})
    by_name = await mesh.publish("book", "b", {"times": 3}, run_again=True)
    await drained(mesh)
    assert await by_name.result(5) == 21


async def test_in_a_transaction_too_what_comes_from_a_dependency_is_known(mesh: TaskMesh) -> None:
    page, book = fed(mesh)

    seven = await page.publish("7", n=7)
    handle = await book.configure(after={"x": seven}).publish("b")
    async with mesh.connection.store.driver.session() as session, await session.start_transaction():
        await book.configure(run_again=True, session=session).publish("b", times=2)
    await drained(mesh)
    assert await handle.result(5) == 14


@pytest.mark.parametrize("where", ["loop", "thread", "process"])
async def test_a_handler_that_changes_a_task_need_not_give_what_comes_from_a_dependency(
    mesh: TaskMesh, where: str
) -> None:
    page, book = fed(mesh)

    @mesh.task
    async def looping() -> None:
        await current_task().publish(book.configure(run_again=True), "b", times=2)

    @mesh.task
    def threaded() -> None:
        current_blocking_task().publish(book.configure(run_again=True), "b", times=2)

    elsewhere = mesh.task(publishes_what_is_fed, run="process")
    handle = await book.configure(after={"x": await page.publish("7", n=7)}).publish("b")
    await {"loop": looping, "thread": threaded, "process": elsewhere}[where].publish("p")
    await drained(mesh)
    assert await handle.result(5) == 14


async def test_a_handler_in_a_child_process_starts_what_gets_the_result_of_another_child(mesh: TaskMesh) -> None:
    fed(mesh)
    handle = await mesh.task(starts_what_is_fed, run="process").publish("p")
    await drained(mesh)
    assert await handle.result(5) == 6


async def test_published_by_name_a_param_that_comes_from_a_dependency_may_not_be_given_either(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    page, _ = fed(mesh)
    await drained(mesh)  # its worker has registered what it takes
    seven = await page.publish("7", n=7)
    async with TaskMesh(mongo_uri, database=database) as elsewhere:
        with pytest.raises(InvalidParams, match="x comes from a dependency: leave it out"):
            await elsewhere.publish("book", "b", {"x": 5}, after={"x": seven})
        await elsewhere.publish("book", "b", {"times": 2}, after={"x": seven})
        with pytest.raises(InvalidParams, match="x comes from a dependency: leave it out"):
            await elsewhere.publish("book", "b", {"x": 5}, run_again=True)
        handle = await elsewhere.publish("book", "b", {"times": 3}, update_existing_params=True)
        await drained(mesh)
        assert await handle.result(5) == 21


async def test_what_gets_the_result_of_a_task_that_was_begun_anew_waits_for_the_new_one(mesh: TaskMesh) -> None:
    page, book = fed(mesh)
    seven = await page.publish("7", n=7)
    handle = await book.configure(after={"x": seven}, max_unexpected_retries=0).publish("b")
    await mesh.consumer(names=["page"]).run(until_idle=True)
    await eventually(lambda: is_claimable(mesh, "book", "b"), what="its gate is open")
    await page.configure(run_again=True, delay_ms=3_600_000).publish("7", n=8)

    async def tried() -> bool:
        [found] = await mesh.connection.store.find({"_id": "book:b"}, {})
        return "resume_time" in found["task_state"] or found["status"] == "FAIL"

    async with working(mesh, "w1"):
        await eventually(tried, what="it was claimed, and put off")
        assert await handle.status() is not Status.FAIL
        await mesh.retry("page", "7")  # due at once
        assert await handle.result(30) == 8
    assert [entry.state for entry in (await handle.task()).task_state.worker_states] == ["SUCCESS"]


async def test_a_dependency_that_was_begun_anew_is_told_as_that(mesh: TaskMesh) -> None:
    page, _ = fed(mesh)

    @mesh.task
    async def reader() -> str:
        await page.configure(run_again=True, delay_ms=3_600_000).publish("7", n=8)
        [found] = (await current_task().dependencies()).values()
        return str(found)

    seven = await page.publish("7", n=7)
    handle = await reader.configure(after=[seven], on_dependency_failure="run").publish("r")
    await drained(mesh)
    told = await handle.result(5)
    assert "task 'page' '7' was started again" in told
    assert "ended as" not in told
