"""Parents that start children at the same moment share a transaction, and nothing else: what befalls one stops no other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskmesh import InvalidKey, LeaseLost, Status, TaskMesh, TaskNotFound, TaskOption, TaskTooLarge, current_task
from taskmesh.consumer.durable import journal
from taskmesh.store.renew import end_lease
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import finished, working

ONCE = TaskOption(max_unexpected_retries=0)
PARENTS = 20


async def test_each_gets_what_its_own_children_return(mesh: TaskMesh) -> None:
    together = asyncio.Barrier(PARENTS)
    began: set[int] = set()

    @mesh.task
    async def part(n: int) -> int:
        return n

    @mesh.task(option=ONCE)
    async def whole(n: int) -> list[int]:
        task = current_task()
        if n not in began:
            began.add(n)
            await together.wait()
        parts = await task.start_many(part, {f"{n}-{i}": {"n": 10 * n + i} for i in range(3)})
        return await task.results(parts)

    async with working(mesh, concurrency=PARENTS):
        handles = await whole.publish_many({str(n): {"n": n} for n in range(PARENTS)})
        for n, handle in enumerate(handles):
            assert await handle.result(60) == [10 * n, 10 * n + 1, 10 * n + 2]
            assert [step.kind for step in (await handle.task()).steps] == ["start", "start", "start", "join"]


async def test_what_one_cannot_start_stops_no_other(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_VALUE_BYTES", 200)
    kinds = ["stranger", "lonely", "large", "lost", *(f"good-{n}" for n in range(8))]
    together = asyncio.Barrier(len(kinds))
    runs: list[str] = []
    told: dict[str, BaseException] = {}

    @mesh.task
    async def part() -> str:
        return current_task().key

    @mesh.task
    async def whole(kind: str) -> list[str]:
        task = current_task()
        waits_for_nobody = part.configure(after=[("part", "nobody")])
        definition, key = {
            "stranger": (part, "published"),
            "lonely": (waits_for_nobody, "lonely"),
            "large": (part, "x" * 200),
        }.get(kind, (part, kind))
        runs.append(kind)
        if runs.count(kind) == 1:
            if kind == "lost":
                await end_lease(mesh.store, "whole:lost", task.running_id)
            await together.wait()
        try:
            started = await task.start(definition, key)
        except Exception as error:
            told[kind] = error
            if isinstance(error, LeaseLost):
                raise
            return [type(error).__name__]
        return await task.results([started])

    await part.publish("published")
    async with working(mesh, concurrency=len(kinds)):
        handles = await whole.publish_many({kind: {"kind": kind} for kind in kinds})
        results = {kind: await handle.result(60) for kind, handle in zip(kinds, handles, strict=True)}
    assert results.pop("stranger") == ["InvalidKey"]
    assert results.pop("lonely") == ["TaskNotFound"]
    assert results.pop("large") == ["TaskTooLarge"]
    assert results == {kind: [kind] for kind in kinds[3:]}
    assert {kind: type(error) for kind, error in told.items()} == {
        "stranger": InvalidKey,
        "lonely": TaskNotFound,
        "large": TaskTooLarge,
        "lost": LeaseLost,
    }
    assert [runs.count(kind) for kind in kinds[:3]] == [1, 1, 1]


async def test_of_two_that_start_the_same_child_one_has_it(mesh: TaskMesh) -> None:
    together = asyncio.Barrier(2)

    @mesh.task
    async def part() -> None: ...

    @mesh.task(option=ONCE)
    async def whole() -> str:
        await together.wait()
        await current_task().start(part, "same")
        return "has it"

    async with working(mesh):
        handles = await whole.publish_many({"a": {}, "b": {}})
        ended = [await finished(mesh, "whole", handle.key) for handle in handles]
        await part.handle("same").result(60)
    [other] = [task for task in ended if task.status is Status.FAIL]
    [owner] = [task for task in ended if task.status is Status.SUCCESS]
    assert f"task 'part' 'same' is there already and was not started by 'whole:{other.key}'" in other.fail_reasons[0]
    stored = await mesh.store.driver.collection(mesh.store.tasks).find_one({"_id": "part:same"})
    assert stored["task_state"]["parent"] == f"whole:{owner.key}"


@pytest.mark.parametrize("how", [{"errorCode": 8}, {"errorCode": 112}, {"closeConnection": True}], ids=str)
@pytest.mark.parametrize("command", ["insert", "commitTransaction"])
async def test_all_have_their_children_though_the_server_fails(
    mesh: TaskMesh, mongo_uri: str, command: str, how: dict[str, Any]
) -> None:
    together = asyncio.Barrier(PARENTS)
    began: set[str] = set()
    runs: list[int] = []

    @mesh.task
    async def part() -> str:
        return current_task().key

    @mesh.task(option=ONCE)
    async def whole() -> list[str]:
        task = current_task()
        if task.key not in began:
            began.add(task.key)
            await together.wait()
        runs.append(task.failures)
        return await task.results([await task.start(part, task.key)])

    async with working(mesh, concurrency=PARENTS):
        handles = await whole.publish_many({str(n): {} for n in range(PARENTS - 1)})
        await eventually(lambda: together.n_waiting == PARENTS - 1)
        async with failing_commands(mongo_uri, [command], times=2, **how) as have_failed:
            await together.wait()
            await have_failed()
            results = [await handle.result(60) for handle in handles]
    assert results == [[handle.key] for handle in handles]
    assert not any(runs)


async def test_what_two_calls_read_of_one_child_is_not_shared(mesh: TaskMesh) -> None:
    @mesh.task
    async def part() -> Any:
        return [1]

    @mesh.task(option=ONCE)
    async def whole() -> list[Any]:
        task = current_task()
        a, b = await task.start_many(part, {"a": {}, "b": {}})
        both, one = await asyncio.gather(task.results([a, b]), task.results([a]))
        both[0].append(2)
        return one

    async with working(mesh):
        assert await (await whole.publish("k")).result(60) == [[1]]
