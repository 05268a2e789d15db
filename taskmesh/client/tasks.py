"""Single tasks: read one, change it, wait until it is finished."""

from __future__ import annotations

import asyncio
from typing import Unpack

from taskmesh.client.connection import Connection
from taskmesh.model.errors import TaskNotFound, TaskRunning
from taskmesh.model.option import OptionFields
from taskmesh.model.task import Task, task_id
from taskmesh.store import Store, audit, control, find


class Tasks:
    """What can be asked and done about a task by its name and key."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def _store(self) -> Store:
        return self._connection.store

    async def get(self, name: str, key: str) -> Task:
        """Return the task as it stands now, params and all. Raises `TaskNotFound`."""
        found = await find.get(self._store, [task_id(name, key)])
        if not found:
            raise no_such_task(name, key)
        return Task.from_document(found[0])

    async def cancel(self, name: str, key: str, *, by: str | None = None) -> Task:
        """Cancel the task: CANCELLED from now on; a running execution is stopped. A finished task stays as it is.

        `by`: who, for the audit; by default the user of this process, and its host. Raises `TaskNotFound`.
        """
        id_, who = task_id(name, key), audit.author(by)
        cancelled = await control.cancel(self._store, id_)
        # With no retention it is past it by now.
        found = await find.get(self._store, [id_], forgotten=True) if cancelled else []
        task = Task.from_document(found[0]) if found else await self.get(name, key)
        await audit.note(self._store, "task.cancel", who, name=name, key=key)
        return task

    async def retry(self, name: str, key: str, *, by: str | None = None) -> Task:
        """Make a finished task INIT again, its entries and counts dropped; a waiting one is due at once.

        `by`: who, for the audit; by default the user of this process, and its host. Raises `TaskRunning`, `TaskNotFound`.
        """
        who = audit.author(by)
        if not await control.retry(self._store, task_id(name, key)):
            await self.get(name, key)
            raise TaskRunning(f"task {name!r} {key!r} is running: cancel it first, or publish it with run_again")
        task = await self.get(name, key)
        await audit.note(self._store, "task.retry", who, name=name, key=key)
        return task

    async def delete(self, name: str, key: str, *, by: str | None = None) -> Task:
        """Remove the task, and return it as it was. A running execution is stopped. Raises `TaskNotFound`.

        `by`: who, for the audit; by default the user of this process, and its host.
        """
        who = audit.author(by)
        task = await self.get(name, key)
        await control.delete(self._store, task_id(name, key))
        await audit.note(self._store, "task.delete", who, name=name, key=key)
        return task

    async def set_option(self, name: str, key: str, *, by: str | None = None, **changes: Unpack[OptionFields]) -> Task:
        """Change fields of a published task's option. Raises `InvalidOption`, `TaskNotFound`.

        `by`: who, for the audit; by default the user of this process, and its host.

        On a running task, a worker that is no longer in `specific_worker_ids` stops; `ping_interval_ms` counts from the
        next ping; all else from the next claim.
        """
        who = audit.author(by)
        if not changes:
            return await self.get(name, key)
        while True:
            before = (await self.get(name, key)).task_option
            after = before.changed(**changes).stored()
            expected = before.stored()
            if await control.set_option(
                self._store, task_id(name, key), {field: after[field] for field in changes}, expected
            ):
                await audit.note(self._store, "task.set_option", who, name=name, key=key, changes=dict(changes))
                return await self.get(name, key)

    async def finished(self, name: str, key: str, timeout: float | None, *, published: bool = False) -> Task:
        """Wait until the task is finished, and return it. Raises `TaskNotFound`, `TimeoutError`.

        `published`: the caller has just published it, so that it may be past its retention already.
        """
        results = self._connection.results
        try:
            async with asyncio.timeout(timeout):
                document = await results.finished(task_id(name, key), published=published)
        except TimeoutError:
            raise TimeoutError(f"task {name!r} {key!r} has not finished within {timeout} s") from None
        return Task.from_document(document)


def no_such_task(name: str, key: str) -> TaskNotFound:
    """Return the error for a task that no reader sees."""
    return TaskNotFound(
        f"there is no task {name!r} {key!r}: it was never published, was deleted, or is past its retention"
    )
