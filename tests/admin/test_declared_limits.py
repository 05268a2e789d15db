"""Limits that code declares: the first to connect sets them, and what people say later counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskmesh import InvalidOption, QueueLimits, TaskMesh, TaskMeshError


def _declaring(uri: str, database: str, **limits: Any) -> TaskMesh:
    mesh = TaskMesh(uri, database=database)
    mesh.queue("mail", **limits)
    return mesh


async def _limits(mesh: TaskMesh) -> QueueLimits:
    return next((queue.limits for queue in await mesh.queues.all() if queue.queue == "mail"), QueueLimits())


async def test_the_first_to_connect_sets_them_and_later_ones_do_not(mongo_uri: str, database: str) -> None:
    async with _declaring(mongo_uri, database, rate=20, running=5) as first:
        assert await _limits(first) == QueueLimits(rate=20, per_ms=1_000, running=5)
    async with _declaring(mongo_uri, database, rate=7, group_running=1) as second:
        assert await _limits(second) == QueueLimits(rate=20, per_ms=1_000, running=5)


@pytest.mark.parametrize("said", [{"running": 3}, {"running": None}])
async def test_what_people_set_or_take_away_stays(mongo_uri: str, database: str, said: Any) -> None:
    async with _declaring(mongo_uri, database, running=5) as mesh:
        await mesh.set_limit("mail", **said)
    async with _declaring(mongo_uri, database, running=5) as again:
        assert await _limits(again) == QueueLimits(**said)


async def test_of_two_that_start_together_one_wins_as_a_whole(mongo_uri: str, database: str) -> None:
    meshes = [_declaring(mongo_uri, database, running=1, rate=1), _declaring(mongo_uri, database, running=2, rate=2)]
    await asyncio.gather(*(mesh.connect() for mesh in meshes))
    found = await _limits(meshes[0])
    for mesh in meshes:
        await mesh.close()
    assert (found.running, found.rate) in [(1, 1), (2, 2)]


async def test_a_declared_limit_leaves_the_pause_on_failures_alone(mongo_uri: str, database: str) -> None:
    async with _declaring(mongo_uri, database, pause_on_failures=0.5, running=5) as mesh:
        (queue,) = await mesh.queues.all()
        assert queue.failure_pause is not None
        assert queue.limits.running == 5
    async with _declaring(mongo_uri, database, running=9) as mesh:
        (queue,) = await mesh.queues.all()
        assert queue.failure_pause is not None


async def test_what_cannot_be_declared_is_refused(mesh: TaskMesh) -> None:
    fresh = TaskMesh()
    with pytest.raises(InvalidOption, match="rate must be a whole number from 0"):
        fresh.queue("mail", rate=-1)
    with pytest.raises(InvalidOption, match="per_ms=5 has no meaning without rate"):
        fresh.queue("mail", per_ms=5)
    with pytest.raises(InvalidOption, match="nothing is declared about queue 'mail'"):
        fresh.queue("mail")
    with pytest.raises(TaskMeshError, match="connected already"):
        mesh.queue("mail", running=1)
