"""The code of docs/loops.md works."""

from __future__ import annotations

import asyncio
from typing import Any

from taskmesh import TaskMesh, TaskOption
from tests.docs.examples import examples_in
from tests.docs.running import run
from tests.waiting import eventually
from tests.working import working

DOCUMENT = "docs/loops.md"


async def test_loops_run_and_a_broadcast_reaches_the_worker(mesh: TaskMesh) -> None:
    log: list[str] = []
    namespace: dict[str, Any] = {
        "mesh": mesh,
        "TaskOption": TaskOption,
        "asyncio": asyncio,
        "log": log,
        "worker_id": "w1",
    }
    [example] = examples_in(DOCUMENT)
    defining, _, publishing = example.in_place.partition("handle = ")
    await run(defining, namespace, DOCUMENT)
    async with working(mesh, "w1"):
        await run("handle = " + publishing, namespace, DOCUMENT)
        await eventually(lambda: {"swept", "refreshed", "relayed"} == set(log))
