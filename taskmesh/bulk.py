"""What a mesh can do with many tasks at once: count, retry, cancel, delete and purge by a filter.

The filter is asked again for each task in the very update that changes it, so nothing else is ever touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from taskmesh.errors import InvalidOption
from taskmesh.store import Store, bulk
from taskmesh.store.settle import settle
from taskmesh.task import Status
from taskmesh.where import TaskFilter

logger = logging.getLogger("taskmesh.bulk")

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


class BulkActions:
    """The part of `TaskMesh` that is about many tasks at once."""

    if TYPE_CHECKING:  # what it uses of the mesh that it is a part of

        @property
        def store(self) -> Store:
            """The connection."""

    async def count(self, where: str | TaskFilter = "", *, at_most: int | None = None) -> int:
        """Count the tasks that fit a filter, no further than `at_most`. Raises `InvalidOption`."""
        return await bulk.count(self.store, _filter(where), at_most)

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
        matched = await bulk.count(self.store, which)
        done = 0
        if not dry_run:
            async for batch in bulk.ids(self.store, which):
                done += await bulk.act(self.store, action, which, batch)
                if progress is not None:
                    progress(done)
            logger.info("%s of %s: %d of %d tasks", called or action, which, done, matched)
        return BulkResult(action=called or action, where=str(which), matched=matched, done=done, dry_run=dry_run)


def _filter(where: str | TaskFilter) -> TaskFilter:
    return where if isinstance(where, TaskFilter) else TaskFilter.parse(where)


def _narrow(where: str | TaskFilter) -> TaskFilter:
    which = _filter(where)
    if which.is_empty:
        raise InvalidOption("an empty filter means every task: name at least a status, like status:FAIL")
    return which
