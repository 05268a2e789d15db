"""What a mesh can do with tasks that were published, one at a time: look at them, follow them, change them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, get_args

from taskmesh.admin.explain import Explanation, Waiting, explain, explain_waiting
from taskmesh.admin.filters import TaskFilter
from taskmesh.admin.store import listing
from taskmesh.admin.store.index_choice import Order
from taskmesh.admin.what_if import OptionEffect, effect_of_option
from taskmesh.client.connection import Connected
from taskmesh.client.events import DEFAULT_BUFFER, EventReader
from taskmesh.model.errors import IncompatibleCollection, InvalidOption, TaskNotFound, TaskRunning
from taskmesh.model.ids import checked_worker_id
from taskmesh.model.task import Status, Task, checked_key, checked_name, task_id
from taskmesh.store import control, find
from taskmesh.store.publish import stored_option

logger = logging.getLogger("taskmesh")


class TaskActions(Connected):
    """The part of `TaskMesh` that is about single tasks."""

    async def get(self, name: str, key: str) -> Task:
        """Return the task as it stands now, params and all. Raises `TaskNotFound`."""
        found = await find.get(self.store, [task_id(name, key)])
        if not found:
            raise TaskNotFound(
                f"there is no task {name!r} {key!r}: it was never published, was deleted, or is past its retention"
            )
        return Task.from_document(found[0])

    async def find(
        self,
        name: str | None = None,
        status: Status | str | Sequence[Status | str] | None = None,
        queue: str | None = None,
        limit: int = 100,
        *,
        key_prefix: str | None = None,
        sort: Order = "key",
        params: bool = False,
        after: str | None = None,
        where: str | TaskFilter | None = None,
    ) -> AsyncIterator[Task]:
        """Yield matching tasks, without their params unless asked for. `limit=0`: all.

        `sort`: `"key"`, `"newest"` or `"oldest"`. `after`: a key, to go on behind it (with `name` and `sort="key"`).
        `where`: a filter, or its text (`status:FAIL error:timeout age>1h`), instead of the arguments above. Raises
        `InvalidOption`.
        """
        if sort not in get_args(Order):
            raise InvalidOption(f"sort is one of {', '.join(get_args(Order))}, not {sort!r}")
        if where is None:
            if status is not None and not status:
                return  # none of no statuses
            statuses = () if status is None else (status,) if isinstance(status, str) else tuple(status)
            which = TaskFilter.checked(
                name=None if name is None else checked_name(name),
                status=statuses,
                queue=queue,
                key_prefix=key_prefix or None,
            )
        elif (name, status, queue, key_prefix, after) != (None,) * 5:
            raise InvalidOption("`where` says which tasks are meant: leave name, status, queue and the like out")
        else:
            which = TaskFilter.parse(where) if isinstance(where, str) else where
        behind = None if after is None else task_id("" if name is None else name, after)
        documents = listing.find(self.store, which, order=sort, limit=limit, params=params, after=behind)
        async for document in documents:
            task = _readable(document)
            if task is not None:
                yield task

    async def cancel(self, name: str, key: str) -> Task:
        """Cancel the task: CANCELLED from now on; a running execution is stopped. A finished task stays as it is."""
        id_ = task_id(name, key)
        if await control.cancel(self.store, id_) and (found := await find.get(self.store, [id_], forgotten=True)):
            return Task.from_document(found[0])  # with no retention it is past it by now
        return await self.get(name, key)

    async def retry(self, name: str, key: str) -> Task:
        """Make a finished task INIT again, its entries and counts dropped; a waiting one is due at once.

        Raises `TaskRunning`, `TaskNotFound`.
        """
        if not await control.retry(self.store, task_id(name, key)):
            await self.get(name, key)
            raise TaskRunning(f"task {name!r} {key!r} is running: cancel it first, or publish it with run_again")
        return await self.get(name, key)

    async def delete(self, name: str, key: str) -> Task:
        """Remove the task, and return it as it was. A running execution is stopped. Raises `TaskNotFound`."""
        task = await self.get(name, key)
        await control.delete(self.store, task_id(name, key))
        return task

    async def set_option(self, name: str, key: str, **changes: Any) -> Task:
        """Change fields of a published task's option. Raises `InvalidOption`, `TaskNotFound`.

        On a running task, a worker that is no longer in `specific_worker_ids` stops; `ping_interval_ms` counts from the
        next ping; all else from the next claim.
        """
        if not changes:
            return await self.get(name, key)
        while True:
            before = (await self.get(name, key)).task_option
            after = stored_option(before.changed(**changes))
            expected = stored_option(before)
            if await control.set_option(self.store, task_id(name, key), {f: after[f] for f in changes}, expected):
                return await self.get(name, key)

    async def what_if_option(self, name: str, key: str, **changes: Any) -> OptionEffect:
        """Tell what `set_option` with these arguments would do: who could claim the task then, whose run would be stopped.

        Changes nothing. Raises `InvalidOption`, `TaskNotFound`.
        """
        task = await self.get(name, key)
        stored = stored_option(task.task_option.changed(**changes))
        return await effect_of_option(self.store, task, {field: stored[field] for field in changes})

    async def explain(self, name: str, key: str, worker_id: str | None = None) -> list[Explanation]:
        """Tell, for one worker or every live one, which gates of the claim rule are open or shut, why, and until when."""
        who = None if worker_id is None else checked_worker_id(worker_id)
        return await explain(self.store, task_id(name, key), who)

    async def explain_worker(self, worker_id: str, name: str | None = None, *, at_most: int = 200) -> list[Waiting]:
        """Tell which gates are shut for this worker, of the oldest tasks that wait: grouped, the largest group first.

        `name`: only of these tasks. `at_most`: how many are looked at.
        """
        which = self.find(name, Status.INIT, limit=at_most, sort="oldest")
        ids = [task_id(task.name, task.key) async for task in which]
        return await explain_waiting(self.store, ids, checked_worker_id(worker_id))

    async def finished(self, name: str, key: str, timeout: float | None, *, published: bool = False) -> Task:
        """Wait until the task is finished, and return it. Raises `TaskNotFound`, `TimeoutError`.

        `published`: the caller has just published it, so that it may be past its retention already.
        """
        _ = self.store
        try:
            async with asyncio.timeout(timeout):
                document = await self._results.finished(task_id(name, key), published=published)
        except TimeoutError:
            raise TimeoutError(f"task {name!r} {key!r} has not finished within {timeout} s") from None
        return Task.from_document(document)

    def events(
        self,
        name: str | None = None,
        key: str | None = None,
        *,
        after: str | None = None,
        buffer: int = DEFAULT_BUFFER,
    ) -> EventReader:
        """Return an async iterator of what happens to tasks from now on, in order for each task.

        `after`: the `token` of an event, to go on behind it. `buffer`: how many events wait for a slow reader; then it is
        told how many it missed. Raises `InvalidOption` for what is no token.
        """
        name = None if name is None else checked_name(name)
        key = None if key is None else checked_key(key)
        reader = EventReader(self.feed, self.store, name, key, after=after, buffer=buffer)
        self._event_readers.add(reader)
        return reader


def _readable(document: dict[str, Any]) -> Task | None:
    """Read a task, or skip a stranger's document with a word."""
    try:
        return Task.from_document(document)
    except IncompatibleCollection as error:
        logger.warning("skipped: %.300s", error)
        return None
