"""Publishing: by definition or by name, with or without an event loop.

All params are checked first; then they are inserted, one or two thousand per round trip. If the answer is lost they are published
again: each publication is recognised by its `publish_id`, so nothing exists twice and `created` is that of the first attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar, Unpack

from pymongo.errors import OperationFailure, PyMongoError

from taskmesh.client.connection import Connection, sample
from taskmesh.client.handle import TaskHandle
from taskmesh.client.params import with_stored_fields
from taskmesh.client.portal import portal_loop, run_blocking
from taskmesh.client.registered import RegisteredDefinition
from taskmesh.client.returns import PLAIN, Returns
from taskmesh.client.tasks import Tasks
from taskmesh.client.tracing import Carrier, carrier, going_on, publishing
from taskmesh.model.configuration import Configuration, PublishSettings
from taskmesh.model.dependency import After
from taskmesh.model.errors import InvalidOption, InvalidParams, TaskMeshError, TaskNotFound, TaskTooLarge
from taskmesh.model.labels import words
from taskmesh.model.option import MOST_WORKERS
from taskmesh.model.task import Task, checked_key, checked_name, task_id, unchecked_id
from taskmesh.model.worker import able_workers
from taskmesh.store import Store, apart, find
from taskmesh.store.apart import Apart
from taskmesh.store.audit import author
from taskmesh.store.mongodb.driver import Document, twin_of
from taskmesh.store.mongodb.server_errors import is_over_deadline, is_passing, patiently
from taskmesh.store.payloads import Payloads
from taskmesh.store.publication import Publication, PublishId
from taskmesh.store.publish import Published, publish
from taskmesh.store.relations import dependencies
from taskmesh.store.values import MAX_BYTES, new_id

T = TypeVar("T")
PUBLISH_DEADLINE_S = 30.0
_AFTER_AN_ERROR_S = 10.0
"""For how long a publish is tried again after its first error, even if `PUBLISH_DEADLINE_S` is over before."""
_AT_A_STRETCH = 500
"""So many of one call are checked before other tasks in the event loop have their turn: some milliseconds."""


class Publishable(Protocol):
    """What a publish needs to know of a task: its definition, or what workers have registered about it."""

    @property
    def name(self) -> str:
        """The task's name."""

    @property
    def broadcast(self) -> bool:
        """Whether each worker that is live at its publication runs it once."""

    @property
    def found(self) -> bool:
        """Whether it is a handler's, of this process or of some worker. False: it consists of defaults."""

    @property
    def encrypted(self) -> bool:
        """Whether workers have registered that its values are encrypted."""

    @property
    def configuration(self) -> Configuration:
        """How it is published."""

    @property
    def returns(self) -> Returns:
        """How its results are read."""

    def to_store(self, params: Mapping[str, Any], after: After | None = None) -> tuple[dict[str, Any], int]:
        """Return checked params as they are stored, and their size in bytes. Raises `InvalidParams`, `TaskTooLarge`."""


@dataclass(frozen=True)
class Addressed:
    """A broadcast, with the workers that have to run what is published of it now."""

    definition: Publishable
    configuration: Configuration
    broadcast = True

    @property
    def found(self) -> bool:
        """Whether it is a handler's."""
        return self.definition.found

    @property
    def encrypted(self) -> bool:
        """Whether workers have registered that its values are encrypted."""
        return self.definition.encrypted

    @property
    def name(self) -> str:
        """Its name."""
        return self.definition.name

    @property
    def returns(self) -> Returns:
        """How its results are read."""
        return self.definition.returns

    def to_store(self, params: Mapping[str, Any], after: After | None = None) -> tuple[dict[str, Any], int]:
        """Return checked params as they are stored, and their size in bytes."""
        return self.definition.to_store(params, after)


class Publisher:
    """Publishes on one connection. `definitions` are the tasks whose code is known here."""

    def __init__(self, connection: Connection, tasks: Tasks, definitions: Mapping[str, Publishable]) -> None:
        self._connection = connection
        self._tasks = tasks
        self.definitions = definitions
        self._twin: tuple[asyncio.AbstractEventLoop, asyncio.Task[Connection]] | None = None
        """A connection to the same database on the portal's loop, for `publish_sync`."""

    async def publish_many(
        self,
        name: str,
        params_by_key: Mapping[str, Mapping[str, Any]],
        **configuration: Unpack[PublishSettings],
    ) -> list[TaskHandle[Any]]:
        """Publish many tasks by name, one or two thousand per round trip; handles in the order given.

        Uses the option and queue of the definition if this mesh knows the name, else those that workers have registered,
        else the defaults. All are checked before any is written. Raises as `TaskDefinition.publish` does.
        """
        return await self._by_name(
            name, configuration, lambda definition, settings: self.publish_all(definition, params_by_key, settings)
        )

    async def check_many(
        self,
        name: str,
        params_by_key: Mapping[str, Mapping[str, Any]],
        **configuration: Unpack[PublishSettings],
    ) -> None:
        """Raise what `publish_many` would raise for one of these, for callers that publish them in parts."""

        async def check(definition: Publishable, settings: Configuration) -> None:
            await self._checked(definition, params_by_key, *self.final_configuration(definition, settings))

        await self._by_name(name, configuration, check)

    async def _by_name(
        self, name: str, configuration: PublishSettings, use: Callable[[Publishable, Configuration], Awaitable[T]]
    ) -> T:
        """Call `use` with the definition of a name, and these settings of it."""
        definition = self.definitions.get(checked_name(name))
        if definition is not None:
            return await use(definition, definition.configuration.changed(**configuration))
        registered = await self.registered(name)
        try:
            return await use(registered, registered.configuration.changed(**configuration))
        except InvalidParams:  # a worker that accepts them may have come since
            registered = await self.registered(name, newly=True)
            return await use(registered, registered.configuration.changed(**configuration))

    async def registered(self, name: str, *, newly: bool = False) -> RegisteredDefinition:
        """Return what workers have registered about the tasks of this name. `newly`: not as it was some seconds ago."""
        definition = await self._connection.registry.definition(checked_name(name), newly=newly)
        definition.most_bytes = self.payloads.most_bytes
        return definition

    def workers_changed(self) -> None:
        """Note that a worker of this mesh has started or ended: the next publication warns by the workers that there are then."""
        self._connection.registry.outdate()

    async def publish_all(
        self,
        definition: Publishable,
        params_by_key: Mapping[str, Mapping[str, Any]],
        configuration: Configuration | None = None,
    ) -> list[TaskHandle[Any]]:
        """Publish tasks of one definition, in its configuration unless another is given.

        All are checked before any is written.
        """
        began = time.monotonic()
        configuration = configuration or definition.configuration
        if definition.broadcast:
            configuration = await self.addressed(definition.name, configuration)
        configuration, size_of_fields = self.final_configuration(definition, configuration)
        publications = await self._checked(definition, params_by_key, configuration, size_of_fields)
        await self._connection.create_what_is_missing()
        await self._put_apart(publications)
        with publishing(definition.name, [each.key for each in publications], configuration.queue) as trace:
            for publication in publications:
                publication.trace = trace
            if configuration.session is None:
                published = await self._insert_with_dependencies(self._connection.store, publications)
            else:
                published = await self._publish_in_session(publications, configuration)
        await self._remove_unused(publications, published)
        warnings = await self._warnings(definition, configuration)
        existing = [each.id for each, result in zip(publications, published, strict=True) if not result.created]
        of_existing = await self._warnings_of_existing(definition, configuration, existing)
        not_before = began if _end_is_announced(configuration) else None
        handles: list[TaskHandle[Any]] = []
        for publication, result in zip(publications, published, strict=True):
            said = warnings if result.created else of_existing.get(publication.id, warnings)
            handle: TaskHandle[Any] = TaskHandle(
                self._tasks,
                definition.name,
                publication.key,
                created=result.created,
                updated=result.updated,
                warnings=[_throttled(configuration, publication), *said] if result.throttled else said,
                returns=definition.returns,
                not_before=not_before if result.created else None,
            )
            handles.append(handle)
            if len(handles) % _AT_A_STRETCH == 0:
                await asyncio.sleep(0)
        return handles

    async def _checked(
        self,
        definition: Publishable,
        params_by_key: Mapping[str, Mapping[str, Any]],
        configuration: Configuration,
        size_of_fields: int,
    ) -> list[Publication]:
        """Check them all, and return the publications. Raises as `publish` does."""
        keys, all_params = list(_by_key(params_by_key)), list(params_by_key.values())
        store, clock = self._connection.store, self._connection.clock
        # Before anything is awaited: in the order of the calls.
        first_number = None if clock.stale else store.numbers.take(len(keys), clock.now())
        publish_id = new_id()
        given = configuration.given_after
        # Dependencies of an existing task need not be repeated. Publications in the caller's transaction cannot be seen here.
        existing = await self._existing(definition.name, keys) if given is None else {}
        otherwise = After() if given is None and configuration.session is None else given
        publications: list[Publication] = []
        for key, params in zip(keys, all_params, strict=True):
            checked_key(key)
            seen = existing.get(key)
            try:
                stored, size = definition.to_store(params, _after_of(seen, otherwise))
            except (InvalidParams, TaskTooLarge) as error:
                if len(keys) == 1:
                    raise
                raise type(error)(f"{error} (key {key!r}; none of these {len(keys)} was published)") from None
            size += size_of_fields
            publication = self.new_publication(
                definition, key, stored, configuration, size, apart=True, publish_id=publish_id
            )
            publication.seen = seen
            if first_number is not None:
                publication.number = first_number + len(publications)
            publications.append(publication)
            if len(publications) % _AT_A_STRETCH == 0:
                await asyncio.sleep(0)
        if configuration.after:
            _check_no_circle(publications)
        return publications

    async def _put_apart(self, publications: Sequence[Publication]) -> None:
        """Store what is so large that it is kept separately, before the tasks that refer to it."""
        values = [value for publication in publications for value in publication.apart]
        if values:
            await patiently(lambda: apart.put(self._connection.store, values))

    async def _remove_unused(self, publications: Sequence[Publication], published: Sequence[Published]) -> None:
        """Remove that of publications which neither created nor changed a task."""
        results = zip(publications, published, strict=True)
        unused = [each for each, result in results if each.apart and not (result.created or result.updated)]
        if unused:
            await self._connection.remove_apart(value.id for publication in unused for value in publication.apart)

    async def _publish_in_session(
        self, publications: Sequence[Publication], configuration: Configuration
    ) -> list[Published]:
        """Publish in the caller's transaction, once: it is the caller who tries again."""
        from taskmesh.store.blocking import publish_in_any_session  # noqa: PLC0415 — few need it

        store, clock = self._connection.store, self._connection.clock
        if clock.stale:
            await sample(clock, store)
        if configuration.changes_existing:
            # Outside of the transaction: a task that is not accepted yet cannot be changed.
            await self._connection.acceptance.accept([each.id for each in publications], author(None))
        return await publish_in_any_session(store, publications, clock.now(), configuration.session)

    async def _warnings(self, definition: Publishable, configuration: Configuration) -> list[str]:
        registry, now = self._connection.registry, self._connection.clock.now()
        try:
            return await registry.warnings(definition.name, configuration, now, found=definition.found)
        except PyMongoError as error:  # the tasks are published nevertheless
            return [f"could not be checked against the workers that there are ({type(error).__name__})"]

    async def _warnings_of_existing(
        self, definition: Publishable, configuration: Configuration, ids: Sequence[str]
    ) -> dict[str, list[str]]:
        """Return the warnings about existing tasks that are in another queue or group than this call says."""
        registry = self._connection.registry
        if not ids or configuration.session is not None or not registry.places_differ:
            return {}
        try:
            places = await find.places(self._connection.store, ids)
        except PyMongoError:
            return {}
        warned: dict[tuple[str, str | None], list[str]] = {}
        for queue, group in {*places.values()} - {(configuration.queue, configuration.group)}:
            there = replace(configuration, queue=queue, group=group)
            warned[queue, group] = await self._warnings(definition, there)
        return {id_: warned[place] for id_, place in places.items() if place in warned}

    async def _insert_with_dependencies(self, store: Store, publications: list[Publication]) -> list[Published]:
        """Publish, and take care of dependencies. Raises as `publish` does, and `TaskNotFound` if one does not exist."""
        waited_for = {id_ for each in publications if (after := each.configuration.after) for id_ in after.ids}
        if not any(each.waits for each in publications):
            return await self._insert_patiently(store, publications)
        if waited_for:
            await self._connection.links.check(waited_for)
        published = await self._insert_patiently(store, publications)
        marks = [result.mark for result in published]
        await self._connection.links.tell(zip(publications, marks, strict=True))
        return published

    async def _insert_patiently(self, store: Store, publications: list[Publication]) -> list[Published]:
        """Publish; while the database is away, again, up to a deadline. A repeated publish is recognised by its `publish_id`."""
        give_up = time.monotonic() + PUBLISH_DEADLINE_S
        pause = 0.05
        locked = failed_before = False
        while True:
            try:
                if self._connection.clock.stale:
                    await sample(self._connection.clock, store)
                now, changes = self._connection.clock.now(), self._connection.changes
                return await publish(store, publications, now, changes, alone=locked)
            except PyMongoError as error:
                locked = is_over_deadline(error)
                if not failed_before:  # thousands may have taken longer than the deadline before the first error
                    give_up = max(give_up, time.monotonic() + _AFTER_AN_ERROR_S)
                    failed_before = True
                if await self._accepted(publications, error):
                    continue
                if not (is_passing(error) or locked) or time.monotonic() + pause > give_up:
                    if locked:
                        keys = ", ".join(repr(publication.key) for publication in publications[:3])
                        raise TaskMeshError(
                            f"publishing {keys} waits for somebody's open transaction: try again later"
                        ) from error
                    await self._connection.refuse_strangers([each.id for each in publications], error)
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    async def _accepted(self, publications: Sequence[Publication], error: PyMongoError) -> bool:
        """Accept those of these tasks that another language has inserted: a task that is not accepted yet cannot be changed."""
        if not isinstance(error, OperationFailure) or is_passing(error):
            return False
        for publication in publications:
            publication.sent_to = None  # refused, so it is sent again, to the task that this one becomes
        ids = [publication.id for publication in publications]
        try:
            return await self._connection.acceptance.accept(ids, author(None)) > 0
        except PyMongoError:  # the error of the publication matters
            return False

    async def resolved(self, definition: Publishable | str) -> Publishable:
        """Return the definition that is meant: by name, the one of this mesh, otherwise what workers have registered.

        That is read at most every two seconds. A broadcast is addressed to the workers that are live now.
        """
        if isinstance(definition, str):
            definition = self.definitions.get(checked_name(definition)) or await self.registered(definition)
        if not definition.broadcast:
            return definition
        return Addressed(definition, await self.addressed(definition.name, definition.configuration))

    async def addressed(self, name: str, configuration: Configuration) -> Configuration:
        """Return the configuration of a broadcast, addressed to the workers that are live now and may run it.

        If there is none, the task is EXPIRED from the start.
        """
        queue, named = configuration.queue, configuration.option.specific_worker_ids
        workers = await patiently(self._connection.registry.read)
        able = able_workers(workers, name, queue, only=named, needs=words(configuration.needs))
        ids = tuple(worker.worker_id for worker in able if worker.state == "running")
        if len(ids) > MOST_WORKERS:
            raise TaskMeshError(
                f"task {name!r} would be for {len(ids)} workers, of {MOST_WORKERS} that one task can be for: give parts of "
                "the fleet labels, and publish one broadcast with needs=… for each part"
            )
        if not ids:
            return configuration.changed(expire_time=self._connection.clock.now() - timedelta(seconds=1))
        return configuration.changed(specific_worker_ids=ids, concurrent_worker_cnt=len(ids))

    @property
    def payloads(self) -> Payloads:
        """How the values of tasks are written and read."""
        return self._connection.payloads

    def final_configuration(self, definition: Publishable, configuration: Configuration) -> tuple[Configuration, int]:
        """Return how it is published, with its `fields` as they are stored, and their size.

        Raises `InvalidOption`, `TaskTooLarge`.

        What is encrypted needs a worker that has the key.
        """
        if needs := self.payloads.needs_of(definition.name):
            configuration = replace(configuration, needs={**configuration.needs, **needs})
        elif definition.encrypted:
            raise InvalidOption(
                f"task {definition.name!r} is encrypted by its workers, and this mesh has no codec for it: give it the key by "
                "TaskMesh(codec=…); nothing was published in the clear"
            )
        return with_stored_fields(definition.name, configuration)

    def new_publication(
        self,
        definition: Publishable,
        key: str,
        params: Document,
        configuration: Configuration,
        size: int,
        *,
        apart: bool = False,
        publish_id: PublishId | None = None,
    ) -> Publication:
        """Return a publication of checked params, in its `final_configuration`. All publications are made here.

        `apart`: large values may be stored separately, which the caller has to do. `publish_id`: shared by all tasks of one
        call; None: one of its own. Raises `TaskTooLarge` for what fits in no document.
        """
        name, payloads = definition.name, self.payloads
        sealed = payloads.codec_of(name) is not None
        stored = payloads.sealed_params(unchecked_id(name, key), params) if sealed else params
        put_apart: Sequence[Apart] = ()
        if apart and payloads.is_large(size):
            stored, put_apart, size = payloads.apart_params(unchecked_id(name, key), stored)
        if size > MAX_BYTES:
            raise TaskTooLarge(
                f"task {name!r}: params of {size} bytes fit in no document, and what a handler publishes is not stored apart: "
                "store them elsewhere and pass a reference"
            )
        return Publication(
            name,
            key,
            stored,
            configuration,
            size,
            publish_id=publish_id or new_id(),
            broadcast=definition.broadcast,
            apart=put_apart,
            sealed=sealed,
        )

    async def fetched(self, document: Document) -> Document:
        """Return the document of a task with its separately stored values."""
        return await self._connection.fetched(document)

    async def after_of(self, name: str, key: str) -> After | None:
        """Return what a task waits for, or has waited for: some of its params may come from that. None: unknown."""
        return _after_of((await self._existing(name, [key])).get(key), None)

    async def _existing(self, name: str, keys: Sequence[str]) -> dict[str, Document]:
        """Return what stands under these keys, by key."""
        key_of = {task_id(name, key): key for key in keys}
        found = await self._connection.existing.read(key_of)
        return {key: found[id_] for id_, key in key_of.items() if id_ in found}

    def publication_of(
        self, definition: Publishable, key: str, params: Mapping[str, Any], after: After | None = None
    ) -> Publication:
        """Check a task that a handler publishes with its SUCCESS. Raises as `publish` does.

        `after`: what the task waits for, if its configuration does not say.
        """
        given = definition.configuration.given_after
        stored, size = definition.to_store(params, after if given is None else given)
        configuration, size_of_fields = self.final_configuration(definition, definition.configuration)
        publication = self.new_publication(definition, checked_key(key), stored, configuration, size + size_of_fields)
        _check_no_circle([publication])
        return publication

    async def check_after(self, publication: Publication, beside: Collection[str]) -> None:
        """Raise `TaskNotFound` unless each dependency of a task that a handler publishes exists or is among `beside`.

        `beside`: the ids of other tasks that the handler publishes. A task that exists itself keeps its dependencies.
        """
        after, store = publication.configuration.after, self._connection.store
        if after is None or not (unknown := set(after.ids).difference(beside)):
            return
        try:
            await self._connection.links.check(unknown)
        except TaskNotFound:
            if not await patiently(lambda: dependencies.there(store, [publication.id])):
                raise

    def handle_of(self, definition: Publishable, name: str, key: str, *, created: bool) -> TaskHandle[Any]:
        """Return the handle of a child that a handler has started."""
        return TaskHandle(self._tasks, name, key, created=created, returns=definition.returns)

    def handle(self, name: str, key: str) -> TaskHandle[Any]:
        """Return a handle to a task that was published before. See `TaskMesh.handle`."""
        definition = self.definitions.get(checked_name(name))
        return TaskHandle(
            self._tasks, name, checked_key(key), returns=PLAIN if definition is None else definition.returns
        )

    # --- from code without an event loop ---

    def publish_all_sync(
        self, definition: Publishable, params_by_key: Mapping[str, Mapping[str, Any]]
    ) -> list[TaskHandle[Any]]:
        """Publish from code without an event loop. Raises `RuntimeError` inside one."""
        from taskmesh.store.blocking import is_blocking  # noqa: PLC0415 — few need it

        session = definition.configuration.session
        if session is not None and not is_blocking(session):  # of a client that belongs to a loop, which this is not
            raise InvalidOption(
                f"publish_sync takes the session of a blocking client (pymongo.MongoClient), got a {type(session).__name__}: "
                "open the transaction on one, or use `await publish(…)` in the event loop of this session's client"
            )
        handles = run_blocking(self._publish_in_portal(definition, params_by_key, carrier()), "publish_sync")
        for handle in handles:
            handle.tasks = self._tasks
        return handles

    async def _publish_in_portal(
        self, definition: Publishable, params_by_key: Mapping[str, Mapping[str, Any]], trace: Carrier | None
    ) -> list[TaskHandle[Any]]:
        """Publish in the portal's loop, on a connection of its own. `trace`: the caller's trace."""
        twin = await self._twin_in_portal()
        with going_on(trace):
            return await Publisher(twin, Tasks(twin), self.definitions).publish_all(definition, params_by_key)

    def get_sync(self, name: str, key: str) -> Task:
        """Return a task, from code without an event loop. Raises `RuntimeError` inside one, `TaskNotFound`."""
        return run_blocking(self._get_in_portal(name, key), "get_sync")

    async def _get_in_portal(self, name: str, key: str) -> Task:
        return await Tasks(await self._twin_in_portal()).get(name, key)

    async def _twin_in_portal(self) -> Connection:
        """Return the connection of the portal's loop, in which this runs."""
        loop = asyncio.get_running_loop()
        if self._twin is None or self._twin[0] is not loop:  # after a fork, the child has a portal of its own
            # As a task, since many threads may ask at once: the first connects, and all wait for that.
            self._twin = loop, loop.create_task(self._opened_twin(), name="taskmesh connects publish_sync")
        try:
            return await self._twin[1]
        except BaseException:
            self._twin = None
            raise

    async def _opened_twin(self) -> Connection:
        ours = self._connection
        client = ours.client if ours.client is None or isinstance(ours.client, str) else twin_of(ours.client)
        twin = Connection(client, ours.database, ours.collection, ours.payloads)
        twin.numbers = ours.numbers  # one order for both loops
        await twin.open()
        return twin

    def close_sync(self) -> None:
        """Close what `publish_sync` opened, if anything. The next `publish_sync` opens it again. `mesh.close` does it, too."""
        twin, self._twin = self._twin, None
        if twin is not None and twin[0] is portal_loop():
            run_blocking(_close_twin(twin[1]), "close_sync")

    async def close(self) -> None:
        """Close what `publish_sync` opened, from code with an event loop."""
        if self._twin is not None:
            await asyncio.to_thread(self.close_sync)


def _by_key(params_by_key: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return the mapping. Raises `InvalidParams` for what does not say which params each key has."""
    if not isinstance(params_by_key, Mapping):
        raise InvalidParams(f"publish_many takes a dict of params by key, got {type(params_by_key).__name__}")
    return params_by_key


def _end_is_announced(configuration: Configuration) -> bool:
    """Whether an event announces the end of a new task: not if it expires where no worker is, or was never committed."""
    return configuration.expire_time is None and configuration.session is None


def _throttled(configuration: Configuration, publication: Publication) -> str:
    label, ms = f"task {publication.name!r} {publication.key!r}", configuration.throttle_ms
    return f"{label} was published less than {ms} ms ago (throttle_ms), so this publication did nothing"


def _after_of(task: Document | None, otherwise: After | None) -> After | None:
    """Return what a task waits for, if it exists and its publisher has said."""
    return otherwise if task is None or task.get("after") is None else After.of(task["after"])


def _check_no_circle(publications: Sequence[Publication]) -> None:
    """Raise `InvalidOption` for a task that waits for itself. It is new, so no existing task waits for it."""
    for publication in publications:
        after = publication.configuration.after
        if after and publication.id in after.ids:
            raise InvalidOption(
                f"task {publication.name!r} {publication.key!r} is in its own after: it would wait for itself; take it out"
            )


async def _close_twin(opening: asyncio.Task[Connection]) -> None:
    """Close a connection on the portal's loop, and its client, which nobody else uses."""
    try:
        twin = await opening
    except Exception:  # noqa: BLE001 — it was never open, for whatever reason: whoever asked for it was told
        return
    driver = twin.store.driver
    await twin.close()
    await driver.close()
