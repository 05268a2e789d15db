"""The fleet: which workers there are, and orders to them."""

from __future__ import annotations

from typing import Any

from taskmesh.client.connection import Connection
from taskmesh.model.errors import TaskNotFound
from taskmesh.model.ids import checked_worker_id
from taskmesh.model.worker import WorkerInfo, checked_concurrency, checked_grace
from taskmesh.store import audit, registry


class Fleet:
    """What can be asked of and told to workers, wherever they run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def workers(self) -> list[WorkerInfo]:
        """Return the live workers and those that went within the last hour."""
        return await self._connection.registry.read()

    async def stop_worker(self, worker_id: str, grace_ms: int = 30_000, *, by: str | None = None) -> None:
        """Let a consumer elsewhere stop gracefully. Raises `TaskNotFound` if no such worker is registered, `InvalidOption`.

        `by`: who, for the audit; by default the user of this process, and its host.
        """
        await self._order("worker.stop", by, worker_id, {"stop_grace_ms": checked_grace(grace_ms)})

    async def pause_worker(self, worker_id: str, *, by: str | None = None) -> None:
        """Let a consumer elsewhere claim no more; what it runs, runs on. Raises `TaskNotFound`.

        `by`: who, for the audit; by default the user of this process, and its host.
        """
        await self._order("worker.pause", by, worker_id, {"paused": True})

    async def resume_worker(self, worker_id: str, *, by: str | None = None) -> None:
        """Let a paused consumer elsewhere go on. Raises `TaskNotFound`.

        `by`: who, for the audit; by default the user of this process, and its host.
        """
        await self._order("worker.resume", by, worker_id, {"paused": False})

    async def set_concurrency(self, worker_id: str, concurrency: int, *, by: str | None = None) -> None:
        """Change how many executions a consumer elsewhere runs at once. Raises `TaskNotFound`, `InvalidOption`.

        `by`: who, for the audit; by default the user of this process, and its host.
        """
        wanted = checked_concurrency(concurrency)
        await self._order("worker.set_concurrency", by, worker_id, {"concurrency": wanted}, concurrency=wanted)

    async def _order(self, action: str, by: str | None, worker_id: str, changes: dict[str, Any], **about: Any) -> None:
        who = audit.author(by)
        if not await registry.order(self._connection.store, checked_worker_id(worker_id), changes):
            raise TaskNotFound(f"no worker {worker_id!r} is registered: `taskmesh workers` lists those that are")
        await audit.note(self._connection.store, action, who, worker_id=worker_id, **about)
