"""Celery's calls on a mesh (`delay`, `apply_async`, `chain`, `group`, `chord`, `self.retry`): old code runs while it moves.

A module of Celery tasks changes two lines:

    from taskmesh.integrations.celery_compat import Celery, chain, chord, group

    app = Celery(mesh)  # was: Celery("shop", broker=…)

Each of its tasks is a task of the mesh under the name that it has in Celery, and can be published in either way: its params are
stored by name. Like Celery's, these calls block, and raise `RuntimeError` inside an event loop: there it is
`await task.definition.publish(…)`. What differs from Celery stands in docs/migrating.md.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn, TypeVar, overload
from uuid import uuid4

from taskmesh.client.annotations import signature_of
from taskmesh.client.definition import TaskDefinition, is_async
from taskmesh.client.flows import Flow
from taskmesh.client.handle import TaskHandle
from taskmesh.client.portal import portal_loop, run_blocking
from taskmesh.consumer.run.context import current_task
from taskmesh.mesh import TaskMesh
from taskmesh.model.configuration import PublishSettings
from taskmesh.model.errors import (
    InvalidOption,
    InvalidParams,
    Retry,
    TaskCancelled,
    TaskError,
    TaskExpired,
    TaskNotFound,
)
from taskmesh.model.option import TaskOption
from taskmesh.model.task import Status
from taskmesh.model.times import checked_timeout
from taskmesh.store.mongodb.driver import twin_of

__all__ = ["AsyncResult", "Celery", "CeleryTask", "GroupResult", "chain", "chord", "group"]

T = TypeVar("T")
_FOR_EVER = 1_000_000_000
_GATHER = "celery_compat.gather"
_STATES = {
    Status.INIT: "PENDING",
    Status.RUNNING: "STARTED",
    Status.SUCCESS: "SUCCESS",
    Status.FAIL: "FAILURE",
    Status.CANCELLED: "REVOKED",
    Status.EXPIRED: "REVOKED",
}


async def _gather(of: list[tuple[str, str]]) -> list[Any]:
    """Return the results of a group, in its order: what the body of a chord gets."""
    results = await current_task().dependencies()
    return [results[name, key] for name, key in of]


class Celery:
    """Stands in for Celery's app: makes tasks of functions, and applies them on a mesh."""

    def __init__(self, mesh: TaskMesh) -> None:
        self.mesh = mesh
        self.tasks: dict[str, CeleryTask] = {}
        self._twin: tuple[asyncio.AbstractEventLoop, asyncio.Task[TaskMesh]] | None = None
        """The same mesh, connected in the portal's loop, where what blocks is done."""

        # Several apps of one mesh share it, as they share its workers.
        self._gather = mesh.definitions.get(_GATHER) or mesh.task(_gather, name=_GATHER)

    @overload
    def task(self, fn: Callable[..., Any], /) -> CeleryTask: ...
    @overload
    def task(self, fn: None = None, **options: Any) -> Callable[[Callable[..., Any]], CeleryTask]: ...

    def task(
        self,
        fn: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        bind: bool = False,
        queue: str = "default",
        priority: int = 0,
        max_retries: int | None = 3,
        default_retry_delay: float = 180.0,
        autoretry_for: tuple[type[Exception], ...] = (),
        retry_backoff: bool | float = False,
        time_limit: float | None = None,
        ignore_result: bool = False,  # noqa: ARG002 — results are stored with the task, and go with it
        acks_late: bool = True,  # noqa: ARG002 — they always are: a lost task is taken over
        **unknown: Any,
    ) -> Any:
        """Make a task of a function, as `app.task` and `shared_task` do; with or without arguments.

        Only what `autoretry_for` names is tried again by itself, up to `max_retries` times (None: for ever). Raises
        `InvalidOption` for an option of Celery's that has no counterpart here, and for an async function.
        """
        if unknown:
            raise InvalidOption(
                f"{', '.join(sorted(unknown))}: no such option here; docs/migrating.md says what to use instead, or drop it"
            )

        def define(fn: Callable[..., Any]) -> CeleryTask:
            delay_ms = round(1000 * (float(retry_backoff) if retry_backoff else default_retry_delay))
            option = TaskOption(
                priority=priority,
                max_unexpected_retries=_FOR_EVER if max_retries is None else max_retries,
                unexpected_retry_delay_ms=delay_ms,
                unexpected_retry_backoff=2.0 if retry_backoff else 1.0,
                run_timeout_ms=None if time_limit is None else round(1000 * time_limit),
            )
            own_name = name or f"{fn.__module__}.{fn.__name__}"  # as Celery names it
            if is_async(fn):
                raise InvalidOption(
                    f"task {own_name!r} is an async function, and what Celery calls is plain: make it a plain one, or define "
                    "it by @mesh.task"
                )
            task = CeleryTask(self, fn, own_name, bind, default_retry_delay)
            task.define(queue, option, autoretry_for)
            self.tasks[task.name] = task
            return task

        return define if fn is None else define(fn)

    def send_task(
        self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> AsyncResult:
        """Apply a task by name. Raises `InvalidOption` if this app does not define it."""
        if name not in self.tasks:
            raise InvalidOption(f"this app has no task {name!r}: publish it with mesh.publish(name, key, params)")
        return self.tasks[name].apply_async(args, kwargs, **options)

    def run(self, what: str, call: Callable[[TaskMesh], Coroutine[Any, Any, T]]) -> T:
        """Do something with the mesh, and wait for it. Raises `RuntimeError` inside an event loop, which that would block."""
        return run_blocking(self._in_portal(call), what)

    async def _in_portal(self, call: Callable[[TaskMesh], Coroutine[Any, Any, T]]) -> T:
        loop = asyncio.get_running_loop()
        if self._twin is None or self._twin[0] is not loop:  # after a fork, the child has a portal of its own
            self._twin = loop, loop.create_task(self._connected(), name="taskmesh connects celery_compat")
        try:
            mesh = await self._twin[1]
        except BaseException:
            self._twin = None
            raise
        return await call(mesh)

    async def _connected(self) -> TaskMesh:
        ours = self.mesh.connection
        client = ours.client if ours.client is None or isinstance(ours.client, str) else twin_of(ours.client)
        mesh = TaskMesh(client, database=ours.database, collection=ours.collection)
        mesh.connection.payloads = (
            ours.payloads
        )  # codec and threshold, of each task's own too: nothing is stored otherwise
        mesh.connection.numbers = ours.numbers  # one order for both
        await mesh.connect()
        return mesh

    def close(self) -> None:
        """Close the connection of the calls that block, if there is one; the next call opens it again."""
        twin, self._twin = self._twin, None
        if twin is not None and twin[0] is portal_loop():
            run_blocking(_close(twin[1]), "close")


async def _close(connecting: asyncio.Task[TaskMesh]) -> None:
    mesh = await connecting
    driver = mesh.store.driver
    await mesh.close()
    await driver.close()


class CeleryTask:
    """A task as Celery's callers know it. `definition` is the same task as the mesh knows it."""

    definition: TaskDefinition[..., Any]

    def __init__(self, app: Celery, fn: Callable[..., Any], name: str, bind: bool, default_retry_delay: float) -> None:
        self.app = app
        self.run = functools.partial(fn, self) if bind else fn
        self.name = name
        self.default_retry_delay = default_retry_delay
        self._signature = signature_of(self.run)
        functools.update_wrapper(self, fn)

    def define(self, queue: str, option: TaskOption, autoretry_for: tuple[type[Exception], ...]) -> None:
        """Make it a task of the mesh."""

        @functools.wraps(getattr(self, "__wrapped__", self.run))
        def handler(*args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

        handler.__signature__ = self._signature  # type: ignore[attr-defined]  # of a bound one: without `self`
        self.definition = self.app.mesh.task(
            handler, name=self.name, queue=queue, option=option, retry_on=autoretry_for, run="thread"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, here and now."""
        return self.run(*args, **kwargs)

    # --- applying it ---

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult:
        """Publish it with these arguments."""
        return self.apply_async(args, kwargs)

    def apply_async(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> AsyncResult:
        """Publish it. `options`: `task_id` (the key), `countdown`, `eta`, `expires`, `queue`, `priority`."""
        return self.s(*args, **(kwargs or {})).apply_async(**options)

    def s(self, *args: Any, **kwargs: Any) -> _Signature:
        """Return a signature: in a chain the result of the task before becomes its first argument."""
        return _Signature(self, args, kwargs)

    def signature(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        immutable: bool = False,
        **options: Any,
    ) -> _Signature:
        """Return a signature of these arguments, with options of `apply_async`."""
        return replace(self.s(*args, **(kwargs or {})), options=options, immutable=immutable)

    def si(self, *args: Any, **kwargs: Any) -> _Signature:
        """Return an immutable signature: in a chain it does not get the result of the task before."""
        return replace(self.s(*args, **kwargs), immutable=True)

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments by name. Raises `InvalidParams`."""
        return self.definition.params.named(args, kwargs)

    def AsyncResult(self, task_id: str) -> AsyncResult:  # noqa: N802 — Celery's name for it
        """Return the result of a task of this kind by its id."""
        return AsyncResult(self.app, self.definition.handle(task_id))

    # --- inside of a bound task ---

    @property
    def request(self) -> Request:
        """What runs now."""
        task = current_task()
        return Request(task.key, task.failures)

    def retry(
        self,
        exc: BaseException | None = None,
        countdown: float | None = None,
        eta: datetime | None = None,
        max_retries: int | None = None,
    ) -> NoReturn:
        """Try it again later, counted; when no retries are left, of `max_retries` or the task's own, it FAILs with this `exc`."""
        task = current_task()
        if max_retries is not None and max_retries != task.option.max_unexpected_retries:
            # The engine judges, which knows what has failed and what was lost.
            self.app.run("retry", lambda mesh: mesh.set_option(task.name, task.key, max_unexpected_retries=max_retries))
        if eta is not None:
            countdown = (_utc(eta) - datetime.now(UTC)).total_seconds()
        seconds = self.default_retry_delay if countdown is None else max(0.0, countdown)
        raise Retry(*([] if exc is None else [repr(exc)]), delay_ms=round(1000 * seconds)) from exc

    def __repr__(self) -> str:
        return f"<CeleryTask {self.name!r}>"


@dataclass(frozen=True)
class Request:
    """What a bound task can ask of its execution."""

    id: str
    retries: int
    """How many executions have failed or asked for a retry; one whose worker was lost is none."""


# --- results ----------------------------------------------------------------------------------------------------------


class AsyncResult:
    """A published task, as Celery's callers know it."""

    def __init__(self, app: Celery, handle: TaskHandle[Any], parent: AsyncResult | GroupResult | None = None) -> None:
        self._app = app
        self._name, self.id = handle.name, handle.key
        self._handle = handle
        self.parent = parent
        self.task_id = self.id

    def get(self, timeout: float | None = None, propagate: bool = True) -> Any:
        """Wait for the value. Raises `TaskError`, `TaskCancelled`, `TaskExpired`, `TimeoutError`.

        Not `propagate`: how the task has ended otherwise is returned instead.
        """
        return self._app.run("get", lambda mesh: self.value(mesh, timeout, propagate=propagate))

    async def value(self, mesh: TaskMesh, timeout: float | None, *, propagate: bool) -> Any:
        """Do as `get` does, in the event loop of this mesh."""
        self._handle.tasks = mesh.tasks
        try:
            return await self._handle.result(timeout)
        except (TaskError, TaskCancelled, TaskExpired) as error:
            if propagate:
                raise
            return error

    wait = get

    @property
    def state(self) -> str:
        """`PENDING`, `RETRY`, `STARTED`, `SUCCESS`, `FAILURE` or `REVOKED`. What is not there is `PENDING`, as in Celery."""
        try:
            task = self._app.run("state", lambda mesh: mesh.get(self._name, self.id))
        except TaskNotFound:
            return "PENDING"
        return "RETRY" if task.standing == "retrying" else _STATES[task.status]

    status = state

    def ready(self) -> bool:
        """Whether it is finished."""
        return self.state in ("SUCCESS", "FAILURE", "REVOKED")

    def successful(self) -> bool:
        """Whether it has succeeded."""
        return self.state == "SUCCESS"

    def failed(self) -> bool:
        """Whether it has failed for good."""
        return self.state == "FAILURE"

    def revoke(self, terminate: bool = False) -> None:  # noqa: ARG002 — an execution under way is told to stop in any case
        """Cancel it."""
        self._app.run("revoke", lambda mesh: mesh.cancel(self._name, self.id))

    def forget(self) -> None:
        """Delete it, and so its result."""
        self._app.run("forget", lambda mesh: mesh.delete(self._name, self.id))

    def __repr__(self) -> str:
        return f"<AsyncResult {self._name} {self.id}>"


class GroupResult:
    """The results of a group, in its order."""

    def __init__(self, app: Celery, handles: Sequence[TaskHandle[Any]]) -> None:
        self._app = app
        self.results = [AsyncResult(app, handle) for handle in handles]

    def get(self, timeout: float | None = None, propagate: bool = True) -> list[Any]:
        """Wait for all values, for no longer than `timeout` altogether. Raises as `AsyncResult.get` does."""

        async def wait(mesh: TaskMesh) -> list[Any]:
            seconds = checked_timeout(timeout)
            if seconds is not None and seconds <= 0:  # one look
                return [await result.value(mesh, 0, propagate=propagate) for result in self.results]
            try:
                async with asyncio.timeout(seconds):
                    return [await result.value(mesh, None, propagate=propagate) for result in self.results]
            except TimeoutError:
                raise TimeoutError(f"a group of {len(self.results)} has not finished within {timeout} s") from None

        return self._app.run("get", wait)

    join = get

    def ready(self) -> bool:
        """Whether all are finished."""
        return all(result.ready() for result in self.results)

    def successful(self) -> bool:
        """Whether all have succeeded."""
        return all(result.successful() for result in self.results)

    def completed_count(self) -> int:
        """How many have succeeded."""
        return sum(result.successful() for result in self.results)

    def revoke(self, terminate: bool = False) -> None:
        """Cancel all."""
        for result in self.results:
            result.revoke(terminate)


# --- canvas: what is applied together is published as one flow ------------------------------------------------------------


@dataclass(frozen=True)
class _Ends:
    """What comes after a part of a canvas waits for these; `many`: it gets the list of their results."""

    app: Celery
    handles: list[TaskHandle[Any]]
    many: bool

    def joined(self, flow: Flow) -> TaskHandle[Any]:
        """Return the one task whose result the next one gets."""
        if not self.many:
            return self.handles[0]
        of = [[handle.name, handle.key] for handle in self.handles]
        return flow.add(self.app._gather, str(uuid4()), params={"of": of}, after=self.handles)  # noqa: SLF001 — its app's

    def result(self) -> AsyncResult | GroupResult:
        """Return what its caller waits for."""
        return GroupResult(self.app, self.handles) if self.many else AsyncResult(self.app, self.handles[0])


class _Canvas:
    """What can be applied."""

    def add(self, flow: Flow, before: _Ends | None, options: Mapping[str, Any]) -> _Ends:
        """Add its tasks to a flow, behind what comes before; return the last of them."""
        raise NotImplementedError

    @property
    def app(self) -> Celery:
        """Whose tasks these are."""
        raise NotImplementedError

    def apply_async(self, **options: Any) -> Any:
        """Publish it as a whole, or nothing of it. `options` are those of a single task's; they go to what comes first."""

        async def publish(mesh: TaskMesh) -> _Ends:
            async with mesh.flow(str(uuid4())) as flow:
                return self.add(flow, None, options)

        return self.app.run("apply_async", publish).result()

    def delay(self) -> Any:
        """Publish it."""
        return self.apply_async()

    def __or__(self, other: _Canvas) -> _Chain:
        return chain(self, other)


@dataclass(frozen=True)
class _Signature(_Canvas):
    """A task with arguments, not applied yet."""

    task: CeleryTask
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    immutable: bool = False

    @property
    def app(self) -> Celery:
        return self.task.app

    def set(self, **options: Any) -> _Signature:
        """Return it with options of `apply_async`."""
        return replace(self, options={**self.options, **options})

    def __call__(self, *args: Any) -> Any:
        """Call the function, here and now."""
        return self.task(*args, *self.args, **self.kwargs)

    def apply_async(self, **options: Any) -> AsyncResult:
        """Publish the task."""
        settings, key = _settings({**self.options, **options})
        params = self.task.named(self.args, self.kwargs)
        definition = self.task.definition.configure(**settings)

        async def publish(mesh: TaskMesh) -> TaskHandle[Any]:
            return (await mesh.publisher.publish_all(definition, {key: params}))[0]

        return AsyncResult(self.app, self.app.run("apply_async", publish))

    def add(self, flow: Flow, before: _Ends | None, options: Mapping[str, Any]) -> _Ends:
        settings, key = _settings({**self.options, **options})
        definition = self.task.definition.configure(**settings)
        after: Any = None if before is None else [before.joined(flow)]
        args: tuple[Any, ...] = self.args
        if after is not None and not self.immutable:
            args = (_RESULT, *args)
        params = self.task.named(args, self.kwargs)
        if fed := [name for name, value in params.items() if value is _RESULT]:
            after = {fed[0]: after[0]}
            del params[fed[0]]
        return _Ends(self.app, [flow.add(definition, key, params=params, after=after)], many=False)


_RESULT: Any = object()
"""Stands for the argument that the result of the task before is put into."""


@dataclass(frozen=True)
class _Several(_Canvas):
    """Some that are applied as one."""

    parts: tuple[_Canvas, ...]

    @property
    def app(self) -> Celery:
        return self.parts[0].app

    def __call__(self) -> Any:
        """Publish it, as Celery's chains and groups do when they are called."""
        return self.apply_async()


class _Chain(_Several):
    def add(self, flow: Flow, before: _Ends | None, options: Mapping[str, Any]) -> _Ends:
        ends = self.parts[0].add(flow, before, options)
        for part in self.parts[1:]:
            ends = part.add(flow, ends, {})
        return ends


class _Group(_Several):
    def add(self, flow: Flow, before: _Ends | None, options: Mapping[str, Any]) -> _Ends:
        if before is not None:  # gathered once, and not by each part
            before = _Ends(self.app, [before.joined(flow)], many=False)
        ends = [part.add(flow, before, options) for part in self.parts]
        return _Ends(self.app, [each.joined(flow) for each in ends], many=True)


def chain(*parts: _Canvas) -> _Chain:
    """One after the other: each gets the result of the one before as its first argument."""
    if not parts:
        raise InvalidParams("chain() needs at least one signature: chain(add.s(1, 2), double.s())")
    return _Chain(tuple(each for part in parts for each in (part.parts if isinstance(part, _Chain) else (part,))))


def group(*parts: Any) -> _Group:
    """Side by side; signatures, or one iterable of them."""
    members = tuple(parts[0]) if len(parts) == 1 and not isinstance(parts[0], _Canvas) else parts
    if not members:
        raise InvalidParams("group() needs at least one signature: group(add.s(n, n) for n in range(10))")
    return _Group(members)


def chord(header: Any, body: _Signature | None = None) -> Any:
    """Side by side, then `body` with the list of the results; without a body: what takes one, `chord(header)(body)`."""
    head = header if isinstance(header, _Group) else group(header)
    if body is not None:
        return chain(head, body)
    return lambda body: chain(head, body)()


# --- options --------------------------------------------------------------------------------------------------------------


def _settings(options: Mapping[str, Any]) -> tuple[PublishSettings, str]:
    """Return options of `apply_async` as settings of `configure`, and the key."""
    left = dict(options)
    key = left.pop("task_id", None) or str(uuid4())
    settings: dict[str, Any] = {name: left.pop(name) for name in ("queue", "priority") if left.get(name) is not None}
    if (countdown := left.pop("countdown", None)) is not None:
        settings["delay_ms"] = max(0, round(1000 * countdown))
    if (eta := left.pop("eta", None)) is not None:
        settings["start_time"] = _utc(eta)
    if (expires := left.pop("expires", None)) is not None:
        settings["expire_time"] = (
            _utc(expires) if isinstance(expires, datetime) else datetime.now(UTC) + timedelta(seconds=expires)
        )
    if unknown := [name for name in left if left[name] is not None]:
        raise InvalidOption(
            f"{', '.join(sorted(unknown))}: no such option of apply_async here; docs/migrating.md says what to use instead"
        )
    return settings, key  # type: ignore[return-value]  # of `configure`, by name


def _utc(moment: datetime) -> datetime:
    """Celery takes a time without a zone as UTC."""
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
