"""The fleet: the workers, and orders to them."""

from __future__ import annotations

from typing import Any

from taskmesh.client.connection import Connection
from taskmesh.model.errors import TaskNotFound
from taskmesh.model.ids import checked_worker_id
from taskmesh.model.worker import WorkerInfo, checked_concurrency, checked_grace
from taskmesh.store import audit, registry


class Fleet:
    """Workers: list them, and give them orders, wherever they run. `by`: who, for the audit; see `TaskMesh`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def workers(self) -> list[WorkerInfo]:
        """Return the live workers and those that went away within the last hour."""
        return await self._connection.registry.read()

    async def stop_worker(self, worker_id: str, grace_ms: int = 30_000, *, by: str | None = None) -> None:
        """Stop a worker gracefully, wherever it runs. Raises `TaskNotFound` if no such worker is registered, `InvalidOption`."""
        await self._order("worker.stop", by, worker_id, {"stop_grace_ms": checked_grace(grace_ms)})

    async def pause_worker(self, worker_id: str, *, by: str | None = None) -> None:
        """Pause a worker, wherever it runs: it claims no more tasks; those it runs go on. Raises `TaskNotFound`."""
        await self._order("worker.pause", by, worker_id, {"paused": True})

    async def resume_worker(self, worker_id: str, *, by: str | None = None) -> None:
        """Resume a paused worker, wherever it runs. Raises `TaskNotFound`."""
        await self._order("worker.resume", by, worker_id, {"paused": False})

    async def set_concurrency(self, worker_id: str, concurrency: int, *, by: str | None = None) -> None:
        """Change how many executions a worker runs at once, wherever it runs. Raises `TaskNotFound`, `InvalidOption`."""
        wanted = checked_concurrency(concurrency)
        await self._order("worker.set_concurrency", by, worker_id, {"concurrency": wanted}, concurrency=wanted)

    async def _order(self, action: str, by: str | None, worker_id: str, changes: dict[str, Any], **about: Any) -> None:
        who = audit.author(by)
        if not await registry.order(self._connection.store, checked_worker_id(worker_id), changes):
            raise TaskNotFound(f"no worker {worker_id!r} is registered: `taskmesh workers` lists those that are")
        await audit.note(self._connection.store, action, who, worker_id=worker_id, **about)
