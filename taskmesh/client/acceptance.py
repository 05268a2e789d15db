"""Acceptance: checks what programs in other languages have inserted, and publishes it as if from Python.

It gets the queue and the option that workers have registered for its name, changed by what its publisher has set. What does not
fit becomes a task that has FAILed, with the reason, so that whoever waits for it is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from taskmesh.client.registered import RegisteredDefinition
from taskmesh.client.registry import Registry
from taskmesh.model.configuration import Configuration
from taskmesh.model.errors import InvalidOption, InvalidParams, TaskMeshError
from taskmesh.model.ids import shown
from taskmesh.model.option import TaskOption
from taskmesh.model.task import checked_key, checked_name
from taskmesh.store import Store, acceptance
from taskmesh.store.acceptance import Inserted, Verdict
from taskmesh.store.clock import ServerClock
from taskmesh.store.publication import Publication
from taskmesh.store.publish import give_numbers
from taskmesh.store.registry import server_time
from taskmesh.store.values import new_id

SETTINGS = frozenset(TaskOption.model_fields) | {
    "queue",
    "start_time",
    "expire_time",
    "delay_ms",
    "group",
    "tags",
    "needs",
}
"""What `configuration` may set in an inserted task."""
_SECOND = timedelta(seconds=1)


class Acceptance:
    """Accepts inserted tasks, on one connection."""

    def __init__(self, store: Store, clock: ServerClock, registry: Registry) -> None:
        self._store = store
        self._clock = clock
        self._registry = registry

    async def waiting(self, limit: int) -> list[str]:
        """Return the `_id`s of inserted tasks that nobody has accepted yet."""
        return await acceptance.inserted(self._store, limit)

    async def accept(self, ids: Sequence[str], by: str) -> int:
        """Accept those of these tasks that nobody has accepted yet. Return how many.

        `by`: who accepts, for the entry of a refusal.
        """
        found = await acceptance.read(self._store, ids)
        if not found:
            return 0
        now = await server_time(self._store) if self._clock.stale else self._clock.now()
        return await acceptance.accept(self._store, [await self._verdict(each, now, by) for each in found])

    async def _verdict(self, inserted: Inserted, now: datetime, by: str) -> Verdict:
        definition = RegisteredDefinition(inserted.name, None)
        publication = Publication(inserted.name, inserted.key, {}, publish_id=new_id())
        error: TaskMeshError | None = None
        try:
            definition = await self._registry.definition(checked_name(inserted.name))
            publication.configuration = definition.configuration
            publication.configuration = _configured(inserted, definition)
            _check(inserted, definition)
        except TaskMeshError as refusal:
            error = refusal
        try:
            published = inserted.published(now)
        except TypeError:
            error = error or InvalidOption(
                f"publish_time must be an empty BSON timestamp, which the server fills in, got {shown(inserted.publish_time)}"
            )
            published = None
        if published is None:
            give_numbers(self._store, [publication], now)
        else:
            moment, publication.number = published
            # Delays count from then on: the server says it to the second, so from the end of that second.
            now = min(now, moment + _SECOND)
        return Verdict(publication, now, None if error is None else (type(error).__name__, str(error)), by)


def _configured(inserted: Inserted, definition: RegisteredDefinition) -> Configuration:
    """Return what its publisher asks for. Raises `InvalidOption`."""
    wanted = {} if inserted.configuration is None else inserted.configuration
    if not isinstance(wanted, Mapping):
        raise InvalidOption(f"configuration must be a document, got {shown(wanted)}")
    if inserted.ours:
        raise InvalidOption(
            f"{', '.join(inserted.ours)}: fields of taskmesh's own: leave them out, and put settings into `configuration`"
        )
    if unknown := sorted(set(wanted) - SETTINGS):
        raise InvalidOption(
            f"configuration: unknown setting {', '.join(unknown)}; there are {', '.join(sorted(SETTINGS))}"
        )
    return definition.configuration.changed(**{name: _whole(value) for name, value in wanted.items()})


def _whole(value: Any) -> Any:
    """Return a whole number as an int: some drivers store large ones as doubles."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check(inserted: Inserted, definition: RegisteredDefinition) -> None:
    """Raise what a publication from Python would raise for this key and these params."""
    checked_key(inserted.key)
    if definition.broadcast:
        raise InvalidParams(f"task {inserted.name!r} is a broadcast, for the workers that live: publish it from Python")
    definition.to_store(inserted.params)
