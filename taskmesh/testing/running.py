"""What a test calls: run what is due, move time, look at what was published."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Generator
from datetime import timedelta

from taskmesh.consumer.hooks import Ending
from taskmesh.mesh import TaskMesh
from taskmesh.model.errors import TaskNotFound
from taskmesh.model.task import Task
from taskmesh.store.mongodb.driver import maybe


async def drain(mesh: TaskMesh) -> list[Task]:
    """Run all that is due, and what that publishes, until nothing is left; return the task of each execution, in order.

    Each as it stands in the end, so that one which was tried twice is there twice. What is due later (retries, delays, schedules)
    is left: `advance` makes it due. The hooks of `mesh.hooks` are called as ever.
    """
    ran: list[Task] = []
    after = mesh.hooks_of_consumers.get("after")

    async def note(task: Task, ending: Ending) -> None:
        ran.append(task)
        if after is not None:
            await maybe(after(task, ending))

    await mesh.consumer(after=note, listen=False).run(until_idle=True)
    ids = {(task.name, task.key) for task in ran}
    now: dict[tuple[str, str], Task] = {}
    for id_ in ids:
        with contextlib.suppress(TaskNotFound):  # deleted meanwhile, or past its retention: as its handler saw it
            now[id_] = await mesh.get(*id_)
    return [now.get((task.name, task.key), task) for task in ran]


class _Moved:
    """What `advance` returns: it is done, and may be awaited all the same, as what stands beside it in a test has to be."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


def advance(mesh: TaskMesh, **by: float) -> Awaitable[None]:
    """Move the mesh's idea of now: `advance(mesh, hours=1)`, with the words of `timedelta`. Nothing sleeps; `await` is optional.

    What other processes think is not changed, nor is what MongoDB does by itself: it removes no finished task sooner.
    """
    step = timedelta(**by)
    if step < timedelta(0):
        raise ValueError(f"advance() cannot move time back, got {by}")
    mesh.store.move_on(step)
    mesh.clock.move_on(step)
    return _Moved()


async def published(mesh: TaskMesh, name: str | None = None) -> list[Task]:
    """Return the tasks that there are, of this name or of all, in the order in which they were published; with their params."""
    return [task async for task in mesh.find(name, sort="oldest", params=True, limit=0)]
