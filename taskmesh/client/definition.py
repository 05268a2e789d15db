"""Task definitions: what `@mesh.task` makes of a function."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar, Unpack, cast

from taskmesh.client.handle import TaskHandle
from taskmesh.client.params import Params
from taskmesh.client.publisher import Publisher
from taskmesh.client.returns import Returns
from taskmesh.model.configuration import Configuration, PublishSettings
from taskmesh.model.dependency import After
from taskmesh.model.error_policy import NO_POLICY, ErrorPolicy, ErrorTypes
from taskmesh.model.errors import InvalidOption, InvalidParams
from taskmesh.model.labels import words
from taskmesh.model.loop import Loop, check_published
from taskmesh.model.option import TaskOption
from taskmesh.model.queue import checked_queue
from taskmesh.model.task import checked_key, checked_name

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
Run = Literal["async", "thread", "process"]
_LONGEST_SCHEMA = 100_000


class TaskDefinition(Generic[P, R]):
    """A kind of task: a name, a handler, and how to publish one. Calling it calls the handler's function."""

    batch = 0
    """How many tasks one call of the handler may get. 0: each call is for one task."""
    batch_wait_ms = 0
    """How long, in ms, the first of them waits for others."""
    found = True
    """Its handler is here."""
    encrypted = False
    """Its publisher knows its codec, and need not be told."""

    def __init__(
        self,
        publisher: Publisher,
        fn: Callable[P, Awaitable[R]] | Callable[P, R],
        name: str,
        configuration: Configuration,
        run: Run | None,
        projection: Sequence[str] | None = None,
        errors: ErrorPolicy = NO_POLICY,
        *,
        loop: Loop | None = None,
        broadcast: bool = False,
    ) -> None:
        """`loop`: workers run it again and again without its being published.

        `broadcast`: each live worker runs what is published.
        """
        self.publisher = publisher
        self.fn = fn
        self.name = checked_name(name)
        self.configuration = configuration
        self.run: Run = run or ("async" if is_async(fn) else "thread")
        if self.run not in ("async", "thread", "process"):
            raise InvalidOption(f"run must be 'async', 'thread' or 'process', got {run!r}")
        if (self.run == "async") != is_async(fn):
            plain = "a plain function", "'thread' or 'process'"
            kind, fitting = ("an async function", "'async'") if is_async(fn) else plain
            raise InvalidOption(f"task {name!r}: run={self.run!r} cannot run {kind}: leave run out, or use {fitting}")
        self.params = Params(name, fn)
        self.returns = Returns(f"the result of task {name!r}", fn)
        self.errors = errors
        self.projection = None if projection is None else self.params.checked_projection(projection)
        self.loop = loop
        self.broadcast = broadcast
        if loop is not None:
            self._check_needs_no_params()
        self._on_queue: dict[str, TaskDefinition[..., Any]] = {}
        self.__doc__ = fn.__doc__
        self.__name__ = getattr(fn, "__name__", name)
        self.__wrapped__ = fn

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the handler's function, here and now."""
        return self.fn(*args, **kwargs)

    def on_queue(
        self,
        queue: str,
        *,
        run: Run | None = None,
        retry_on: ErrorTypes | None = None,
        fail_on: ErrorTypes | None = None,
    ) -> Callable[[F], F]:
        """Give the tasks of this name in `queue` a handler of its own: a decorator. See `Next`.

            @video.on_queue("encode")
            async def encode(path: str) -> str: ...

        `run`, `retry_on`, `fail_on`: as in `mesh.task`; if neither of the last two is given, the task's own apply here, too.
        Raises `InvalidOption` for an invalid queue, or one that has a handler already.
        """
        checked_queue(queue)
        told = retry_on is not None or fail_on is not None
        errors = ErrorPolicy.declared(retry_on, fail_on) if told else self.errors

        def add(fn: F) -> F:
            if queue in self._on_queue:
                raise InvalidOption(
                    f"task {self.name!r} has a handler for queue {queue!r} already: give each queue one"
                )
            settings = self.configuration.changed(queue=queue)
            handler: TaskDefinition[..., Any] = TaskDefinition(
                self.publisher, fn, self.name, settings, run, errors=errors
            )
            self._on_queue[queue] = handler
            self.returns.by_queue[queue] = handler.returns
            return fn

        return add

    def on(self, queue: str) -> TaskDefinition[..., Any]:
        """Return the definition that runs the tasks of this name in `queue`: the one from `on_queue`, or this."""
        return self._on_queue.get(queue, self)

    @property
    def queues(self) -> list[str]:
        """The queue in which its tasks start, and the queues with handlers of their own."""
        return list(dict.fromkeys([self.queue, *self._on_queue]))

    @property
    def queue(self) -> str:
        """The queue in which its tasks start."""
        return self.configuration.queue

    @property
    def option(self) -> TaskOption:
        """How its tasks are run."""
        return self.configuration.option

    def configure(self, **configuration: Unpack[PublishSettings]) -> TaskDefinition[P, R]:
        """Return the same definition with other settings.

        Every field of `TaskOption`, and: `queue`; `group`; `tags` (words to find it by); `fields` (your own, at the top of the
        document: for `Task.extra`, hooks, `current_task().extra` and filters of `on_claim`); `start_time` (not before),
        `expire_time` (not after: what has not started by then becomes EXPIRED), `delay_ms`; `session` (publish inside the
        caller's transaction); `after` (what a new task waits for: handles or `(name, key)` pairs, or a dict that says which
        param gets whose result) and `on_dependency_failure` (`"fail"`, `"wait"`, `"run"`: if one of them ends in any other
        way than SUCCESS); `sequence_key` (tasks of one key in one queue run one after the other, in the order of publication) and
        `on_sequence_failure` (`"continue"`, or `"block"`: nothing behind it runs until it is retried or deleted); and for a
        key that exists already `update_existing_params`, `not_update_running`, `clean_success`, `clean_failed`, `run_again`,
        `replace_running`, `debounce_ms` with `debounce_max_ms`, `throttle_ms`. Raises `InvalidOption`.
        """
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, configuration=self.configuration.changed(**configuration))
        return changed

    def to_store(self, params: Mapping[str, Any], after: After | None = None) -> tuple[dict[str, Any], int]:
        """Return checked params in MongoDB's types, and their size in bytes. Raises `InvalidParams`, `TaskTooLarge`.

        `after`: what the task waits for, whose results are params, too. None: not specified.
        """
        check_published(self.name, is_loop=self.loop is not None)
        return self.on(self.queue).params.to_store(params, after, self.publisher.payloads.most_bytes)

    def _check_needs_no_params(self) -> None:
        try:
            self.params.to_store({})
        except InvalidParams as error:
            raise InvalidOption(
                f"task {self.name!r} is run without params, so its function may take none but those with defaults ({error})"
            ) from error

    async def publish(self, key: str, /, *args: P.args, **params: P.kwargs) -> TaskHandle[R]:
        """Publish one task under `key`, once: an existing task with that key is left as it is, unless configured otherwise.

        The key is taken until the finished task's retention is over; after that it is published afresh. Raises `InvalidKey`,
        `InvalidParams`, `TaskTooLarge`, `TaskRunning`; then nothing is written.
        """
        named = self.params.named(args, params)
        return cast("TaskHandle[R]", (await self.publisher.publish_all(self, {checked_key(key): named}))[0])

    async def publish_many(self, params_by_key: Mapping[str, Mapping[str, Any]], /) -> list[TaskHandle[R]]:
        """Publish many tasks, one or two thousand per round trip; handles in the order given.

        All are checked before any is written.
        """
        return cast("list[TaskHandle[R]]", await self.publisher.publish_all(self, params_by_key))

    def publish_sync(self, key: str, /, *args: P.args, **params: P.kwargs) -> TaskHandle[R]:
        """Publish from code without an event loop: threads, WSGI apps, after a fork.

        A `session` has to belong to a blocking client. Raises `RuntimeError` if called inside a running loop, and as `publish`
        does.
        """
        named = self.params.named(args, params)
        return cast("TaskHandle[R]", self.publisher.publish_all_sync(self, {checked_key(key): named})[0])

    def handle(self, key: str) -> TaskHandle[R]:
        """Return a handle to a task that was published before, by this process or another: to wait for its result.

        The database is not asked. `created` and `updated` are False. Raises `InvalidKey`.
        """
        return self.publisher.handle(self.name, key)

    def described(self) -> dict[str, Any]:
        """Return what a worker registers about the task, for publishers without its code."""
        schema = self.params.json_schema()
        text = None if schema is None else json.dumps(schema, sort_keys=True)
        known = text is not None and len(text) <= _LONGEST_SCHEMA
        described: dict[str, Any] = {
            "queue": self.queue,
            "option": self.option.stored(),
            "schema": text if known else None,
        }
        needs = self.configuration.needs
        kind = {"loop": self.loop.stored()} if self.loop else {"broadcast": True} if self.broadcast else {}
        if self.publisher.payloads.codec_of(self.name) is not None:
            described["encrypted"] = True
        if secret := self.params.secrets():
            described["secret"] = secret
        return described | ({"needs": words(needs)} if needs else {}) | kind

    def __repr__(self) -> str:
        return f"<TaskDefinition {self.name!r} queue={self.queue!r} run={self.run!r}>"


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling `fn` returns a coroutine."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004  # the method itself is asked
