"""Nothing lost, nothing doubled, every result right: from the database, the workers' diaries, and a direct computation."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from taskmesh.demo.counting import count
from taskmesh.demo.tasks import NAME
from taskmesh.mesh import TaskMesh
from taskmesh.task import Status, Task

_CHUNK = 50


@dataclass
class Report:
    """What came of it. `problems` is empty if all went as it must."""

    files: int
    seconds: float
    killed: str
    held: list[str]
    lines: int = 0
    tokens: int = 0
    executions: int = 0
    preempted: int = 0
    moved: dict[str, str] = field(default_factory=dict)
    """Key → the worker that finished what another had lost."""
    finished_by: Counter[str] = field(default_factory=Counter)
    executed_by: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


async def check(
    mesh: TaskMesh, paths: list[str], diaries: Path, *, seconds: float, killed: tuple[str, list[str]], again: int
) -> Report:
    """Compare every task with what it must be."""
    report = Report(files=len(paths), seconds=seconds, killed=killed[0], held=killed[1])
    written: Counter[str] = Counter()
    for worker, done in (await asyncio.to_thread(_read, diaries)).items():
        report.executed_by[worker] = len(done)
        written.update(done)
    tasks = {task.key: task async for task in mesh.find(NAME, limit=0)}
    expected = await asyncio.to_thread(_computed_directly, paths)
    for path in paths:
        if path not in tasks:
            report.problems.append(f"{path}: lost, there is no such task any more")
        else:
            _check_task(report, tasks[path], expected[path], written[path])
    if again:
        report.problems.append(f"{again} tasks were new at the second publish: none should be")
    if unknown := tasks.keys() - set(paths):
        report.problems.append(f"tasks that nobody published: {', '.join(sorted(unknown)[:5])}")
    if not report.moved:
        report.problems.append(f"{report.killed} held {len(report.held)} tasks when it was killed, but none moved")
    report.executions = written.total()
    return report


def _check_task(report: Report, task: Task, expected: dict[str, Any], executed: int) -> None:
    state = task.task_state
    if task.status is not Status.SUCCESS or len(task.successes) != 1:
        report.problems.append(f"{task.key}: {task.status}, with {len(task.successes)} successes: one is right")
        return
    winner = task.successes[0]
    report.finished_by[winner.worker_id] += 1
    report.preempted += state.lost_cnt
    if state.lost_cnt:
        report.moved[task.key] = winner.worker_id
    if winner.returns != expected:
        report.problems.append(f"{task.key}: the result is {winner.returns}, computed directly {expected}")
    # An execution is begun again only if one was lost. (One that was lost may still have come to its last line.)
    if not 1 <= executed <= 1 + state.lost_cnt:
        report.problems.append(f"{task.key}: executed {executed} times, with {state.lost_cnt} executions lost")
    report.lines += expected["lines"]
    report.tokens += expected["tokens"] or 0


def _read(diaries: Path) -> dict[str, list[str]]:
    """Return what each worker noted that it had done."""
    return {diary.name: diary.read_text().splitlines() for diary in diaries.iterdir()}


def _computed_directly(paths: list[str]) -> dict[str, dict[str, Any]]:
    # Spawned, not forked: this process has threads.
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), initializer=_end_with_parent) as pool:
        return dict(zip(paths, pool.map(count, paths, chunksize=_CHUNK), strict=True))


def _end_with_parent() -> None:
    """In a process of the pool: do not outlive a demo that is killed."""

    def watch() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
