"""The job: publish all, run three workers, kill one, publish all again; then check.

Everything goes through what users have: the public API, and `taskmesh worker` as real processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from taskmesh.cli.slot import Slot
from taskmesh.demo.board import Board, View, WorkerRow, view_of
from taskmesh.demo.check import Report, check
from taskmesh.demo.counting import source_files
from taskmesh.demo.tasks import DIARIES, NAME, tokenize_file
from taskmesh.demo.tasks import mesh as definitions
from taskmesh.errors import TaskMeshError
from taskmesh.mesh import TaskMesh
from taskmesh.task import Status

CONCURRENCY = 4
_DEADLINE_S = 150.0
_LOOK_S = 0.1
_IN_FLIGHT_S = 0.3


class Job:
    """One run of the demo, in a database of its own, or in collections of its own that are dropped at the end."""

    def __init__(
        self,
        *,
        uri: str | None = None,
        database: str | None = None,
        files: int | None = None,
        workers: int = 3,
        keep: bool = False,
    ) -> None:
        """`database`: make its collections there. `files`: only so many. `keep`: leave what it makes, to look at."""
        self._uri = uri
        self._paths = source_files(files)
        self._workers = [f"worker-{number}" for number in range(1, workers + 1)]
        self._keep = keep
        own = f"demo_{secrets.token_hex(4)}"
        self.database, self.collection = (own, "tasks") if database is None else (database, own)
        self._board = Board(total=len(self._paths))
        self._slots: dict[str, Slot] = {}
        self._life = os.pipe()
        self._directory = Path(tempfile.mkdtemp(prefix="taskmesh-demo-"))

    async def run(self) -> Report:
        """Do it all, and return what came of it. Whatever happens, no process stays behind."""
        try:
            definitions.connect_to(self._uri, database=self.database, collection=self.collection)
            async with definitions as mesh, self._collections_of_its_own(mesh):
                return await self._run(mesh)
        except TaskMeshError:
            self._show_logs()
            raise
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _run(self, mesh: TaskMesh) -> Report:
        print(f"{len(self._paths)} source files, {len(self._workers)} worker processes")
        print(f"{mesh.address}", flush=True)
        async with self._events(mesh):
            created = await self._publish()
            print(f"published {len(self._paths)} tasks, {created} of them new")
            with view_of(self._board) as view:
                async with self._processes():
                    killed = await self._kill_one_half_way(mesh, view)
                    await self._until(view, self._all_done(mesh), "all tasks are done")
                    self._board.note("all done; publishing everything a second time")
                    again = await self._publish()
                    await self._until_idle()
                    self._board.note(f"{again} of {len(self._paths)} were new, and an idle worker found nothing to do")
        print("checking every result against a direct computation", flush=True)
        return await check(
            mesh, self._paths, self._directory / "diaries", seconds=self._board.seconds, killed=killed, again=again
        )

    # --- publishing ---

    async def _publish(self) -> int:
        """Publish every file under its path; return how many were new."""
        handles = await tokenize_file.publish_many({path: {"path": path} for path in self._paths})
        return sum(handle.created for handle in handles)

    # --- processes ---

    @contextlib.asynccontextmanager
    async def _processes(self) -> AsyncIterator[None]:
        (self._directory / "diaries").mkdir()
        try:
            for name in self._workers:
                await self._start(name)
            yield
            await self._stop_gracefully()
        finally:
            for slot in self._slots.values():
                slot.send(signal.SIGKILL)
                await slot.ended()

    async def _start(self, name: str, *more: str) -> Slot:
        command = [sys.executable, "-m", "taskmesh.cli", "worker", "taskmesh.demo.tasks:mesh", "--worker-id", name]
        slot = self._slots[name] = Slot(name, [*command, "--concurrency", str(CONCURRENCY), *more])
        environment = os.environ | {
            "TASKMESH_DATABASE": self.database,
            "TASKMESH_COLLECTION": self.collection,
            DIARIES: str(self._directory / "diaries"),
        }
        if self._uri is not None:
            environment["TASKMESH_URI"] = self._uri  # else they attach to the embedded one, as we did
        with (self._directory / f"{name}.log").open("wb") as log:
            await slot.start(self._life[0], environment, log.fileno())
        return slot

    async def _stop_gracefully(self) -> None:
        living = [slot for slot in self._slots.values() if slot.alive]
        for slot in living:
            slot.stop(1)
        for slot in living:
            if status := await slot.ended():
                raise TaskMeshError(f"{slot.name} ended with status {status} after SIGTERM, not with 0")

    async def _kill_one_half_way(self, mesh: TaskMesh, view: View) -> tuple[str, list[str]]:
        """Kill a worker that holds tasks, and return its name and their keys."""

        async def half_done() -> bool:
            await self._count(mesh)
            return self._board.done >= self._board.total // 2

        await self._until(view, half_done, "half of the tasks are done")
        victim = max(self._workers, key=lambda name: len(self._row(name).running))
        slot = self._slots[victim]
        while not (held := await self._held_while_suspended(mesh, slot)):
            slot.send(signal.SIGCONT)  # just then it had nothing
            view.refresh()
            if self._board.done >= self._board.total:
                raise TaskMeshError("all tasks were done before a worker could be killed: take more files")
            await asyncio.sleep(0.02)
            await self._count(mesh)
        slot.send(signal.SIGKILL)
        self._row(victim).state = "killed"
        self._board.note(f"SIGKILL to {victim}, which holds {len(held)}: {', '.join(held)}")
        return victim, held

    async def _held_while_suspended(self, mesh: TaskMesh, slot: Slot) -> list[str]:
        """Suspend a worker, let its writes on the way arrive, and return the keys that it then holds."""
        slot.send(signal.SIGSTOP)
        await asyncio.sleep(_IN_FLIGHT_S)
        return [
            task.key
            async for task in mesh.find(NAME, Status.RUNNING, limit=0)
            if any(entry.worker_id == slot.name and entry.state == "RUNNING" for entry in task.task_state.worker_states)
        ]

    async def _until_idle(self) -> None:
        """A fresh worker, which may run everything, ends by itself as it finds nothing."""
        status = await (await self._start("latecomer", "--until-idle")).ended()
        if status:
            raise TaskMeshError(f"a worker that should have found nothing to do ended with status {status}")

    def _row(self, worker_id: str) -> WorkerRow:
        return self._board.workers.setdefault(worker_id, WorkerRow())

    # --- watching ---

    @contextlib.asynccontextmanager
    async def _events(self, mesh: TaskMesh) -> AsyncIterator[None]:
        async def listen() -> None:
            async for event in mesh.events(NAME):
                self._board.take(event)

        listening = asyncio.create_task(listen())
        try:
            yield
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async def _count(self, mesh: TaskMesh) -> None:
        counts = (await mesh.stats()).counts.get(NAME, {})
        self._board.done = counts.get("SUCCESS", 0)
        if failed := counts.get("FAIL", 0):
            raise TaskMeshError(f"{failed} tasks failed: `taskmesh ls --status FAIL` tells why (run with --keep)")

    def _all_done(self, mesh: TaskMesh) -> Callable[[], Awaitable[bool]]:
        async def done() -> bool:
            await self._count(mesh)
            return self._board.done == self._board.total

        return done

    async def _until(self, view: View, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not await condition():
            view.refresh()
            if time.monotonic() > deadline:
                raise TaskMeshError(f"not within {_DEADLINE_S:.0f} s: {what}")
            for name, slot in self._slots.items():
                if not slot.alive and self._row(name).state != "killed":
                    raise TaskMeshError(f"{name} died by itself")
            await asyncio.sleep(_LOOK_S)

    def _show_logs(self) -> None:
        for log in sorted(self._directory.glob("*.log")):
            tail = log.read_text("utf-8", "replace").splitlines()[-15:]
            print(f"--- {log.name}", *tail, sep="\n", file=sys.stderr)

    @contextlib.asynccontextmanager
    async def _collections_of_its_own(self, mesh: TaskMesh) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if self._keep:
                print(f"kept: taskmesh ls --database {self.database} --collection {self.collection}")
            else:
                logging.getLogger("taskmesh.feed").setLevel(logging.ERROR)  # it hears of the drop, rightly
                await self._drop(mesh)

    async def _drop(self, mesh: TaskMesh) -> None:
        driver = mesh.store.driver
        if self.collection == "tasks":
            await driver.client.drop_database(self.database)
            return
        for name in await driver.database.list_collection_names():
            if name == self.collection or name.startswith(f"{self.collection}."):
                await driver.database.drop_collection(name)
