"""What a handler can ask and report while it runs: `current_task()`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from taskmesh.client.definition import TaskDefinition
from taskmesh.client.handle import TaskHandle
from taskmesh.consumer.run.recording import (
    Ledger,
    Recorder,
    blocking_step,
    checked_handles,
    checked_moment,
    duration_ms,
    step_under_way,
)
from taskmesh.model.errors import TaskError, TaskMeshError
from taskmesh.model.option import TaskOption

P = ParamSpec("P")
T = TypeVar("T")

_current: ContextVar[Any] = ContextVar("taskmesh_current_task")


class ExecutionFields(Protocol):
    """What identifies an execution."""

    # ruff: noqa: D102 — the methods are documented where handlers see them, in the classes below

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def worker_id(self) -> str: ...
    @property
    def running_id(self) -> str: ...


def fields_of(execution: ExecutionFields) -> dict[str, str]:
    """Return the fields of a log record about an execution: `logger.info(…, extra=fields_of(execution))`."""
    return {
        "task": execution.name,
        "key": execution.key,
        "worker": execution.worker_id,
        "running_id": execution.running_id,
    }


class Running(ExecutionFields, Protocol):
    """The execution behind a context: the executor's, or one at the other end of a pipe. See `TaskContext`."""

    @property
    def attempt(self) -> int: ...
    @property
    def failures(self) -> int: ...
    @property
    def option(self) -> TaskOption: ...
    @property
    def extra(self) -> Mapping[str, Any]: ...
    @property
    def state(self) -> Any: ...
    @property
    def deadline(self) -> datetime | None: ...
    @property
    def cancelled(self) -> bool: ...
    def set_progress(self, fraction: float, message: str | None) -> None: ...
    @property
    def in_a_block(self) -> bool: ...
    def log(self, message: str) -> None: ...
    def set_result(self, value: Any) -> None: ...


class RunningInLoop(Running, Protocol):
    """An execution whose handler runs in the event loop."""

    @property
    def journal(self) -> Recorder: ...
    async def publish(self, definition: Any, key: str, params: Mapping[str, Any]) -> None: ...
    async def dependencies(self) -> dict[tuple[str, str], Any]: ...
    def transaction(self) -> AbstractAsyncContextManager[Any]: ...
    def in_transaction(self, fn: Callable[[Any], Awaitable[Any]]) -> Awaitable[Any]: ...


class RunningElsewhere(Running, Protocol):
    """An execution whose handler runs in a thread or a child process."""

    @property
    def ledger(self) -> Ledger: ...
    def publish_in_thread(self, definition: Any, key: str, params: Mapping[str, Any]) -> None: ...
    def blocking_dependencies(self) -> dict[tuple[str, str], Any]: ...
    def blocking_transaction(self) -> AbstractContextManager[Any]: ...
    def blocking_in_transaction(self, fn: Callable[[Any], Any]) -> Any: ...


@dataclass(frozen=True)
class _Context:
    _running: Running

    def _refuse_in_a_step(self, what: str) -> None:
        """Raise `TaskMeshError` inside a step, which a retry does not call again: what belongs to the SUCCESS would be lost."""
        if (step := step_under_way()) is not None:
            raise TaskMeshError(
                f"task {self.name!r} {self.key!r}: {what} was called inside the step {step!r}, which is not called again when "
                "the task is resumed, so it would be lost then: call it from the handler, after the step"
            )

    @property
    def name(self) -> str:
        """The task's name."""
        return self._running.name

    @property
    def key(self) -> str:
        """The task's key."""
        return self._running.key

    @property
    def worker_id(self) -> str:
        """The worker that runs this execution."""
        return self._running.worker_id

    @property
    def running_id(self) -> str:
        """The execution's fencing token: unique for the task, also among all workers."""
        return self._running.running_id

    @property
    def attempt(self) -> int:
        """Which execution of the task this is, from 1. Released and snoozed ones do not count."""
        return self._running.attempt

    @property
    def failures(self) -> int:
        """How many executions of the task have failed or raised `Retry` before: what `max_unexpected_retries` counts."""
        return self._running.failures

    @property
    def option(self) -> TaskOption:
        """The task's option, as of the claim."""
        return self._running.option

    @property
    def extra(self) -> Mapping[str, Any]:
        """Fields at the top of the task's document that are not taskmesh's: those of `configure(fields=…)`, and of others."""
        return self._running.extra

    @property
    def state(self) -> Any:
        """What the function under `@mesh.lifespan` has yielded in this process. The lifespan's own `state` has its type.

        Raises `TaskMeshError` if there is nothing: without such a function, and in a child process (`run="process"`).
        """
        return self._running.state

    @property
    def deadline(self) -> datetime | None:
        """When `run_timeout_ms` ends this execution. None: never."""
        return self._running.deadline

    @property
    def cancelled(self) -> bool:
        """Whether the execution should stop: cancelled, timed out, lease lost, or a forced stop of the worker."""
        return self._running.cancelled

    def log(self, message: str) -> None:
        """Add a line to the log that is kept with the execution. The newest lines are kept."""
        self._running.log(str(message))

    def set_result(self, value: Any) -> None:
        """Set the execution's result, inside `transaction()`. Anywhere else it would be lost: `TaskMeshError`."""
        self._refuse_in_a_step("set_result()")
        if not self._running.in_a_block:
            raise TaskMeshError(
                f"task {self.name!r} {self.key!r}: set_result() was called outside of transaction(): call it in the block that "
                "the result goes with; without one, the result is what the handler returns"
            )
        self._running.set_result(value)


@dataclass(frozen=True)
class TaskContext(_Context):
    """The running execution, seen from an async handler."""

    _running: RunningInLoop

    async def progress(self, fraction: float, message: str | None = None) -> None:
        """Report progress, from 0 to 1. Many calls cost few writes. Raises `LeaseLost` if the lease is lost."""
        self._running.set_progress(fraction, message)

    @overload
    async def publish(
        self, definition: TaskDefinition[P, Any], key: str, /, *args: P.args, **params: P.kwargs
    ) -> None: ...
    @overload
    async def publish(self, definition: str, key: str, /, **params: Any) -> None: ...
    async def publish(self, definition: TaskDefinition[..., Any] | str, key: str, /, *args: Any, **params: Any) -> None:
        """Publish a task if, and only if, this execution SUCCEEDs or goes on by `Next`, and atomically with that.

        `definition`: what `@mesh.task` returned, or a task's name; if this mesh has no such task, its queue, option and params
        are those that workers have registered. Not for use in the function of a step, which is not called again when the task
        resumes. Raises `InvalidParams`, `InvalidKey`, and `TaskNotFound` for a dependency in `after` that nobody has published.
        """
        self._refuse_in_a_step("publish()")
        await self._running.publish(definition, key, _named(definition, args, params))

    @overload
    def step(
        self, name: str, fn: Callable[..., Awaitable[T]], /, *args: Any, transactional: bool, **kwargs: Any
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def step(
        self, name: str, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def step(self, name: str, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]: ...
    def step(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `fn(*args, **kwargs)` once for this task, and return its value, which is recorded: later executions get the same.

            charge = await current_task().step("charge", charge_card, order_id)

        `fn` is async, or a plain function, which runs in a thread. Its value is recorded before this returns, in the form that
        is stored, and comes back as `fn`'s return annotation says. A recorded step counts as progress. An exception records
        nothing and propagates; a `TaskFailed` is recorded and raised again whenever the task resumes.

        The second step of one name in an execution is `name#2`, and so on. Steps that run side by side need names of their own.
        `transactional=True`: `fn` gets `session=`, and what it writes with that commits together with the record, or not at
        all; it is called again if others write the same documents. A worker that is killed in it leaves its locks for up to the
        server's `transactionLifetimeLimitSeconds` (60).

        Raises `StepMismatch` if another function or other arguments are recorded under the name, `UnstorableValue`,
        `TaskTooLarge` (a value over 1 MB), `TaskFailed` (8 MB of records), `LeaseLost`, `InvalidName`.
        """
        transactional = bool(kwargs.pop("transactional", False))
        return self._running.journal.step(name, fn, args, kwargs, transactional=transactional)

    async def sleep(self, name: str, /, **timedelta_parts: float) -> None:
        """Wait for so long, counted from the first call with this name: `await task.sleep("cooling off", hours=24)`.

        Up to a second it waits in place. Longer sleeps suspend the task, which then holds neither slot nor lease: the handler
        unwinds by a `BaseException` (`TaskSuspended`), and is called again when the time has come. Raises `InvalidOption`,
        `InvalidName`.
        """
        await self._running.journal.sleep(name, duration_ms(timedelta_parts), None)

    async def sleep_until(self, name: str, when: datetime, /) -> None:
        """Wait until a moment, which the first call with this name fixes; a naive one is taken as UTC. Otherwise like `sleep`."""
        await self._running.journal.sleep(name, None, checked_moment(when))

    async def wait_for(self, event: str, /, timeout_ms: int | None = None) -> Any:
        """Wait for a signal and return its payload (`{}` if it has none); None after the timeout, which the first call fixes.

        A signal that was sent before counts. Each is consumed by one call, in the order in which they came. The task is
        suspended as by `sleep`. Send a signal by `handle.signal(event, payload)`. Raises `InvalidOption`, `InvalidName`.
        """
        return await self._running.journal.wait_for(event, timeout_ms)

    @overload
    async def start(
        self, definition: TaskDefinition[P, T], key: str, /, *args: P.args, **params: P.kwargs
    ) -> TaskHandle[T]: ...
    @overload
    async def start(
        self, definition: TaskDefinition[..., T], key: str, /, *args: Any, detached: bool, **params: Any
    ) -> TaskHandle[T]: ...
    @overload
    async def start(
        self, definition: TaskDefinition[..., T], key: str, /, *, params: Mapping[str, Any], detached: bool = False
    ) -> TaskHandle[T]: ...
    @overload
    async def start(self, definition: str, key: str, /, **params: Any) -> TaskHandle[Any]: ...
    async def start(
        self, definition: TaskDefinition[..., Any] | str, key: str, /, *args: Any, **named: Any
    ) -> TaskHandle[Any]:
        """Start a child of this task, now and once. Return its handle, for `results` or to be left alone.

            parts = [await task.start(pack, f"{order}-{i}", n=i) for i in range(3)]

        It is published together with a record in this task, or not at all. If this task is cancelled or fails, its unfinished
        children are cancelled, unless they are `detached`. If the handler has a param named `detached` or `params`, pass all of
        them by `params={…}`. Raises `InvalidKey` for a key that somebody else has published, `InvalidParams`, `LeaseLost`; for
        a dependency in `after` `TaskNotFound` if nobody has published it, `InvalidOption` if it is this task.
        """
        detached, params = bool(named.pop("detached", False)), named.pop("params", None)
        given = dict(params) if params is not None else _named(definition, args, named)
        [handle] = await self._running.journal.start(definition, {key: given}, detached=detached)
        return handle

    @overload
    async def start_many(
        self,
        definition: TaskDefinition[..., T],
        params_by_key: Mapping[str, Mapping[str, Any]],
        /,
        *,
        detached: bool = ...,
    ) -> list[TaskHandle[T]]: ...
    @overload
    async def start_many(
        self, definition: str, params_by_key: Mapping[str, Mapping[str, Any]], /, *, detached: bool = ...
    ) -> list[TaskHandle[Any]]: ...
    async def start_many(
        self,
        definition: TaskDefinition[..., Any] | str,
        params_by_key: Mapping[str, Mapping[str, Any]],
        /,
        *,
        detached: bool = False,
    ) -> list[TaskHandle[Any]]:
        """Start many children at once, a thousand in one transaction. Return their handles in order.

            parts = await task.start_many(pack, {f"{order}-{i}": {"n": i} for i in range(10_000)})

        Each is started as by `start`, and once: a later execution goes on with those that are missing. All params are checked
        before any is written. Raises as `start` does.
        """
        return await self._running.journal.start(definition, params_by_key, detached=detached)

    @overload
    async def results(self, handles: Sequence[TaskHandle[T]], /) -> list[T]: ...
    @overload
    async def results(self, handles: Sequence[TaskHandle[T]], /, *, return_errors: bool) -> list[T | TaskError]: ...
    async def results(self, handles: Sequence[TaskHandle[Any]], /, *, return_errors: bool = False) -> list[Any]:
        """Wait until these children are finished, and return their values in order. The task is suspended as by `sleep`.

        A child that did not succeed raises `TaskError`; with `return_errors=True` that error takes the place of its value. The
        same is returned after a retry: values stay with the children, which are kept until this task is finished.
        """
        return await self._running.journal.results(checked_handles(handles), return_errors=return_errors)

    async def dependencies(self) -> dict[tuple[str, str], Any]:
        """Return the results of this task's dependencies, by `(name, key)`, in the order of `after`.

        Each has the type that its handler is annotated to return, if this process knows the handler. A dependency that did not
        end as SUCCESS (`on_dependency_failure="run"`), or was restarted since, is represented by a `TaskError`, which is
        returned and not raised.
        """
        return await self._running.dependencies()

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Return a block whose writes with its session commit together with this execution's SUCCESS, or not at all.

            async with current_task().transaction() as session:
                await client["shop"]["orders"].insert_one(order, session=session)
                current_task().set_result("ordered")

        The session belongs to the client with which the mesh was created (`session.client`). The block ends the execution: its
        result is that of `set_result`. Do slow work before it, since the server ends a transaction after
        `transactionLifetimeLimitSeconds` (60). If others change the task meanwhile (a cancel, an option), nothing of the block
        remains.

        If others write what the block writes, MongoDB aborts one of the two: then the block raises `TransactionConflict`. Do
        not catch it: the execution ends as if it snoozed, and runs again in a moment; nothing is counted, but the hundredth in
        a row FAILs. To try again in place, use `in_transaction`. Raises `LeaseLost`.
        """
        self._refuse_in_a_step("transaction()")
        return self._running.transaction()

    async def in_transaction(self, fn: Callable[[Any], Awaitable[T]]) -> T:
        """Await `fn(session)` in a `transaction()`, and again after each conflict, for up to two minutes.

        Return what it returns.

            async def transfer(session):
                await accounts.update_one({"_id": "ada"}, {"$inc": {"cents": -500}}, session=session)
                await accounts.update_one({"_id": "bob"}, {"$inc": {"cents": 500}}, session=session)
                return "moved"

            await current_task().in_transaction(transfer)

        So `fn` must have no other effects. What it returns is the execution's result, unless it calls `set_result`.
        """
        if not callable(fn):
            raise TypeError(f"in_transaction() takes a function of the session, got {type(fn).__name__}")
        self._refuse_in_a_step("in_transaction()")
        value: T = await self._running.in_transaction(fn)
        return value


@dataclass(frozen=True)
class BlockingTaskContext(_Context):
    """The running execution, seen from a plain function in a thread or a process: the same methods, without `await`."""

    _running: RunningElsewhere

    def progress(self, fraction: float, message: str | None = None) -> None:
        """Report progress, from 0 to 1. Raises `LeaseLost` if the lease is lost."""
        self._running.set_progress(fraction, message)

    @overload
    def publish(self, definition: TaskDefinition[P, Any], key: str, /, *args: P.args, **params: P.kwargs) -> None: ...
    @overload
    def publish(self, definition: str, key: str, /, **params: Any) -> None: ...
    def publish(self, definition: TaskDefinition[..., Any] | str, key: str, /, *args: Any, **params: Any) -> None:
        """Publish a task if, and only if, this execution SUCCEEDs or goes on by `Next`, and atomically with that.

        `definition`: what `@mesh.task` returned, or a task's name; if this mesh has no such task, its queue, option and params
        are those that workers have registered. Not for use in the function of a step, which is not called again when the task
        resumes. Raises `InvalidParams`, `InvalidKey`, and `TaskNotFound` for a dependency in `after` that nobody has published.
        """
        self._refuse_in_a_step("publish()")
        self._running.publish_in_thread(definition, key, _named(definition, args, params))

    @overload
    def step(
        self, name: str, fn: Callable[..., Coroutine[Any, Any, T]], /, *args: Any, transactional: bool, **kwargs: Any
    ) -> T: ...
    @overload
    def step(self, name: str, fn: Callable[..., T], /, *args: Any, transactional: bool, **kwargs: Any) -> T: ...
    @overload
    def step(self, name: str, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def step(self, name: str, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def step(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `fn(*args, **kwargs)` once for this task, and return its value, which is recorded: later executions get the same.

        `fn` is a plain function, or an async one, which runs in an event loop of its own here. With `transactional=True` its
        `session=` belongs to a blocking client. Otherwise like `TaskContext.step`.
        """
        transactional = bool(kwargs.pop("transactional", False))
        return blocking_step(self._running.ledger, name, fn, args, kwargs, transactional=transactional)

    def sleep(self, name: str, /, **timedelta_parts: float) -> None:
        """Wait for so long, counted from the first call with this name. See `TaskContext.sleep`."""
        self._running.ledger.sleep(name, duration_ms(timedelta_parts), None, step_under_way())

    def sleep_until(self, name: str, when: datetime, /) -> None:
        """Wait until a moment, which the first call with this name fixes. See `TaskContext.sleep`."""
        self._running.ledger.sleep(name, None, checked_moment(when), step_under_way())

    def wait_for(self, event: str, /, timeout_ms: int | None = None) -> Any:
        """Wait for a signal and return its payload; None after the timeout. See `TaskContext.wait_for`."""
        return self._running.ledger.wait_for(event, timeout_ms, step_under_way())

    @overload
    def start(
        self, definition: TaskDefinition[P, T], key: str, /, *args: P.args, **params: P.kwargs
    ) -> TaskHandle[T]: ...
    @overload
    def start(
        self, definition: TaskDefinition[..., T], key: str, /, *args: Any, detached: bool, **params: Any
    ) -> TaskHandle[T]: ...
    @overload
    def start(
        self, definition: TaskDefinition[..., T], key: str, /, *, params: Mapping[str, Any], detached: bool = False
    ) -> TaskHandle[T]: ...
    @overload
    def start(self, definition: str, key: str, /, **params: Any) -> TaskHandle[Any]: ...
    def start(
        self, definition: TaskDefinition[..., Any] | str, key: str, /, *args: Any, **named: Any
    ) -> TaskHandle[Any]:
        """Start a child of this task, now and once. Return its handle, for `results` or to be left alone.

            parts = [task.start(pack, f"{order}-{i}", n=i) for i in range(3)]

        It is published together with a record in this task, or not at all. If this task is cancelled or fails, its unfinished
        children are cancelled, unless they are `detached`. If the handler has a param named `detached` or `params`, pass all of
        them by `params={…}`. Raises `InvalidKey` for a key that somebody else has published, `InvalidParams`, `LeaseLost`; for
        a dependency in `after` `TaskNotFound` if nobody has published it, `InvalidOption` if it is this task.
        """
        detached, params = bool(named.pop("detached", False)), named.pop("params", None)
        given = dict(params) if params is not None else _named(definition, args, named)
        [handle] = self._running.ledger.start(definition, {key: given}, detached=detached)
        return handle

    @overload
    def start_many(
        self,
        definition: TaskDefinition[..., T],
        params_by_key: Mapping[str, Mapping[str, Any]],
        /,
        *,
        detached: bool = ...,
    ) -> list[TaskHandle[T]]: ...
    @overload
    def start_many(
        self, definition: str, params_by_key: Mapping[str, Mapping[str, Any]], /, *, detached: bool = ...
    ) -> list[TaskHandle[Any]]: ...
    def start_many(
        self,
        definition: TaskDefinition[..., Any] | str,
        params_by_key: Mapping[str, Mapping[str, Any]],
        /,
        *,
        detached: bool = False,
    ) -> list[TaskHandle[Any]]:
        """Start many children at once, a thousand in one transaction. Return their handles in order.

            parts = task.start_many(pack, {f"{order}-{i}": {"n": i} for i in range(10_000)})

        Each is started as by `start`, and once: a later execution goes on with those that are missing. All params are checked
        before any is written. Raises as `start` does.
        """
        return self._running.ledger.start(definition, params_by_key, detached=detached)

    @overload
    def results(self, handles: Sequence[TaskHandle[T]], /) -> list[T]: ...
    @overload
    def results(self, handles: Sequence[TaskHandle[T]], /, *, return_errors: bool) -> list[T | TaskError]: ...
    def results(self, handles: Sequence[TaskHandle[Any]], /, *, return_errors: bool = False) -> list[Any]:
        """Wait until these children are finished, and return their values in order. The task is suspended as by `sleep`.

        A child that did not succeed raises `TaskError`; with `return_errors=True` that error takes the place of its value. The
        same is returned after a retry: values stay with the children, which are kept until this task is finished. In a child
        process the values of children that were started by name are plain ones; those started by definition are as annotated.
        """
        return self._running.ledger.results(checked_handles(handles), return_errors=return_errors)

    def dependencies(self) -> dict[tuple[str, str], Any]:
        """Return the results of this task's dependencies, by `(name, key)`, in the order of `after`.

        Each has the type that its handler is annotated to return, if this worker knows the handler; in a child process it
        consists of plain values. A dependency that did not end as SUCCESS (`on_dependency_failure="run"`) is represented by a
        `TaskError`, which is returned and not raised.
        """
        return self._running.blocking_dependencies()

    def transaction(self) -> AbstractContextManager[Any]:
        """Return a block whose writes commit together with this execution's SUCCESS, or not at all.

        Its session belongs to a blocking client: write with `session.client`. Otherwise like `TaskContext.transaction`.
        """
        self._refuse_in_a_step("transaction()")
        return self._running.blocking_transaction()

    def in_transaction(self, fn: Callable[[Any], T]) -> T:
        """Call `fn(session)` in a `transaction()`, and again after each conflict, for up to two minutes.

        Return what it returns.

        `fn` is a plain function, and its session belongs to a blocking client. Otherwise like `TaskContext.in_transaction`.
        """
        if not callable(fn) or inspect.iscoroutinefunction(fn):
            kind = "an async function" if callable(fn) else type(fn).__name__
            raise TypeError(f"in_transaction() in a plain handler takes a plain function of the session, got {kind}")
        self._refuse_in_a_step("in_transaction()")
        value: T = self._running.blocking_in_transaction(fn)
        return value


def _named(definition: TaskDefinition[..., Any] | str, args: tuple[Any, ...], params: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return params
    if isinstance(definition, str):
        raise TypeError("a task that is published by name takes its params by keyword")
    return definition.params.named(args, params)


def current_task() -> TaskContext:
    """Return the context of the running execution of an async handler. Raises `RuntimeError` outside of a handler.

    In a plain function (a thread, a child process) it is a `BlockingTaskContext`, with the same methods without `await`;
    `current_blocking_task()` returns that under its own type.
    """
    context: TaskContext | list[TaskContext] | None = _current.get(None)
    if isinstance(context, list):
        told = "current_task() was called in the handler of a batch: current_batch() has the context of each task"
        raise RuntimeError(told)  # noqa: TRY004 — the place is wrong, no type is
    if context is None:
        raise RuntimeError("current_task() was called outside of a task's execution: only a handler has one")
    return context


def current_blocking_task() -> BlockingTaskContext:
    """Return the context of the running execution of a plain function, in a thread or a child process.

    Raises `RuntimeError` outside of a handler, and in an async one, which has `current_task()`.
    """
    context = _current.get(None)
    if not isinstance(context, BlockingTaskContext):
        where = "in an async handler: use current_task()" if context is not None else "outside of a plain handler"
        raise RuntimeError(f"current_blocking_task() was called {where}")  # noqa: TRY004 — the place is wrong, no type is
    return context


def current_batch() -> list[TaskContext]:
    """Return the context of each task whose item the running call has got, in the order of the items.

    `cancelled` of a context says that its task no longer needs a value. In a plain function they are `BlockingTaskContext`s;
    `current_blocking_batch()` returns them under their own type. Raises `RuntimeError` outside of the handler of a batch.
    """
    contexts: list[TaskContext] | None = _current.get(None)
    if not isinstance(contexts, list):
        told = "current_batch() was called outside of the handler of a batch: only @mesh.task(batch=…) has one"
        raise RuntimeError(told)  # noqa: TRY004 — the place is wrong, no type is
    return contexts


def current_blocking_batch() -> list[BlockingTaskContext]:
    """Return the contexts of a batch in a plain function. Raises `RuntimeError` anywhere else."""
    contexts: list[Any] = current_batch()
    if not all(isinstance(context, BlockingTaskContext) for context in contexts):
        raise RuntimeError("current_blocking_batch() was called in an async handler: use current_batch()")
    return contexts


def running_task() -> Any:
    """Return the context of the running execution. None outside of a handler, and in one that runs a batch."""
    context = _current.get(None)
    return None if isinstance(context, list) else context


def enter(context: _Context) -> None:
    """Make this the current task of the running asyncio task or thread."""
    _current.set(context)


def enter_batch(contexts: Sequence[_Context]) -> None:
    """Make these the current tasks of the running asyncio task or thread."""
    _current.set(list(contexts))


__all__ = [
    "BlockingTaskContext",
    "Running",
    "TaskContext",
    "current_batch",
    "current_blocking_batch",
    "current_blocking_task",
    "current_task",
    "enter",
    "enter_batch",
    "running_task",
]
