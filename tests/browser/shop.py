"""A photo shop's tasks: what the workers behind the pages run. `taskmesh worker tests.browser.shop:mesh` runs them.

A task that waits does so until a file of its name is in the directory `SHOP_DOORS`: tests open doors, nothing sleeps by guess.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from taskmesh import TaskFailed, TaskMesh, TaskOption, current_task

DOORS = "SHOP_DOORS"
QUICK = TaskOption(
    worker_timeout_ms=30_000, ping_interval_ms=1_000, unexpected_retry_delay_ms=200, max_unexpected_retries=1
)
FRAIL = QUICK.model_copy(update={"worker_timeout_ms": 4_000})
"""For the task whose worker is killed: nobody wants to wait for half a minute."""


def door(name: str) -> Path:
    """Return the file for which a task waits."""
    return Path(os.environ[DOORS], name)


async def _opened(name: str) -> None:
    while not door(name).exists():  # noqa: ASYNC110 -- whoever opens it is another process
        await asyncio.sleep(0.02)


def define(mesh: TaskMesh) -> TaskMesh:
    """Define the shop's tasks."""

    @mesh.task(name="image.resize", queue="images", option=QUICK)
    async def resize(path: str, width: int = 1200) -> dict[str, Any]:
        await asyncio.sleep(0.02 + width / 20_000)
        return {"path": path.replace("original", str(width)), "width": width, "bytes": width * 173}

    @mesh.task(name="mail.send", queue="mail", option=QUICK)
    async def send(to: str, template: str) -> str:
        task = current_task()
        task.log(f"connecting to smtp.photos.example:587 for {to}")
        if "@" not in to:
            raise TaskFailed(f"550 5.1.1 no such mailbox: {to!r}")
        if not door("mail").exists():
            raise TimeoutError("smtp.photos.example:587 did not answer within 10 s")
        task.log(f"sent {template}")
        return "250 2.0.0 accepted"

    @mesh.task(name="report.monthly", queue="reports", option=QUICK)
    async def report(month: str) -> dict[str, Any]:
        task = current_task()
        for done, what in enumerate(("reading orders", "adding up", "drawing charts", "writing the PDF")):
            task.log(f"{month}: {what}")
            await task.progress(done / 4, what)
            await _opened(f"{task.key}.{done}")
        return {"month": month, "orders": 48_213, "pages": 31, "pdf": f"reports/{month}.pdf"}

    @mesh.task(name="video.transcode", queue="videos", option=FRAIL)
    async def transcode(source: str, codec: str = "av1") -> dict[str, Any]:
        task = current_task()
        if codec not in ("av1", "h264"):
            raise ValueError(f"no encoder for {codec!r}")
        task.log(f"{source}: first pass")
        await task.progress(0.37, "first pass")
        await _opened(task.key)
        return {"source": source, "codec": codec, "seconds": 94.2}

    @mesh.task(name="backup.verify", queue="backups", option=QUICK.model_copy(update={"concurrent_worker_cnt": 2}))
    async def verify(archive: str) -> str:
        await asyncio.sleep(0.3)
        return f"{archive}: sha256 9f2c41ab fits"

    return mesh


mesh = define(TaskMesh(os.environ.get("TASKMESH_URI"), database=os.environ.get("TASKMESH_DATABASE", "shop")))
