"""Every error taskmesh raises on purpose.

    TaskMeshError
    ├── InvalidName, InvalidKey, InvalidParams, InvalidOption     what was asked for cannot be stored
    ├── TaskTooLarge, TooManySignals                              ... nor can so much of it
    ├── UnstorableValue                                           ... nor can what a function returned
    ├── TaskNotFound, TaskRunning, TaskFinished                   the task is not there, is busy, or is done
    ├── QueueNotEmpty                                             the queue has unfinished tasks
    ├── StepMismatch                                              a record was made by another step
    ├── CannotDecrypt                                             a value is encrypted with a key that is not here
    ├── PayloadMissing                                            a value that is stored apart is not there
    ├── TaskError, TaskCancelled, TaskExpired                     how a task ended, raised by result()
    ├── LeaseLost                                                 this execution no longer holds its task
    ├── ProcessDied                                               the process of a handler is gone
    ├── WorkerIdTaken                                             another live consumer has this worker_id
    ├── NotAReplicaSet, IncompatibleCollection, EmbeddedUnavailable   the database will not do
    └── ExtraMissing                                              packages of an extra are not installed

Each message says what was wrong, with the value, and what to do. `TaskFailed`, `Retry` and `Snooze` are no
errors of ours: a handler raises them to say how its execution ends. `TransactionConflict` is the `Snooze` that
`transaction()` raises.
"""

from __future__ import annotations


class TaskMeshError(Exception):
    """The root of all errors that taskmesh raises on purpose."""


class InvalidName(TaskMeshError):
    """A task name that is not 1–100 characters of letters, digits, `_`, `.`, `-`; a database name that MongoDB refuses."""


class InvalidKey(TaskMeshError):
    """A key that is not 1–512 bytes of UTF-8 text without NUL."""


class InvalidParams(TaskMeshError):
    """Params that do not fit the handler's signature, or that MongoDB cannot store."""


class InvalidOption(TaskMeshError):
    """A `TaskOption` field or a setting of `configure` that is unknown or out of range."""


class TaskTooLarge(TaskMeshError):
    """A task whose document would come near MongoDB's limit of 16 MB."""


class UnstorableValue(TaskMeshError):
    """A value that a handler or a step returned, and that MongoDB cannot store, or that does not fit the return annotation.

    If it ends a handler, the task FAILs for good: repeating the work would be useless.
    """


class TaskNotFound(TaskMeshError):
    """No task of this name and key: never published, deleted, or past its retention."""


class TaskRunning(TaskMeshError):
    """The task is running, and the operation must not disturb a running task."""


class QueueNotEmpty(TaskMeshError):
    """A queue whose settings were to be removed while there are unfinished tasks in it."""


class TaskFinished(TaskMeshError):
    """The task, or the flow, is finished, and the operation needs one that is not."""


class TooManySignals(TaskMeshError):
    """The task has as many unconsumed signals as are kept: 1,000, or 1 MB of them together."""


class StepMismatch(TaskMeshError):
    """A step whose record was made by another function or with other arguments, or that shares its name with one under way."""


class CannotDecrypt(TaskMeshError):
    """A value is encrypted with a key that this process does not have, or not under that id. `key_id` names it.

    An execution that meets it is put off, uncharged: a worker that has the key runs the task.
    """

    def __init__(self, message: str, key_id: str = "") -> None:
        super().__init__(message)
        self.key_id = key_id


class PayloadMissing(TaskMeshError):
    """A separately stored value is missing: the task was changed a moment ago, or somebody has removed it.

    An execution that meets it is put off, uncharged.
    """


class TaskError(TaskMeshError):
    """The task ended as FAIL. `reasons` says why, with one line or traceback for each failed execution."""

    def __init__(self, message: str, reasons: list[str] | None = None) -> None:
        super().__init__(message)
        self.reasons = reasons or []


class TaskCancelled(TaskMeshError):
    """The task was cancelled before it could finish."""


class TaskExpired(TaskMeshError):
    """The task had not succeeded by its `expire_time`, so nobody may start it any more."""


class LeaseLost(TaskMeshError):
    """This execution no longer holds its task: its lease ran out, or the task was cancelled or deleted.

    Nothing that it writes through taskmesh counts any more.
    """


class ProcessDied(TaskMeshError):
    """The process of a handler ended before the handler did. The message names its exit code or signal."""


class WorkerIdTaken(TaskMeshError):
    """A live consumer is registered under this `worker_id`; two must never act as one."""


class ExtraMissing(TaskMeshError, ImportError):
    """Packages of an extra are not installed. The message contains the command that installs them."""


class NotAReplicaSet(TaskMeshError):
    """The server is a standalone `mongod`: no change streams, no transactions, no majority writes."""


class IncompatibleCollection(TaskMeshError):
    """The collection holds data of a schema version that this release does not know. Nothing was touched."""


class EmbeddedUnavailable(TaskMeshError):
    """The embedded MongoDB cannot be started here; the message says what is missing."""


class TaskFailed(Exception):
    """Raise this in a handler: the task FAILs for good, whatever retries are left."""


class Retry(Exception):
    """Raise this in a handler: try again after exactly `delay_ms`, on any worker. Counts as a failure."""

    def __init__(self, reason: str = "the handler asked for a retry", *, delay_ms: int = 0) -> None:
        super().__init__(reason)
        self.delay_ms = _checked_delay(delay_ms)


class Snooze(Exception):
    """Raise this in a handler: run again after exactly `delay_ms`, on any worker. Nothing is counted.

    So nothing would end a task that snoozes for no time at all: less than `SHORTEST_SNOOZE_MS` counts as that.
    """

    def __init__(self, reason: str = "the handler snoozed", *, delay_ms: int = 1_000) -> None:
        super().__init__(reason)
        self.delay_ms = _checked_delay(delay_ms)


class TaskSuspended(BaseException):
    """Raised in a handler by a sleep or a wait: the task is suspended until what it waits for has happened. Do not catch it.

    The handler unwinds (`finally` runs), and is called again from its first line when the time has come. Catching this changes
    nothing: every further call of the task's context raises it again, and what the handler returns or raises is ignored.
    """

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name
        super().__init__(
            f"the task is put aside until the {kind} {name!r} is over, and its handler is called again then: let this exception "
            "pass; catching it changes nothing"
        )


class TransactionConflict(Snooze):
    """Raised by `transaction()`: the server aborted it, in favour of what others wrote. Do not catch it: nothing is counted.

    The execution ends like one that snoozes, for a short random time. The hundredth in a row FAILs.
    """


SHORTEST_SNOOZE_MS = 100
MAX_DURATION_MS = 10 * 366 * 86_400_000
"""The longest duration that can be set: ten years."""


def delay_of(error: Retry | Snooze) -> int:
    """Return how long a task has to wait, after the limits. Raises `InvalidOption`: an attribute can be set to anything."""
    delay_ms = _checked_delay(getattr(error, "delay_ms", None))
    return max(delay_ms, SHORTEST_SNOOZE_MS) if isinstance(error, Snooze) else delay_ms


def _checked_delay(delay_ms: object) -> int:
    if isinstance(delay_ms, bool) or not isinstance(delay_ms, int) or not 0 <= delay_ms <= MAX_DURATION_MS:
        raise InvalidOption(
            f"delay_ms must be a whole number of milliseconds from 0 to {MAX_DURATION_MS} (ten years), got {delay_ms!r:.100}"
        )
    return int(delay_ms)
