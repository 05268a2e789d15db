"""Many tasks at once: retry, cancel, delete and purge by a filter, and undo that.

Each task is checked against the filter again in the update that changes it, so nothing else is ever touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from typing import TypedDict, Unpack

from taskmesh.admin.filters import TaskFilter
from taskmesh.admin.listing import filter_of
from taskmesh.admin.store import bulk, listing, undo
from taskmesh.client.connection import Connection
from taskmesh.model.errors import InvalidOption
from taskmesh.model.ids import checked_count, checked_text
from taskmesh.model.queue import checked_queue
from taskmesh.model.read_only import ReadOnly
from taskmesh.model.task import Status
from taskmesh.store import audit
from taskmesh.store.settle import settle
from taskmesh.store.store import WRITE_DEADLINE_MS

logger = logging.getLogger("taskmesh.bulk")

UNDO_MS = 3_600_000
"""How long a bulk action can be undone."""
FINISHED = tuple(status for status in Status if status.finished)
UNFINISHED = tuple(status for status in Status if not status.finished)


class BulkResult(ReadOnly):
    """What a bulk action did, or would do."""

    action: str
    where: str
    """The filter, as text."""
    matched: int
    """How many tasks matched when it began."""
    done: int
    """How many were changed; 0 in a dry run."""
    dry_run: bool
    id: str | None = None
    """The id that `undo` takes; None: it cannot be undone."""


class BulkAction(ReadOnly):
    """Who did what to many tasks, and whether it can still be undone."""

    id: str
    action: str
    where: str
    by: str | None = None
    time: datetime
    matched: int
    done: int | None = None
    """None: it is still running, or was interrupted."""
    undoable: bool = False
    undo_until: datetime | None = None
    undone_time: datetime | None = None


class UndoResult(ReadOnly):
    """What an undo did."""

    id: str
    action: str
    restored: int
    left: int
    """How many tasks were left as they are, since they have changed: claimed, published again."""


class BulkOptions(TypedDict, total=False):
    """How a bulk action is done."""

    dry_run: bool
    """Only count the tasks; False by default."""
    progress: Callable[[int], None] | None
    """Called with the number of tasks done so far, after each batch."""
    by: str | None
    """Who, for the list of `actions`; by default the user of this process, and its host."""
    undo_ms: int
    """How long `undo` can restore the tasks: an hour by default; each task is copied first. 0: there is no undo."""


class Bulk:
    """Bulk actions. `by`: who, for the audit, as told at `TaskMesh`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def retry(self, where: str | TaskFilter, **options: Unpack[BulkOptions]) -> BulkResult:
        """Make every matching task INIT again (waiting ones due at once). Running ones are left alone.

        `where`: a `TaskFilter`, or its text: `status:FAIL name:resize error:timeout age>1h`. `dry_run`: only count them.
        `progress`: called with the number of tasks done, batch by batch. `by`: who, for the list of `actions`; by default the
        user of this process, and its host. `undo_ms`: how long `undo` can restore the tasks (by default an hour, at most a
        month; each is copied); 0: it cannot. Raises `InvalidOption`, also for an empty filter: it would mean every task.
        """
        return await self._act("retry", _narrow(where), **options)

    async def redrive(self, queue: str, **options: Unpack[BulkOptions]) -> BulkResult:
        """Retry the dead letters of a queue: each returns to the queue that it came from, its failures forgotten.

        `queue`: the one named by `on_fail` of their option. Other FAIL tasks in it are retried where they are. Options as in
        `retry`. Raises `InvalidOption`.
        """
        which = TaskFilter(queue=checked_queue(queue), status=(Status.FAIL,))
        return await self._act("retry", which, called="redrive", **options)

    async def cancel(self, where: str | TaskFilter, **options: Unpack[BulkOptions]) -> BulkResult:
        """Cancel every unfinished matching task. Finished ones are not counted, either. Options as in `retry`.

        Raises `InvalidOption`, also for an empty filter, and for one that asks for finished tasks.
        """
        return await self._act("cancel", cancellable(_narrow(where)), **options)

    async def delete(self, where: str | TaskFilter, **options: Unpack[BulkOptions]) -> BulkResult:
        """Delete every matching task. Running executions are stopped. Options as in `retry`.

        Raises `InvalidOption`, also for an empty filter.
        """
        return await self._act("delete", _narrow(where), **options)

    async def purge(
        self,
        where: str | TaskFilter = "",
        *,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
        by: str | None = None,
    ) -> BulkResult:
        """Delete every finished matching task, by default all of them, before their retention is over. There is no undo.

        Tasks that time alone has finished (expired, exhausted) are recorded as such before. Raises `InvalidOption` for a filter
        on tasks that are not finished.
        """
        which = filter_of(where)
        if unfinished := [str(status) for status in which.status if not status.finished]:
            raise InvalidOption(
                f"only finished tasks can be purged, got {', '.join(unfinished)}: use a bulk delete for others"
            )
        which = which.model_copy(update={"status": which.status or FINISHED})
        if not dry_run and (settled := await settle(self._connection.store, WRITE_DEADLINE_MS)):
            logger.info("finished %d tasks whose expiry or last lease had passed", settled)
        options: BulkOptions = {"dry_run": dry_run, "progress": progress, "by": by, "undo_ms": 0}
        return await self._act("delete", which, called="purge", **options)

    async def actions(self, limit: int = 20) -> list[BulkAction]:
        """Return what was done to many tasks at once within the last month, the newest first."""
        found = await undo.actions(self._connection.store, checked_count("limit", limit))
        return [BulkAction.model_validate({**document, "id": document["_id"]}) for document in found]

    async def undo(self, action_id: str, *, by: str | None = None) -> UndoResult:
        """Restore the tasks that a bulk action changed, except those that have changed since.

        An execution that the action stopped is not restored: its task waits. Raises `InvalidOption` if there is no such
        action, or its time is over. Safe to repeat while it has not returned. `by`: who, for the audit; by default the user of
        this process, and its host.
        """
        who = audit.author(by)
        found = await undo.action(self._connection.store, checked_text("action_id", action_id))
        if found is None:
            raise InvalidOption(f"there is no bulk action {action_id!r}: `taskmesh undo` lists them")
        if found.get("undone_time") is not None:
            raise InvalidOption(
                f"the {found['action']} of {found['where']!r} was undone already, at {found['undone_time']}"
            )
        if not found["kept"]:
            raise InvalidOption(
                f"the {found['action']} of {found['where']!r} cannot be undone any more: its copies were kept until "
                f"{found.get('undo_until', 'its end')}"
            )
        restored, left = await undo.put_back(self._connection.store, action_id, found["action"])
        await undo.forget(self._connection.store, action_id)
        await audit.note(self._connection.store, "bulk.undo", who, id=action_id)
        logger.info("undone: %s of %s: %d tasks put back, %d left", found["action"], found["where"], restored, left)
        return UndoResult(id=action_id, action=found["action"], restored=restored, left=left)

    async def _act(
        self,
        action: bulk.Action,
        which: TaskFilter,
        *,
        called: str | None = None,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
        by: str | None = None,
        undo_ms: int = UNDO_MS,
    ) -> BulkResult:
        name, where, who = called or action, str(which), audit.author(by)
        checked_count("undo_ms", undo_ms, least=0, most=audit.KEPT_MS)
        matched = await listing.count(self._connection.store, which) or 0
        if dry_run:
            return BulkResult(action=name, where=where, matched=matched, done=0, dry_run=True)
        id_ = await audit.begin(self._connection.store, name, where, who, matched, undo_ms)
        undo_id = id_ if undo_ms else None
        done = 0
        async for batch in listing.ids(self._connection.store, which):
            done += await bulk.act(self._connection.store, action, which, batch, undo_id=undo_id, undo_ms=undo_ms)
            if progress is not None:
                progress(done)
        await audit.end(self._connection.store, id_, done)
        logger.info("%s of %s: %d of %d tasks", name, which, done, matched)
        return BulkResult(action=name, where=where, matched=matched, done=done, dry_run=False, id=undo_id)


def cancellable(which: TaskFilter) -> TaskFilter:
    """Return the filter for those of these tasks that can be cancelled. Raises `InvalidOption` if it asks for others."""
    if finished := [str(status) for status in which.status if status.finished]:
        raise InvalidOption(
            f"only unfinished tasks can be cancelled, got {', '.join(finished)}: a bulk delete or a purge removes those"
        )
    return which.model_copy(update={"status": which.status or UNFINISHED})


def _narrow(where: str | TaskFilter) -> TaskFilter:
    which = filter_of(where)
    if which.is_empty:
        raise InvalidOption("an empty filter means every task: name at least a status, like status:FAIL")
    return which
