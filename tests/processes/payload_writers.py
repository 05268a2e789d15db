"""A process that is killed while it stores a large value apart: arguments ROLE URI DATABASE ID DEATH (see `tests.warm`).

ROLE `publisher`: it publishes the task ID, with large params. ROLE `worker`: as worker ID it runs tasks, whose results are large.
DEATH says when it ends as by `kill -9`; see `DEATHS`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from pymongo.asynchronous.collection import AsyncCollection

from taskmesh import TaskMesh, TaskOption
from taskmesh.client.definition import TaskDefinition
from taskmesh.consumer.durable import together
from taskmesh.consumer.run import finisher
from taskmesh.store import Store, apart
from tests.processes.worker import die_with_parent

TEXT = "large " * 1_000
CHUNK_BYTES = 2_000
DEATHS = {
    "with the head": 1,
    "between the chunks": 3,
    "with all chunks, before what refers to them": None,
}
"""After how many writes to the collection of payloads; None: after all of them."""


def define(mesh: TaskMesh) -> TaskDefinition[Any, str]:
    """Define the task: what it returns is stored apart, whatever its params are."""

    @mesh.task(
        option=TaskOption(ping_interval_ms=300, worker_timeout_ms=1_500, max_timeouts=10, retain_success_ms=None)
    )
    async def echo(text: str) -> str:
        return text if len(text) > 100 else TEXT

    return echo


def main() -> None:
    """Do so."""
    die_with_parent()
    role, uri, database, id_, death = sys.argv[1:]
    apart.CHUNK_BYTES = CHUNK_BYTES
    _die_after(DEATHS[death])
    asyncio.run(_publish(uri, database, id_) if role == "publisher" else _work(uri, database, id_))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_after(writes: int | None) -> None:
    """Die when so many writes to the payloads are answered, or when all that belong together are."""
    if writes is None:
        put = apart.put

        async def put_and_die(store: Store, values: Sequence[apart.Apart]) -> None:
            await put(store, values)
            if values:
                _die()

        for module in (apart, finisher, together):  # the others have their own import of the verb
            module.put = put_and_die  # type: ignore[attr-defined]
        return
    answered = 0
    for name in ("update_one", "replace_one"):
        write = getattr(AsyncCollection, name)

        async def write_and_count(self: Any, *arguments: Any, write: Any = write, **settings: Any) -> Any:
            nonlocal answered
            result = await write(self, *arguments, **settings)
            if self.name == "payloads":
                answered += 1
                if answered == writes:
                    _die()
            return result

        setattr(AsyncCollection, name, write_and_count)


async def _publish(uri: str, database: str, key: str) -> None:
    async with TaskMesh(uri, database=database, payload_threshold=1_000) as mesh:
        await define(mesh).publish(key, text=TEXT)


async def _work(uri: str, database: str, worker_id: str) -> None:
    async with TaskMesh(uri, database=database, payload_threshold=1_000) as mesh:
        define(mesh)
        await mesh.consumer(worker_id=worker_id).run()
