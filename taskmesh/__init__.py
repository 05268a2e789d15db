"""taskmesh: a task engine on MongoDB.

Its rooms, in reading order; each imports only those before it:

- `model`: what is stored, as types: option, configuration, task, schedule, worker, queue, event, errors. No I/O.
- `store`: every read and write on a task's way: `rules` (who may claim what when), publish, find, claim, renew, finish, settle.
- `client`: who publishes and waits: definition, params, publisher, handle, results, events, schedules, on one connection.
- `consumer`: a worker: it listens, scans, claims, executes, pings, finishes; `context` is what a handler sees.
- `admin`: people who look and act: listings, explain, doctor, errors, bulk actions, queues, the fleet, the audit.
- `integrations`: metrics for a monitoring system; AES for values; agents of pydantic-ai; a backend for Django's tasks.
- `mesh`: `TaskMesh`, the front door, which composes all of these.
- `operations`: what can be asked of it, once for all faces. `cli`, `web`: these. `embedded`: the bundled MongoDB.
"""

from typing import TYPE_CHECKING, Any

from taskmesh.client.batch import BatchDefinition
from taskmesh.client.definition import TaskDefinition
from taskmesh.client.flows import Flow
from taskmesh.client.handle import TaskHandle
from taskmesh.consumer.lifespan import Lifespan
from taskmesh.consumer.run.context import (
    BlockingTaskContext,
    TaskContext,
    current_batch,
    current_blocking_batch,
    current_blocking_task,
    current_task,
)
from taskmesh.mesh import TaskMesh
from taskmesh.model.codec import Codec, Encrypted
from taskmesh.model.data_change import ChangeEvent
from taskmesh.model.dependency import FromDependency
from taskmesh.model.errors import (
    CannotDecrypt,
    EmbeddedUnavailable,
    ExtraMissing,
    IncompatibleCollection,
    InvalidKey,
    InvalidName,
    InvalidOption,
    InvalidParams,
    LeaseLost,
    NotAReplicaSet,
    PayloadMissing,
    ProcessDied,
    QueueNotEmpty,
    Retry,
    Snooze,
    StepMismatch,
    TaskCancelled,
    TaskError,
    TaskExpired,
    TaskFailed,
    TaskFinished,
    TaskMeshError,
    TaskNotFound,
    TaskRunning,
    TaskSuspended,
    TaskTooLarge,
    TooManySignals,
    TransactionConflict,
    UnstorableValue,
    WorkerIdTaken,
)
from taskmesh.model.event import TaskEvent
from taskmesh.model.flow import FlowStatus, FlowTask
from taskmesh.model.option import TaskOption
from taskmesh.model.queue import FailurePause, Percentiles, QueueInfo, QueueLatency, QueueLimits
from taskmesh.model.schedule import ScheduleInfo, Tick
from taskmesh.model.stage import Next
from taskmesh.model.task import (
    LogLine,
    Progress,
    Signal,
    Stage,
    Status,
    Step,
    SuspendedFor,
    Task,
    TaskState,
    WorkerState,
)
from taskmesh.model.worker import LeaseLeft, WorkerInfo

if TYPE_CHECKING:
    from taskmesh.admin.audit import NotedAction
    from taskmesh.admin.bulk import BulkAction, BulkResult, UndoResult
    from taskmesh.admin.doctor import Finding
    from taskmesh.admin.error_groups import ErrorGroup, ErrorReport
    from taskmesh.admin.explain import Explanation, Gate, Waiting
    from taskmesh.admin.filters import TaskFilter
    from taskmesh.admin.stats import Stats
    from taskmesh.admin.what_if import LimitEffect, OptionEffect, ScheduleEffect
    from taskmesh.consumer.hooks import Ending
    from taskmesh.consumer.worker import Consumer
    from taskmesh.integrations.encryption import AESCodec

__all__ = [
    "AESCodec",
    "BatchDefinition",
    "BlockingTaskContext",
    "BulkAction",
    "BulkResult",
    "CannotDecrypt",
    "ChangeEvent",
    "Codec",
    "Consumer",
    "EmbeddedUnavailable",
    "Encrypted",
    "Ending",
    "ErrorGroup",
    "ErrorReport",
    "Explanation",
    "ExtraMissing",
    "FailurePause",
    "Finding",
    "Flow",
    "FlowStatus",
    "FlowTask",
    "FromDependency",
    "Gate",
    "IncompatibleCollection",
    "InvalidKey",
    "InvalidName",
    "InvalidOption",
    "InvalidParams",
    "LeaseLeft",
    "LeaseLost",
    "Lifespan",
    "LimitEffect",
    "LogLine",
    "Next",
    "NotAReplicaSet",
    "NotedAction",
    "OptionEffect",
    "PayloadMissing",
    "Percentiles",
    "ProcessDied",
    "Progress",
    "QueueInfo",
    "QueueLatency",
    "QueueLimits",
    "QueueNotEmpty",
    "Retry",
    "ScheduleEffect",
    "ScheduleInfo",
    "Signal",
    "Snooze",
    "Stage",
    "Stats",
    "Status",
    "Step",
    "StepMismatch",
    "SuspendedFor",
    "Task",
    "TaskCancelled",
    "TaskContext",
    "TaskDefinition",
    "TaskError",
    "TaskEvent",
    "TaskExpired",
    "TaskFailed",
    "TaskFilter",
    "TaskFinished",
    "TaskHandle",
    "TaskMesh",
    "TaskMeshError",
    "TaskNotFound",
    "TaskOption",
    "TaskRunning",
    "TaskState",
    "TaskSuspended",
    "TaskTooLarge",
    "Tick",
    "TooManySignals",
    "TransactionConflict",
    "UndoResult",
    "UnstorableValue",
    "Waiting",
    "WorkerIdTaken",
    "WorkerInfo",
    "WorkerState",
    "current_batch",
    "current_blocking_batch",
    "current_blocking_task",
    "current_task",
]


_LATER = {
    "AESCodec": "taskmesh.integrations.encryption",
    "BulkAction": "taskmesh.admin.bulk",
    "BulkResult": "taskmesh.admin.bulk",
    "Consumer": "taskmesh.consumer.worker",
    "Ending": "taskmesh.consumer.hooks",
    "ErrorGroup": "taskmesh.admin.error_groups",
    "ErrorReport": "taskmesh.admin.error_groups",
    "Explanation": "taskmesh.admin.explain",
    "Finding": "taskmesh.admin.doctor",
    "Gate": "taskmesh.admin.explain",
    "LimitEffect": "taskmesh.admin.what_if",
    "NotedAction": "taskmesh.admin.audit",
    "OptionEffect": "taskmesh.admin.what_if",
    "ScheduleEffect": "taskmesh.admin.what_if",
    "Stats": "taskmesh.admin.stats",
    "TaskFilter": "taskmesh.admin.filters",
    "UndoResult": "taskmesh.admin.bulk",
    "Waiting": "taskmesh.admin.explain",
}
"""Names of the rooms of people and of workers, which are imported when they are asked for: whoever publishes needs neither."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'taskmesh' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 — `taskmesh.import_module` is no name of ours

    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return __all__
