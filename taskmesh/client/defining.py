"""Defining tasks on a mesh: what publishers publish, what workers run by themselves, and what each worker runs once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from taskmesh.client.batch import DEFAULT_WAIT_MS, BatchDefinition
from taskmesh.client.connection import Connection
from taskmesh.client.data_changes import READER_OPTION, READER_QUEUE, DataChanges, reader_name
from taskmesh.client.definition import Run, TaskDefinition
from taskmesh.client.publisher import Publisher
from taskmesh.model.codec import Codec, checked_codec
from taskmesh.model.configuration import Configuration, checked_needs
from taskmesh.model.data_change import FullDocument, OnLost, checked_watched
from taskmesh.model.error_policy import ErrorPolicy, ErrorTypes
from taskmesh.model.errors import InvalidName, InvalidOption
from taskmesh.model.loop import Loop, Per, checked_loop, option_of_broadcast, option_of_loop
from taskmesh.model.option import TaskOption
from taskmesh.model.queue import checked_queue

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E")
DEFAULT_OPTION = TaskOption()


class Settings(TypedDict, total=False):
    """The settings of every kind of task; see `TaskMesh.task`."""

    name: str | None
    queue: str
    option: TaskOption | None
    needs: Mapping[str, Any] | None
    run: Run | None
    retry_on: ErrorTypes | None
    fail_on: ErrorTypes | None
    codec: Codec | None


class TaskSettings(Settings, total=False):
    """The settings of `mesh.task(…)`."""

    projection: Sequence[str] | None
    cron: str | None
    interval_ms: int | None
    timezone: str


class Decorator(Protocol):
    """What `mesh.task(…)` returns: it keeps the signature of what it decorates."""

    @overload
    def __call__(self, fn: Callable[P, Awaitable[R]], /) -> TaskDefinition[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> TaskDefinition[P, R]: ...


class ChangeDecorator(Protocol):
    """What `mesh.on_change(…)` returns: it decorates a handler that takes the change event."""

    @overload
    def __call__(self, fn: Callable[[E], Awaitable[R]], /) -> TaskDefinition[[E], R]: ...
    @overload
    def __call__(self, fn: Callable[[E], R], /) -> TaskDefinition[[E], R]: ...


class Defining:
    """The definitions of one mesh, and the decorators that add to them."""

    publisher: Publisher
    connection: Connection

    def __init__(self) -> None:
        self.definitions: dict[str, TaskDefinition[Any, Any]] = {}
        """The tasks that are defined on this mesh, by name."""
        self.data_changes: dict[str, DataChanges] = {}
        """The collections whose changes become tasks, by the names of the singletons that read them."""

    @overload
    def loop(
        self, fn: Callable[P, Awaitable[R]], *, interval_ms: int, per: Per = "fleet", **settings: Unpack[Settings]
    ) -> TaskDefinition[P, R]: ...
    @overload
    def loop(
        self, fn: Callable[P, R], *, interval_ms: int, per: Per = "fleet", **settings: Unpack[Settings]
    ) -> TaskDefinition[P, R]: ...
    @overload
    def loop(
        self, fn: None = None, *, interval_ms: int, per: Per = "fleet", **settings: Unpack[Settings]
    ) -> Decorator: ...
    def loop(self, fn: Any = None, *, interval_ms: Any, per: Any = "fleet", **settings: Any) -> Any:
        """Define a function that workers run again and again: a decorator, with or without arguments. It is not published.

        It runs again `interval_ms` after its last end, in milliseconds; the first time when a worker first declares it. `per`:
        once in the fleet (`"fleet"`), in each worker (`"worker"`) or on each host (`"host"`, by the worker's label of that
        name). A failure is logged and kept, and the function runs again `interval_ms` later, or after
        `unexpected_retry_delay_ms` if that is sooner; neither failures nor lost workers ever end it. What it returns is not
        kept. It occupies no slot of its worker's `concurrency`.

        `settings`: as for `task`. Raises `InvalidOption`.
        """
        return self._definer("loop", fn, settings, loop=checked_loop(interval_ms, per))

    @overload
    def singleton(self, fn: Callable[P, Awaitable[R]], **settings: Unpack[Settings]) -> TaskDefinition[P, R]: ...
    @overload
    def singleton(self, fn: Callable[P, R], **settings: Unpack[Settings]) -> TaskDefinition[P, R]: ...
    @overload
    def singleton(self, fn: None = None, **settings: Unpack[Settings]) -> Decorator: ...
    def singleton(self, fn: Any = None, **settings: Any) -> Any:
        """Define a function of which exactly one live instance runs in the fleet: a decorator, with or without arguments.

        Workers start it by themselves. If its worker dies, hangs or is cut off, another one takes over when its lease has ended
        (`worker_timeout_ms`). If it returns or raises, it is started again after `unexpected_retry_delay_ms`. A worker that is
        stopped gracefully stops it at once (an async function is cancelled; a plain one should check
        `current_task().cancelled`), and another worker starts it. It occupies no slot of its worker's `concurrency`.

        `settings`: as for `task`. Raises `InvalidOption`.
        """
        return self._definer("singleton", fn, settings, loop=Loop())

    @overload
    def broadcast(self, fn: Callable[P, Awaitable[R]], **settings: Unpack[Settings]) -> TaskDefinition[P, R]: ...
    @overload
    def broadcast(self, fn: Callable[P, R], **settings: Unpack[Settings]) -> TaskDefinition[P, R]: ...
    @overload
    def broadcast(self, fn: None = None, **settings: Unpack[Settings]) -> Decorator: ...
    def broadcast(self, fn: Any = None, **settings: Any) -> Any:
        """Define a task that each live worker runs once whenever it is published: a decorator, with or without arguments.

        It is for the workers that are live when it is published, know the task, serve its queue and may run it;
        `specific_worker_ids` of the published task names them. A worker that joins later does not run it; one that is gone
        (stopped, or without a heartbeat for eight seconds) is not waited for. The task is SUCCESS when all remaining workers
        have run it; published while there is none, it is EXPIRED at once.

        `settings`: as for `task`. A failure delays only its own worker. Raises `InvalidOption`.
        """
        return self._definer("broadcast", fn, settings, broadcast=True)

    def on_change(
        self,
        collection: str,
        pipeline: Sequence[Mapping[str, Any]] = (),
        *,
        full_document: FullDocument = "updateLookup",
        on_lost: OnLost = "stop",
        **settings: Unpack[Settings],
    ) -> ChangeDecorator:
        """Define a task for the changes of a collection, each of which becomes exactly one task: a decorator of its handler.

        `collection`: `"orders"` in the mesh's database, or with its database `"shop.orders"`. The handler takes one parameter,
        a `ChangeEvent`. `pipeline`: which changes, and what of them: stages `$match`, `$project`, `$addFields`, `$set`,
        `$unset`, `$redact` over MongoDB's change events, whose `_id` they must not change. `full_document`: for updates, too,
        read the document (`"updateLookup"`), or not (`"default"`), or use the collection's post-image (`"whenAvailable"`).

        A singleton, `<name>.reader` in the queue `changes`, reads the changes from the moment it first runs; its position is
        stored in the transaction in which the tasks are published. `on_lost`: what happens if it was away for longer than the
        oplog reaches back: `"stop"`, reported by the doctor and the log until that is changed, or `"skip"` what is lost, and
        report it.

        `settings`: as for `task`. Raises `InvalidOption`; errors in the pipeline that only the server can detect are raised
        when a worker starts.
        """
        watched = checked_watched(collection, pipeline, full_document, on_lost)
        definer = self._definer("on_change", None, settings)

        def define(function: Any) -> TaskDefinition[Any, Any]:
            checked_function("on_change", function)
            definition: TaskDefinition[Any, Any] = definer(function)
            changes = DataChanges(self.connection, definition, watched)
            name = reader_name(definition.name)
            self._define(changes.read, name=name, queue=READER_QUEUE, option=READER_OPTION, loop=Loop())
            self.data_changes[name] = changes
            return definition

        return define

    def _definer(self, what: str, fn: Any, settings: Mapping[str, Any], **kind: Any) -> Any:
        """Return the definition of `fn`; without `fn`, a decorator that does."""
        if unknown := sorted(set(settings) - Settings.__annotations__.keys()):
            known = ", ".join(Settings.__annotations__)
            raise InvalidOption(f"mesh.{what} got {unknown[0]}={settings[unknown[0]]!r}; it takes: {known}")
        checked_function(what, fn)
        checked_option(settings.get("option"))

        def define(function: Any) -> TaskDefinition[Any, Any]:
            return self._define(function, **settings, **kind)

        return define if fn is None else define(fn)

    def _define(
        self,
        fn: Any,
        *,
        name: str | None = None,
        queue: str = "default",
        option: TaskOption | None = None,
        needs: Mapping[str, Any] | None = None,
        run: Run | None = None,
        retry_on: ErrorTypes | None = None,
        fail_on: ErrorTypes | None = None,
        codec: Codec | None = None,
        projection: Sequence[str] | None = None,
        batch: int | None = None,
        batch_wait_ms: int | None = None,
        loop: Loop | None = None,
        broadcast: bool = False,
    ) -> TaskDefinition[Any, Any]:
        """Add a definition of any kind, and return it. Raises `InvalidOption`."""
        name = name_of(fn) if name is None else name
        option = option or DEFAULT_OPTION
        codec = checked_codec(codec)
        errors = ErrorPolicy.declared(retry_on, fail_on)
        if loop is not None:
            option = option_of_loop(name, option)
            if retry_on is not None or fail_on is not None:
                raise InvalidOption(
                    f"task {name!r}: no error makes a loop or a singleton FAIL for good: leave out retry_on and fail_on"
                )
        elif broadcast:
            option = option_of_broadcast(name, option)
        configuration = Configuration(queue=checked_queue(queue), option=option, needs=checked_needs(needs))
        definition: TaskDefinition[Any, Any]
        if batch is None:
            definition = TaskDefinition(
                self.publisher, fn, name, configuration, run, projection, errors, loop=loop, broadcast=broadcast
            )
        else:
            wait_ms = DEFAULT_WAIT_MS if batch_wait_ms is None else batch_wait_ms
            definition = BatchDefinition(self.publisher, fn, name, configuration, run, errors, batch, wait_ms)
        if definition.name in self.definitions:
            raise InvalidOption(f"a task {definition.name!r} is defined already: give one of them another name")
        self.definitions[definition.name] = definition
        if codec is not None:
            self.publisher.payloads.set_codec(definition.name, codec)
        return definition


def checked_function(what: str, fn: Any) -> None:
    """Raise `InvalidOption` for what is not a function. None is accepted: the function follows."""
    if fn is not None and not callable(fn):
        raise InvalidOption(
            f"{what} must be given a function, got {fn!r}: write @mesh.{what}(name={fn!r}) to name a task"
        )


def name_of(fn: Any) -> str:
    """Return the name of a function. Raises `InvalidName` if it has none, like a `functools.partial`."""
    name: str | None = getattr(fn, "__name__", None)
    if name is None:
        raise InvalidName(f"{fn!r} has no name that the task could have: give it one by name=…")
    return name


def checked_option(option: Any) -> None:
    """Raise `InvalidOption` for what is not an option."""
    if option is not None and not isinstance(option, TaskOption):
        raise InvalidOption(f"option must be a TaskOption, got {option!r}")
