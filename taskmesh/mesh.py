"""`TaskMesh`: the front door. What it does stands in the files it calls."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, ParamSpec, Self, TypeVar, overload

from pymongo.errors import PyMongoError

from taskmesh.bulk import BulkActions
from taskmesh.clock import ServerClock, in_utc
from taskmesh.consumer import Consumer
from taskmesh.definition import Configuration, Run, TaskDefinition, TaskHandle, checked_queue
from taskmesh.doctor import Finding, examine
from taskmesh.errors import (
    IncompatibleCollection,
    InvalidOption,
    InvalidParams,
    TaskMeshError,
    TaskNotFound,
    TaskRunning,
)
from taskmesh.events import DEFAULT_BUFFER, EventReader
from taskmesh.explain import Explanation, explain
from taskmesh.feed import Feed
from taskmesh.option import TaskOption
from taskmesh.params import checked_size
from taskmesh.portal import portal_loop, run_blocking
from taskmesh.queues import QueueInfo, read_queues, set_group_limit, set_limit
from taskmesh.results import Results
from taskmesh.scheduling import Scheduling
from taskmesh.stats import Stats, read_stats
from taskmesh.store import Store, control, find, fleet, schema
from taskmesh.store.driver import twin_of
from taskmesh.store.faults import is_over_deadline, is_passing
from taskmesh.store.publish import Publication, Published, publish, publish_in_session, stored_option
from taskmesh.task import Status, Task, checked_key, checked_name, task_id
from taskmesh.where import TaskFilter
from taskmesh.workers import Registry, WorkerInfo

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("taskmesh")

PUBLISH_DEADLINE_S = 30.0


class TaskMesh(Scheduling, BulkActions):
    """A set of task definitions on a MongoDB collection.

    `client`: a MongoDB URI, a `pymongo.AsyncMongoClient` or a `motor.motor_asyncio.AsyncIOMotorClient`. None: the URI in
    `TASKMESH_URI`; without one, the embedded MongoDB (`pip install 'taskmesh[embedded]'`).
    """

    def __init__(self, client: Any = None, *, database: str = "taskmesh", collection: str = "tasks") -> None:
        self._client = client
        self._database = database
        self._collection = collection
        self.definitions: dict[str, TaskDefinition[Any, Any]] = {}
        self._declarations = {}
        self._store: Store | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._embedded: Any = None
        self._event_readers: weakref.WeakSet[EventReader] = weakref.WeakSet()
        self._pid = os.getpid()
        self._twin: tuple[asyncio.AbstractEventLoop, asyncio.Task[TaskMesh]] | None = None
        """The same mesh on the portal's loop, for `publish_sync`."""

    # --- definitions ---

    @overload
    def task(self, fn: Callable[P, Awaitable[R]], /) -> TaskDefinition[P, R]: ...
    @overload
    def task(self, fn: Callable[P, R], /) -> TaskDefinition[P, R]: ...
    @overload
    def task(
        self,
        fn: None = None,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        option: TaskOption | None = None,
        run: Run | None = None,
        projection: Sequence[str] | None = None,
        cron: str | None = None,
        interval_ms: int | None = None,
        timezone: str = "UTC",
    ) -> _Decorator: ...

    def task(
        self,
        fn: Any = None,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        option: TaskOption | None = None,
        run: Run | None = None,
        projection: Sequence[str] | None = None,
        cron: str | None = None,
        interval_ms: int | None = None,
        timezone: str = "UTC",
    ) -> Any:
        """Define a task: a decorator, with or without arguments.

        `name`: the function's, by default. `run`: `"async"`, `"thread"` (the default for plain functions) or `"process"`.
        `projection`: load only these params at execution; the others keep their defaults. `cron`, `interval_ms`,
        `timezone`: run it periodically, with the defaults of its params; `every` can say more.
        """
        if option is not None and not isinstance(option, TaskOption):
            raise InvalidOption(f"option is a TaskOption, not {option!r}")

        def define(function: Any) -> TaskDefinition[Any, Any]:
            configuration = Configuration(queue=checked_queue(queue), option=option or TaskOption())
            definition: TaskDefinition[Any, Any] = TaskDefinition(
                self, function, name or function.__name__, configuration, run, projection
            )
            if definition.name in self.definitions:
                raise InvalidOption(f"a task {definition.name!r} is defined already: give one of them another name")
            self.definitions[definition.name] = definition
            if cron is not None or interval_ms is not None:
                self.every(definition, cron=cron, interval_ms=interval_ms, timezone=timezone)
            return definition

        return define if fn is None else define(fn)

    # --- connection ---

    def connect_to(self, client: Any = None, *, database: str | None = None, collection: str | None = None) -> None:
        """Change where this mesh will connect to: what a command line or a test overrides. None: as it is.

        Raises `TaskMeshError` if it is connected already.
        """
        if self._store is not None:
            raise TaskMeshError("this mesh is connected already: say where before `async with mesh`")
        self._client = self._client if client is None else client
        self._database = database or self._database
        self._collection = collection or self._collection

    @property
    def address(self) -> str:
        """Where this mesh is connected: host and port, database and collection; without credentials."""
        store = self.store
        return f"{schema.hosts(store)}, database {self._database!r}, collection {self._collection!r}"

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect, check the server, and create the collections and indexes that are missing.

        Raises `NotAReplicaSet`, `IncompatibleCollection`, `EmbeddedUnavailable`, or `TaskMeshError` if no server answers.
        """
        if self._store is not None:
            raise TaskMeshError("this mesh is connected already: use one `async with mesh` around all that needs it")
        store = Store(await self._client_or_uri(), self._database, self._collection)
        clock = ServerClock()
        try:
            await schema.check_server(store)
            for _ in range(3):
                sent = time.monotonic()
                clock.observe(await fleet.server_time(store), sent, time.monotonic())
            await schema.create(store)
        except BaseException:
            await store.close()
            await self._leave_embedded()
            raise
        self._store, self.clock, self._loop, self._pid = store, clock, asyncio.get_running_loop(), os.getpid()
        self.feed = Feed(store)
        self._results = Results(store, self.feed)
        self._registry = Registry(store)
        await self.store_declarations()

    async def close(self) -> None:
        """Close what `connect` opened. Does nothing the second time."""
        if self._twin is not None:
            await asyncio.to_thread(self.close_sync)
        if self._store is None:
            return
        store, self._store = self._store, None
        for reader in tuple(self._event_readers):
            reader.close()
        await self._results.close()
        await self.feed.close()
        await store.close()
        await self._leave_embedded()

    async def _client_or_uri(self) -> Any:
        client = self._client or os.environ.get("TASKMESH_URI")
        if client is not None:
            return client
        from taskmesh.embedded import attach  # noqa: PLC0415 — an extra

        self._embedded = await asyncio.to_thread(attach)
        return self._embedded.uri

    async def _leave_embedded(self) -> None:
        if self._embedded is not None:
            embedded, self._embedded = self._embedded, None
            await asyncio.to_thread(embedded.close)

    def connected_in(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether the mesh can be used in this event loop, in this process."""
        return self._store is not None and self._loop is loop and self._pid == os.getpid()

    @property
    def store(self) -> Store:
        """The connection. Raises `TaskMeshError` if there is none that can be used here."""
        if self._store is None:
            raise TaskMeshError("this mesh is not connected: use it inside `async with mesh:` (or `publish_sync`)")
        if self._pid != os.getpid():
            raise TaskMeshError(
                "this mesh was connected before a fork: connect it anew in the child, or use `publish_sync`"
            )
        if self._loop is not asyncio.get_running_loop():
            raise TaskMeshError("this mesh is connected in another event loop: connect it in the one that uses it")
        return self._store

    # --- publishing ---

    async def publish(
        self, name: str, key: str, params: Mapping[str, Any] | None = None, **configuration: Any
    ) -> TaskHandle[Any]:
        """Publish by task name, without the handler's code.

        Uses the option and queue of the definition if this mesh knows the name, else the defaults. Raises as
        `TaskDefinition.publish` does.
        """
        return (await self.publish_many(name, {key: {} if params is None else params}, **configuration))[0]

    async def publish_many(
        self, name: str, params_by_key: Mapping[str, Mapping[str, Any]], **configuration: Any
    ) -> list[TaskHandle[Any]]:
        """Publish many tasks by name, about a thousand per round trip; handles in the order given.

        All are checked before any is written.
        """
        definition = self.definitions.get(checked_name(name))
        if definition is not None:
            return await self.publish_all(definition.configure(**configuration), params_by_key)
        checked = {checked_key(key): self._unchecked(name, params) for key, params in params_by_key.items()}
        return await self._publish_named(name, Configuration().changed(**configuration), checked)

    @staticmethod
    def _unchecked(name: str, params: Mapping[str, Any] | None) -> tuple[dict[str, Any], int]:
        if params is not None and not isinstance(params, Mapping):
            raise InvalidParams(f"task {name!r}: params are a mapping by parameter name, not {type(params).__name__}")
        stored = dict(params or {})
        return stored, checked_size(name, stored)

    async def publish_all(
        self, definition: TaskDefinition[Any, Any], params_by_key: Mapping[str, Mapping[str, Any]]
    ) -> list[TaskHandle[Any]]:
        """Publish tasks of one definition; all are checked before any is written."""
        checked = {checked_key(key): definition.params.to_store(params) for key, params in params_by_key.items()}
        return await self._publish_named(definition.name, definition.configuration, checked)

    async def _publish_named(
        self, name: str, configuration: Configuration, checked: Mapping[str, tuple[dict[str, Any], int]]
    ) -> list[TaskHandle[Any]]:
        publications = [_publication(name, key, params, size, configuration) for key, (params, size) in checked.items()]
        store = self.store
        if configuration.session is not None:
            published = [
                await publish_in_session(store, publication, self.clock.now(), configuration.session)
                for publication in publications
            ]
        else:
            published = await self._published(store, publications)
        warnings = await self._registry.warnings(name, configuration, self.clock.now())
        return [
            TaskHandle(
                self, name, publication.key, created=result.created, updated=result.updated, warnings=list(warnings)
            )
            for publication, result in zip(publications, published, strict=True)
        ]

    @staticmethod
    def publication(
        name: str, key: str, params: dict[str, Any], size: int, configuration: Configuration
    ) -> Publication:
        """Return the task to publish, from params that were checked."""
        return _publication(name, key, params, size, configuration)

    async def _published(self, store: Store, publications: list[Publication]) -> list[Published]:
        """Publish, and again while the database is away, up to a deadline: a repeated publish is known by its `publish_id`."""
        give_up = time.monotonic() + PUBLISH_DEADLINE_S
        pause = 0.05
        while True:
            try:
                return await publish(store, publications, self.clock.now())
            except PyMongoError as error:
                locked = is_over_deadline(error)
                if not (is_passing(error) or locked) or time.monotonic() + pause > give_up:
                    if locked:
                        keys = ", ".join(repr(publication.key) for publication in publications[:3])
                        raise TaskMeshError(
                            f"publishing {keys} waits for somebody's open transaction: try again later"
                        ) from error
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    def publish_all_sync(
        self, definition: TaskDefinition[Any, Any], params_by_key: Mapping[str, Mapping[str, Any]]
    ) -> list[TaskHandle[Any]]:
        """Publish from code without an event loop. Raises `RuntimeError` inside one."""
        handles = run_blocking(self._publish_in_portal(definition, params_by_key), "publish_sync")
        for handle in handles:
            handle.mesh = self
        return handles

    async def _publish_in_portal(
        self, definition: TaskDefinition[Any, Any], params_by_key: Mapping[str, Mapping[str, Any]]
    ) -> list[TaskHandle[Any]]:
        """Publish in the portal's loop, on a connection of its own."""
        loop = asyncio.get_running_loop()
        if self._twin is None or self._twin[0] is not loop:  # after a fork, the child has a portal of its own
            # As a task, since many threads may ask at once: the first connects, and all wait for that.
            self._twin = loop, loop.create_task(self._connected_twin(), name="taskmesh connects publish_sync")
        try:
            twin = await self._twin[1]
        except BaseException:
            self._twin = None
            raise
        return await twin.publish_all(definition, params_by_key)

    async def _connected_twin(self) -> TaskMesh:
        twin = TaskMesh(self._twin_client(), database=self._database, collection=self._collection)
        twin.definitions = self.definitions
        await twin.connect()
        return twin

    def close_sync(self) -> None:
        """Close what `publish_sync` opened, if it did; the next `publish_sync` opens it again. `close` does it too."""
        twin, self._twin = self._twin, None
        if twin is not None and twin[0] is portal_loop():
            run_blocking(_close_twin(twin[1]), "close_sync")

    def _twin_client(self) -> Any:
        return self._client if self._client is None or isinstance(self._client, str) else twin_of(self._client)

    def publication_of(
        self, definition: TaskDefinition[Any, Any] | str, key: str, params: Mapping[str, Any]
    ) -> Publication:
        """Check what a handler wants to be published with its SUCCESS. Raises as `publish` does."""
        if isinstance(definition, str):
            named = self.definitions.get(checked_name(definition))
            stored, size = named.params.to_store(params) if named else self._unchecked(definition, params)
            configuration = named.configuration if named else Configuration()
            return _publication(definition, checked_key(key), stored, size, configuration)
        stored, size = definition.params.to_store(params)
        return _publication(definition.name, checked_key(key), stored, size, definition.configuration)

    # --- tasks ---

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
        sort: find.Sort = "key",
        params: bool = False,
        after: str | None = None,
        where: str | TaskFilter | None = None,
    ) -> AsyncIterator[Task]:
        """Yield matching tasks, without their params unless asked for. `limit=0`: all.

        `sort`: `"key"`, `"newest"` or `"oldest"`. `after`: a key, to go on behind it (with `name` and `sort="key"`).
        `where`: a filter, or its text (`status:FAIL error:timeout age>1h`), instead of the arguments above. Raises
        `InvalidOption`.
        """
        which = TaskFilter.parse(where) if isinstance(where, str) else where
        if which is not None:
            if (name, status, queue, key_prefix, after) != (None,) * 5:
                raise InvalidOption("`where` says which tasks are meant: leave name, status, queue and the like out")
            status = which.status or None
        wanted = None if status is None else [str(Status(s)) for s in ([status] if isinstance(status, str) else status)]
        behind = None if after is None else task_id(name or "", after)
        documents = find.find(
            self.store,
            name=name and checked_name(name),
            status=wanted,
            queue=queue,
            key_prefix=key_prefix,
            sort=sort,
            limit=limit,
            params=params,
            after=behind,
            extra=None if which is None else which.query(self.store.now),
        )
        async for document in documents:
            task = _readable(document)
            if task is not None:
                yield task

    async def cancel(self, name: str, key: str) -> Task:
        """Cancel the task: CANCELLED from now on; a running execution is stopped. A finished task stays as it is."""
        await control.cancel(self.store, task_id(name, key))
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

    async def explain(self, name: str, key: str, worker_id: str | None = None) -> list[Explanation]:
        """Tell, for one worker or every live one, which gates of the claim rule are open or shut, why, and until when."""
        return await explain(self.store, task_id(name, key), worker_id)

    async def finished(self, name: str, key: str, timeout: float | None) -> Task:
        """Wait until the task is finished, and return it. Raises `TaskNotFound`, `TimeoutError`."""
        _ = self.store
        try:
            document = await asyncio.wait_for(self._results.finished(task_id(name, key)), timeout)
        except TimeoutError:
            raise TimeoutError(f"task {name!r} {key!r} has not finished within {timeout} s") from None
        return Task.from_document(document)

    # --- queues and workers ---

    async def pause(
        self, queue: str, *, reason: str | None = None, by: str | None = None, until: datetime | None = None
    ) -> None:
        """Let no worker claim from this queue any more, until `resume`, or the time `until`. What runs, runs on."""
        settings = {
            "paused": True,
            "paused_reason": reason,
            "paused_by": by,
            "paused_until": None if until is None else in_utc(until),
            "pause_time": self.clock.now(),
        }
        await fleet.set_queue(self.store, checked_queue(queue), settings)

    async def resume(self, queue: str) -> None:
        """Let workers claim from this queue again."""
        await fleet.set_queue(self.store, checked_queue(queue), {"paused": False, "paused_until": None})

    async def set_limit(
        self,
        queue: str,
        *,
        rate: int | None = None,
        per_ms: int | None = None,
        running: int | None = None,
        group_running: int | None = None,
    ) -> None:
        """Limit a queue, over the whole fleet; what is not given here is not limited (any more).

        At most `rate` starts in any `per_ms` (1000 by default); at most `running` executions at a time; at most
        `group_running` of each group (`configure(group=…)`) at a time: tasks of a full group hold up nobody else. What
        runs already runs on, and is counted. Workers hear of it within two seconds. Raises `InvalidOption`.
        """
        await set_limit(
            self.store, checked_queue(queue), rate=rate, per_ms=per_ms, running=running, group_running=group_running
        )

    async def set_group_limit(self, queue: str, group: str, running: int | None) -> None:
        """Let this one group of a queue run `running` executions at a time; None: as many as every other group."""
        await set_group_limit(self.store, checked_queue(queue), group, running)

    async def queues(self) -> list[QueueInfo]:
        """Return the queues that have settings or unfinished tasks, with their pauses and limits."""
        return await read_queues(self.store)

    async def workers(self) -> list[WorkerInfo]:
        """Return the live workers and those that went within the last hour."""
        _ = self.store
        return await self._registry.read()

    async def stop_worker(self, worker_id: str, grace_ms: int = 30_000) -> None:
        """Let a consumer elsewhere stop gracefully. Raises `TaskNotFound` if no such worker is registered."""
        await self._order(worker_id, {"stop_grace_ms": grace_ms})

    async def pause_worker(self, worker_id: str) -> None:
        """Let a consumer elsewhere claim no more; what it runs, runs on."""
        await self._order(worker_id, {"paused": True})

    async def resume_worker(self, worker_id: str) -> None:
        """Let a paused consumer elsewhere go on."""
        await self._order(worker_id, {"paused": False})

    async def set_concurrency(self, worker_id: str, concurrency: int) -> None:
        """Change how many executions a consumer elsewhere runs at once."""
        await self._order(worker_id, {"concurrency": concurrency})

    async def _order(self, worker_id: str, changes: dict[str, Any]) -> None:
        if not await fleet.order(self.store, worker_id, changes):
            raise TaskNotFound(f"no worker {worker_id!r} is registered: `taskmesh workers` lists those that are")

    async def stats(self) -> Stats:
        """Return counts by name and status, the lag of the oldest claimable task, and the throughput of the fleet."""
        return await read_stats(self.store)

    async def doctor(self) -> list[Finding]:
        """Look for what is wrong with the server, the collection, the fleet and the tasks. Changes nothing."""
        return await examine(self.store)

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
        reader = EventReader(self.feed, self.store, name, key, after=after, buffer=buffer)
        self._event_readers.add(reader)
        return reader

    # --- consumers ---

    def consumer(
        self,
        *,
        worker_id: str | None = None,
        concurrency: int = 100,
        names: Sequence[str] | None = None,
        queues: Sequence[str] | None = None,
        listen: bool = True,
        **hooks: Any,
    ) -> Consumer:
        """Return a consumer of this mesh's tasks. No `worker_id`: `host-pid-random`. `listen=False`: scans only.

        Hooks: `on_claim(consumer)` returns a filter on task documents, or None to claim nothing this round;
        `before(task)`, `after(task, ending)`. Plain or async.
        """
        return Consumer(
            self, worker_id=worker_id, concurrency=concurrency, names=names, queues=queues, listen=listen, **hooks
        )


async def _close_twin(connecting: asyncio.Task[TaskMesh]) -> None:
    """Close a mesh on the portal's loop, and its client, which is nobody else's."""
    try:
        twin = await connecting
    except Exception:  # noqa: BLE001 — it never connected, for whatever reason: whoever asked for it was told
        return
    driver = twin.store.driver
    await twin.close()
    await driver.close()


class _Decorator:
    """The type of `mesh.task(…)`, which keeps the signature of what it decorates."""

    @overload
    def __call__(self, fn: Callable[P, Awaitable[R]], /) -> TaskDefinition[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> TaskDefinition[P, R]: ...
    def __call__(self, fn: Any, /) -> Any:
        """Define the task."""


def _publication(name: str, key: str, params: dict[str, Any], size: int, configuration: Configuration) -> Publication:
    return Publication(
        name=name,
        key=key,
        queue=configuration.queue,
        params=params,
        option=configuration.option,
        size=size + 1_000,
        start_time=configuration.start_time,
        expire_time=configuration.expire_time,
        delay_ms=configuration.delay_ms,
        group=configuration.group,
        tuned=dict(configuration.tuned),
        update_existing_params=configuration.update_existing_params,
        not_update_running=configuration.not_update_running,
        clean_success=configuration.clean_success,
        clean_failed=configuration.clean_failed,
        run_again=configuration.run_again,
    )


def _readable(document: dict[str, Any]) -> Task | None:
    """Read a task, or skip a stranger's document with a word."""
    try:
        return Task.from_document(document)
    except IncompatibleCollection as error:
        logger.warning("skipped: %.300s", error)
        return None
