"""Publishing: task definitions, what can be configured, and handles on what was published."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, cast

from bson import ObjectId

from taskmesh.client.params import Params
from taskmesh.model.errors import InvalidName, InvalidOption, TaskCancelled, TaskError, TaskExpired, TaskNotFound
from taskmesh.model.ids import checked_group, shown
from taskmesh.model.option import TaskOption
from taskmesh.model.task import Status, Task, checked_key, checked_name
from taskmesh.store.clock import in_utc
from taskmesh.store.publish import Publication

if TYPE_CHECKING:
    from taskmesh.mesh import TaskMesh

P = ParamSpec("P")
R = TypeVar("R")
Run = Literal["async", "thread", "process"]
MAX_DELAY_MS = 10 * 366 * 86_400_000
_SIZE_OF_THE_REST = 1_000
"""What a new document has beside its params, in bytes; rather more than less."""


@dataclass(frozen=True)
class Configuration:
    """What a publisher may set beside the params. See `TaskDefinition.configure`."""

    queue: str = "default"
    option: TaskOption = field(default_factory=TaskOption)
    tuned: Mapping[str, Any] = field(default_factory=dict)
    placed: Mapping[str, str | None] = field(default_factory=dict)
    """`queue` and `group` as far as the publisher set them, and not the definition."""
    start_time: datetime | None = None
    expire_time: datetime | None = None
    delay_ms: int | None = None
    session: Any = None
    group: str | None = None
    update_existing_params: bool = False
    not_update_running: bool = False
    clean_success: bool = False
    clean_failed: bool = False
    run_again: bool = False

    def changed(self, **settings: Any) -> Configuration:
        """Return this with other settings. Raises `InvalidOption`."""
        own = {f.name for f in fields(self)} - {"option", "tuned", "placed"}
        options = {name: value for name, value in settings.items() if name in TaskOption.model_fields}
        if unknown := set(settings) - own - set(options):
            raise InvalidOption(
                f"unknown setting {', '.join(sorted(unknown))}; there are {', '.join(sorted(own))} and the options "
                f"{', '.join(TaskOption.model_fields)}"
            )
        mine = {name: value for name, value in settings.items() if name in own}
        for name in ("start_time", "expire_time"):
            if mine.get(name) is not None:
                mine[name] = checked_time(name, mine[name])
        for name in ("update_existing_params", "not_update_running", "clean_success", "clean_failed", "run_again"):
            if not isinstance(mine.get(name, False), bool):
                raise InvalidOption(f"{name} is True or False, not {mine[name]!r}")
        if "delay_ms" in mine:
            _check_delay(mine["delay_ms"])
        if "queue" in mine:
            checked_queue(mine["queue"])
        if mine.get("group") is not None:
            checked_group(mine["group"])
        placed: dict[str, str | None] = {name: mine[name] for name in ("queue", "group") if name in mine}
        configuration = replace(self, **mine, placed={**self.placed, **placed})
        if configuration.start_time is not None and configuration.delay_ms is not None:
            raise InvalidOption("start_time and delay_ms were both set: use one of them")
        if options:
            option = configuration.option.changed(**options)
            stored = {name: getattr(option, name) for name in options}
            stored = {n: list(v) if isinstance(v, tuple) else v for n, v in stored.items()}
            configuration = replace(configuration, option=option, tuned={**configuration.tuned, **stored})
        return configuration

    def publication(
        self, name: str, key: str, params: dict[str, Any], size: int, publish_id: ObjectId | None = None
    ) -> Publication:
        """Return the task to publish, from params that were checked; `size` is theirs, in bytes of BSON."""
        return Publication(
            name=name,
            key=key,
            queue=self.queue,
            params=params,
            option=self.option,
            size=size + _SIZE_OF_THE_REST,
            start_time=self.start_time,
            expire_time=self.expire_time,
            delay_ms=self.delay_ms,
            group=self.group,
            tuned=dict(self.tuned),
            placed=dict(self.placed),
            update_existing_params=self.update_existing_params,
            not_update_running=self.not_update_running,
            clean_success=self.clean_success,
            clean_failed=self.clean_failed,
            run_again=self.run_again,
            publish_id=publish_id or ObjectId(),
        )


def checked_time(name: str, value: Any) -> datetime:
    """Return the time in UTC, or raise `InvalidOption`."""
    if not isinstance(value, datetime):
        raise InvalidOption(f"{name} is a datetime (naive ones are UTC), not {value!r}")
    try:
        return in_utc(value)
    except OverflowError:
        raise InvalidOption(f"{name}={value!r} is out of range: use a time that exists in UTC") from None


def _check_delay(delay_ms: Any) -> None:
    if delay_ms is None:
        return
    if isinstance(delay_ms, bool) or not isinstance(delay_ms, int) or not 0 <= delay_ms <= MAX_DELAY_MS:
        raise InvalidOption(f"delay_ms is a whole number from 0 to {MAX_DELAY_MS} (ten years), not {delay_ms!r}")


def checked_queue(queue: Any) -> str:
    """Return the queue's name, or raise `InvalidOption`."""
    try:
        return checked_name(queue)
    except InvalidName:
        raise InvalidOption(
            f"a queue's name must be 1 to 100 characters of letters, digits, '_', '.' and '-', got {shown(queue)}"
        ) from None


class TaskDefinition(Generic[P, R]):
    """A kind of task: a name, a handler, and how to publish one. Calling it calls the handler's function."""

    def __init__(
        self,
        mesh: TaskMesh,
        fn: Callable[P, Awaitable[R]] | Callable[P, R],
        name: str,
        configuration: Configuration,
        run: Run | None,
        projection: Sequence[str] | None = None,
    ) -> None:
        self.mesh = mesh
        self.fn = fn
        self.name = checked_name(name)
        self.configuration = configuration
        self.run: Run = run or ("async" if is_async(fn) else "thread")
        if self.run not in ("async", "thread", "process"):
            raise InvalidOption(f"run is 'async', 'thread' or 'process', not {run!r}")
        if (self.run == "async") != is_async(fn):
            kind = "an async function" if is_async(fn) else "a plain function"
            raise InvalidOption(f"task {name!r}: run={self.run!r} does not go with {kind}")
        self.params = Params(name, fn)
        self.projection = None if projection is None else self.params.checked_projection(projection)
        self.__doc__ = fn.__doc__
        self.__name__ = getattr(fn, "__name__", name)
        self.__wrapped__ = fn

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the handler's function, here and now."""
        return self.fn(*args, **kwargs)

    @property
    def queue(self) -> str:
        """Where its tasks go."""
        return self.configuration.queue

    @property
    def option(self) -> TaskOption:
        """How its tasks are run."""
        return self.configuration.option

    def configure(self, **configuration: Any) -> TaskDefinition[P, R]:
        """Return the same definition with other settings.

        Every field of `TaskOption`, and: `queue`; `group`; `start_time` (not before), `expire_time` (not after: what has
        not started by then becomes EXPIRED), `delay_ms`; `session` (publish inside the caller's transaction); and for a
        key that exists already `update_existing_params`, `not_update_running`, `clean_success`, `clean_failed`,
        `run_again`. Raises `InvalidOption`.
        """
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, configuration=self.configuration.changed(**configuration))
        return changed

    async def publish(self, key: str, /, *args: P.args, **params: P.kwargs) -> TaskHandle[R]:
        """Publish one task under `key`, once: a key that is there already is left as it is, unless configured.

        The key is taken until the finished task's retention is over; after that it is published afresh. Raises
        `InvalidKey`, `InvalidParams`, `TaskTooLarge`, `TaskRunning`; then nothing is written.
        """
        named = self.params.named(args, params)
        return cast("TaskHandle[R]", (await self.mesh.publish_all(self, {checked_key(key): named}))[0])

    async def publish_many(self, params_by_key: Mapping[str, Mapping[str, Any]], /) -> list[TaskHandle[R]]:
        """Publish many tasks, about a thousand per round trip; handles in the order given.

        All are checked before any is written.
        """
        return cast("list[TaskHandle[R]]", await self.mesh.publish_all(self, params_by_key))

    def publish_sync(self, key: str, /, *args: P.args, **params: P.kwargs) -> TaskHandle[R]:
        """Publish from code without an event loop: threads, WSGI apps, after a fork.

        Raises `RuntimeError` when called from inside a running loop.
        """
        named = self.params.named(args, params)
        return cast("TaskHandle[R]", self.mesh.publish_all_sync(self, {key: named})[0])

    def __repr__(self) -> str:
        return f"<TaskDefinition {self.name!r} queue={self.queue!r} run={self.run!r}>"


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling `fn` gives a coroutine."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004  # the method itself is asked


class TaskHandle(Generic[R]):
    """A published task, to wait for and to ask about."""

    def __init__(self, mesh: Any, name: str, key: str, *, created: bool, updated: bool, warnings: list[str]) -> None:
        self.mesh = mesh
        self.name = checked_name(name)
        self.key = checked_key(key)
        self.created = created
        """True: inserted now; False: the key was there already."""
        self._is_due_a_result = created or updated
        """Whether nobody has had the result of what this handle published."""
        self.updated = updated
        """Whether an existing task was changed."""
        self.warnings = warnings
        """Why nobody could run the task when it was published."""

    async def task(self) -> Task:
        """Return the task as it stands now. Raises `TaskNotFound`."""
        return cast(Task, await self.mesh.get(self.name, self.key))

    async def status(self) -> Status:
        """Return where the task stands now. Raises `TaskNotFound`."""
        return (await self.task()).status

    async def result(self, timeout: float | None = None) -> R:
        """Wait for the task to finish, and return the value of its first SUCCESS.

        `timeout` in seconds; None waits for ever. Raises `TaskError` (with `reasons`), `TaskCancelled`, `TaskExpired`,
        `TaskNotFound` (deleted meanwhile) or `TimeoutError`.
        """
        return cast(R, (await self._finished(timeout)).successes[0].returns)

    async def results(self, timeout: float | None = None) -> dict[str, R]:
        """Wait for the task to finish, and return the value of every worker that ran it to SUCCESS."""
        task = await self._finished(timeout)
        return {entry.worker_id: cast(R, entry.returns) for entry in task.successes}

    async def cancel(self) -> Task:
        """Cancel the task; a finished one stays as it is. Returns it as it stands after."""
        return cast(Task, await self.mesh.cancel(self.name, self.key))

    async def _finished(self, timeout: float | None) -> Task:
        task = cast(Task, await self.mesh.finished(self.name, self.key, timeout, published=self._is_due_a_result))
        self._is_due_a_result = False
        label = f"task {self.name!r} {self.key!r}"
        if task.status is Status.FAIL:
            raise TaskError(
                f"{label} failed: {'; '.join(task.fail_reasons) or 'no reason was recorded'}", task.fail_reasons
            )
        if task.status is Status.CANCELLED:
            raise TaskCancelled(f"{label} was cancelled at {task.task_state.cancel_time}")
        if task.status is Status.EXPIRED:
            raise TaskExpired(f"{label} had not succeeded by {task.task_state.expire_time}, its expire_time")
        if not task.successes:
            raise TaskNotFound(f"{label} has no result (any more)")
        return task

    def __repr__(self) -> str:
        return f"<TaskHandle {self.name!r} {self.key!r} created={self.created} updated={self.updated}>"
