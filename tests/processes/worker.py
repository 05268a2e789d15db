"""A worker process of these tests: `python -m tests.processes.worker '{…}'`. See `Setting`.

It tells its state on standard output, a JSON object per line: `ready`, and at its end what its claimer counted.
"""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import json
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from taskmesh import Consumer, TaskMesh
from taskmesh.consumer import signals
from tests.processes import sabotage, staged
from tests.processes.broken import BROKEN
from tests.processes.change_handlers import READING
from tests.processes.wrong_clock import shift_wall_clock
from tests.waiting import eventually

_PR_SET_PDEATHSIG = 1


@dataclass
class Setting:
    """What a worker is told by its command line."""

    uri: str
    database: str
    history: str
    handlers: str = "tests.processes.handlers"
    """The module whose `define` defines the tasks."""
    worker_id: str | None = None
    concurrency: int = 20
    names: Sequence[str] | None = None
    listen: bool = True
    until_idle: bool = False
    grace_ms: int = 30_000
    wrong_clock_s: float = 0.0
    """How far the wall clock of this process is to be off, as far as Python asks for it."""
    broken: Sequence[str] = field(default_factory=list)
    """Which parts of the engine to break, so that a test can show that somebody notices: see `sabotage` and `broken`."""
    staged: Sequence[str] = field(default_factory=list)
    """Which moments to bring about: see `staged`."""


def main() -> None:
    """Run one consumer until a signal, or until there is nothing left to do."""
    die_with_parent()
    setting = Setting(**json.loads(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if setting.wrong_clock_s:
        shift_wall_clock(setting.wrong_clock_s)
    parts = staged.parts(str(setting.worker_id), Path(setting.history))
    for part in setting.staged:  # first, so that what is broken has the last word
        parts[part]()
    for part in setting.broken:
        if part in BROKEN:
            BROKEN[part](sabotage.replace)
        elif part in READING:
            READING[part]()
        else:
            sabotage.PARTS[part]()
    signals.GRACE_MS = setting.grace_ms
    asyncio.run(_work(setting))


async def _work(setting: Setting) -> None:
    mesh = TaskMesh(setting.uri, database=setting.database)
    import_module(setting.handlers).define(mesh, Path(setting.history))
    async with mesh:
        consumer = mesh.consumer(
            worker_id=setting.worker_id, concurrency=setting.concurrency, names=setting.names, listen=setting.listen
        )
        telling = asyncio.create_task(_tell_when_ready(consumer))
        try:
            await consumer.run(until_idle=setting.until_idle)
        finally:
            telling.cancel()
            claimer = consumer._worker.claimer if consumer._worker else None
            _tell(tried=claimer.tried if claimer else 0, won=claimer.won if claimer else 0)


async def _tell_when_ready(consumer: Consumer) -> None:
    await eventually(lambda: consumer.state != "ready", 60.0)
    _tell(ready=consumer.worker_id)


def _tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201 -- its standard output is what its test reads


def die_with_parent() -> None:
    """Be killed when the test's process ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(ctypes.util.find_library("c")).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
