"""`TaskMesh`: the front door. It composes everything below: each of its parts is an object of one package, created here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from functools import cached_property
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack, overload

from taskmesh.client.batch import DEFAULT_WAIT_MS, BatchDefinition
from taskmesh.client.change_feed import Feed
from taskmesh.client.connection import Connection
from taskmesh.client.defining import DEFAULT_OPTION, Decorator, Defining, TaskSettings, checked_function, checked_option
from taskmesh.client.definition import Run, TaskDefinition
from taskmesh.client.events import DEFAULT_BUFFER, EventReader
from taskmesh.client.flows import Flow, Flows
from taskmesh.client.handle import TaskHandle
from taskmesh.client.publisher import Publisher
from taskmesh.client.schedules import Declared, Schedules
from taskmesh.client.tasks import UNSAID, Tasks
from taskmesh.consumer.lifespan import Lifespan, checked_lifespan
from taskmesh.model.codec import Codec, checked_codec, checked_threshold
from taskmesh.model.configuration import Configuration, PublishSettings
from taskmesh.model.error_policy import ErrorTypes
from taskmesh.model.errors import InvalidOption
from taskmesh.model.flow import FlowStatus
from taskmesh.model.option import OptionFields, TaskOption
from taskmesh.model.schedule import Missed, Overlap, checked_declaration
from taskmesh.model.task import Status, Task, checked_key, checked_name
from taskmesh.model.worker import DEFAULT_STALL_LIMIT_MS, WorkerInfo, checked_concurrency
from taskmesh.store import Store
from taskmesh.store.clock import ServerClock
from taskmesh.store.payloads import Payloads

# ruff: noqa: PLC0415 — what only workers and people need is a third of what we are: whoever only publishes does not load it
if TYPE_CHECKING:
    from taskmesh.admin.audit import Audit
    from taskmesh.admin.bulk import Bulk
    from taskmesh.admin.explain import Explanation
    from taskmesh.admin.filters import TaskFilter
    from taskmesh.admin.fleet import Fleet
    from taskmesh.admin.inspection import Inspection
    from taskmesh.admin.listing import Listing
    from taskmesh.admin.queues import LimitFields, Queues
    from taskmesh.admin.stats import Stats
    from taskmesh.admin.store.index_choice import Order
    from taskmesh.admin.what_if import WhatIf
    from taskmesh.consumer.hooks import AfterHook, BeforeHook
    from taskmesh.consumer.observer import Observer
    from taskmesh.consumer.worker import ClaimHook, Consumer

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class BatchDecorator(Protocol):
    """What `mesh.task(batch=…, …)` returns: each task has one of the items of which the handler takes a list."""

    @overload
    def __call__(self, fn: Callable[[list[T]], Awaitable[None]], /) -> BatchDefinition[T, None]: ...
    @overload
    def __call__(
        self, fn: Callable[[list[T]], Awaitable[Sequence[R | Exception] | None]], /
    ) -> BatchDefinition[T, R]: ...
    @overload
    def __call__(self, fn: Callable[[list[T]], None], /) -> BatchDefinition[T, None]: ...
    @overload
    def __call__(self, fn: Callable[[list[T]], Sequence[R | Exception] | None], /) -> BatchDefinition[T, R]: ...


class TaskMesh(Defining):
    """A set of task definitions on a MongoDB collection.

    `client`: a MongoDB URI, a `pymongo.AsyncMongoClient` or a `motor.motor_asyncio.AsyncIOMotorClient`, all of which take
    precedence over `TASKMESH_URI`. None: the URI in `TASKMESH_URI`; without one, the embedded MongoDB of this directory (extra
    `embedded`). `codec`: encrypts params, results, records, reasons and logs of all tasks that have no codec of their own: an
    `AESCodec`. `payload_threshold`: if params, or a result, have more bytes than this, their largest parts are stored
    separately from the task. None: everything is stored in the task's document, and has to fit.

    The most frequent operations are methods of the mesh itself; all others are on the objects that it holds: `listing`, `bulk`,
    `queues`, `fleet`, `schedules`, `inspect`, `what_if`, `audit`, `publisher` and `tasks`.

    Changes that people make are written to the audit, with their author: `by=`, or else the user of this process and its host.
    """

    def __init__(
        self,
        client: Any = None,
        *,
        database: str = "taskmesh",
        collection: str = "tasks",
        codec: Codec | None = None,
        payload_threshold: int | None = None,
    ) -> None:
        super().__init__()
        payloads = Payloads(checked_codec(codec), checked_threshold(payload_threshold))
        self.connection = Connection(client, database, collection, payloads)
        """Where the mesh is connected."""
        self.tasks = Tasks(self.connection)
        """Single tasks: read, change, wait for one."""
        self.publisher = Publisher(self.connection, self.tasks, self.definitions)
        """Publishes by name, many tasks at once, and reads what workers have registered about a task."""
        self.schedules = Schedules(self.connection, self.publisher, self.definitions)
        """Periodic tasks: list, pause, resume, trigger and remove them."""
        self.flows = Flows(self.connection, self.publisher, self.tasks)
        """Flows: tasks that are published as a whole."""
        self.tasks.flows = self.flows
        self.hooks_of_consumers: Hooks = {}
        """The hooks set by `hooks`."""
        self.worker_lifespan: Lifespan[Any] | None = None
        """The lifespan set by `lifespan`."""

    @cached_property
    def listing(self) -> Listing:
        """Many tasks: find, count and page through them."""
        from taskmesh.admin.listing import Listing

        return Listing(self.connection)

    @cached_property
    def bulk(self) -> Bulk:
        """Many tasks at once: retry, cancel, delete, purge by a filter, and undo that."""
        from taskmesh.admin.bulk import Bulk

        return Bulk(self.connection)

    @cached_property
    def queues(self) -> Queues:
        """Queues: list, pause, resume and limit them, and their groups."""
        from taskmesh.admin.queues import Queues

        return Queues(self.connection)

    @cached_property
    def fleet(self) -> Fleet:
        """Workers: list them, and give them orders."""
        from taskmesh.admin.fleet import Fleet

        return Fleet(self.connection)

    @cached_property
    def inspect(self) -> Inspection:
        """Why a task waits, what fails, and what is wrong."""
        from taskmesh.admin.inspection import Inspection

        return Inspection(self.connection, self.listing)

    @cached_property
    def what_if(self) -> WhatIf:
        """Says what a change would do, without making it."""
        from taskmesh.admin.what_if import WhatIf

        return WhatIf(self.connection, self.tasks)

    @cached_property
    def audit(self) -> Audit:
        """Who changed what; each verb writes it down."""
        from taskmesh.admin.audit import Audit

        return Audit(self.connection)

    # --- connecting ---

    async def connect(self, *, create: bool = True) -> None:
        """Connect, check the server, create what is missing, and store the schedules that were declared before.

        `create=False`: only connect and check, so that looking at a database changes nothing in it; the first publication
        creates what is missing. Raises `NotAReplicaSet`, `IncompatibleCollection`, `EmbeddedUnavailable`, or `TaskMeshError` if
        no server answers.
        """
        await self.connection.open(create=create)
        if create:
            await self.schedules.store_declared()
            await self.queues.store_declared()

    async def close(self) -> None:
        """Stop running consumers, within their grace period; then close what `connect` and `publish_sync` have opened.

        A second call does nothing.
        """
        try:
            await self.connection.close()
        finally:
            await self.publisher.close()  # handlers may have used it up to now

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:  # as if what failed had been running it
                await self.connection.stop_consumers(grace_ms=0)
        finally:
            await self.close()

    def connect_to(self, client: Any = None, *, database: str | None = None, collection: str | None = None) -> None:
        """Change where this mesh will connect, as a command line or a test does. None: unchanged.

        Raises `TaskMeshError` if it is connected already.
        """
        self.connection.lead_to(client, database=database, collection=collection)

    def connected_in(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether the mesh can be used in this event loop, in this process."""
        return self.connection.is_usable_in(loop)

    @property
    def reached(self) -> bool:
        """Whether the server has ever answered, even if the mesh is not connected yet."""
        return self.connection.reached

    @property
    def address(self) -> str:
        """Where this mesh is connected: host and port, database and collection; without credentials."""
        return self.connection.address

    @property
    def store(self) -> Store:
        """Reads and writes MongoDB. Raises `TaskMeshError` if the mesh is not connected in this event loop and process."""
        return self.connection.store

    @property
    def clock(self) -> ServerClock:
        """The server's time. Raises `TaskMeshError` for a mesh that was never connected."""
        return self.connection.clock

    @property
    def feed(self) -> Feed:
        """Delivers events of tasks to all subscribers in this mesh. Raises `TaskMeshError` as `clock` does."""
        return self.connection.feed

    # --- defining ---

    @overload
    def task(
        self, fn: None = None, *, batch: int, batch_wait_ms: int = DEFAULT_WAIT_MS, **settings: Unpack[TaskSettings]
    ) -> BatchDecorator: ...
    @overload
    def task(self, fn: Callable[P, Awaitable[R]], **settings: Unpack[TaskSettings]) -> TaskDefinition[P, R]: ...
    @overload
    def task(self, fn: Callable[P, R], **settings: Unpack[TaskSettings]) -> TaskDefinition[P, R]: ...
    @overload
    def task(self, fn: None = None, **settings: Unpack[TaskSettings]) -> Decorator: ...
    def task(
        self,
        fn: Any = None,
        *,
        name: str | None = None,
        queue: str = "default",
        option: TaskOption | None = DEFAULT_OPTION,
        needs: Mapping[str, Any] | None = None,
        run: Run | None = None,
        projection: Sequence[str] | None = None,
        retry_on: ErrorTypes | None = None,
        fail_on: ErrorTypes | None = None,
        codec: Codec | None = None,
        batch: int | None = None,
        batch_wait_ms: int | None = None,
        cron: str | None = None,
        interval_ms: int | None = None,
        timezone: str = "UTC",
    ) -> Any:
        """Define a task: a decorator, with or without arguments.

        `name`: by default the function's. `queue`: `"default"`. `option`: a `TaskOption`. `needs`: the labels that a worker
        must have to run it, with equal values of the same type. `run`: `"async"`, `"thread"` (the default for plain functions)
        or `"process"`. `projection`: load only these params at execution; the others have their defaults. `retry_on`: only
        these types of errors are retried, by default all; `fail_on`: these make the task FAIL for good at once, and take
        precedence over `retry_on`. Subclasses count; lost leases do not. `codec`: encrypts the values of these tasks, instead
        of the mesh's codec. `batch`: one call of the handler gets the items of up to so many tasks, as a list; `batch_wait_ms`
        (50): how long the first of them waits for others. `cron`, `interval_ms`, `timezone`: run it periodically, with the
        defaults of its params; `every` offers more. Raises `InvalidOption`.
        """
        checked_function("task", fn)
        checked_option(option)
        if batch is None and batch_wait_ms is not None:
            raise InvalidOption("batch_wait_ms was set without batch: set both, or neither")
        if batch is not None and projection is not None:
            raise InvalidOption(
                "batch and projection were both set: a task of a batch has one param, so use one of them"
            )

        def define(function: Any) -> TaskDefinition[Any, Any]:
            definition = self._define(
                function,
                name=name,
                queue=queue,
                option=option,
                needs=needs,
                run=run,
                projection=projection,
                retry_on=retry_on,
                fail_on=fail_on,
                codec=codec,
                batch=batch,
                batch_wait_ms=batch_wait_ms,
            )
            if cron is not None or interval_ms is not None:
                self.every(definition, cron=cron, interval_ms=interval_ms, timezone=timezone)
            return definition

        return define if fn is None else define(fn)

    def every(
        self,
        name: str | TaskDefinition[Any, Any],
        *,
        cron: str | None = None,
        interval_ms: int | None = None,
        timezone: str = "UTC",
        params: Mapping[str, Any] | None = None,
        schedule_id: str | None = None,
        missed: Missed = "latest",
        overlap: Overlap = "allow",
        jitter_ms: int = 0,
        by: str | None = None,
        **configuration: Unpack[PublishSettings],
    ) -> Declared:
        """Publish a task periodically: each tick once, however many workers run.

        If called before the mesh connects, the schedule is stored when it does; afterwards at once, and the call may be
        awaited. Declaring it again changes it, and leaves unchanged fields alone: it goes on, or stays paused.

        `cron`: five fields (or six, with seconds in front), in `timezone`; see `ticks` on daylight saving. `interval_ms`:
        counted from the first declaration. `schedule_id`: by default the name; a task with several schedules needs one for
        each. `missed`: of the ticks while no worker was live, publish none (`skip`), only the `latest`, or `all`; none if the
        timing is changed before a worker has published them. `overlap="skip"`: leave out a tick while the task of the tick
        before is not finished. `jitter_ms`: each task starts up to this much later, so that not everything starts at the full
        hour. Other settings as in `configure`; but a tick's task is kept for at least a minute, since its key is what makes it
        unique. `by`: who, for the audit; without it nothing is written there, as code declares its schedules at each start.
        Raises `InvalidOption`.
        """
        name = checked_name(name.name if isinstance(name, TaskDefinition) else name)
        Configuration().changed(**configuration)
        declaration = checked_declaration(
            name,
            checked_key(name if schedule_id is None else schedule_id),
            cron=cron,
            interval_ms=interval_ms,
            timezone=timezone,
            params={} if params is None else params,
            missed=missed,
            overlap=overlap,
            jitter_ms=jitter_ms,
            settings=dict(configuration),
        )
        return self.schedules.declare(declaration, by=by)

    def queue(
        self,
        queue: str,
        *,
        pause_on_failures: float | EllipsisType | None = ...,
        of_last: int = 50,
        canary_ms: int = 30_000,
        **limits: Unpack[LimitFields],
    ) -> None:
        """Declare the settings of a queue.

        They are stored when the mesh connects, and apply to the whole fleet until they are changed.

        `limits`: `rate` with `per_ms`, `running`, `group_running`, `group_rate` with `group_per_ms`, as in `set_limit`. They
        are stored unless somebody has set a limit before: the first process sets them, and later changes by people stay.
        `pause_on_failures`: the queue pauses automatically when this share (0.5: half) of its newest `of_last` executions
        failed; then one task is tried every `canary_ms`, and opens the queue again when it SUCCEEDs. None: never. While the
        mesh is connected, await `mesh.queues.pause_on_failures` instead. Raises `InvalidOption`; `TaskMeshError` if the mesh is
        connected already.
        """
        if isinstance(pause_on_failures, EllipsisType):  # nothing is said of it
            self.queues.declare(queue, limits)
            return
        self.queues.declare(queue, limits, (pause_on_failures, of_last, canary_ms))

    # --- running ---

    @overload
    def lifespan(self, fn: Callable[[], AsyncIterator[T]], /) -> Lifespan[T]: ...
    @overload
    def lifespan(self, fn: Callable[[], AbstractAsyncContextManager[T]], /) -> Lifespan[T]: ...
    def lifespan(self, fn: Any, /) -> Lifespan[Any]:
        """Define what workers open before they claim, and close when their handlers have ended: pools, clients, models.

            @mesh.lifespan
            async def pools() -> AsyncIterator[Pools]:
                async with httpx.AsyncClient() as http:
                    yield Pools(http)

        `fn`: an async generator function that yields once, or a function that returns an async context manager; called without
        arguments. What it yields is `pools.state`, with its type, and `current_task().state`. It is opened once in each process
        in which a consumer runs, while the mesh is connected: by the first of them, and closed by the last, also when they are
        stopped or cancelled. The child processes of handlers with `run="process"` have none. If it cannot be opened, `run()`
        raises `TaskMeshError`, and nothing is claimed; if it ends by itself, the workers stop. Closing may take up to ten
        seconds. A mesh has one lifespan. Raises `InvalidOption`.
        """
        checked_lifespan(fn)
        lifespan: Lifespan[Any] = Lifespan(fn)
        if self.worker_lifespan is not None:
            raise InvalidOption(
                f"this mesh has a lifespan already, {self.worker_lifespan.name!r}: open {lifespan.name!r} inside it"
            )
        self.worker_lifespan = lifespan
        return lifespan

    def hooks(
        self, *, on_claim: ClaimHook | None = None, before: BeforeHook | None = None, after: AfterHook | None = None
    ) -> None:
        """Set the hooks of consumers that this mesh creates from now on, unless they are given others.

        So also of `taskmesh worker`.

        The hooks are described at `consumer`. Raises `InvalidOption` for what cannot be called.
        """
        self.hooks_of_consumers = _checked_hooks({"on_claim": on_claim, "before": before, "after": after})

    def consumer(
        self,
        *,
        worker_id: str | None = None,
        concurrency: int = 100,
        names: Sequence[str] | None = None,
        queues: Sequence[str] | None = None,
        labels: Mapping[str, Any] | None = None,
        listen: bool = True,
        on_claim: ClaimHook | None = None,
        before: BeforeHook | None = None,
        after: AfterHook | None = None,
        observer: Observer | None = None,
        stall_limit_ms: int = DEFAULT_STALL_LIMIT_MS,
    ) -> Consumer:
        """Return a consumer of this mesh's tasks, to be run once.

        `worker_id`: by default `host-pid-random`. `concurrency`: how many executions run at once. `names`: the tasks that it
        runs, by default all. `queues`: the queues that it takes tasks from, by default all. `labels`: what tasks may need,
        values by name; `host` is one of them. `listen=False`: it only scans, and opens no change stream.

        Hooks, plain or async; those of `mesh.hooks` unless given here: `on_claim(consumer)` returns a filter on task documents,
        or None to claim nothing this round; `before(task)`, whose exception makes the execution fail; `after(task, outcome)`,
        whose exception is logged. `observer`: measures it, like `metrics.WorkerMetrics`. `stall_limit_ms`: how long the event
        loop may be blocked before it stops pinging. Raises `InvalidOption`.
        """
        from taskmesh.consumer.settings import (
            Settings,
            all_labels,
            checked_listen,
            checked_names,
            checked_queues,
            worker_id_or_new,
        )
        from taskmesh.consumer.worker import Consumer

        _checked_hooks({"on_claim": on_claim, "before": before, "after": after})
        settings = Settings(
            worker_id=worker_id_or_new(worker_id),
            labels=all_labels(labels) | self.connection.payloads.labels(),
            names=checked_names(self.definitions, names),
            queues=checked_queues(queues),
            concurrency=checked_concurrency(concurrency),
            listen=checked_listen(listen),
            before=before or self.hooks_of_consumers.get("before"),
            after=after or self.hooks_of_consumers.get("after"),
            observer=observer,
            stall_limit_ms=stall_limit_ms,
        )
        consumer = Consumer(self, settings, on_claim or self.hooks_of_consumers.get("on_claim"))
        self.connection.consumers.add(consumer)
        return consumer

    # --- single tasks ---

    async def publish(
        self, name: str, key: str, params: Mapping[str, Any] | None = None, **configuration: Unpack[PublishSettings]
    ) -> TaskHandle[Any]:
        """Publish by task name, without the handler's code.

        Uses the option and queue of the definition if this mesh knows the name, otherwise those that workers have registered,
        otherwise the defaults; `configuration` as in `TaskDefinition.configure`. Raises as `TaskDefinition.publish` does.
        """
        params_by_key = {checked_key(key): {} if params is None else params}
        return (await self.publisher.publish_many(name, params_by_key, **configuration))[0]

    def flow(self, key: str) -> Flow:
        """Return a flow. Add tasks to it in its `async with` block; at the end of that they are published as a whole.

        See `Flow`.
        """
        return Flow(self.flows, key)

    async def flow_status(self, key: str) -> FlowStatus:
        """Return how far a flow has come: counts, progress, members and edges; with `result`, `cancel` and `retry`.

        Raises `TaskNotFound`.
        """
        return await self.flows.status(key)

    def handle(self, name: str, key: str) -> TaskHandle[Any]:
        """Return a handle to a task that was published before, by this process or another: to wait for its result.

        The database is not asked. `created` and `updated` are False. The result has the type that the handler is annotated
        to return if this mesh knows the handler, otherwise it consists of plain values; `definition.handle(key)` is typed.
        Raises `InvalidName`, `InvalidKey`.
        """
        return self.publisher.handle(name, key)

    async def get(self, name: str, key: str) -> Task:
        """Return the task as it stands now, params and all. Raises `TaskNotFound`."""
        return await self.tasks.get(name, key)

    def get_sync(self, name: str, key: str) -> Task:
        """Return the task as it stands now, from code without an event loop, like `publish_sync`.

        The mesh need not be connected.

        Raises `RuntimeError` inside an event loop, and `TaskNotFound`.
        """
        return self.publisher.get_sync(name, key)

    def find(
        self,
        name: str | None = None,
        status: Status | str | Sequence[Status | str] | None = None,
        queue: str | None = None,
        limit: int = 100,
        *,
        tags: str | Sequence[str] | None = None,
        key_prefix: str | None = None,
        sort: Order = "key",
        params: bool = False,
        after: str | None = None,
        where: str | TaskFilter | None = None,
    ) -> AsyncIterator[Task]:
        """Yield matching tasks, without their params unless requested. `limit`: by default 100; 0: all.

        `status`: one or several; also what INIT means: `"ready"`, `"scheduled"`, `"retrying"`. `key_prefix`: how the key
        starts. `sort`: `"key"` (by name and key), `"newest"` or `"oldest"`. `after`: a key after which to continue (with a
        name, and `sort="key"`). `where`: a filter, or its text (`status:FAIL error:timeout age>1h`), instead of `name`,
        `status`, `queue`, `key_prefix` and `tags`. A task has to have all given tags. Raises `InvalidOption`, `InvalidName`,
        `InvalidKey`.
        """
        from taskmesh.admin.listing import filter_from

        which = filter_from(where, name, status, queue, key_prefix, tags)
        return self.listing.find(which, limit=limit, sort=sort, params=params, after=after)

    async def explain(self, name: str, key: str, worker_id: str | None = None) -> list[Explanation]:
        """Return, for one worker or every live one, which gates of the claim rule are open or shut, why, and until when.

        Raises `TaskNotFound`.
        """
        return await self.inspect.explain(name, key, worker_id)

    async def set_option(self, name: str, key: str, *, by: str | None = None, **changes: Unpack[OptionFields]) -> Task:
        """Change fields of a published task's option, and return the task. Raises `InvalidOption`, `TaskNotFound`.

        On a running task, a worker that is no longer in `specific_worker_ids` stops; `ping_interval_ms` applies from the next
        ping; all other fields from the next claim.
        """
        return await self.tasks.set_option(name, key, by=by, **changes)

    async def cancel(self, name: str, key: str, *, by: str | None = None) -> Task:
        """Cancel the task: CANCELLED from now on; a running execution is stopped. A finished task stays as it is.

        Returns the task as it stands after that. Raises `TaskNotFound`.
        """
        return await self.tasks.cancel(name, key, by=by)

    async def signal(
        self, name: str, key: str, event: str, payload: Any = UNSAID, *, signal_id: str | None = None
    ) -> None:
        """Tell the task that something has happened: its handler gets `payload` (by default `{}`) from `wait_for(event)`.

        A signal is kept until the handler waits for it; each is consumed once, in the order in which they came. `signal_id`: a
        signal that is sent again under the same id is the same signal, even if the task has finished since. Raises
        `TaskFinished`, `TaskNotFound`, `TooManySignals` (1,000 that nobody has waited for, or 1 MB of them), `UnstorableValue`,
        `InvalidName`.
        """
        await self.tasks.signal(name, key, event, payload, signal_id=signal_id)

    async def retry(self, name: str, key: str, *, fresh: bool = False, by: str | None = None) -> Task:
        """Make a finished task INIT again, without its entries and counts; make a waiting one due at once.

        It resumes: what its handler has recorded by `step`, `sleep` and `wait_for` stays, except for errors, and a sleep is not
        cut short. `fresh`: it starts over in its first stage, with nothing recorded and no signals. Returns the task as it
        stands after that. Raises `TaskRunning`, `TaskNotFound`.
        """
        return await self.tasks.retry(name, key, fresh=fresh, by=by)

    async def delete(self, name: str, key: str, *, by: str | None = None) -> Task:
        """Remove the task, and return it as it was. A running execution is stopped. Raises `TaskNotFound`."""
        return await self.tasks.delete(name, key, by=by)

    def events(
        self,
        name: str | None = None,
        key: str | None = None,
        *,
        after: str | None = None,
        buffer: int = DEFAULT_BUFFER,
    ) -> EventReader:
        """Return an async iterator of what happens to tasks from now on, in order for each task.

        `after`: the `token` of an event after which to continue. `buffer`: how many events wait for a slow reader; beyond that,
        an event says how many it has missed. Raises `InvalidOption` for an invalid token.
        """
        return self.connection.events(name, key, after=after, buffer=buffer)

    # --- queues and the fleet ---

    async def pause(
        self,
        queue: str,
        *,
        group: str | None = None,
        reason: str | None = None,
        by: str | None = None,
        until: datetime | None = None,
    ) -> None:
        """Stop claims from this queue in the whole fleet, until `resume`, or the time `until`. Running tasks go on.

        `group`: pause only this group of the queue. `reason`: shown in listings and by `explain`. Raises `InvalidOption`.
        """
        await self.queues.pause(queue, group=group, reason=reason, by=by, until=until)

    async def resume(self, queue: str, *, group: str | None = None, by: str | None = None) -> None:
        """Let workers claim from this queue again; with `group`: from this group, if it was paused. Raises `InvalidOption`."""
        await self.queues.resume(queue, group=group, by=by)

    async def set_limit(self, queue: str, *, by: str | None = None, **limits: Unpack[LimitFields]) -> None:
        """Limit a queue, over the whole fleet. Given limits are set, others stay as they are; None removes a limit.

        At most `rate` starts in any `per_ms` (by default 1000); at most `running` executions at a time; of each group
        (`configure(group=…)`) at most `group_rate` starts in any `group_per_ms`, and at most `group_running` executions at a
        time: tasks of a full group hold up nobody else. Running executions go on, and are counted. Consumers of this mesh know
        of it when this returns, other processes a moment later: at once if they listen, within two seconds if they only scan.
        Raises `InvalidOption`.
        """
        await self.queues.set_limit(queue, by=by, **limits)

    async def workers(self) -> list[WorkerInfo]:
        """Return the live workers and those that went away within the last hour."""
        return await self.fleet.workers()

    async def stop_worker(self, worker_id: str, grace_ms: int = 30_000, *, by: str | None = None) -> None:
        """Stop a worker gracefully, wherever it runs. Raises `TaskNotFound` if no such worker is registered, `InvalidOption`."""
        await self.fleet.stop_worker(worker_id, grace_ms, by=by)

    async def pause_worker(self, worker_id: str, *, by: str | None = None) -> None:
        """Pause a worker, wherever it runs: it stops claiming; running tasks go on. Raises `TaskNotFound`, `InvalidOption`."""
        await self.fleet.pause_worker(worker_id, by=by)

    async def resume_worker(self, worker_id: str, *, by: str | None = None) -> None:
        """Resume a paused worker, wherever it runs. Raises `TaskNotFound`, `InvalidOption`."""
        await self.fleet.resume_worker(worker_id, by=by)

    async def stats(self) -> Stats:
        """Return counts by name and status, the lag of the oldest claimable task, and the throughput of the fleet."""
        return await self.inspect.stats()


class Hooks(TypedDict, total=False):
    """The hooks of a mesh."""

    on_claim: ClaimHook | None
    before: BeforeHook | None
    after: AfterHook | None


def _checked_hooks(hooks: Hooks) -> Hooks:
    """Return the hooks. Each has to be callable, or None. Raises `InvalidOption`."""
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            raise InvalidOption(f"the hook {name} must be a function, got {hook!r}")
    return hooks
