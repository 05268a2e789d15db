"""taskmesh: a task engine on MongoDB.

In reading order, as a task lives: `option` and `task` (what is stored), `rules` (who may claim what when), `definition`,
`params`, `values` and `publishing` (into the world; `portal`: from code without an event loop), `consumer` (running) with
`context` (what a handler sees), `feed`, `results` and `events` (hearing of it), `where`, `task_actions` with `explain`,
`timeline` and `what_if`, `bulk` and `error_groups` (looking at tasks and changing them), `fleet_actions` with `queues`,
`workers`, `stats` and `doctor` (the fleet), `scheduling` with `periodic` and `ticks`; under them `store` (every read and write),
`connection`, `clock` and `ending` (of what nobody answers), over them `mesh` (the front door); beside them `embedded`, `logs`,
`tracing`, `metrics`, `cli`, `web` and `demo`.
"""

from taskmesh.bulk import BulkAction, BulkResult, NotedAction, UndoResult
from taskmesh.consumer import Consumer
from taskmesh.consumer.ending import Ending
from taskmesh.context import BlockingTaskContext, TaskContext, current_task
from taskmesh.definition import TaskDefinition, TaskHandle
from taskmesh.doctor import Finding
from taskmesh.error_groups import ErrorGroup, ErrorReport
from taskmesh.errors import (
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
from taskmesh.events import TaskEvent
from taskmesh.explain import Explanation, Gate, Waiting
from taskmesh.mesh import TaskMesh
from taskmesh.option import TaskOption
from taskmesh.periodic import ScheduleInfo, Tick
from taskmesh.queues import QueueInfo, QueueLimits
from taskmesh.stats import Stats
from taskmesh.task import LogLine, Progress, Status, Task, TaskState, WorkerState
from taskmesh.what_if import LimitEffect, OptionEffect
from taskmesh.where import TaskFilter
from taskmesh.workers import LeaseLeft, WorkerInfo

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
