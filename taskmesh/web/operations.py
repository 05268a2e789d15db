"""What the API can do: one table, from which REST routes, the forms of the pages and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from taskmesh.bulk import BulkResult, TaskPage
from taskmesh.explain import Explanation
from taskmesh.mesh import TaskMesh
from taskmesh.periodic import Missed, Overlap, ScheduleInfo
from taskmesh.queues import QueueInfo
from taskmesh.stats import Stats
from taskmesh.task import Task
from taskmesh.workers import WorkerInfo

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,100}$")]
Key = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\x00]+$")]
Text = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00]*$")]
WorkerId = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00]+$")]
Milliseconds = Annotated[int, Field(ge=0, le=10 * 366 * 86_400_000)]
Positive = Annotated[int, Field(ge=1, le=1_000_000)]


class _Request(BaseModel):
    """What a request says, in its query or its body. What is not known is refused."""

    model_config = ConfigDict(extra="forbid")


class Nothing(_Request):
    """No parameters."""


class TheTask(_Request):
    """Which task."""

    name: Name
    key: Key


class TheQueue(_Request):
    """Which queue."""

    queue: Name


class TheWorker(_Request):
    """Which worker."""

    worker_id: WorkerId


class TheSchedule(_Request):
    """Which schedule."""

    schedule_id: Key


class Listing(_Request):
    """Which page of which tasks."""

    where: Text = Field("", description="A filter like `status:FAIL name:resize error:timeout age>1h`.")
    newest_first: bool = True
    after: Annotated[str, StringConstraints(max_length=4_000)] | None = Field(
        None, description="`following` of the page before."
    )
    limit: int = Field(50, ge=1, le=500)


class Counting(_Request):
    """Which tasks to count."""

    where: Text = ""
    at_most: int = Field(10_000, ge=1, le=10_000_000, description="Count no further.")


class Count(BaseModel):
    """How many."""

    count: int


class Asking(TheTask):
    """Which task, and which worker."""

    worker_id: WorkerId | None = None


class Publishing(_Request):
    """A task to publish."""

    name: Name
    key: Key
    params: dict[str, Any] = {}
    configuration: dict[str, Any] = Field({}, description="As in `configure`; times in ISO 8601.")


class PublishingMany(_Request):
    """Tasks of one name to publish."""

    name: Name
    params_by_key: dict[Key, dict[str, Any]] = Field(max_length=10_000)
    configuration: dict[str, Any] = {}


class Published(BaseModel):
    """What a publish did."""

    name: str
    key: str
    created: bool
    updated: bool
    warnings: list[str]


class OptionChange(_Request):
    """Fields of `TaskOption` to change."""

    changes: dict[str, Any]


class Bulk(_Request):
    """What to do to all tasks that fit a filter."""

    where: Text
    dry_run: bool = Field(False, description="Only count.")


class Purge(_Request):
    """Which finished tasks to delete."""

    where: Text = ""
    dry_run: bool = False


class Stopping(_Request):
    """How to stop."""

    grace_ms: Milliseconds = 30_000


class Concurrency(_Request):
    """How many executions at once."""

    concurrency: Positive


class PausingSchedule(_Request):
    """Why, and who."""

    reason: Text | None = None
    by: Text | None = None


class Pausing(PausingSchedule):
    """Why, who, and for how long."""

    for_ms: Annotated[int, Field(ge=1, le=10 * 366 * 86_400_000)] | None = None


class Limits(_Request):
    """What a queue is limited to; what is not given is not limited."""

    rate: Positive | None = None
    per_ms: Annotated[int, Field(ge=1, le=7 * 86_400_000)] | None = None
    running: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    group_running: Positive | None = None


class GroupLimit(_Request):
    """What one group of a queue is limited to."""

    group: Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00]+$")]
    running: Annotated[int, Field(ge=0, le=1_000_000)] | None = None


class Scheduling(_Request):
    """A schedule to declare, or to change."""

    name: Name
    cron: Annotated[str, StringConstraints(max_length=200)] | None = None
    interval_ms: int | None = None
    timezone: Annotated[str, StringConstraints(max_length=100, pattern=r"^[^\x00]*$")] = "UTC"
    params: dict[str, Any] = {}
    missed: Missed = "latest"
    overlap: Overlap = "allow"
    jitter_ms: int = Field(0, ge=0, le=86_400_000)


class WhichEvents(_Request):
    """Which events to tell of, and behind which to begin."""

    name: Name | None = None
    key: Key | None = None
    after: Annotated[str, StringConstraints(max_length=4_000)] | None = None


class Done(BaseModel):
    """It was done."""

    done: Literal[True] = True


Handler = Callable[[TaskMesh, Any, Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that the API can do."""

    name: str
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    summary: str
    query: type[BaseModel]
    body: type[BaseModel] | None
    result: Any
    handler: Handler

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return self.method != "GET"


OPERATIONS: dict[str, Operation] = {}


def _operation(
    name: str,
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"],
    path: str,
    result: Any,
    query: type[BaseModel] = Nothing,
    body: type[BaseModel] | None = None,
) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        summary = (handler.__doc__ or name).strip().rstrip(".")
        OPERATIONS[name] = Operation(name, method, path, summary, query, body, result, handler)
        return handler

    return add


# --- tasks ---


@_operation("stats", "GET", "/stats", Stats)
async def _stats(mesh: TaskMesh, _query: Nothing, _body: None) -> Stats:
    """Count tasks by name and status; lag and throughput."""
    return await mesh.stats()


@_operation("tasks.list", "GET", "/tasks", TaskPage, Listing)
async def _list(mesh: TaskMesh, query: Listing, _body: None) -> TaskPage:
    """Return a page of the tasks that fit a filter."""
    return await mesh.page(query.where, newest_first=query.newest_first, after=query.after, limit=query.limit)


@_operation("tasks.count", "GET", "/tasks/count", Count, Counting)
async def _count(mesh: TaskMesh, query: Counting, _body: None) -> Count:
    """Count the tasks that fit a filter."""
    return Count(count=await mesh.count(query.where, at_most=query.at_most))


@_operation("tasks.publish", "POST", "/tasks", Published, Nothing, Publishing)
async def _publish(mesh: TaskMesh, _query: Nothing, body: Publishing) -> Published:
    """Publish a task by name."""
    handle = await mesh.publish(body.name, body.key, body.params, **_configuration(body.configuration))
    return Published.model_validate(handle, from_attributes=True)


@_operation("tasks.publish_many", "POST", "/tasks/many", list[Published], Nothing, PublishingMany)
async def _publish_many(mesh: TaskMesh, _query: Nothing, body: PublishingMany) -> list[Published]:
    """Publish many tasks of one name."""
    if not body.params_by_key:
        return []
    handles = await mesh.publish_many(body.name, body.params_by_key, **_configuration(body.configuration))
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
    return read


@_operation("task.get", "GET", "/task", Task, TheTask)
async def _get(mesh: TaskMesh, query: TheTask, _body: None) -> Task:
    """Return a task as it stands now, with params, results and logs."""
    return await mesh.get(query.name, query.key)


@_operation("task.explain", "GET", "/task/explain", list[Explanation], Asking)
async def _explain(mesh: TaskMesh, query: Asking, _body: None) -> list[Explanation]:
    """Tell which gates of the claim rule are open or shut, for one worker or every live one."""
    return await mesh.explain(query.name, query.key, query.worker_id)


@_operation("task.retry", "POST", "/task/retry", Task, TheTask)
async def _retry(mesh: TaskMesh, query: TheTask, _body: None) -> Task:
    """Make a finished task INIT again; a waiting one is due at once."""
    return await mesh.retry(query.name, query.key)


@_operation("task.cancel", "POST", "/task/cancel", Task, TheTask)
async def _cancel(mesh: TaskMesh, query: TheTask, _body: None) -> Task:
    """Cancel a task; a finished one stays as it is."""
    return await mesh.cancel(query.name, query.key)


@_operation("task.delete", "DELETE", "/task", Task, TheTask)
async def _delete(mesh: TaskMesh, query: TheTask, _body: None) -> Task:
    """Delete a task, and return it as it was."""
    return await mesh.delete(query.name, query.key)


@_operation("task.set_option", "PATCH", "/task/option", Task, TheTask, OptionChange)
async def _set_option(mesh: TaskMesh, query: TheTask, body: OptionChange) -> Task:
    """Change fields of a task's option."""
    return await mesh.set_option(query.name, query.key, **body.changes)


# --- many tasks ---


@_operation("bulk.retry", "POST", "/bulk/retry", BulkResult, Nothing, Bulk)
async def _retry_all(mesh: TaskMesh, _query: Nothing, body: Bulk) -> BulkResult:
    """Retry every task that fits a filter."""
    return await mesh.retry_all(body.where, dry_run=body.dry_run)


@_operation("bulk.cancel", "POST", "/bulk/cancel", BulkResult, Nothing, Bulk)
async def _cancel_all(mesh: TaskMesh, _query: Nothing, body: Bulk) -> BulkResult:
    """Cancel every unfinished task that fits a filter."""
    return await mesh.cancel_all(body.where, dry_run=body.dry_run)


@_operation("bulk.delete", "POST", "/bulk/delete", BulkResult, Nothing, Bulk)
async def _delete_all(mesh: TaskMesh, _query: Nothing, body: Bulk) -> BulkResult:
    """Delete every task that fits a filter."""
    return await mesh.delete_all(body.where, dry_run=body.dry_run)


@_operation("bulk.purge", "POST", "/bulk/purge", BulkResult, Nothing, Purge)
async def _purge(mesh: TaskMesh, _query: Nothing, body: Purge) -> BulkResult:
    """Delete every finished task that fits a filter."""
    return await mesh.purge(body.where, dry_run=body.dry_run)


# --- workers ---


@_operation("workers.list", "GET", "/workers", list[WorkerInfo])
async def _workers(mesh: TaskMesh, _query: Nothing, _body: None) -> list[WorkerInfo]:
    """Return the live workers and those that went within the last hour."""
    return await mesh.workers()


@_operation("worker.stop", "POST", "/worker/stop", Done, TheWorker, Stopping)
async def _stop_worker(mesh: TaskMesh, query: TheWorker, body: Stopping) -> Done:
    """Let a worker stop gracefully."""
    await mesh.stop_worker(query.worker_id, body.grace_ms)
    return Done()


@_operation("worker.pause", "POST", "/worker/pause", Done, TheWorker)
async def _pause_worker(mesh: TaskMesh, query: TheWorker, _body: None) -> Done:
    """Let a worker claim no more."""
    await mesh.pause_worker(query.worker_id)
    return Done()


@_operation("worker.resume", "POST", "/worker/resume", Done, TheWorker)
async def _resume_worker(mesh: TaskMesh, query: TheWorker, _body: None) -> Done:
    """Let a paused worker go on."""
    await mesh.resume_worker(query.worker_id)
    return Done()


@_operation("worker.set_concurrency", "POST", "/worker/concurrency", Done, TheWorker, Concurrency)
async def _set_concurrency(mesh: TaskMesh, query: TheWorker, body: Concurrency) -> Done:
    """Change how many executions a worker runs at once."""
    await mesh.set_concurrency(query.worker_id, body.concurrency)
    return Done()


# --- queues ---


@_operation("queues.list", "GET", "/queues", list[QueueInfo])
async def _queues(mesh: TaskMesh, _query: Nothing, _body: None) -> list[QueueInfo]:
    """Return the queues with their pauses and limits."""
    return await mesh.queues()


@_operation("queue.pause", "POST", "/queue/pause", Done, TheQueue, Pausing)
async def _pause(mesh: TaskMesh, query: TheQueue, body: Pausing) -> Done:
    """Let no worker claim from a queue any more."""
    until = None if body.for_ms is None else mesh.clock.now() + timedelta(milliseconds=body.for_ms)
    await mesh.pause(query.queue, reason=body.reason, by=body.by, until=until)
    return Done()


@_operation("queue.resume", "POST", "/queue/resume", Done, TheQueue)
async def _resume(mesh: TaskMesh, query: TheQueue, _body: None) -> Done:
    """Let workers claim from a queue again."""
    await mesh.resume(query.queue)
    return Done()


@_operation("queue.set_limit", "PUT", "/queue/limit", Done, TheQueue, Limits)
async def _set_limit(mesh: TaskMesh, query: TheQueue, body: Limits) -> Done:
    """Limit a queue; what is not given is not limited any more."""
    await mesh.set_limit(
        query.queue, rate=body.rate, per_ms=body.per_ms, running=body.running, group_running=body.group_running
    )
    return Done()


@_operation("queue.set_group_limit", "PUT", "/queue/group-limit", Done, TheQueue, GroupLimit)
async def _set_group_limit(mesh: TaskMesh, query: TheQueue, body: GroupLimit) -> Done:
    """Limit one group of a queue; without `running` it is as every other group."""
    await mesh.set_group_limit(query.queue, body.group, body.running)
    return Done()


# --- schedules ---


@_operation("schedules.list", "GET", "/schedules", list[ScheduleInfo])
async def _schedules(mesh: TaskMesh, _query: Nothing, _body: None) -> list[ScheduleInfo]:
    """Return all schedules, the next to tick first."""
    return await mesh.schedules()


@_operation("schedule.declare", "PUT", "/schedule", ScheduleInfo, TheSchedule, Scheduling)
async def _declare(mesh: TaskMesh, query: TheSchedule, body: Scheduling) -> ScheduleInfo:
    """Create a schedule, or change it."""
    return await mesh.every(
        body.name,
        cron=body.cron,
        interval_ms=body.interval_ms,
        timezone=body.timezone,
        params=body.params,
        schedule_id=query.schedule_id,
        missed=body.missed,
        overlap=body.overlap,
        jitter_ms=body.jitter_ms,
    )


@_operation("schedule.pause", "POST", "/schedule/pause", ScheduleInfo, TheSchedule, PausingSchedule)
async def _pause_schedule(mesh: TaskMesh, query: TheSchedule, body: PausingSchedule) -> ScheduleInfo:
    """Let a schedule tick no more."""
    return await mesh.pause_schedule(query.schedule_id, reason=body.reason, by=body.by)


@_operation("schedule.resume", "POST", "/schedule/resume", ScheduleInfo, TheSchedule)
async def _resume_schedule(mesh: TaskMesh, query: TheSchedule, _body: None) -> ScheduleInfo:
    """Let a paused schedule tick again, from now on."""
    return await mesh.resume_schedule(query.schedule_id)


@_operation("schedule.trigger", "POST", "/schedule/trigger", Published, TheSchedule)
async def _trigger(mesh: TaskMesh, query: TheSchedule, _body: None) -> Published:
    """Publish a schedule's task now."""
    return Published.model_validate(await mesh.trigger(query.schedule_id), from_attributes=True)


@_operation("schedule.remove", "DELETE", "/schedule", ScheduleInfo, TheSchedule)
async def _unschedule(mesh: TaskMesh, query: TheSchedule, _body: None) -> ScheduleInfo:
    """Remove a schedule; its tasks stay."""
    return await mesh.unschedule(query.schedule_id)
