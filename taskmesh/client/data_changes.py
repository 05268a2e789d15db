"""On data change: each change of a collection becomes one task, whatever dies.

A singleton reads the stream (see `mesh.singleton`): one reader in the fleet at a time, since each open stream costs the server
work at every write. That saves work, and is not the guarantee: two may read for a moment, as when one was suspended and wakes
up. What makes it exactly one task is in `store/triggers/data_changes.py`: the transaction that publishes a set of events
advances the position in the stream. See docs/decisions/0018-on-data-change.md.

If the process dies, nothing is half done; the next reader starts at the position.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from pymongo.errors import OperationFailure, PyMongoError

from taskmesh.client.annotations import signature_of
from taskmesh.client.connection import Connection, sample
from taskmesh.client.definition import TaskDefinition
from taskmesh.client.params import checked_size
from taskmesh.model.data_change import Watched
from taskmesh.model.errors import InvalidOption, InvalidParams, TaskMeshError, TaskTooLarge
from taskmesh.model.option import TaskOption
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import is_event_too_large, is_history_lost, is_passing, patiently
from taskmesh.store.publication import Publication
from taskmesh.store.triggers import data_changes
from taskmesh.store.triggers.data_changes import Overtaken, Place
from taskmesh.store.values import Unstorable, size_of

logger = logging.getLogger("taskmesh.changes")

READER_QUEUE = "changes"
"""A queue of its own, so that a pause of the tasks' queue lets no reader fall behind the oplog."""
READER_OPTION = TaskOption(ping_interval_ms=3_000, worker_timeout_ms=15_000, unexpected_retry_delay_ms=5_000)
_MOVE_EVERY_S = 10.0
"""How often the position advances where nothing has to be published: it must not fall off the oplog."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


def reader_name(name: str) -> str:
    """Return the name of the singleton that reads the changes for the tasks of this name."""
    return f"{name}.reader"


class DataChanges:
    """The changes of one collection, as the tasks of one definition."""

    def __init__(self, connection: Connection, definition: TaskDefinition[Any, Any], watched: Watched) -> None:
        self._connection = connection
        self._definition = definition
        self._watched = watched
        self._param = _param_of(definition.name, definition.fn)
        self._cut = False
        """Whether the next event is larger than the server can send."""
        try:
            size_of(list(watched.pipeline), "pipeline")
        except Unstorable as error:
            raise InvalidOption(f"task {definition.name!r}: {error}") from None

    @property
    def _source(self) -> str:
        return data_changes.namespace(self._connection.store, self._watched)

    @property
    def _place_id(self) -> str:
        return data_changes.place_id(self._connection.store, self._definition.name, self._watched)

    async def check(self) -> None:
        """Ask the server whether it opens such a stream. Raises `InvalidOption`."""
        store, name = self._connection.store, self._definition.name
        if data_changes.is_our_own(store, self._watched):
            raise InvalidOption(
                f"task {name!r} would watch {self._source}, in which taskmesh keeps its own: each change would make another; "
                "name a collection of yours"
            )

        async def open_once() -> None:
            async with data_changes.opened(store, self._watched, None):
                pass

        try:
            await patiently(open_once)
        except OperationFailure as error:
            if is_passing(error):
                raise
            said = (error.details or {}).get("errmsg", error)
            raise InvalidOption(
                f"task {name!r}: the server opens no stream of changes of {self._source} with the pipeline "
                f"{list(self._watched.pipeline)!r:.500}: {said}"
            ) from error

    async def read(self) -> None:
        """Read for ever, and publish a task for each change. Raises errors that are not temporary."""
        pause = _FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            try:
                await self._read_one_stream()
            except Overtaken:
                logger.info("another process reads the changes of %s, too: continuing from where it is", self._source)
            except PyMongoError as error:
                await self._see_to(error)
            if time.monotonic() - began > _LONGEST_PAUSE_S:
                pause = _FIRST_PAUSE_S
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _read_one_stream(self) -> None:
        """Read until the stream ends, as it does when the collection is dropped."""
        store = self._connection.store
        place = await data_changes.read(store, self._place_id)
        cut = self._cut
        async with data_changes.opened(store, self._watched, None if place is None else place.token, cut=cut) as stream:
            if place is None:
                await data_changes.begin(store, self._place_id, stream.resume_token)
                logger.info("the changes of %s are read from now on", self._source)
                return  # by the first reader, from where that began
            logger.debug("reading the changes of %s", self._source)
            next_move = time.monotonic() + _MOVE_EVERY_S
            while stream.alive:
                events = await data_changes.next_events(stream, 1 if cut else data_changes.MOST)
                if events:
                    await self._publish(place, events, stream.resume_token)
                elif stream.alive and time.monotonic() < next_move:
                    continue
                else:
                    await data_changes.move(store, place, stream.resume_token)
                if cut and events:  # it is behind us
                    self._cut = False
                    return
                next_move = time.monotonic() + _MOVE_EVERY_S
                place = Place(place.id, stream.resume_token, place.revision + 1, place.read_time)

    async def _publish(self, place: Place, events: list[Document], token: Document) -> None:
        store, clock = self._connection.store, self._connection.clock
        if clock.stale:
            await sample(clock, store)
        publications = [self._publication_of(event) for event in events]
        await data_changes.publish_and_move(store, place, publications, token, clock.now())

    def _publication_of(self, event: Document) -> Publication:
        name, key = self._definition.name, data_changes.key_of(event)
        params = {self._param: data_changes.told(event, cut=self._cut)}
        try:
            size = checked_size(name, params)
        except (TaskTooLarge, InvalidParams) as error:
            logger.warning(
                "a change of %s is passed on without its document, which is too large for a task: %s", key, error
            )
            params = {self._param: data_changes.told(event, cut=True)}
            size = checked_size(name, params)
        publisher = self._definition.publisher
        configuration, _ = publisher.final_configuration(self._definition, self._definition.configuration)
        return publisher.new_publication(self._definition, key, params, configuration, size)

    async def _see_to(self, error: PyMongoError) -> None:
        """Do what an error requires, or raise it. Temporary errors are only logged."""
        store = self._connection.store
        if is_event_too_large(error) and not self._cut:
            self._cut = True
        elif is_history_lost(error):
            await self._go_on_behind_what_is_lost(error)
        elif is_passing(error):
            logger.info("the changes of %s cannot be read now (%s): trying again", self._source, type(error).__name__)
        else:
            await data_changes.note_trouble(store, self._place_id, str(error)[:2_000], lost=False)
            raise error

    async def _go_on_behind_what_is_lost(self, error: PyMongoError) -> None:
        """The position is out of the server's reach: stop there, or skip what is lost, as configured."""
        store, reason = self._connection.store, str(error)[:2_000]
        place = await data_changes.read(store, self._place_id)
        if place is None:
            return
        if self._watched.on_lost == "stop":
            await data_changes.note_trouble(store, self._place_id, reason, lost=True)
            raise TaskMeshError(
                f"changes of {self._source} are lost since {place.read_time:%Y-%m-%d %H:%M:%S} UTC, as the oplog does not reach "
                f"back so far: set on_lost='skip' to read on from now (docs/changes.md); the server says: {reason}"
            ) from error
        async with data_changes.opened(store, self._watched, None) as stream:
            await data_changes.move(store, place, stream.resume_token, gap=reason)
        logger.error(
            "changes of %s since %s are lost and make no tasks, as on_lost='skip' says: %s",
            self._source,
            place.read_time,
            reason,
        )


def _param_of(name: str, fn: Callable[..., Any]) -> str:
    """Return the name of the one parameter that the handler takes. Raises `InvalidOption`."""
    signature = signature_of(fn)
    needed = [p for p in signature.parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len(needed) != 1:
        raise InvalidOption(
            f"task {name!r}: the handler of on_change takes one parameter, like event: ChangeEvent, got {signature}"
        )
    return needed[0].name
