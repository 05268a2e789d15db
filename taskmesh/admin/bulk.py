"""What a mesh can do with many tasks at once: count, retry, cancel, delete and purge by a filter.

The filter is asked again for each task in the very update that changes it, so nothing else is ever touched.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from taskmesh.admin.filters import TaskFilter
from taskmesh.admin.store import bulk, listing, undo
from taskmesh.client.connection import Connected
from taskmesh.model.errors import InvalidOption
from taskmesh.model.ids import checked_remark, checked_text, shown
from taskmesh.model.task import Progress, Standing, Status
from taskmesh.store.clock import in_utc
from taskmesh.store.settle import settle

logger = logging.getLogger("taskmesh.bulk")

_NEWEST_WITHIN_MS = 100
UNDO_MS = 3_600_000
"""For how long a bulk action can be undone."""
FINISHED = tuple(status for status in Status if status.finished)
UNFINISHED = tuple(status for status in Status if not status.finished)


class BulkResult(BaseModel):
    """What a bulk action did, or would do."""

    model_config = ConfigDict(frozen=True)

    action: str
    where: str
    """The filter, as text."""
    matched: int
    """How many tasks fitted when it began."""
    done: int
    """How many were changed; 0 in a dry run."""
    dry_run: bool
    id: str | None = None
    """What `undo` takes; None: it cannot be undone."""


class BulkAction(BaseModel):
    """Who did what to many tasks, and whether that can be undone still."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    action: str
    where: str
    by: str | None = None
    time: datetime
    matched: int
    done: int | None = None
    """None: it goes on, or was broken off."""
    undoable: bool = False
    undo_until: datetime | None = None
    undone_time: datetime | None = None


class NotedAction(BaseModel):
    """Who did what to one task, queue, worker or schedule, by the command line, the dashboard or the REST API."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    action: str
    """Like `task.retry` or `queue.set_limit`."""
    about: str
    """To what, and what was set."""
    by: str | None = None
    time: datetime


class UndoResult(BaseModel):
    """What an undo did."""

    model_config = ConfigDict(frozen=True)

    id: str
    action: str
    restored: int
    left: int
    """How many tasks were left as they are, since something has happened to them: claimed, published anew."""


class TaskSummary(BaseModel):
    """A task as a listing shows it: without params, results and logs."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    key: str
    queue: str
    group: str | None = None
    status: Status
    standing: Standing | None = None
    """Of one that is INIT: what that means at the moment."""
    priority: int = 0
    create_time: datetime
    start_time: datetime | None = None
    next_claim_time: datetime | None = None
    finish_time: datetime | None = None
    progress: Progress | None = None
    fail_cnt: int = 0
    running_on: list[str] = []
    """The workers that run it now."""
    reason: str = ""
    """The beginning of the newest failure's reason."""


class TaskPage(BaseModel):
    """A page of a listing."""

    model_config = ConfigDict(frozen=True)

    tasks: list[TaskSummary]
    newest_first: bool
    """Whether the last published come first; else they are in the order of name and key."""
    following: str | None
    """What to give as `after` for the next page; None: this is the last."""
    complete: bool = True
    """False: the search was given up, as no index serves it and there are too many tasks: narrow it down."""


class BulkActions(Connected):
    """The part of `TaskMesh` that is about many tasks at once."""

    async def count(self, where: str | TaskFilter = "", *, at_most: int | None = None) -> int:
        """Count the tasks that fit a filter, no further than `at_most`. Raises `InvalidOption`."""
        found = await listing.count(self.store, _filter(where), at_most)
        assert found is not None, "without a deadline it takes as long as it takes"
        return found

    async def count_within(self, where: str | TaskFilter = "", *, at_most: int, deadline_ms: int) -> int | None:
        """Count likewise; None if that takes longer than the deadline."""
        return await listing.count(self.store, _filter(where), at_most, deadline_ms)

    async def page(
        self,
        where: str | TaskFilter = "",
        *,
        newest_first: bool = True,
        after: str | None = None,
        limit: int = 50,
        deadline_ms: int = 2_000,
    ) -> TaskPage:
        """Return a page of the tasks that fit, in time however many there are: each page begins where the last one ended.

        Where the newest cannot be found in a moment (thousands fit, and all were published long before many others), they come in
        the order of name and key instead. Raises `InvalidOption` for a filter, or an `after`, that cannot be read.
        """
        which = _filter(where)
        behind = None if after is None else _Cursor.read(after)
        newest = newest_first if behind is None else behind.newest
        # A new listing that the index by time does not serve at once is begun again in the other order.
        first_try_ms = deadline_ms if behind is not None or not newest else min(_NEWEST_WITHIN_MS, deadline_ms)
        found = None
        for in_time_order, within_ms in ((newest, first_try_ms), (False, deadline_ms)):
            found = await listing.page(
                self.store,
                which,
                newest=in_time_order,
                behind=behind.place if behind is not None else None,
                limit=limit,
                deadline_ms=within_ms,
            )
            if found is not None or behind is not None or not in_time_order:
                newest = in_time_order
                break
        if found is None:
            return TaskPage(tasks=[], newest_first=newest, following=None, complete=False)
        documents, following = found
        return TaskPage(
            tasks=[summary for document in documents if (summary := _summary(document)) is not None],
            newest_first=newest,
            following=None if following is None else str(_Cursor(newest, following)),
        )

    async def retry_all(
        self,
        where: str | TaskFilter,
        *,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
        by: str | None = None,
        undo_ms: int = UNDO_MS,
    ) -> BulkResult:
        """Make every task that fits INIT again (waiting ones due at once); running ones are left alone.

        `where`: a `TaskFilter`, or its text: `status:FAIL name:resize error:timeout age>1h`. `progress` is told how many
        are done, batch by batch. `by`: who, for the list of `bulk_actions`. `undo_ms`: for so long `undo` can put the tasks back
        (an hour by default; each is copied aside); 0: it cannot. Raises `InvalidOption` for an empty filter: say what is meant.
        """
        return await self._act("retry", _narrow(where), dry_run, progress, by=by, undo_ms=undo_ms)

    async def cancel_all(
        self,
        where: str | TaskFilter,
        *,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
        by: str | None = None,
        undo_ms: int = UNDO_MS,
    ) -> BulkResult:
        """Cancel every unfinished task that fits; others are not counted either. The rest as in `retry_all`.

        Raises `InvalidOption` also for a filter that asks for finished tasks.
        """
        return await self._act("cancel", cancellable(_narrow(where)), dry_run, progress, by=by, undo_ms=undo_ms)

    async def delete_all(
        self,
        where: str | TaskFilter,
        *,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
        by: str | None = None,
        undo_ms: int = UNDO_MS,
    ) -> BulkResult:
        """Delete every task that fits; running executions are stopped. The rest as in `retry_all`."""
        return await self._act("delete", _narrow(where), dry_run, progress, by=by, undo_ms=undo_ms)

    async def purge(
        self,
        where: str | TaskFilter = "",
        *,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
        by: str | None = None,
    ) -> BulkResult:
        """Delete every finished task that fits, all of them by default, before their retention is over. There is no undo.

        What time alone has finished (expired, exhausted) is written down before. Raises `InvalidOption` for a filter on
        tasks that are not finished.
        """
        which = _filter(where)
        if unfinished := [str(status) for status in which.status if not status.finished]:
            raise InvalidOption(f"only finished tasks are purged, not {', '.join(unfinished)}: use delete_all")
        which = which.model_copy(update={"status": which.status or FINISHED})
        if not dry_run and (settled := await settle(self.store)):
            logger.info("settled %d tasks that time alone had finished", settled)
        return await self._act("delete", which, dry_run, progress, called="purge", by=by)

    async def bulk_actions(self, limit: int = 20) -> list[BulkAction]:
        """Return what was done to many tasks at once within the last month, the newest first."""
        found = await undo.actions(self.store, limit)
        return [BulkAction.model_validate({**document, "id": document["_id"]}) for document in found]

    async def note_action(self, action: str, about: str, by: str | None = None) -> None:
        """Write down for `noted_actions` what somebody did: the command line, the dashboard and the REST API do."""
        about = checked_remark("about", about) or ""
        await undo.note(self.store, checked_text("action", action), about, checked_remark("by", by))

    async def noted_actions(self, limit: int = 50) -> list[NotedAction]:
        """Return what was done to single things within the last month, the newest first: what `note_action` wrote down."""
        return [NotedAction.model_validate(document) for document in await undo.noted(self.store, limit)]

    async def undo(self, action_id: str) -> UndoResult:
        """Put back the tasks that a bulk action has changed, as they were before; those that nothing has happened to since.

        An execution that the action stopped is not put back: its task waits. Raises `InvalidOption` if there is no such
        action, or its time is over. Safe to repeat while it has not returned.
        """
        found = await undo.action(self.store, checked_text("action_id", action_id))
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
        restored, left = await undo.put_back(self.store, action_id, found["action"])
        await undo.forget(self.store, action_id)
        logger.info("undone: %s of %s: %d tasks put back, %d left", found["action"], found["where"], restored, left)
        return UndoResult(id=action_id, action=found["action"], restored=restored, left=left)

    async def _act(
        self,
        action: bulk.Action,
        which: TaskFilter,
        dry_run: bool,
        progress: Callable[[int], None] | None,
        *,
        called: str | None = None,
        by: str | None = None,
        undo_ms: int = 0,
    ) -> BulkResult:
        name, where, by = called or action, str(which), checked_remark("by", by)
        matched = await listing.count(self.store, which) or 0
        if dry_run:
            return BulkResult(action=name, where=where, matched=matched, done=0, dry_run=True)
        id_ = await undo.begin(self.store, name, where, by, matched, undo_ms)
        undo_id = id_ if undo_ms else None
        done = 0
        async for batch in listing.ids(self.store, which):
            done += await bulk.act(self.store, action, which, batch, undo_id=undo_id, undo_ms=undo_ms)
            if progress is not None:
                progress(done)
        await undo.end(self.store, id_, done)
        logger.info("%s of %s: %d of %d tasks", name, which, done, matched)
        return BulkResult(action=name, where=where, matched=matched, done=done, dry_run=False, id=undo_id)


@dataclass(frozen=True, slots=True)
class _Cursor:
    """Where a page ended."""

    newest: bool
    place: list[Any]

    def __str__(self) -> str:
        place = [part.isoformat() if isinstance(part, datetime) else part for part in self.place]
        return base64.urlsafe_b64encode(json.dumps([self.newest, *place]).encode()).decode().rstrip("=")

    @classmethod
    def read(cls, text: str) -> Self:
        """Read it back. Raises `InvalidOption`."""
        try:
            newest, *place = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            if newest is True:
                moment, id_ = place
                place = [in_utc(datetime.fromisoformat(moment)), _text(id_)]
            else:
                (id_,) = place
                place = [_text(id_)]
        except (ValueError, TypeError, OverflowError):
            raise InvalidOption(f"after={text!r} is no place where a page ended: begin anew without it") from None
        return cls(newest is True, place)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    value.encode()
    return value


def _summary(document: dict[str, Any]) -> TaskSummary | None:
    try:
        return TaskSummary.model_validate(document)
    except ValueError:  # a stranger's document
        logger.warning("the document %r is no task of ours, and skipped", document.get("_id"))
        return None


def cancellable(which: TaskFilter) -> TaskFilter:
    """Return the filter for those of these tasks that can be cancelled. Raises `InvalidOption` if it asks for others."""
    if finished := [str(status) for status in which.status if status.finished]:
        raise InvalidOption(f"only unfinished tasks are cancelled, not {', '.join(finished)}: use delete_all, or purge")
    return which.model_copy(update={"status": which.status or UNFINISHED})


def _filter(where: str | TaskFilter) -> TaskFilter:
    if isinstance(where, str):
        return TaskFilter.parse(where)
    if not isinstance(where, TaskFilter):
        raise InvalidOption(f"a filter must be a text or a TaskFilter, got {shown(where)}")
    return where


def _narrow(where: str | TaskFilter) -> TaskFilter:
    which = _filter(where)
    if which.is_empty:
        raise InvalidOption("an empty filter means every task: name at least a status, like status:FAIL")
    return which
