"""Delays that handlers ask for with `Retry` and `Snooze`: checked where they are used, and never none at all."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest

from taskmesh import Retry, Snooze, Status, TaskMesh, TaskOption
from tests.working import finished, working

IMPOSSIBLE = [10**18, -1, 0.5, None, "soon"]


def with_delay(error: Any, delay_ms: Any) -> Any:
    error.delay_ms = delay_ms
    return error


@pytest.mark.parametrize("kind", [Retry, Snooze])
async def test_an_impossible_delay_that_was_set_later_fails_the_execution(mesh: TaskMesh, kind: Any) -> None:
    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def asks(number: int) -> None:
        raise with_delay(kind("later"), IMPOSSIBLE[number])

    async with working(mesh):
        for number, delay_ms in enumerate(IMPOSSIBLE):
            await asks.publish(str(number), number=number)
            task = await finished(mesh, "asks", str(number))
            assert task.status is Status.FAIL
            assert f"got {delay_ms!r}" in task.fail_reasons[0]


@pytest.mark.parametrize(("asked", "shortest_s"), [({}, 1.0), ({"delay_ms": 0}, 0.1), ({"delay_ms": 30}, 0.1)])
async def test_a_snooze_never_spins(mesh: TaskMesh, asked: dict[str, Any], shortest_s: float) -> None:
    began: list[float] = []

    @mesh.task
    async def snoozes() -> None:
        began.append(time.monotonic())
        if len(began) < 3:
            raise Snooze(**asked)

    async with working(mesh):
        await (await snoozes.publish("k")).result(30)
    assert all(later - earlier >= shortest_s for earlier, later in pairwise(began))
