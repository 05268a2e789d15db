"""The stored task as models: what `mesh.get` and `mesh.find` return. No I/O here.

A task is one document with a list of what each worker did with it (`task_state.worker_states`). That list is the truth; the
server derives `status` and `next_claim_time` from it (see `rules.py`).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from taskmesh.model.errors import IncompatibleCollection, InvalidKey, InvalidName, InvalidOption
from taskmesh.model.ids import shown
from taskmesh.model.labels import from_words
from taskmesh.model.option import TaskOption
from taskmesh.model.read_only import ReadOnly
from taskmesh.model.times import duration

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,100}\Z")
_MAX_KEY_BYTES = 512
_MISFITS_TOLD = 5
_WANTED = {
    "bool": "true or false",
    "datetime": "a time",
    "dict": "a document",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "model": "a document",
    "string": "a text",
    "tuple": "a list",
}
"""How pydantic's complaints about types are worded for people."""


class Status(StrEnum):
    """Where a task stands, at the moment of reading."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    FAIL = "FAIL"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen to the task by itself."""
        return self not in (Status.INIT, Status.RUNNING)


Standing = Literal["ready", "scheduled", "retrying"]
"""What INIT means: some worker may claim it now; it has not run and waits for its time; it ran and waits to be retried."""


class _Stored(ReadOnly):
    model_config = ConfigDict(arbitrary_types_allowed=True)


class LogLine(_Stored):
    """One line that a handler logged with `current_task().log`."""

    time: datetime
    message: str


class Progress(_Stored):
    """The newest progress that a handler reported. `fraction` goes from 0 to 1."""

    fraction: float
    message: str | None = None
    time: datetime


class WorkerState(_Stored):
    """One worker's entry in a task: one execution, named by its `running_id`."""

    running_id: str
    worker_id: str
    state: str
    start_time: datetime | None = None
    ping_expire_time: datetime | None = None
    success_time: datetime | None = None
    fail_time: datetime | None = None
    fail_reason: str | None = None
    fail_type: str | None = None
    """The type of the error that made it fail, if an error did."""
    fail_frame: str | None = None
    """Where that was raised: the end of the path, line and function of the innermost frame outside of libraries."""
    returns: Any = None
    logs: list[LogLine] = []
    dropped_log_cnt: int = 0
    """Older log lines that are no longer kept."""
    params_version: int = 0
    final: bool = False
    """Whether this FAIL is for good, whatever retries are left."""
    final_because: str | None = None
    """Why, if `retry_on` or `fail_on` says so."""

    @property
    def fail_message(self) -> str | None:
        """Why it failed, without the lines of code."""
        return None if self.fail_reason is None else self.fail_reason.partition('\n  File "')[0]


class Loss(_Stored):
    """An execution that was lost: its worker stopped pinging. The newest few are kept with the task."""

    running_id: str
    worker_id: str
    start_time: datetime | None = None
    ping_expire_time: datetime | None = None


class Leaving(_Stored):
    """An execution from before the task was restarted, or from before its worker was excluded, whose handler may be at work.

    It keeps its place until its worker says that the handler has ended, or its lease is over.
    """

    running_id: str
    worker_id: str
    ping_expire_time: datetime | None = None


class After(_Stored):
    """What a task waits for, or has waited for, by `_id` (`name:key`)."""

    ids: list[str] = []
    params: list[list[str]] = []
    """Pairs of a param and the `_id` of the task whose result it gets."""


class DependencyFailure(_Stored):
    """Why a task FAILed without having run: one of its dependencies did not end as SUCCESS."""

    id: str
    reason: str
    time: datetime


class Step(_Stored):
    """Something that an execution has recorded, and that no later one repeats."""

    kind: str
    """`step`, `sleep`, `wait`, `start` or `join`."""
    name: str
    """Its name; the second of one name and kind is `name#2`."""
    value: Any = None
    time: datetime | None = None
    worker_id: str | None = None
    attempt: int | None = None
    error: str | None = None
    """What a step raised that failed for good."""
    until: datetime | None = None
    """When a sleep or a wait is over."""


def _one_by_one(steps: Any) -> Any:
    """Return a record for each child that was started by itself: in the document many are one record, with all their names."""
    if not isinstance(steps, list):
        return steps
    found: list[Any] = []
    for step in steps:
        if isinstance(step, dict) and isinstance(step.get("names"), list):
            found += [{**step, "name": name} for name in step["names"]]
        else:
            found.append(step)
    return found


Steps = Annotated[list[Step], BeforeValidator(_one_by_one)]


class SuspendedFor(_Stored):
    """What a suspended task waits for."""

    kind: str
    """`sleep`, `wait` or `join`."""
    name: str
    until: datetime | None = None
    """When it stops waiting. None: never."""

    @property
    def sentence(self) -> str:
        """What it waits for, in words."""
        until = "" if self.until is None else f" until {self.until.isoformat(' ', 'seconds')}"
        if self.kind == "join":
            return f"waits for {self.name} that it has started{until}"
        return f"{'sleeps' if self.kind == 'sleep' else 'waits for the signal'} {self.name!r}{until}"


class Signal(_Stored):
    """A signal that no handler has consumed yet."""

    event: str
    id: str
    payload: Any = None
    time: datetime | None = None


class Stage(_Stored):
    """A stage of a task that went on in another queue (`Next`)."""

    queue: str
    params: dict[str, Any] | None = None
    worker_id: str
    running_id: str
    start_time: datetime | None = None
    end_time: datetime
    steps: Steps = []
    """What it had recorded."""


class Rounds(_Stored):
    """What a loop has done: its executions that ended well."""

    cnt: int
    start_time: datetime | None = None
    """Of the last one."""
    end_time: datetime
    worker_id: str


class Loops(_Stored):
    """How a task repeats without being published; see `TaskMesh.loop`."""

    per: str
    interval_ms: int | None = None
    singleton: bool = False

    @property
    def sentence(self) -> str:
        """How it runs, in words."""
        if self.interval_ms is None:
            return "as the singleton of the fleet"
        where = {"fleet": "once in the fleet", "worker": "in each worker", "host": "on each host"}.get(
            self.per, self.per
        )
        return f"again {duration(self.interval_ms)} after its last end, {where}"


class TaskState(_Stored):
    """What happened to a task so far."""

    create_time: datetime
    start_time: datetime | None = None
    expire_time: datetime | None = None
    cancel_time: datetime | None = None
    resume_time: datetime | None = None
    """Set by `Retry` and `Snooze`: no worker claims the task before."""
    suspended_for: SuspendedFor | None = None
    """What a suspended task waits for. None if it is not suspended."""
    timeout_cnt: int = 0
    """Executions lost in a row."""
    lost_cnt: int = 0
    """Executions lost altogether."""
    losses: list[Loss] = []
    dropped_fail_cnt: int = 0
    """FAIL entries no longer kept, since a document has to stay small. They still count."""
    conflict_cnt: int = 0
    """Executions in a row whose `transaction()` met a conflict and was aborted."""
    params_version: int = 0
    """How often the params were replaced. An entry has the version that its execution saw."""
    progress: Progress | None = None
    rounds: Rounds | None = None
    """For a loop: what ended well. Failures and lost executions are where those of any task are."""
    worker_states: list[WorkerState] = []
    leaving: list[Leaving] = []
    after: After | None = None
    home: str | None = None
    """For a dead letter: the queue that it came from, and returns to when it is retried."""
    stages: list[Stage] = []
    """What the task did before it went on in its present queue: see `Task.stages`."""
    flow: str | None = None
    """While its gate `flow` is shut: the flow that is not completely published yet."""
    waits_for: str | None = None
    """While its gate `dependencies` is shut: what happens when one of them fails (`fail`, `wait`, `run`)."""
    dependency_failure: DependencyFailure | None = None
    signals: list[Signal] = []
    """Signals that have come and were not consumed yet, the oldest first."""
    steps: Steps = []
    """All records, including those of waits that are not over; see `Task.steps`."""


class Task(_Stored):
    """A task when it was read.

    `params` is None unless they were requested. `extra` holds fields of others at the top level of the document.
    """

    name: str
    key: str
    queue: str
    status: Status
    standing: Standing | None = None
    """What INIT means for it, at the moment of reading. None for any other status, and for a task as its handler sees it."""
    params: dict[str, Any] | None = None
    task_option: TaskOption
    task_state: TaskState
    next_claim_time: datetime | None = None
    finish_time: datetime | None = None
    delete_time: datetime | None = None
    group: str | None = None
    tags: list[str] = []
    """Words by which it is found, set by `configure(tags=…)`."""
    needs: dict[str, Any] = {}
    """Labels that a worker must have to run it."""
    loop: Loops | None = None
    """How it repeats, if it is a loop or a singleton."""
    broadcast: bool = False
    """Whether each live worker that it names runs it."""
    extra: dict[str, Any] = Field(default_factory=dict)

    OWN_FIELDS: ClassVar[frozenset[str]] = frozenset(
        [
            "_id",
            "name",
            "key",
            "queue",
            "status",
            "params",
            "task_option",
            "task_state",
            "next_claim_time",
            "finish_time",
            "delete_time",
            "group",
            "tags",
            "needs",
            "settle_time",
            "pinned",
            "lane",
            "event",
            "record_event",
            "publish_id",
            "publish_number",
            "change_id",
            "change_ids",
            "bulk_id",
            "schema_version",
            "trace",
            "loop",
            "broadcast",
            "configuration",
            "publish_time",
        ]
    )
    """Top-level fields that belong to taskmesh; all others are the users' own."""

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Task:
        """Read a stored document. Raises `IncompatibleCollection` if it is not a task of ours."""
        own = {field: value for field, value in document.items() if field in cls.OWN_FIELDS}
        extra = {field: value for field, value in document.items() if field not in cls.OWN_FIELDS}
        if "needs" in own:
            own["needs"] = from_words(own["needs"] if isinstance(own["needs"], list) else ())
        if own.get("status") == "INIT" and "queue" not in own:
            own = _before_acceptance(own)
        state = own.get("task_state")
        # A reading puts it there, since users may have a top-level field of this name.
        standing = state.get("standing") if isinstance(state, dict) else None
        try:
            return cls.model_validate({**own, "standing": standing, "extra": extra})
        except ValidationError as error:
            raise no_task(document.get("_id"), _misfits(error)) from error
        except (ValueError, InvalidOption) as error:
            raise no_task(document.get("_id"), error) from error

    @classmethod
    def remains(cls, document: dict[str, Any]) -> Task:
        """Return what is known of a document that is no task of ours: its name and key, by its `_id`.

        Its status and its queue, if valid; all else is as in a new task.
        """
        name, _, key = str(document["_id"]).partition(":")
        status, queue = document.get("status"), document.get("queue")
        return cls(
            name=name,
            key=key,
            queue=queue if is_name(queue) else "default",
            status=Status(status) if status in list(Status) else Status.INIT,
            task_option=TaskOption(),
            task_state=TaskState(create_time=datetime.fromtimestamp(0, UTC)),
            extra={field: value for field, value in document.items() if field not in cls.OWN_FIELDS},
        )

    @property
    def steps(self) -> list[Step]:
        """What its executions have recorded, in order: steps, sleeps, waits. Not read by listings."""
        waits = self.task_state.suspended_for
        under_way = None if waits is None else (waits.kind, waits.name)
        return [step for step in self.task_state.steps if step.time is not None and (step.kind, step.name) != under_way]

    @property
    def stages(self) -> list[Stage]:
        """The stages before this one, in order: each ended with `Next`. The first one and the newest 99 are kept.

        The queue and the params of the first are those with which the task starts if it starts over: a publication changes
        them.
        """
        return self.task_state.stages

    @property
    def successes(self) -> list[WorkerState]:
        """The SUCCESS entries, the earliest first."""
        done = [entry for entry in self.task_state.worker_states if entry.state == "SUCCESS"]
        return sorted(done, key=lambda entry: (entry.success_time is None, entry.success_time))

    @property
    def fail_reasons(self) -> list[str]:
        """Why executions failed or were lost, one text each."""
        failed = [
            f"{entry.worker_id}: {entry.fail_reason}"
            for entry in self.task_state.worker_states
            if entry.state == "FAIL"
        ]
        lost = [
            f"{loss.worker_id}: lost: no ping until {loss.ping_expire_time} (the worker died, hung or was cut off)"
            for loss in self.task_state.losses
        ]
        failure = self.task_state.dependency_failure
        return failed + lost + ([failure.reason] if failure is not None else [])


def no_task(id_: Any, why: object = "a part of it is missing, or of a wrong type") -> IncompatibleCollection:
    """Return the error that says that this document is no task of ours."""
    return IncompatibleCollection(f"the document {id_!r} is not a taskmesh task: repair or delete it ({why})")


def _misfits(error: ValidationError) -> str:
    """Say in a line which fields a document lacks, and which are invalid."""
    told = []
    for found in error.errors(include_url=False, include_context=False):
        field = ".".join(map(str, found["loc"]))
        wanted = _WANTED.get(found["type"].partition("_")[0]) or found["msg"].removeprefix("Input should be ")
        missing = found["type"] == "missing"
        told.append(f"{field} is missing" if missing else f"{field} must be {wanted}, got {shown(found['input'])}")
    more = len(told) - _MISFITS_TOLD
    return "; ".join(told[:_MISFITS_TOLD]) + (f" and {more} more" if more > 0 else "")


def why_no_task(document: dict[str, Any]) -> IncompatibleCollection:
    """Return the error for a document that is no task of ours, with the first problem in reading it."""
    try:
        Task.from_document(document)
    except IncompatibleCollection as error:
        return error
    return no_task(document.get("_id"))


def _before_acceptance(inserted: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of a task that another language has inserted: the worker that accepts it says the rest.

    Raises `IncompatibleCollection` for what no worker ever accepts.
    """
    id_, name, key = (inserted.get(field) for field in ("_id", "name", "key"))
    if id_ != unchecked_id(name, key):
        raise no_task(id_, f"its _id must be name:key, of its name {shown(name)} and its key {shown(key)}")
    wanted, published = inserted.get("configuration"), inserted.get("publish_time")
    queue = wanted.get("queue", "default") if isinstance(wanted, dict) else "default"
    moment = getattr(published, "as_datetime", lambda: datetime.fromtimestamp(0, UTC))()
    return {**inserted, "queue": queue, "task_option": {}, "task_state": {"create_time": moment}}


def task_id(name: str, key: str) -> str:
    """Return the `_id` of a task, after checking its parts. Raises `InvalidName`, `InvalidKey`."""
    return unchecked_id(checked_name(name), checked_key(key))


def unchecked_id(name: Any, key: Any) -> str:
    """Return the `_id` of a task whose name and key have been checked."""
    return f"{name}:{key}"


def is_name(name: Any) -> bool:
    """Whether it is a valid name for a task."""
    return isinstance(name, str) and _NAME.match(name) is not None


def checked_name(name: str) -> str:
    """Return `name`, or raise `InvalidName`."""
    if not is_name(name):
        raise InvalidName(
            f"a task's name must be 1 to 100 characters of letters, digits, '_', '.' and '-', got {shown(name)}: rename it"
        )
    return name


def checked_key(key: str) -> str:
    """Return `key`, or raise `InvalidKey`."""
    if not isinstance(key, str):
        raise InvalidKey(f"key must be a str, got {type(key).__name__} {shown(key)}: pass str(…) of it")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidKey(
            f"the key {shown(key)} has half a surrogate pair and cannot be stored: clean it first"
        ) from None
    if not 1 <= size <= _MAX_KEY_BYTES or "\0" in key:
        begins = key if size <= 80 else key[:60] + "…"
        why = "has a NUL: take it out" if "\0" in key else f"has {size} bytes: use a shorter one or a hash of it"
        why = why if size else "is empty: use what the task works on, or a random text"
        raise InvalidKey(f"key must have 1 to {_MAX_KEY_BYTES} bytes and no NUL, but {begins!r} {why}")
    return key
