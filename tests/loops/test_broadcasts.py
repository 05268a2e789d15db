"""A broadcast is run once by each worker that was live when it was published, and waits for none that is gone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from taskmesh import InvalidOption, Status, TaskMesh, TaskOption, current_blocking_task, current_task
from taskmesh.consumer import broadcasts
from taskmesh.consumer.broadcasts import Broadcasts
from tests.processes.fleet import Fleet
from tests.waiting import eventually
from tests.working import all_working, finished, lanes_of, seen_by_others, working


async def test_each_live_worker_runs_it_once_and_one_that_joins_later_does_not(mesh: TaskMesh) -> None:
    @mesh.broadcast
    async def reload(version: int) -> str:
        return f"{current_task().worker_id}: {version}"

    @mesh.task
    async def order() -> None:
        await current_task().publish(reload, "of a handler", version=3)

    @mesh.task
    def order_in_a_thread() -> None:
        current_blocking_task().publish("reload", "of a thread", version=4)

    async with all_working(mesh, ["w1", "w2"]):
        handle = await reload.publish("k", version=1)
        assert handle.warnings == []
        assert (await finished(mesh, "reload", "k")).status is Status.SUCCESS
        assert await handle.results() == {"w1": "w1: 1", "w2": "w2: 1"}
        async with working(mesh, "w3", names=["order"]), working(mesh, "w4", queues=["elsewhere"]):
            for definition, key in ((order, "of a handler"), (order_in_a_thread, "of a thread")):
                await definition.publish("k")
                assert (await finished(mesh, definition.name, "k")).status is Status.SUCCESS
                task = await finished(mesh, "reload", key)
                assert {entry.worker_id for entry in task.successes} == {"w1", "w2"}
        async with working(mesh, "w5"):
            assert set((await mesh.get("reload", "k")).task_option.specific_worker_ids) == {"w1", "w2"}
            again = await mesh.publish("reload", "k", {"version": 2}, run_again=True)
            assert again.updated
            assert (await finished(mesh, "reload", "k")).status is Status.SUCCESS
            assert set(await again.results()) == {"w1", "w2", "w5"}


@pytest.mark.lasting
async def test_workers_that_are_killed_or_stopped_are_not_waited_for(mesh: TaskMesh, fleet: Fleet) -> None:
    @mesh.broadcast
    async def reload(slow_on: str | None = None) -> None: ...

    killed, stopped, _ = (
        fleet.start(name, handlers="tests.loops.handlers", names=["reload"]) for name in ("killed", "stopped", "left")
    )
    for worker in fleet.workers:
        worker.wait_ready()
    handle = await reload.publish("k", slow_on="killed")
    await eventually(lambda: len(fleet.runs) == 3)
    killed.kill()
    held = await reload.publish("after", slow_on="stopped")
    assert set((await mesh.get("reload", "after")).task_option.specific_worker_ids) == {"killed", "stopped", "left"}
    await eventually(lambda: len([run for run in fleet.runs if run.start.key == "after"]) == 2)
    assert (await finished(mesh, "reload", "k")).status is Status.SUCCESS
    assert set(await handle.results()) == {"stopped", "left"}
    await mesh.stop_worker("stopped", grace_ms=0)
    assert stopped.wait() == 0
    assert (await finished(mesh, "reload", "after")).status is Status.SUCCESS
    assert set(await held.results()) == {"left"}


async def test_a_broadcast_for_nobody_is_expired_and_one_whose_workers_are_all_gone_becomes_so(mesh: TaskMesh) -> None:
    @mesh.broadcast
    async def reload() -> None: ...

    handle = await reload.publish("nobody")
    assert handle.warnings[0].startswith("no worker is alive")
    assert await handle.status() is Status.EXPIRED
    async with working(mesh, "w1", queues=["default"], on_claim=lambda _: None):
        await reload.publish("gone")
        assert (await mesh.get("reload", "gone")).status is Status.INIT
    async with working(mesh, "w2"):
        assert (await finished(mesh, "reload", "gone")).status is Status.EXPIRED


async def test_who_fails_makes_only_itself_wait(mesh: TaskMesh) -> None:
    failed: list[str] = []

    @mesh.broadcast(option=TaskOption(unexpected_retry_delay_ms=50))
    async def reload() -> None:
        if not failed:
            failed.append(current_task().worker_id)
            raise ValueError("once")

    async with all_working(mesh, ["w1", "w2"]):
        handle = await reload.publish("k")
        assert (await finished(mesh, "reload", "k")).status is Status.SUCCESS
        assert set(await handle.results()) == {"w1", "w2"}
        assert (await mesh.get("reload", "k")).task_option.unexpected_retry_delay_scope == "worker"


class EndOfLoop(Exception):
    """Ends a loop that goes on for ever."""


async def test_a_large_fleet_looks_for_broadcasts_no_more_often_than_a_small_one(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    @mesh.broadcast
    async def reload() -> None:
        """Do nothing."""

    async def pause_of_one_in(size: int) -> float:
        lanes = lanes_of("w0", [seen_by_others(f"w{n}", ["reload"]) for n in range(size)], ["reload"])
        pauses: list[float] = []

        async def asleep(seconds: float) -> None:
            pauses.append(seconds)
            raise EndOfLoop

        monkeypatch.setattr(broadcasts, "asyncio", SimpleNamespace(sleep=asleep))
        with pytest.raises(EndOfLoop):
            await Broadcasts(mesh.store, mesh.definitions, lanes).run()
        return pauses[0]

    assert await pause_of_one_in(4) == pytest.approx(1.0, rel=0.31)
    assert await pause_of_one_in(20) == pytest.approx(5.0, rel=0.31)


async def test_a_schedule_ticks_a_broadcast(mesh: TaskMesh) -> None:
    @mesh.broadcast
    async def reload() -> None: ...

    async with all_working(mesh, ["w1", "w2"]):
        await mesh.every(reload, interval_ms=200)

        async def by_both() -> bool:
            ticks = [task async for task in mesh.find("reload", status="SUCCESS")]
            return bool(ticks) and all(len(task.successes) == 2 for task in ticks)

        await eventually(by_both)


async def test_what_a_broadcast_cannot_be_is_refused(mesh: TaskMesh) -> None:
    with pytest.raises(InvalidOption, match="follows from the workers that are live"):
        mesh.broadcast(lambda: None, name="many", option=TaskOption(concurrent_worker_cnt=3))

    @mesh.broadcast
    async def reload() -> None: ...

    with pytest.raises(InvalidOption, match="is a broadcast"):
        async with mesh.flow("f") as flow:
            flow.add(reload, "k")
