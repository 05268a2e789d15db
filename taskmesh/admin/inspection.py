"""Inspection, which changes nothing: why a task waits, what fails, how the fleet is, what is wrong."""

from __future__ import annotations

from taskmesh.admin.doctor import Finding, examine
from taskmesh.admin.error_groups import ErrorReport, read_errors
from taskmesh.admin.explain import Explanation, Waiting, explain, explain_waiting
from taskmesh.admin.listing import Listing, filter_from
from taskmesh.admin.stats import Stats, read_stats
from taskmesh.admin.timeline import Timeline, read_timeline
from taskmesh.client.connection import Connection
from taskmesh.client.tasks import no_such_task
from taskmesh.model.ids import checked_count, checked_worker_id
from taskmesh.model.task import Status, checked_name, task_id
from taskmesh.store.audit import author


class Inspection:
    """Inspection of tasks and the fleet. Changes nothing."""

    def __init__(self, connection: Connection, listing: Listing) -> None:
        self._connection = connection
        self._listing = listing

    async def explain(self, name: str, key: str, worker_id: str | None = None) -> list[Explanation]:
        """Return, for one worker or every live one, which gates of the claim rule are open or shut, why, and until when."""
        who = None if worker_id is None else checked_worker_id(worker_id)
        id_ = task_id(name, key)
        # A task that another language inserted has no gates until it is accepted.
        await self._connection.acceptance.accept([id_], author(None))
        return await explain(self._connection.store, id_, who)

    async def timeline(self, name: str, key: str) -> Timeline:
        """Return the task with its executions over time and what happened to it, in order. Raises `TaskNotFound`."""
        found = await read_timeline(self._connection.store, self._connection.payloads, task_id(name, key))
        if found is None:
            raise no_such_task(name, key)
        return found

    async def explain_worker(self, worker_id: str, name: str | None = None, *, at_most: int = 200) -> list[Waiting]:
        """Return which gates are shut for this worker, for the oldest waiting tasks, in groups, the largest first.

        `name`: only these tasks. `at_most`: how many are examined.
        """
        which = self._listing.find(filter_from(None, name, Status.INIT), limit=at_most, sort="oldest")
        ids = [task_id(task.name, task.key) async for task in which]
        return await explain_waiting(self._connection.store, ids, checked_worker_id(worker_id))

    async def stats(self) -> Stats:
        """Return counts by name and status, the lag of the oldest claimable task, and the throughput of the fleet."""
        return await read_stats(self._connection.store)

    async def doctor(self) -> list[Finding]:
        """Look for problems of the server, the collection, the fleet and the tasks. Changes nothing."""
        return await examine(self._connection.store)

    async def errors(self, name: str | None = None, *, at_most: int = 10_000, deadline_ms: int = 10_000) -> ErrorReport:
        """Return what fails and why: failures grouped by task name, type of error and place, the most frequent first.

        Examines `at_most` tasks, the same share of each name and queue (at least 20), and stops at the deadline: the report
        says whether these were all. Statuses are read one after another, so a task that starts or ends meanwhile may be missing.
        """
        checked_count("at_most", at_most)
        return await read_errors(
            self._connection.store, None if name is None else checked_name(name), at_most, deadline_ms
        )
