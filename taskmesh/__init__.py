"""taskmesh: a task engine on MongoDB.

In reading order, as a task lives: `option` and `task` (what is stored), `rules` (who may claim what when), `definition`,
`params`, `values` and `publishing` (into the world; `portal`: from code without an event loop), `consumer` (running) with
`context` (what a handler sees), `feed`, `results` and `events` (hearing of it), `where`, `task_actions` with `explain`,
`timeline` and `what_if`, `bulk` and `error_groups` (looking at tasks and changing them), `fleet_actions` with `queues`,
`workers`, `stats` and `doctor` (the fleet), `scheduling` with `periodic` and `ticks`; under them `store` (every read and write),
`connection`, `clock` and `ending` (of what nobody answers), over them `mesh` (the front door); beside them `embedded`, `logs`,
`tracing`, `metrics`, `cli`, `web` and `demo`.
"""

from taskmesh.admin.audit import NotedAction
from taskmesh.admin.bulk import BulkAction, BulkResult, UndoResult
from taskmesh.admin.doctor import Finding
from taskmesh.admin.error_groups import ErrorGroup, ErrorReport
from taskmesh.admin.explain import Explanation, Gate, Waiting
from taskmesh.admin.filters import TaskFilter
from taskmesh.admin.stats import Stats
from taskmesh.admin.what_if import LimitEffect, OptionEffect
from taskmesh.client.definition import TaskDefinition
from taskmesh.client.handle import TaskHandle
from taskmesh.consumer import Consumer
from taskmesh.consumer.context import BlockingTaskContext, TaskContext, current_task
from taskmesh.consumer.outcome import Ending
from taskmesh.mesh import TaskMesh
from taskmesh.model.errors import (
    EmbeddedUnavailable,
    ExtraMissing,
    IncompatibleCollection,
    InvalidKey,
    InvalidName,
    InvalidOption,
    InvalidParams,
    LeaseLost,
    NotAReplicaSet,
    Retry,
    Snooze,
    TaskCancelled,
    TaskError,
    TaskExpired,
    TaskFailed,
    TaskMeshError,
    TaskNotFound,
    TaskRunning,
    TaskTooLarge,
    TransactionConflict,
    WorkerIdTaken,
)
from taskmesh.model.event import TaskEvent
from taskmesh.model.option import TaskOption
from taskmesh.model.queue import QueueInfo, QueueLimits
from taskmesh.model.schedule import ScheduleInfo, Tick
from taskmesh.model.task import LogLine, Progress, Status, Task, TaskState, WorkerState
from taskmesh.model.worker import LeaseLeft, WorkerInfo

__all__ = [
    "BlockingTaskContext",
    "BulkAction",
    "BulkResult",
    "Consumer",
    "EmbeddedUnavailable",
    "Ending",
    "ErrorGroup",
    "ErrorReport",
    "Explanation",
    "ExtraMissing",
    "Finding",
    "Gate",
    "IncompatibleCollection",
    "InvalidKey",
    "InvalidName",
    "InvalidOption",
    "InvalidParams",
    "LeaseLeft",
    "LeaseLost",
    "LimitEffect",
    "LogLine",
    "NotAReplicaSet",
    "NotedAction",
    "OptionEffect",
    "Progress",
    "QueueInfo",
    "QueueLimits",
    "Retry",
    "ScheduleInfo",
    "Snooze",
    "Stats",
    "Status",
    "Task",
    "TaskCancelled",
    "TaskContext",
    "TaskDefinition",
    "TaskError",
    "TaskEvent",
    "TaskExpired",
    "TaskFailed",
    "TaskFilter",
    "TaskHandle",
    "TaskMesh",
    "TaskMeshError",
    "TaskNotFound",
    "TaskOption",
    "TaskRunning",
    "TaskState",
    "TaskTooLarge",
    "Tick",
    "TransactionConflict",
    "UndoResult",
    "Waiting",
    "WorkerIdTaken",
    "WorkerInfo",
    "WorkerState",
    "current_task",
]
