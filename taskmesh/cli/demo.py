"""`demo`: a real job on real input, with a worker killed mid-run, and every result checked.

Each task tokenizes one file of Python's standard library. Everything goes through what users have: the public API, and
`taskmesh worker` as real processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from taskmesh.cli import output
from taskmesh.cli.connected import COMMAND_LINE_URI, Database, Uri
from taskmesh.cli.demo_tasks import DIARIES, NAME, count, source_files, tokenize_file
from taskmesh.cli.demo_tasks import mesh as definitions
from taskmesh.cli.worker.child import Child
from taskmesh.mesh import TaskMesh
from taskmesh.model.errors import TaskMeshError
from taskmesh.model.task import Status, Task

_CONCURRENCY = 4
_DEADLINE_S = 150.0
_IN_FLIGHT_S = 0.3
_SHOWN = 5


@dataclass
class Report:
    """The outcome. `problems` is empty if everything went well."""

    seconds: float = 0.0
    killed: str = ""
    held: list[str] = field(default_factory=list)
    """The keys that the killed worker held."""
    moved: dict[str, str] = field(default_factory=dict)
    """Key → the worker that finished what another had lost."""
    lines: int = 0
    tokens: int = 0
    preempted: int = 0
    recorded_by: Counter[str] = field(default_factory=Counter)
    executed_by: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def demo(
    files: Annotated[int | None, typer.Option(min=20, help="At most this many files.")] = None,
    workers: Annotated[int, typer.Option(min=2, help="How many worker processes.")] = 3,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the demo's collections, to look at them.")] = False,
    uri: Uri = None,
    database: Database = None,
) -> None:
    """Tokenize Python's standard library with three workers, kill one mid-run, and check every result.

    Uses a database of its own or, in the database that is named, collections of its own; drops them at the end.
    """
    paths = source_files(files)
    own = f"demo_{secrets.token_hex(4)}"
    database, collection = (own, "tasks") if database is None else (database, own)
    definitions.connect_to(uri, database=database, collection=collection)
    place = {"TASKMESH_DATABASE": database, "TASKMESH_COLLECTION": collection} | (
        {COMMAND_LINE_URI: uri} if uri else {}
    )
    names = [f"worker-{number}" for number in range(1, workers + 1)]
    report = asyncio.run(_demo(paths, names, place, keep))
    _show(report, len(paths))


async def _demo(paths: list[str], names: list[str], place: dict[str, str], keep: bool) -> Report:
    """Run it in a place of its own. `place`: the same for the workers, as environment variables."""
    async with definitions as mesh:
        print(f"{len(paths)} source files, {len(names)} worker processes\n{mesh.address}", flush=True)
        with tempfile.TemporaryDirectory(prefix="taskmesh-demo-") as directory:
            try:
                return await _run(mesh, paths, names, _Workers(mesh, Path(directory), place))
            except TaskMeshError:
                await asyncio.to_thread(_show_logs, Path(directory))
                raise
            finally:
                await _leave(mesh, place, keep)


def _show_logs(directory: Path) -> None:
    for log in sorted(directory.glob("*.log")):
        print(f"--- {log.name}", *log.read_text("utf-8", "replace").splitlines()[-15:], sep="\n")


async def _run(mesh: TaskMesh, paths: list[str], names: list[str], workers: _Workers) -> Report:
    """Publish all, run the workers, kill one mid-run, publish all again, and check."""
    report = Report()
    created = await _publish(paths)
    print(f"published {len(paths)} tasks, {created} of them new", flush=True)
    begun = time.monotonic()
    async with _told(mesh, begun), workers:
        for name in names:
            await workers.start(name)
        await workers.until_done(len(paths) // 4, len(paths))
        report.killed, report.held = await workers.kill_one()
        print(f"SIGKILL to {report.killed}, which holds {len(report.held)}: {', '.join(report.held)}", flush=True)
        await workers.until_done(len(paths), len(paths))
        report.seconds = time.monotonic() - begun
        again = await _publish(paths)
        await workers.stop()
        if await (await workers.start("latecomer", "--until-idle")).ended():
            raise TaskMeshError("a worker that should have found nothing to do ended with an error")
    print(f"{again} of {len(paths)} were new, and an idle worker found nothing to do")
    print("checking every result against a direct computation", flush=True)
    await check(mesh, paths, workers.diaries, report)
    if again:
        report.problems.append(f"{again} tasks were new at the second publish: none should be")
    if not report.moved:
        report.problems.append(f"{report.killed} held {len(report.held)} tasks when it was killed, but none moved")
    return report


async def _publish(paths: list[str]) -> int:
    """Publish every file under its path; return how many were new."""
    handles = await tokenize_file.publish_many({path: {"path": path} for path in paths})
    return sum(handle.created for handle in handles)


@contextlib.asynccontextmanager
async def _told(mesh: TaskMesh, begun: float) -> AsyncIterator[None]:
    """Print which tasks move from a worker that lost them to another."""
    losers: dict[str, str | None] = {}

    async def tell() -> None:
        async for event in mesh.events(NAME):
            if event.kind == "timed_out":
                losers[event.key] = event.worker_id
            elif event.kind == "claimed" and (loser := losers.pop(event.key, None)):
                print(f"{time.monotonic() - begun:5.1f} s  {event.key}: {loser} → {event.worker_id}", flush=True)

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.wait([telling])


class _Workers:
    """The worker processes. Whatever happens, none stays behind."""

    def __init__(self, mesh: TaskMesh, directory: Path, place: dict[str, str]) -> None:
        self._mesh = mesh
        self._directory = directory
        self.diaries = directory / "diaries"
        self.diaries.mkdir()
        self._environment = os.environ | place | {DIARIES: str(self.diaries)}
        self._children: dict[str, Child] = {}
        self._life = os.pipe()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self._children.values():
            child.send(signal.SIGKILL)
            await child.ended()

    async def start(self, name: str, *more: str) -> Child:
        command = [sys.executable, "-m", "taskmesh", "worker", "taskmesh.cli.demo_tasks:mesh", "--worker-id", name]
        child = self._children[name] = Child(name, [*command, "--concurrency", str(_CONCURRENCY), *more])
        with (self._directory / f"{name}.log").open("wb") as log:
            await child.start(self._life[0], self._environment, log.fileno())
        return child

    async def stop(self) -> None:
        living = [child for child in self._children.values() if child.alive]
        for child in living:
            child.stop(1)
        for child in living:
            if status := await child.ended():
                raise TaskMeshError(f"{child.name} ended with status {status} after SIGTERM, not with 0")

    async def until_done(self, wanted: int, total: int) -> None:
        """Wait until so many tasks are done, with a line of progress every second."""
        deadline = time.monotonic() + _DEADLINE_S
        while (done := await self._done()) < wanted:
            rows = [
                f"{name}: {len(await self._held(name))} running"
                for name, child in self._children.items()
                if child.alive
            ]
            print(f"{done}/{total} files  {'  '.join(rows)}", flush=True)
            for name, child in self._children.items():
                if not child.alive and child.process is not None and child.process.returncode != -signal.SIGKILL:
                    raise TaskMeshError(f"{name} died by itself")
            if time.monotonic() > deadline:
                raise TaskMeshError(f"only {done} of {wanted} tasks were done within {_DEADLINE_S:.0f} s")
            await asyncio.sleep(1.0 if wanted == total else 0.1)

    async def kill_one(self) -> tuple[str, list[str]]:
        """Kill a worker that holds tasks; return its name and their keys.

        All are frozen while it is chosen: on a busy machine the others would finish every task meanwhile.
        """
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            self._send_to_all(signal.SIGSTOP)
            try:
                await asyncio.sleep(_IN_FLIGHT_S)  # their writes on the way arrive
                for name, child in self._children.items():
                    if held := await self._held(name):
                        child.send(signal.SIGKILL)
                        return name, held
            finally:
                self._send_to_all(signal.SIGCONT)
            await asyncio.sleep(_IN_FLIGHT_S / 10)  # they claim what comes next
        raise TaskMeshError("no worker held a task that could be taken from it: take more files")

    def _send_to_all(self, number: int) -> None:
        for child in self._children.values():
            child.send(number)

    async def _held(self, worker_id: str) -> list[str]:
        return [
            task.key
            async for task in self._mesh.find(NAME, Status.RUNNING, limit=0)
            if any(entry.worker_id == worker_id and entry.state == "RUNNING" for entry in task.task_state.worker_states)
        ]

    async def _done(self) -> int:
        counts = (await self._mesh.stats()).counts.get(NAME, {})
        if failed := counts.get("FAIL", 0):
            raise TaskMeshError(f"{failed} tasks failed: `taskmesh ls --status FAIL` tells why (run with --keep)")
        return counts.get("SUCCESS", 0)


async def check(mesh: TaskMesh, paths: list[str], diaries: Path, report: Report) -> None:
    """Compare every task with what it must be: in the database, in the workers' diaries, and computed directly."""
    written: Counter[str] = Counter()
    for worker, done in (await asyncio.to_thread(_read, diaries)).items():
        report.executed_by[worker] = len(done)
        written.update(done)
    tasks = {task.key: task async for task in mesh.find(NAME, limit=0)}
    for path in paths:
        expected = await asyncio.to_thread(count, path)
        report.lines += expected["lines"]
        report.tokens += expected["tokens"] or 0
        task = tasks.pop(path, None)
        if task is None:
            report.problems.append(f"{path}: lost, there is no such task any more")
        elif task.status is not Status.SUCCESS or len(task.successes) != 1:
            report.problems.append(f"{path}: {task.status}, with {len(task.successes)} successes: one is right")
        else:
            _check_done(report, task, expected, written[path])
    if tasks:
        report.problems.append(f"tasks that nobody published: {', '.join(sorted(tasks)[:_SHOWN])}")


def _read(diaries: Path) -> dict[str, list[str]]:
    """Return what each worker noted that it had done."""
    return {diary.name: diary.read_text().splitlines() for diary in diaries.iterdir()}


def _check_done(report: Report, task: Task, expected: dict[str, Any], executed: int) -> None:
    winner, lost = task.successes[0], task.task_state.lost_cnt
    report.recorded_by[winner.worker_id] += 1
    report.preempted += lost
    if lost:
        report.moved[task.key] = winner.worker_id
    if winner.returns != expected:
        report.problems.append(f"{task.key}: the result is {winner.returns}, computed directly {expected}")
    # An execution is begun again only if one was lost. (One that was lost may still have come to its last line.)
    if not 1 <= executed <= 1 + lost:
        report.problems.append(f"{task.key}: executed {executed} times, with {lost} executions lost")


def _show(report: Report, files: int) -> None:
    """Print what came of it. Exits with 1 if something is wrong."""
    facts: list[tuple[str, object]] = [
        ("files", files),
        ("lines", f"{report.lines:,}"),
        ("tokens", f"{report.tokens:,}"),
        ("executions", report.executed_by.total()),
        ("preempted", report.preempted),
        ("seconds", f"{report.seconds:.1f}"),
    ]
    rows = [
        [name, report.executed_by[name], report.recorded_by[name], "killed" if name == report.killed else "stopped"]
        for name in sorted(report.executed_by | report.recorded_by)
    ]
    console = output.console()
    console.print(
        "", output.table(["", "TOTAL"], facts), "", output.table(["WORKER", "EXECUTED", "RECORDED", "END"], rows)
    )
    moved = [f"{key} ({report.killed} → {winner})" for key, winner in report.moved.items() if key in report.held]
    output.say(f"taken over from {report.killed}: {', '.join(moved) or 'nothing'}")
    for problem in report.problems[:_SHOWN]:
        output.say(f"WRONG: {problem}", stderr=True)
    if report.problems:
        output.say(f"{len(report.problems)} things are wrong", stderr=True)
        raise typer.Exit(1)
    output.say(f"every one of {files} results equals the direct computation; nothing lost, nothing recorded twice")


async def _leave(mesh: TaskMesh, place: dict[str, str], keep: bool) -> None:
    """Drop what the demo made, or say where it is."""
    driver, collection = mesh.store.driver, place["TASKMESH_COLLECTION"]
    if keep:
        print(f"kept: taskmesh ls --database {place['TASKMESH_DATABASE']} --collection {collection}")
        return
    logging.getLogger("taskmesh.feed").setLevel(logging.ERROR)  # it hears of the drop, rightly
    if collection == "tasks":
        await driver.client.drop_database(place["TASKMESH_DATABASE"])
        return
    for name in await driver.database.list_collection_names():
        if name == collection or name.startswith(f"{collection}."):
            await driver.database.drop_collection(name)
