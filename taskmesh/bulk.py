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

from taskmesh.clock import in_utc
from taskmesh.connection import Connected
from taskmesh.errors import InvalidOption
from taskmesh.store import bulk
from taskmesh.store.settle import settle
from taskmesh.task import Progress, Status
from taskmesh.where import TaskFilter

logger = logging.getLogger("taskmesh.bulk")

_NEWEST_WITHIN_MS = 150
FINISHED = tuple(status for status in Status if status.finished)


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


class TaskSummary(BaseModel):
    """A task as a listing shows it: without params, results and logs."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    key: str
    queue: str
    group: str | None = None
    status: Status
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
        found = await bulk.count(self.store, _filter(where), at_most)
        assert found is not None, "without a deadline it takes as long as it takes"
        return found

    async def count_within(self, where: str | TaskFilter = "", *, at_most: int, deadline_ms: int) -> int | None:
        """Count likewise; None if that takes longer than the deadline."""
        return await bulk.count(self.store, _filter(where), at_most, deadline_ms)

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

        Where the newest cannot be found in a moment (a rare status among millions), they come in the order of name and key
        instead. Raises `InvalidOption` for a filter, or an `after`, that cannot be read.
        """
        which = _filter(where)
        behind = None if after is None else _Cursor.read(after)
        newest = newest_first if behind is None else behind.newest
        # A new listing that the index by time does not serve at once is begun again in the other order.
        first_try_ms = deadline_ms if behind is not None or not newest else min(_NEWEST_WITHIN_MS, deadline_ms)
        found = None
        for in_time_order, within_ms in ((newest, first_try_ms), (False, deadline_ms)):
            found = await bulk.page(
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
        self, where: str | TaskFilter, *, dry_run: bool = False, progress: Callable[[int], None] | None = None
    ) -> BulkResult:
        """Make every task that fits INIT again (waiting ones due at once); running ones are left alone.

        `where`: a `TaskFilter`, or its text: `status:FAIL name:resize error:timeout age>1h`. `progress` is told how many
        are done, batch by batch. Raises `InvalidOption` for an empty filter: say what is meant.
        """
        return await self._act("retry", _narrow(where), dry_run, progress)

    async def cancel_all(
        self, where: str | TaskFilter, *, dry_run: bool = False, progress: Callable[[int], None] | None = None
    ) -> BulkResult:
        """Cancel every unfinished task that fits. The rest as in `retry_all`."""
        return await self._act("cancel", _narrow(where), dry_run, progress)

    async def delete_all(
        self, where: str | TaskFilter, *, dry_run: bool = False, progress: Callable[[int], None] | None = None
    ) -> BulkResult:
        """Delete every task that fits; running executions are stopped. The rest as in `retry_all`."""
        return await self._act("delete", _narrow(where), dry_run, progress)

    async def purge(
        self, where: str | TaskFilter = "", *, dry_run: bool = False, progress: Callable[[int], None] | None = None
    ) -> BulkResult:
        """Delete every finished task that fits, all of them by default, before their retention is over.

        What time alone has finished (expired, exhausted) is written down before. Raises `InvalidOption` for a filter on
        tasks that are not finished.
        """
        which = _filter(where)
        if unfinished := [str(status) for status in which.status if not status.finished]:
            raise InvalidOption(f"only finished tasks are purged, not {', '.join(unfinished)}: use delete_all")
        which = which.model_copy(update={"status": which.status or FINISHED})
        if not dry_run and (settled := await settle(self.store)):
            logger.info("settled %d tasks that time alone had finished", settled)
        return await self._act("delete", which, dry_run, progress, called="purge")

    async def _act(
        self,
        action: bulk.Action,
        which: TaskFilter,
        dry_run: bool,
        progress: Callable[[int], None] | None,
        called: str | None = None,
    ) -> BulkResult:
        matched = await bulk.count(self.store, which) or 0
        done = 0
        if not dry_run:
            async for batch in bulk.ids(self.store, which):
                done += await bulk.act(self.store, action, which, batch)
                if progress is not None:
                    progress(done)
            logger.info("%s of %s: %d of %d tasks", called or action, which, done, matched)
        return BulkResult(action=called or action, where=str(which), matched=matched, done=done, dry_run=dry_run)


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


def _filter(where: str | TaskFilter) -> TaskFilter:
    return where if isinstance(where, TaskFilter) else TaskFilter.parse(where)


def _narrow(where: str | TaskFilter) -> TaskFilter:
    which = _filter(where)
    if which.is_empty:
        raise InvalidOption("an empty filter means every task: name at least a status, like status:FAIL")
    return which
