"""`TaskMesh`: the front door. It knows the tasks and makes the consumers; all else is in the parts that it is made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from taskmesh.admin.bulk import BulkActions
from taskmesh.admin.fleet import FleetActions
from taskmesh.client.definition import Configuration, Run, TaskDefinition, checked_queue
from taskmesh.client.schedules import Scheduling
from taskmesh.client.tasks import TaskActions
from taskmesh.consumer import Consumer
from taskmesh.consumer.executor import AfterHook, BeforeHook
from taskmesh.consumer.worker import ClaimHook
from taskmesh.model.errors import InvalidOption
from taskmesh.model.option import TaskOption

P = ParamSpec("P")
R = TypeVar("R")
_DEFAULT_OPTION = TaskOption()


class TaskSettings(TypedDict, total=False):
    """What `mesh.task(…)` can be told about a task."""

    name: str | None
    queue: str
    option: TaskOption | None
    run: Run | None
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


class TaskMesh(Scheduling, TaskActions, BulkActions, FleetActions):
    """A set of task definitions on a MongoDB collection.

    `client`: a MongoDB URI, a `pymongo.AsyncMongoClient` or a `motor.motor_asyncio.AsyncIOMotorClient`, which all win over
    `TASKMESH_URI`. None: the URI in `TASKMESH_URI`; without one, the embedded MongoDB of this directory (extra `embedded`).
    """

    def __init__(self, client: Any = None, *, database: str = "taskmesh", collection: str = "tasks") -> None:
        super().__init__(client, database=database, collection=collection)
        self._hooks: dict[str, Any] = {}

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
        option: TaskOption | None = _DEFAULT_OPTION,
        run: Run | None = None,
        projection: Sequence[str] | None = None,
        cron: str | None = None,
        interval_ms: int | None = None,
        timezone: str = "UTC",
    ) -> Any:
        """Define a task: a decorator, with or without arguments.

        `name`: the function's, by default. `queue`: `"default"`. `option`: a `TaskOption`. `run`: `"async"`, `"thread"` (the
        default for plain functions) or `"process"`. `projection`: load only these params at execution; the others keep
        their defaults. `cron`, `interval_ms`, `timezone`: run it periodically, with the defaults of its params; `every` can
        say more. Raises `InvalidOption`.
        """
        if fn is not None and not callable(fn):
            raise InvalidOption(
                f"task must be given a function, got {fn!r}: write @mesh.task(name={fn!r}) to name a task"
            )
        if option is not None and not isinstance(option, TaskOption):
            raise InvalidOption(f"option is a TaskOption, not {option!r}")

        def define(function: Any) -> TaskDefinition[Any, Any]:
            configuration = Configuration(queue=checked_queue(queue), option=option or _DEFAULT_OPTION)
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

    def hooks(
        self, *, on_claim: ClaimHook | None = None, before: BeforeHook | None = None, after: AfterHook | None = None
    ) -> None:
        """Set the hooks of all consumers of this mesh that are made from now on and are given none: so of `taskmesh worker` too.

        What each does stands at `consumer`. Raises `InvalidOption` for what cannot be called.
        """
        given = {"on_claim": on_claim, "before": before, "after": after}
        if wrong := [name for name, hook in given.items() if hook is not None and not callable(hook)]:
            raise InvalidOption(f"the hook {wrong[0]} is a function, not {given[wrong[0]]!r}")
        self._hooks = {name: hook for name, hook in given.items() if hook is not None}

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
        `before(task)`, `after(task, ending)`. Plain or async; those of `mesh.hooks` unless given here. `observer`: who measures
        it, like `metrics.WorkerMetrics`.
        """
        consumer = Consumer(
            self,
            worker_id=worker_id,
            concurrency=concurrency,
            names=names,
            queues=queues,
            listen=listen,
            **{**self._hooks, **hooks},
        )
        self._consumers.add(consumer)
        return consumer
