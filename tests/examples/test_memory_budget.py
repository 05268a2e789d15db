"""The example of a worker with a memory budget does what it says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from examples import memory_budget as example
from taskmesh import TaskMesh


async def test_the_budget_is_never_exceeded_and_given_back_also_by_what_fails(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use: list[int] = [0]
    failures = 0
    original: Any = example.render.fn

    async def measured(scene: int, memory_mb: int) -> int:
        nonlocal failures
        in_use.append(in_use[-1] + memory_mb)
        try:
            return int(await original(scene, memory_mb))
        except RuntimeError:
            failures += 1
            raise
        finally:
            in_use.append(in_use[-1] - memory_mb)

    monkeypatch.setattr(example.render, "fn", measured)
    example.mesh.connect_to(mongo_uri, database=database)
    needed = await asyncio.wait_for(example.main(), 60)

    assert needed == sum(50 + 70 * n % 600 for n in range(40))
    assert failures == 14, "every third fails once"
    assert 0 < max(in_use) <= example.budget.peak_mb <= example.budget.total_mb
    assert in_use[-1] == 0
    assert example.budget.free_mb == example.budget.total_mb, "given back, also on failure"
    async with TaskMesh(mongo_uri, database=database) as mesh:
        charged = [len(task.fail_reasons) async for task in mesh.find("render")]
    assert sorted(charged) == [0] * 26 + [1] * 14, "who was put off is not charged"
