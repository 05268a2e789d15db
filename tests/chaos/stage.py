"""A stage for scenes with a few worker processes, in which everything happens in an order that the scene sets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from pymongo import AsyncMongoClient

from taskmesh import Status, TaskMesh
from taskmesh.model.task import Task
from tests.chaos.findings import Findings
from tests.chaos.history import Asked, Published
from tests.chaos.scene_handlers import NAME, define
from tests.chaos.witnesses import Witnesses
from tests.processes.fleet import Fleet, Worker
from tests.processes.signs import Signs
from tests.waiting import eventually

APPNAME = "the stage"
"""By which a fail point can tell its publisher from workers."""
_PATIENCE_S = 90.0
ANY_END = ("SUCCESS", "FAIL", "CANCELLED", "EXPIRED")


class Stage:
    """Workers, a publisher, and witnesses of all that they do. `broken`: of every worker, see `tests/processes/broken.py`."""

    def __init__(self, uri: str, database: str, directory: Path, broken: Sequence[str] = ()) -> None:
        self.uri, self.database = uri, database
        self._broken = broken
        self.fleet = Fleet(uri, database, directory)
        self.signs = Signs(self.fleet.history_directory)
        self.witnesses = Witnesses(uri, database)
        self.client = AsyncMongoClient[Any](uri, appname=APPNAME, tz_aware=True)
        self.mesh = TaskMesh(self.client, database=database)
        self._work = define(self.mesh)
        self._published: list[Published] = []
        self._asked: list[Asked] = []

    # --- what a scene does ---

    def worker(self, worker_id: str, *staged: str, broken: Sequence[str] = (), **setting: Any) -> Worker:
        """Start a worker, and wait until it works."""
        setting = {"handlers": "tests.chaos.scene_handlers", "concurrency": 4, "grace_ms": 0, **setting}
        started = self.fleet.start(worker_id, staged=staged, broken=[*broken, *self._broken], **setting)
        return started.wait_ready()

    async def publish(
        self, key: str = "victim", params: dict[str, Any] | None = None, ends: str = "SUCCESS", **configuration: Any
    ) -> None:
        """Publish a task, and note how it should end."""
        handle = await self._work.configure(**configuration).publish(key, **(params or {}))
        self.note_published(key, handle.created, ends)

    def note_published(self, key: str, created: bool | None, ends: str = "SUCCESS", name: str = NAME) -> None:
        """Note what a publisher was told, None for an error."""
        self._published.append(Published(f"{name}:{key}", created, (ends,)))

    async def task(self, key: str = "victim") -> Task:
        """Read a task."""
        return await self.mesh.get(NAME, key)

    async def until(self, sign: str) -> None:
        """Wait until a worker has given a sign."""
        await eventually(lambda: self.signs.given(sign), _PATIENCE_S, what=sign)

    async def until_status(self, status: Status, key: str = "victim") -> None:
        """Wait until a task has this status."""

        async def has_it() -> bool:
            return (await self.task(key)).status is status

        await eventually(has_it, _PATIENCE_S, what=f"{key} is {status}")

    async def until_marked(self, what: str, count: int = 1) -> None:
        """Wait until handlers have noted something so often."""
        await eventually(
            lambda: sum(mark.what == what for mark in self.fleet.history) >= count, _PATIENCE_S, what=f"{count} {what}"
        )

    def is_told(self, kind: str, key: str = "") -> bool:
        """Whether a reader of events has been told this, of any task or of one."""
        told = list(self.witnesses.reader.told)
        return any(event.kind == kind and event.id.endswith(key) for event in told)

    async def let(self, *worker_ids: str) -> None:
        """Let workers claim what they wanted to claim, one after the other, and wait until they have tried."""
        for worker_id in worker_ids:
            self.signs.give(f"{worker_id} may claim")
            await self.until(f"{worker_id} has tried")

    async def cancel(self, key: str = "victim") -> None:
        """Cancel a task."""
        self._asked.append(Asked(f"{NAME}:{key}", "cancelled"))
        await self.mesh.cancel(NAME, key)

    async def delete(self, key: str = "victim") -> None:
        """Delete a task."""
        self._asked.append(Asked(f"{NAME}:{key}", "deleted"))
        await self.mesh.delete(NAME, key)

    # --- and what it comes to ---

    async def end(self, patience_s: float) -> Findings:
        """Wait until every task has ended, or for so long; stop everything, and decide."""

        def all_ended() -> bool:
            with self.witnesses.client() as client:
                return not client[self.database]["tasks"].count_documents({"status": {"$nin": ANY_END}})

        with suppress(AssertionError):  # that is for the check to say
            await eventually(all_ended, patience_s)
        for worker in self.fleet.workers:
            if worker.running:
                worker.terminate()
        for worker in self.fleet.workers:
            worker.wait()
        self.witnesses.stop(patience_s)
        return self.witnesses.check(self.fleet, self._published, self._asked)


@asynccontextmanager
async def stage(uri: str, database: str, directory: Path, broken: Sequence[str] = ()) -> AsyncIterator[Stage]:
    """Set up a stage."""
    built = Stage(uri, database, directory, broken)
    with built.fleet:
        async with built.client, built.mesh:
            built.witnesses.start()
            yield built
