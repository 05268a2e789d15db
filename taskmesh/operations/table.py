"""What the API can do: one table, from which REST routes, forms, the OpenAPI document and `taskmesh call` are made."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import NoneType
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from taskmesh.admin.audit import NotedAction
from taskmesh.admin.bulk import UNDO_MS, BulkAction, BulkResult, UndoResult
from taskmesh.admin.doctor import Finding
from taskmesh.admin.error_groups import ErrorReport
from taskmesh.admin.explain import Explanation, Waiting
from taskmesh.admin.listing import TaskPage
from taskmesh.admin.stats import Stats
from taskmesh.admin.what_if import LimitEffect, OptionEffect, ScheduleEffect
from taskmesh.mesh import TaskMesh
from taskmesh.model.configuration import checked_settings
from taskmesh.model.flow import FlowStatus
from taskmesh.model.option import checked_changes
from taskmesh.model.queue import QueueInfo
from taskmesh.model.schedule import ScheduleInfo
from taskmesh.model.task import Task
from taskmesh.model.worker import WorkerInfo
from taskmesh.operations.requests import (
    Asking,
    Bulk,
    Concurrency,
    Count,
    Counting,
    Done,
    GroupLimit,
    Limits,
    Listing,
    Nothing,
    OfWorker,
    OptionChange,
    Pausing,
    PausingSchedule,
    Published,
    Publishing,
    PublishingMany,
    Purge,
    Redriving,
    Resuming,
    Retrying,
    Scheduling,
    Signalling,
    Stopping,
    TheAction,
    TheEvent,
    TheFlow,
    TheQueue,
    TheSchedule,
    TheTask,
    TheWorker,
    WhatIfLimit,
    WhatIfOption,
    WhatIfSchedule,
    WhichErrors,
)

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Handler = Callable[..., Awaitable[Any]]
"""Takes the mesh, and what it needs of `query` and `body`."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that the API can do. What it takes and returns is what its handler's signature says."""

    name: str
    method: Method
    path: str
    summary: str
    query: type[BaseModel]
    body: type[BaseModel] | None
    result: Any
    handler: Handler

    @property
    def placed(self) -> list[str]:
        """The fields of `query` that stand in the path."""
        return _PLACED.findall(self.path)

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return self.method != "GET"

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """All that it takes, in the path, the query or the body."""
        return {**self.query.model_fields, **(self.body.model_fields if self.body is not None else {})}

    async def perform(self, mesh: TaskMesh, query: BaseModel, body: BaseModel | None) -> Any:
        """Do it. Raises as the mesh does."""
        taken: dict[str, Any] = {} if self.query is Nothing else {"query": query}
        if self.body is not None:
            taken["body"] = body
        answer = await self.handler(mesh, **taken)
        return Done() if answer is None else answer

    async def perform_given(self, mesh: TaskMesh, given: Mapping[str, Any]) -> Any:
        """Do it with values that came in one bag, as from a form. Raises `BadRequest`, and as the mesh does."""
        if unknown := sorted(given.keys() - self.fields.keys()):
            raise BadRequest(
                f"{self.name} takes no {', '.join(unknown)}; it takes: {', '.join(self.fields) or 'nothing'}"
            )
        in_query = {name: value for name, value in given.items() if name in self.query.model_fields}
        in_body = {name: value for name, value in given.items() if name not in self.query.model_fields}
        query = validated(self.query, in_query)
        return await self.perform(mesh, query, None if self.body is None else validated(self.body, in_body))


class BadRequest(Exception):
    """A request that cannot be read."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


def validated(model: type[BaseModel], given: Any, *, strict: bool = False) -> Any:
    """Read a model, or raise `BadRequest` with what does not fit. `strict`: a number is a number, and no text or boolean."""
    try:
        return model.model_validate(given, strict=strict)
    except ValidationError as error:
        problems = []
        for found in error.errors(include_url=False, include_input=False):
            where = ".".join(str(part) for part in found["loc"]) or "the request"
            problems.append(f"{where}: {found['msg']}")
        raise BadRequest("; ".join(problems)) from None


OPERATIONS: dict[str, Operation] = {}
_PLACED = re.compile(r"{(\w+)}")


def _operation(name: str, method: Method, path: str) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        said = get_type_hints(handler)
        result = Done if said["return"] is NoneType else said["return"]
        summary = (handler.__doc__ or name).strip().rstrip(".")
        query, body = said.get("query", Nothing), said.get("body")
        OPERATIONS[name] = Operation(name, method, path, summary, query, body, result, handler)
        return handler

    return add


# --- tasks ---


@_operation("stats", "GET", "/stats")
async def _stats(mesh: TaskMesh) -> Stats:
    """Count tasks by name and status; lag and throughput."""
    return await mesh.stats()


@_operation("tasks.list", "GET", "/tasks")
async def _list(mesh: TaskMesh, query: Listing) -> TaskPage:
    """Return a page of the tasks that match a filter."""
    return await mesh.listing.page(query.where, newest_first=query.newest_first, after=query.after, limit=query.limit)


@_operation("tasks.count", "GET", "/tasks/count")
async def _count(mesh: TaskMesh, query: Counting) -> Count:
    """Count the tasks that match a filter."""
    return Count(count=await mesh.listing.count(query.where, at_most=query.at_most))


@_operation("tasks.publish", "POST", "/tasks")
async def _publish(mesh: TaskMesh, body: Publishing) -> Published:
    """Publish a task by name."""
    handle = await mesh.publish(body.name, body.key, body.params, **_configuration(body.configuration))
    return Published.model_validate(handle, from_attributes=True)


@_operation("tasks.publish_many", "POST", "/tasks/many")
async def _publish_many(mesh: TaskMesh, body: PublishingMany) -> list[Published]:
    """Publish many tasks of one name."""
    if not body.params_by_key:
        return []
    handles = await mesh.publisher.publish_many(body.name, body.params_by_key, **_configuration(body.configuration))
    return [Published.model_validate(handle, from_attributes=True) for handle in handles]


def _configuration(given: dict[str, Any]) -> dict[str, Any]:
    """Return settings with their times read; a session cannot be named from afar."""
    read = {name: value for name, value in given.items() if name != "session"}
    for name in ("start_time", "expire_time"):
        if isinstance(read.get(name), str):
            try:
                read[name] = datetime.fromisoformat(read[name])
            except ValueError:
                continue  # `configure` refuses it, and says why
    return checked_settings(read)


@_operation("task.get", "GET", "/tasks/{name}/{key}")
async def _get(mesh: TaskMesh, query: TheTask) -> Task:
    """Return a task as it stands now, with params, results and logs."""
    return await mesh.get(query.name, query.key)


@_operation("task.explain", "GET", "/tasks/{name}/{key}/explain")
async def _explain(mesh: TaskMesh, query: Asking) -> list[Explanation]:
    """Show which gates of the claim rule are open or shut, for one worker or every live one."""
    return await mesh.explain(query.name, query.key, query.worker_id)


@_operation("flow.status", "GET", "/flows/{key}")
async def _flow(mesh: TaskMesh, query: TheFlow) -> FlowStatus:
    """Return how far a flow has come: counts, progress, its tasks and what waits for what."""
    return await mesh.flow_status(query.key)


@_operation("flow.cancel", "POST", "/flows/{key}/cancel")
async def _cancel_flow(mesh: TaskMesh, query: TheFlow) -> FlowStatus:
    """Cancel the tasks of a flow that are not finished."""
    return await mesh.flows.cancel(query.key)


@_operation("flow.retry", "POST", "/flows/{key}/retry")
async def _retry_flow(mesh: TaskMesh, query: TheFlow) -> FlowStatus:
    """Begin the tasks of a flow anew that did not end as SUCCESS."""
    return await mesh.flows.retry(query.key)


@_operation("worker.explain", "GET", "/workers/{worker_id}/explain")
async def _explain_worker(mesh: TaskMesh, query: OfWorker) -> list[Waiting]:
    """Show which gates keep one worker from the oldest tasks that wait: grouped, the largest group first."""
    return await mesh.inspect.explain_worker(query.worker_id, query.name)


@_operation("task.retry", "POST", "/tasks/{name}/{key}/retry")
async def _retry(mesh: TaskMesh, query: Retrying) -> Task:
    """Run a finished task again; make a waiting one due at once. What it has recorded it does not do again, unless `fresh`."""
    return await mesh.retry(query.name, query.key, fresh=query.fresh)


@_operation("task.cancel", "POST", "/tasks/{name}/{key}/cancel")
async def _cancel(mesh: TaskMesh, query: TheTask) -> Task:
    """Cancel a task; a finished one stays as it is."""
    return await mesh.cancel(query.name, query.key)


@_operation("task.signal", "POST", "/tasks/{name}/{key}/signals/{event}")
async def _signal(mesh: TaskMesh, query: TheEvent, body: Signalling) -> None:
    """Send a task a signal, which its handler waits for or will wait for."""
    payload = {} if "payload" not in body.model_fields_set else {"payload": body.payload}
    await mesh.signal(query.name, query.key, query.event, signal_id=body.signal_id, **payload)


@_operation("task.delete", "DELETE", "/tasks/{name}/{key}")
async def _delete(mesh: TaskMesh, query: TheTask) -> Task:
    """Delete a task, and return it as it was."""
    return await mesh.delete(query.name, query.key)


@_operation("task.set_option", "PATCH", "/tasks/{name}/{key}/option")
async def _set_option(mesh: TaskMesh, query: TheTask, body: OptionChange) -> Task:
    """Change fields of a task's option."""
    return await mesh.set_option(query.name, query.key, **checked_changes(body.changes))


@_operation("task.what_if_option", "GET", "/tasks/{name}/{key}/option/what-if")
async def _what_if_option(mesh: TaskMesh, query: WhatIfOption) -> OptionEffect:
    """Show what a change of a task's option would do: who could claim it then, whose run would be stopped."""
    return await mesh.what_if.option(query.name, query.key, **checked_changes(query.changes))


# --- many tasks ---


@_operation("errors", "GET", "/errors")
async def _errors(mesh: TaskMesh, query: WhichErrors) -> ErrorReport:
    """Show what fails and why: failures grouped by task name, type of error and place, the most frequent first."""
    return await mesh.inspect.errors(query.name, at_most=query.at_most)


def _undo_ms(body: Redriving) -> int:
    return UNDO_MS if body.undo else 0


@_operation("bulk.retry", "POST", "/bulk/retry")
async def _retry_all(mesh: TaskMesh, body: Bulk) -> BulkResult:
    """Retry every task that matches a filter."""
    return await mesh.bulk.retry(body.where, dry_run=body.dry_run, undo_ms=_undo_ms(body))


@_operation("bulk.cancel", "POST", "/bulk/cancel")
async def _cancel_all(mesh: TaskMesh, body: Bulk) -> BulkResult:
    """Cancel every unfinished task that matches a filter."""
    return await mesh.bulk.cancel(body.where, dry_run=body.dry_run, undo_ms=_undo_ms(body))


@_operation("bulk.delete", "POST", "/bulk/delete")
async def _delete_all(mesh: TaskMesh, body: Bulk) -> BulkResult:
    """Delete every task that matches a filter."""
    return await mesh.bulk.delete(body.where, dry_run=body.dry_run, undo_ms=_undo_ms(body))


@_operation("bulk.purge", "POST", "/bulk/purge")
async def _purge(mesh: TaskMesh, body: Purge) -> BulkResult:
    """Delete every finished task that matches a filter."""
    return await mesh.bulk.purge(body.where, dry_run=body.dry_run)


@_operation("bulk.list", "GET", "/bulk")
async def _bulk_actions(mesh: TaskMesh) -> list[BulkAction]:
    """Return what was done to many tasks at once within the last month, the newest first."""
    return await mesh.bulk.actions()


@_operation("bulk.undo", "POST", "/bulk/{id}/undo")
async def _undo(mesh: TaskMesh, query: TheAction) -> UndoResult:
    """Undo a bulk action; tasks that have changed since stay as they are."""
    return await mesh.bulk.undo(query.id)


@_operation("actions.list", "GET", "/actions")
async def _actions(mesh: TaskMesh) -> list[NotedAction]:
    """Return what was done to single tasks, queues, workers and schedules within the last month, the newest first."""
    return await mesh.audit.actions()


# --- workers ---


@_operation("doctor", "GET", "/doctor")
async def _doctor(mesh: TaskMesh) -> list[Finding]:
    """Look for what is wrong with the server, the collection, the fleet and the tasks, each with its remedy."""
    return await mesh.inspect.doctor()


@_operation("workers.list", "GET", "/workers")
async def _workers(mesh: TaskMesh) -> list[WorkerInfo]:
    """Return the live workers and those that went within the last hour."""
    return await mesh.workers()


@_operation("worker.stop", "POST", "/workers/{worker_id}/stop")
async def _stop_worker(mesh: TaskMesh, query: TheWorker, body: Stopping) -> None:
    """Stop a worker gracefully."""
    await mesh.stop_worker(query.worker_id, body.grace_ms)


@_operation("worker.pause", "POST", "/workers/{worker_id}/pause")
async def _pause_worker(mesh: TaskMesh, query: TheWorker) -> None:
    """Pause a worker: it claims nothing more."""
    await mesh.pause_worker(query.worker_id)


@_operation("worker.resume", "POST", "/workers/{worker_id}/resume")
async def _resume_worker(mesh: TaskMesh, query: TheWorker) -> None:
    """Resume a paused worker."""
    await mesh.resume_worker(query.worker_id)


@_operation("worker.set_concurrency", "POST", "/workers/{worker_id}/concurrency")
async def _set_concurrency(mesh: TaskMesh, query: TheWorker, body: Concurrency) -> None:
    """Change how many executions a worker runs at once."""
    await mesh.fleet.set_concurrency(query.worker_id, body.concurrency)


# --- queues ---


@_operation("queues.list", "GET", "/queues")
async def _queues(mesh: TaskMesh) -> list[QueueInfo]:
    """Return the queues with their pauses and limits, and how long their tasks waited and ran, of the newest that ended."""
    return await mesh.queues.all(latencies=True)


@_operation("queue.pause", "POST", "/queues/{queue}/pause")
async def _pause(mesh: TaskMesh, query: TheQueue, body: Pausing) -> None:
    """Pause a queue, or one group of it: workers claim nothing from it."""
    until = None if body.for_ms is None else mesh.clock.now() + timedelta(milliseconds=body.for_ms)
    await mesh.pause(query.queue, group=body.group, reason=body.reason, until=until)


@_operation("queue.resume", "POST", "/queues/{queue}/resume")
async def _resume(mesh: TaskMesh, query: TheQueue, body: Resuming) -> None:
    """Resume a queue, or one group of it: workers claim from it again."""
    await mesh.resume(query.queue, group=body.group)


@_operation("queue.forget", "DELETE", "/queues/{queue}")
async def _forget(mesh: TaskMesh, query: TheQueue) -> None:
    """Remove all that is set for an empty queue, so that it is listed no more."""
    await mesh.queues.forget(query.queue)


@_operation("queue.redrive", "POST", "/queues/{queue}/redrive")
async def _redrive(mesh: TaskMesh, query: TheQueue, body: Redriving) -> BulkResult:
    """Retry the dead letters of a queue: each goes back to the queue that it came from."""
    return await mesh.bulk.redrive(query.queue, dry_run=body.dry_run, undo_ms=_undo_ms(body))


@_operation("queue.set_limit", "PUT", "/queues/{queue}/limit")
async def _set_limit(mesh: TaskMesh, query: TheQueue, body: Limits) -> None:
    """Limit a queue: null takes a limit away, what is left out stays as it is."""
    await mesh.set_limit(query.queue, **body.given)  # type: ignore[arg-type]  # no `by` is among the limits


@_operation("queue.what_if_limit", "GET", "/queues/{queue}/limit/what-if")
async def _what_if_limit(mesh: TaskMesh, query: WhatIfLimit) -> LimitEffect:
    """Show what limits would do: how many waiting tasks could start now, and with the limits."""
    if query.group is not None:
        return await mesh.what_if.group_limit(query.queue, query.group, query.running)
    return await mesh.what_if.limit(query.queue, **query.given)


@_operation("queue.set_group_limit", "PUT", "/queues/{queue}/group-limit")
async def _set_group_limit(mesh: TaskMesh, query: TheQueue, body: GroupLimit) -> None:
    """Limit one group of a queue; without `running`, the limit of every group applies."""
    await mesh.queues.set_group_limit(query.queue, body.group, body.running)


# --- schedules ---


@_operation("schedules.list", "GET", "/schedules")
async def _schedules(mesh: TaskMesh) -> list[ScheduleInfo]:
    """Return all schedules, the next to run first."""
    return await mesh.schedules.all()


@_operation("schedule.declare", "PUT", "/schedules/{schedule_id}")
async def _declare(mesh: TaskMesh, query: TheSchedule, body: Scheduling) -> ScheduleInfo:
    """Create a schedule, or change the given fields of an existing one."""
    return await mesh.schedules.put(
        query.schedule_id, **{field: getattr(body, field) for field in body.model_fields_set}
    )


@_operation("schedule.what_if", "GET", "/schedules/what-if")
async def _what_if_schedule(mesh: TaskMesh, query: WhatIfSchedule) -> ScheduleEffect:
    """Show when a schedule would run next."""
    return await mesh.what_if.schedule(
        query.schedule_id, cron=query.cron, interval_ms=query.interval_ms, timezone=query.timezone
    )


@_operation("schedule.pause", "POST", "/schedules/{schedule_id}/pause")
async def _pause_schedule(mesh: TaskMesh, query: TheSchedule, body: PausingSchedule) -> ScheduleInfo:
    """Pause a schedule: it publishes nothing until it is resumed."""
    return await mesh.schedules.pause(query.schedule_id, reason=body.reason)


@_operation("schedule.resume", "POST", "/schedules/{schedule_id}/resume")
async def _resume_schedule(mesh: TaskMesh, query: TheSchedule) -> ScheduleInfo:
    """Resume a paused schedule; what it missed is not made up for."""
    return await mesh.schedules.resume(query.schedule_id)


@_operation("schedule.trigger", "POST", "/schedules/{schedule_id}/trigger")
async def _trigger(mesh: TaskMesh, query: TheSchedule) -> Published:
    """Publish a schedule's task now."""
    return Published.model_validate(await mesh.schedules.trigger(query.schedule_id), from_attributes=True)


@_operation("schedule.remove", "DELETE", "/schedules/{schedule_id}")
async def _unschedule(mesh: TaskMesh, query: TheSchedule) -> ScheduleInfo:
    """Remove a schedule; its tasks stay."""
    return await mesh.schedules.remove(query.schedule_id)
