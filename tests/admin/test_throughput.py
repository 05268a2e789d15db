"""`mesh.stats()` tells how much the fleet does per second, and `mesh.workers()` each worker's share of it."""

from __future__ import annotations

import pytest

from taskmesh import Stats, TaskMesh
from taskmesh.consumer.worker_stats import Throughput
from tests.waiting import eventually
from tests.working import all_working, working


@pytest.mark.slow
async def test_the_fleets_throughput_is_seen_and_falls_to_nothing_when_it_is_idle(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> None: ...

    async def stats() -> Stats:
        return await mesh.stats()

    assert (await stats()).finished_per_s == 0
    async with all_working(mesh, ["w1", "w2"]):
        await work.publish_many({str(number): {} for number in range(2_000)})

        async def seen() -> bool:
            found = await stats()
            return found.started_per_s > 0 and found.finished_per_s > 0

        await eventually(seen)
        workers = await mesh.workers()
        assert sum(worker.finished_per_s for worker in workers) > 0

        async def idle() -> bool:
            found = await stats()
            return found.started_per_s == found.finished_per_s == 0

        await eventually(idle)
    assert sum(worker.finished for worker in await mesh.workers()) == 2_000


async def test_signs_of_life_that_follow_each_other_closely_make_no_rates_of_their_own(mesh: TaskMesh) -> None:
    @mesh.task
    async def work() -> None: ...

    seen: list[float] = []
    async with working(mesh, "w") as consumer:

        async def is_shown() -> bool:
            [worker] = await mesh.workers()
            seen.append(worker.finished_per_s)
            return worker.paused == consumer.paused

        for number in range(10):
            await (await work.publish(str(number))).result(timeout=60)
            for say in (consumer.pause, consumer.resume):
                say()
                await eventually(is_shown)
    assert max(seen) <= 10, "ten tasks, and never counted over less than a second"


def test_a_rate_is_over_a_second_or_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("taskmesh.consumer.worker_stats.time.monotonic", lambda: now)
    cpu = 7.0
    monkeypatch.setattr("taskmesh.consumer.worker_stats.time.process_time", lambda: cpu)
    counted = Throughput()

    def rates(started: int, finished: int) -> list[float]:
        told = counted.rates(started, finished)
        return [told[name] for name in ("started_per_s", "finished_per_s", "cpu_share")]

    now, cpu = now + 0.1, cpu + 0.1
    assert rates(50, 50) == [0.0, 0.0, 0.0]
    now, cpu = now + 1.9, cpu + 0.9
    assert rates(100, 80) == [50.0, 40.0, 0.5]
    now += 0.5
    assert rates(900, 900) == [50.0, 40.0, 0.5]


def test_the_memory_of_a_process_is_told_in_bytes() -> None:
    assert 10_000_000 < Throughput().rates(0, 0)["memory_peak_bytes"] < 10_000_000_000
