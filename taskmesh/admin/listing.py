"""Listing tasks: find, count and page through those that match a filter."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self, get_args

from taskmesh.admin.filters import TaskFilter
from taskmesh.admin.store import listing
from taskmesh.admin.store.index_choice import Order
from taskmesh.client.connection import Connection
from taskmesh.model.errors import IncompatibleCollection, InvalidOption
from taskmesh.model.ids import checked_count, shown
from taskmesh.model.read_only import ReadOnly
from taskmesh.model.task import Progress, Standing, Status, Task, checked_name, task_id
from taskmesh.model.times import in_utc
from taskmesh.store.payloads import first_line

logger = logging.getLogger("taskmesh.listing")

_NEWEST_WITHIN_MS = 100


class TaskSummary(ReadOnly):
    """A task as a listing shows it: without params, results and logs."""

    name: str
    key: str
    queue: str
    group: str | None = None
    tags: list[str] = []
    status: Status
    standing: Standing | None = None
    """For an INIT task: what that means at the moment."""
    priority: int = 0
    create_time: datetime
    start_time: datetime | None = None
    next_claim_time: datetime | None = None
    finish_time: datetime | None = None
    progress: Progress | None = None
    fail_cnt: int = 0
    executions: int = 0
    """How many executions were started, as far as that is known."""
    took_ms: int | None = None
    """How long its newest execution took, or has been running."""
    worker: str | None = None
    """The worker that ran it last."""
    running_on: list[str] = []
    """The workers that run it now."""
    reason: str = ""
    """The beginning of the newest failure's reason."""


class TaskPage(ReadOnly):
    """A page of a listing."""

    tasks: list[TaskSummary]
    newest_first: bool
    """Whether the newest come first; otherwise the order is that of name and key."""
    following: str | None
    """The `after` for the next page. None: this is the last."""
    complete: bool = True
    """False: the search was given up, since no index serves it and there are too many tasks: use a narrower filter."""


class Listing:
    """Find, count and page through tasks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def find(
        self,
        which: TaskFilter | None,
        *,
        limit: int = 100,
        sort: Order = "key",
        params: bool = False,
        after: str | None = None,
    ) -> AsyncIterator[Task]:
        """Yield the tasks that match a filter (None: no task does), without their params unless requested. `limit=0`: all.

        `sort`: `"key"` (by name and key), `"newest"` or `"oldest"`. `after`: a key after which to continue, with a filter that
        has the task's name and `sort="key"`. Raises `InvalidOption`.
        """
        if sort not in get_args(Order):
            raise InvalidOption(f"sort must be one of {', '.join(get_args(Order))}, got {sort!r}")
        if limit is not None:
            checked_count("limit (0: all)", limit, least=0)
        if which is None:
            return
        behind = None if after is None else task_id(which.name or "", after)
        async for document in listing.find(
            self._connection.store, which, order=sort, limit=limit, params=params, after=behind
        ):
            task = self._readable(await self._connection.fetched(document))
            if task is not None:
                yield task

    def _readable(self, document: dict[str, Any]) -> Task | None:
        """Read a task; skip a document that is not a taskmesh task, and log it."""
        try:
            return self._connection.payloads.task(document)
        except IncompatibleCollection as error:
            logger.warning("skipped: %.300s", error)
            return None

    async def count(self, where: str | TaskFilter = "", *, at_most: int | None = None) -> int:
        """Count the matching tasks, up to `at_most`. Raises `InvalidOption`."""
        if at_most is not None:
            checked_count("at_most", at_most)
        found = await listing.count(self._connection.store, filter_of(where), at_most)
        assert found is not None, "without a deadline it takes as long as it takes"
        return found

    async def count_within(self, where: str | TaskFilter = "", *, at_most: int, deadline_ms: int) -> int | None:
        """Count the matching tasks, up to `at_most`. None if that takes longer than the deadline."""
        return await listing.count(self._connection.store, filter_of(where), at_most, deadline_ms)

    async def count_each(self, filters: Sequence[str], *, at_most: int, within_ms: int) -> list[int | None]:
        """Count the tasks that match each filter, up to `at_most`. None for those for which the time is too short."""
        end = time.monotonic() + within_ms / 1000
        found: list[int | None] = []
        for where in filters:
            left_ms = round((end - time.monotonic()) * 1000)
            found.append(None if left_ms <= 0 else await self.count_within(where, at_most=at_most, deadline_ms=left_ms))
        return found

    async def page(
        self,
        where: str | TaskFilter = "",
        *,
        newest_first: bool = True,
        after: str | None = None,
        limit: int = 50,
        deadline_ms: int = 2_000,
    ) -> TaskPage:
        """Return a page of matching tasks, quickly however many there are: each page starts where the last one ended.

        If the newest cannot be found at once (thousands match, and all were published long before many others), the order is
        that of name and key instead. Raises `InvalidOption` for an invalid filter or `after`.
        """
        which = filter_of(where)
        checked_count("limit", limit)
        behind = None if after is None else _Cursor.read(after)
        newest = newest_first if behind is None else behind.newest
        place = None if behind is None else behind.place
        begins = behind is None and newest
        within_ms = min(_NEWEST_WITHIN_MS, deadline_ms) if begins else deadline_ms
        store = self._connection.store
        found = await listing.page(store, which, newest=newest, behind=place, limit=limit, deadline_ms=within_ms)
        if found is None and begins:  # the index by time does not serve it at once: it starts again in the other order
            newest = False
            found = await listing.page(store, which, newest=False, behind=None, limit=limit, deadline_ms=deadline_ms)
        if found is None:
            return TaskPage(tasks=[], newest_first=newest, following=None, complete=False)
        documents, following = found
        return TaskPage(
            tasks=[summary for document in documents if (summary := _summary(document)) is not None],
            newest_first=newest,
            following=None if following is None else str(_Cursor(newest, following)),
        )


@dataclass(frozen=True, slots=True)
class _Cursor:
    """The position at which a page ended."""

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
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise InvalidOption(
                f"after={shown(text)} is not a position that a page returned: start again without it"
            ) from None
        return cls(newest is True, place)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    value.encode()
    return value


def _summary(document: dict[str, Any]) -> TaskSummary | None:
    document["reason"] = first_line(document.get("reason"))
    if isinstance(progress := document.get("progress"), dict):
        progress["message"] = first_line(progress.get("message"))
    try:
        return TaskSummary.model_validate(document)
    except ValueError:  # not a taskmesh task
        logger.warning("the document %r is not a taskmesh task: skipped", document.get("_id"))
        return None


def filter_from(
    where: str | TaskFilter | None,
    name: str | None = None,
    status: Status | str | Sequence[Status | str] | None = None,
    queue: str | None = None,
    key_prefix: str | None = None,
    tags: str | Sequence[str] | None = None,
) -> TaskFilter | None:
    """Return the filter in `where`, or made of these arguments. None if `status` is empty. Raises `InvalidOption`."""
    if where is None:
        if status is not None and not status:
            return None
        return TaskFilter.checked(
            name=None if name is None else checked_name(name),
            status=_one_or_several("status", status),
            queue=queue,
            key_prefix=key_prefix or None,
            tags=_one_or_several("tags", tags),
        )
    if (name, status, queue, key_prefix, tags) != (None,) * 5:
        raise InvalidOption(
            "where already says which tasks are meant: leave name, status, queue, key_prefix and tags out"
        )
    return filter_of(where)


def _one_or_several(what: str, given: Any) -> tuple[Any, ...]:
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    if isinstance(given, Mapping) or not isinstance(given, Collection):
        raise InvalidOption(f"{what} must be a str or a list of them, got {shown(given)}")
    return tuple(given)


def filter_of(where: str | TaskFilter) -> TaskFilter:
    """Return the filter for this text. Raises `InvalidOption`."""
    if isinstance(where, str):
        return TaskFilter.parse(where)
    if not isinstance(where, TaskFilter):
        raise InvalidOption(f"a filter must be a text or a TaskFilter, got {shown(where)}")
    return where
