"""The audit: who did what to single tasks, queues, workers and schedules."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import datetime

from taskmesh.client.connection import Connection
from taskmesh.model.ids import checked_count
from taskmesh.model.read_only import ReadOnly
from taskmesh.store import audit


class NotedAction(ReadOnly):
    """Who did what to one task, queue, worker or schedule."""

    action: str
    """Like `task.retry` or `queue.set_limit`."""
    about: str
    """To what, and what was set."""
    by: str | None = None
    time: datetime


class Audit:
    """Changes to single tasks, queues, workers and schedules within the last month."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def actions(self, limit: int = 50) -> list[NotedAction]:
        """Return what was done to single tasks, queues, workers and schedules within the last month, the newest first.

        Each verb records itself, whoever called it: Python, the command line, the dashboard, the REST API. Publishing is not
        listed, nor what handlers and workers do by themselves; the declaration of a schedule is listed only if it has `by`.
        """
        found = await audit.noted(self._connection.store, checked_count("limit", limit))
        return [NotedAction.model_validate(document) for document in found]

    def acting_as(self, by: str) -> AbstractContextManager[None]:
        """Sign changes inside the block that have no `by` of their own: for code that acts for others, like the dashboard."""
        return audit.acting_as(by)
