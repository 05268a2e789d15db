"""Progress and logs of running executions reach the database, also when a write fails."""

from __future__ import annotations

import asyncio

from taskmesh import TaskMesh, current_task
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import working


async def test_progress_is_told_again_when_the_write_of_another_s_log_fails(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    speak, end = asyncio.Event(), asyncio.Event()

    @mesh.task
    async def logs() -> None:
        await speak.wait()
        current_task().log("a line")
        await end.wait()

    @mesh.task
    async def progresses() -> None:
        await speak.wait()
        await current_task().progress(0.5)
        await end.wait()

    await logs.publish("k")
    await progresses.publish("k")

    async def both_are_told() -> bool:
        one, other = await mesh.get("logs", "k"), await mesh.get("progresses", "k")
        return bool(one.task_state.worker_states[0].logs) and other.task_state.progress is not None

    async with working(mesh) as consumer:
        await eventually(lambda: len(consumer.running) == 2)
        tasks = f"{database}.tasks"
        async with failing_commands(mongo_uri, ["update"], times=1, errorCode=8000, namespace=tasks) as have_failed:
            speak.set()
            await have_failed()
            await eventually(both_are_told, 20)
        end.set()
