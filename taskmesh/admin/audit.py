"""The audit: who did what to single tasks, queues, workers and schedules."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict

from taskmesh.admin.store import undo
from taskmesh.client.connection import Connection
from taskmesh.model.ids import checked_remark, checked_text
from taskmesh.store import Store


class NotedAction(BaseModel):
    """Who did what to one task, queue, worker or schedule, by the command line, the dashboard or the REST API."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    action: str
    """Like `task.retry` or `queue.set_limit`."""
    about: str
    """To what, and what was set."""
    by: str | None = None
    time: datetime


class Audit:
    """What was done to single things within the last month."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def _store(self) -> Store:
        return self._connection.store

    async def note(self, action: str, about: str, by: str | None = None) -> None:
        """Write down for `actions` what somebody did: the command line, the dashboard and the REST API do."""
        about = checked_remark("about", about) or ""
        await undo.note(self._store, checked_text("action", action), about, checked_remark("by", by))

    async def actions(self, limit: int = 50) -> list[NotedAction]:
        """Return what was done to single things within the last month, the newest first: what `note` wrote down."""
        return [NotedAction.model_validate(document) for document in await undo.noted(self._store, limit)]
