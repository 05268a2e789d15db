"""What fits into a document is accepted by whichever way it comes; what does not is refused with its size or its depth."""

from __future__ import annotations

from typing import Any

import pytest

from taskmesh import InvalidParams, Status, TaskError, TaskMesh, TaskTooLarge
from tests.waiting import eventually
from tests.working import all_working, status_is, working

MEGABYTE = 1_000_000


@pytest.mark.parametrize("setting", ["update_existing_params", "run_again"])
async def test_large_params_of_a_key_that_exists_are_accepted_as_those_of_a_new_one(
    mesh: TaskMesh, setting: str
) -> None:
    @mesh.task
    async def swallow(blob: bytes) -> None:
        del blob

    first, second = bytes(14 * MEGABYTE), b"1" * (14 * MEGABYTE)
    assert (await swallow.publish("k", blob=first)).created
    assert (await swallow.configure(**_on(setting)).publish("k", blob=second)).updated
    handle = await swallow.configure(update_existing_params=True).publish("k", blob=second)
    assert not handle.updated, "they are the same"
    assert (await mesh.get("swallow", "k")).params == {"blob": second}
    client = mesh.store.driver.client
    async with client.start_session() as session, await session.start_transaction():
        await swallow.configure(session=session, update_existing_params=True).publish("k", blob=first)
    assert (await mesh.get("swallow", "k")).params == {"blob": first}


@pytest.mark.parametrize("setting", ["update_existing_params", "run_again"])
async def test_params_that_do_not_fit_beside_the_results_that_are_there_are_refused_as_too_large(
    mesh: TaskMesh, setting: str
) -> None:
    @mesh.task
    async def grow(blob: bytes) -> bytes:
        return bytes(8 * MEGABYTE) + blob

    await grow.configure(concurrent_worker_cnt=2).publish("k", blob=b"")
    async with working(mesh, "w1"):
        await eventually(lambda: _has_succeeded(mesh, "grow"))
    before = await mesh.get("grow", "k")
    definition = grow.configure(**_on(setting))
    if setting == "run_again":  # which forgets the results, so that it fits
        assert (await definition.publish("k", blob=bytes(10 * MEGABYTE))).updated
        return
    with pytest.raises(TaskTooLarge, match="task 'grow' 'k' would be larger than the 16 MB that MongoDB stores"):
        await definition.publish("k", blob=bytes(10 * MEGABYTE))
    assert await mesh.get("grow", "k") == before


async def test_of_several_in_a_transaction_it_is_said_that_one_would_be_too_large(mesh: TaskMesh) -> None:
    @mesh.task
    async def grow(blob: bytes) -> bytes:
        return b"" if blob else bytes(8 * MEGABYTE)

    await grow.configure(concurrent_worker_cnt=2).publish_many({"k": {"blob": b""}, "l": {"blob": b"l"}})
    async with all_working(mesh, ["w1", "w2"]):
        await status_is(mesh, "grow", "k", Status.SUCCESS)
    async with mesh.store.driver.client.start_session() as session:
        await session.start_transaction()
        definition = grow.configure(session=session, update_existing_params=True)
        with pytest.raises(
            TaskTooLarge, match="one of the tasks 'grow' 'k', 'grow' 'l' would be larger than the 16 MB"
        ):
            await definition.publish_many({key: {"blob": bytes(900_000)} for key in "kl"})
    assert [(await mesh.get("grow", key)).params for key in "kl"] == [{"blob": b""}, {"blob": b"l"}]


async def _has_succeeded(mesh: TaskMesh, name: str) -> bool:
    return bool((await mesh.get(name, "k")).successes)


def _nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = {"a": value} if level % 2 else [value]
    return value


async def test_params_nested_too_deeply_are_refused_with_their_depth(mesh: TaskMesh, subtests: pytest.Subtests) -> None:
    @mesh.task
    async def swallow(value: Any) -> None:
        del value

    for depth in (150, 300, 900, 100_000):
        with subtests.test(depth=depth):
            said = f"nested {depth + 1} levels deep" if depth < 900 else "nested"
            match = rf"params.*({said}).*more than the 150 levels that fit"
            with pytest.raises(InvalidParams, match=match):
                await swallow.publish("k", value=_nested(depth))
            with pytest.raises(InvalidParams, match=match):
                await mesh.publish("unknown", "k", {"value": _nested(depth)})
    for name in ("swallow", "unknown"):
        await mesh.publish(name, "k", {"value": _nested(149)})
        await mesh.publish(name, "k", {"value": _nested(147)}, run_again=True)
        await mesh.publish(name, "k", {"value": _nested(149)}, run_again=True)
        assert (await mesh.get(name, "k")).params == {"value": _nested(149)}
    action = await mesh.bulk.delete("name:unknown")
    assert action.id is not None
    assert (await mesh.bulk.undo(action.id)).restored == 1


async def test_a_result_nested_too_deeply_fails_with_its_depth(mesh: TaskMesh) -> None:
    @mesh.task
    async def nest(depth: int) -> Any:
        return _nested(depth)

    async with working(mesh):
        handle = await nest.configure(max_unexpected_retries=0).publish("k", depth=300)
        with pytest.raises(TaskError, match="nested 300 levels deep, more than the 150 levels"):
            await handle.result(timeout=60)
        deepest = await nest.publish("deepest", depth=150)
        assert await deepest.result(timeout=60) == _nested(150)


def _on(setting: str) -> dict[str, Any]:
    return {setting: True}
