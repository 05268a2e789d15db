"""Operations: what people and programs can ask of a mesh. REST, forms, the OpenAPI document and `taskmesh call` come from it.

A row is a function that is given the mesh. Its parameters are what a request may say: those named in the path, and all of a
GET, come from the address; the rest is the body. What a request leaves out is not passed on, so the function's defaults apply.
Most values are checked by the mesh; bounds stand here only where a request may ask for less than Python code may.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import NoneType
from typing import Annotated, Any, Literal, TypedDict, Unpack, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, Json, StringConstraints, ValidationError, create_model
from pydantic.fields import FieldInfo

from taskmesh.admin.audit import NotedAction
from taskmesh.admin.bulk import UNDO_MS, BulkAction, BulkResult, UndoResult
from taskmesh.admin.doctor import Finding
from taskmesh.admin.error_groups import ErrorReport
from taskmesh.admin.explain import Explanation, Waiting
from taskmesh.admin.listing import TaskPage
from taskmesh.admin.queues import LimitFields
from taskmesh.admin.stats import Stats
from taskmesh.admin.what_if import LimitEffect, OptionEffect, ScheduleEffect
from taskmesh.client.tasks import UNSAID
from taskmesh.mesh import TaskMesh
from taskmesh.model.configuration import checked_settings
from taskmesh.model.errors import MAX_DURATION_MS
from taskmesh.model.flow import FlowStatus
from taskmesh.model.option import checked_changes
from taskmesh.model.queue import QueueInfo
from taskmesh.model.schedule import Missed, Overlap, ScheduleInfo
from taskmesh.model.task import Task
from taskmesh.model.worker import WorkerInfo

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Handler = Callable[..., Awaitable[Any]]
"""Takes the mesh, and by name what a request says."""


class _Request(BaseModel):
    """What a request says in its address, or in its body. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


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
        """Perform it. Raises as the mesh does."""
        given = {name: getattr(said, name) for said in (query, body) if said for name in said.model_fields_set}
        given.pop("by", None)  # the faces sign with it
        answer = await self.handler(mesh, **given)
        return Done() if answer is None else answer

    async def perform_given(self, mesh: TaskMesh, given: Mapping[str, Any]) -> Any:
        """Perform it with values from one mapping, as from a form. Raises `BadRequest`, and as the mesh does."""
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
    """Read a model, or raise `BadRequest` that says what does not fit. `strict`: a number must not be a text or boolean."""
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


def _operation(name: str, method: Method, path: str, *, takes_by: bool = False) -> Callable[[Handler], Handler]:
    """Add a row. `takes_by`: the body may say who asks; the faces sign with it, and the handler does not get it."""

    def add(handler: Handler) -> Handler:
        hints = get_type_hints(handler, include_extras=True)
        fields = _fields(handler, hints)
        in_query = {each: fields[each] for each in fields if method == "GET" or each in _PLACED.findall(path)}
        in_body = {each: fields[each] for each in fields if each not in in_query}
        if takes_by:
            in_body["by"] = (By, None)
        title = "".join(word.title() for word in re.split(r"[._]", name))
        OPERATIONS[name] = Operation(
            name,
            method,
            path,
            summary=(handler.__doc__ or name).strip().rstrip("."),
            query=create_model(f"{title}Query", __base__=_Request, **in_query),
            body=create_model(title, __base__=_Request, **in_body) if in_body else None,
            result=Done if hints["return"] is NoneType else hints["return"],
            handler=handler,
        )
        return handler

    return add


def _fields(handler: Handler, hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that these parameters are, for `create_model`: each with its type and its default."""
    fields: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(handler).parameters.items())[1:]:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:  # those of a TypedDict, each of which may be left out
            several = get_type_hints(get_args(hints[name])[0], include_extras=True)
            fields |= {each: (type_, Field(default_factory=lambda: UNSAID)) for each, type_ in several.items()}
        elif parameter.default is UNSAID:
            fields[name] = (hints[name], Field(default_factory=lambda: UNSAID))
        else:
            fields[name] = (hints[name], ... if parameter.default is inspect.Parameter.empty else parameter.default)
    return fields


# --- types of several requests ---

Key = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\x00]+$")]
Where = Annotated[str, StringConstraints(max_length=4_000, pattern=r"^[^\x00]*$")]
"""A filter. Reasons are long, and a quote within what is quoted takes five characters."""
By = Annotated[
    Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00]*$")] | None,
    Field(description="Who does it, for the list of what was done."),
]
Place = Annotated[str, StringConstraints(max_length=4_000)]
DryRun = Annotated[bool, Field(description="Only count.")]
Undo = Annotated[bool, Field(description="Copy each task aside, so that it can be undone within an hour.")]
Configuration = Annotated[dict[str, Any], Field(description="As in `configure`; times in ISO 8601.")]


class Count(BaseModel):
    """How many."""

    count: int


class Published(BaseModel):
    """What a publish did."""

    name: str
    key: str
    created: bool
    updated: bool
    warnings: list[str]


class Done(BaseModel):
    """Done."""

    done: Literal[True] = True


class ScheduleFields(TypedDict, total=False):
    """A schedule to create, which needs a name; or what to change of one: then what is not given stays as it is."""

    name: str
    cron: str | None
    interval_ms: int | None
    timezone: str
    params: dict[str, Any]
    missed: Missed
    overlap: Overlap
    jitter_ms: int


# --- tasks ---


@_operation("stats", "GET", "/stats")
async def _stats(mesh: TaskMesh) -> Stats:
    """Count tasks by name and status; lag and throughput."""
    return await mesh.stats()


@_operation("tasks.list", "GET", "/tasks")
async def _list(
    mesh: TaskMesh,
    where: Annotated[Where, Field(description="A filter like `status:FAIL name:resize error:timeout age>1h`.")] = "",
    newest_first: bool = True,
    after: Annotated[Place | None, Field(description="`following` of the page before.")] = None,
    limit: Annotated[int, Field(ge=1, le=500)] = 50,
) -> TaskPage:
    """Return a page of the tasks that match a filter."""
    return await mesh.listing.page(where, newest_first=newest_first, after=after, limit=limit)


@_operation("tasks.count", "GET", "/tasks/count")
async def _count(
    mesh: TaskMesh,
    where: Where = "",
    at_most: Annotated[int, Field(ge=1, le=10_000_000, description="Count no further.")] = 10_000,
) -> Count:
    """Count the tasks that match a filter."""
    return Count(count=await mesh.listing.count(where, at_most=at_most))


@_operation("tasks.publish", "POST", "/tasks")
async def _publish(
    mesh: TaskMesh,
    name: str,
    key: str,
    params: dict[str, Any] | None = None,
    configuration: Configuration | None = None,
) -> Published:
    """Publish a task by name."""
    handle = await mesh.publish(name, key, params, **_settings(configuration))
    return Published.model_validate(handle, from_attributes=True)


@_operation("tasks.publish_many", "POST", "/tasks/many")
async def _publish_many(
    mesh: TaskMesh,
    name: str,
    params_by_key: Annotated[dict[Key, dict[str, Any]], Field(max_length=10_000)],
    configuration: Configuration | None = None,
) -> list[Published]:
    """Publish many tasks of one name."""
    if not params_by_key:
        return []
    handles = await mesh.publisher.publish_many(name, params_by_key, **_settings(configuration))
    return [Published.model_validate(handle, from_attributes=True) for handle in handles]


def _settings(given: dict[str, Any] | None) -> dict[str, Any]:
    """Return settings with their times read. A session is left out: a request cannot name one."""
    read = {name: value for name, value in (given or {}).items() if name != "session"}
    for name in ("start_time", "expire_time"):
        if isinstance(read.get(name), str):
            try:
                read[name] = datetime.fromisoformat(read[name])
            except ValueError:
                continue  # `configure` refuses it, and says why
    return checked_settings(read)


@_operation("task.get", "GET", "/tasks/{name}/{key}")
async def _get(mesh: TaskMesh, name: str, key: str) -> Task:
    """Return a task as it stands now, with params, results and logs."""
    return await mesh.get(name, key)


@_operation("task.explain", "GET", "/tasks/{name}/{key}/explain")
async def _explain(mesh: TaskMesh, name: str, key: str, worker_id: str | None = None) -> list[Explanation]:
    """Show which gates of the claim rule are open or shut, for one worker or every live one."""
    return await mesh.explain(name, key, worker_id)


@_operation("flow.status", "GET", "/flows/{key}")
async def _flow(mesh: TaskMesh, key: str) -> FlowStatus:
    """Return the progress of a flow: counts, its tasks, and what waits for what."""
    return await mesh.flow_status(key)


@_operation("flow.cancel", "POST", "/flows/{key}/cancel")
async def _cancel_flow(mesh: TaskMesh, key: str) -> FlowStatus:
    """Cancel the tasks of a flow that are not finished."""
    return await mesh.flows.cancel(key)


@_operation("flow.retry", "POST", "/flows/{key}/retry")
async def _retry_flow(mesh: TaskMesh, key: str) -> FlowStatus:
    """Retry the tasks of a flow that ended without SUCCESS."""
    return await mesh.flows.retry(key)


@_operation("worker.explain", "GET", "/workers/{worker_id}/explain")
async def _explain_worker(mesh: TaskMesh, worker_id: str, name: str | None = None) -> list[Waiting]:
    """Show which gates keep one worker from the oldest tasks that wait, in groups, the largest group first."""
    return await mesh.inspect.explain_worker(worker_id, name)


@_operation("task.retry", "POST", "/tasks/{name}/{key}/retry")
async def _retry(
    mesh: TaskMesh,
    name: str,
    key: str,
    fresh: Annotated[bool, Field(description="Start over, with nothing recorded and no signals.")] = False,
) -> Task:
    """Run a finished task again; make a waiting one due at once. Recorded steps are not done again, unless `fresh`."""
    return await mesh.retry(name, key, fresh=fresh)


@_operation("task.cancel", "POST", "/tasks/{name}/{key}/cancel")
async def _cancel(mesh: TaskMesh, name: str, key: str) -> Task:
    """Cancel a task; a finished one stays as it is."""
    return await mesh.cancel(name, key)


@_operation("task.signal", "POST", "/tasks/{name}/{key}/signals/{event}")
async def _signal(
    mesh: TaskMesh,
    name: str,
    key: str,
    event: str,
    payload: Annotated[Any, Field(description="`{}` by default.")] = UNSAID,
    signal_id: Annotated[str | None, Field(description="Sent twice under one id, a signal counts once.")] = None,
) -> None:
    """Send a task a signal, which its handler waits for or will wait for."""
    await mesh.signal(name, key, event, payload, signal_id=signal_id)


@_operation("task.delete", "DELETE", "/tasks/{name}/{key}")
async def _delete(mesh: TaskMesh, name: str, key: str) -> Task:
    """Delete a task, and return it as it was."""
    return await mesh.delete(name, key)


@_operation("task.set_option", "PATCH", "/tasks/{name}/{key}/option")
async def _set_option(mesh: TaskMesh, name: str, key: str, changes: dict[str, Any]) -> Task:
    """Change fields of a task's option."""
    return await mesh.set_option(name, key, **checked_changes(changes))


@_operation("task.what_if_option", "GET", "/tasks/{name}/{key}/option/what-if")
async def _what_if_option(
    mesh: TaskMesh,
    name: str,
    key: str,
    changes: Annotated[Json[dict[str, Any]], Field(description="Fields of `TaskOption`, as JSON.")],
) -> OptionEffect:
    """Show what a change of a task's option would do: who could claim it then, whose run would be stopped."""
    return await mesh.what_if.option(name, key, **checked_changes(changes))


# --- many tasks ---


@_operation("errors", "GET", "/errors")
async def _errors(
    mesh: TaskMesh,
    name: str | None = None,
    at_most: Annotated[
        int, Field(ge=1, le=100_000, description="How many tasks to look at, some of each name.")
    ] = 2_000,
) -> ErrorReport:
    """Show what fails and why: failures grouped by task name, type of error and place, the most frequent first."""
    return await mesh.inspect.errors(name, at_most=at_most)


def _undo_ms(undo: bool) -> int:
    return UNDO_MS if undo else 0


@_operation("bulk.retry", "POST", "/bulk/retry", takes_by=True)
async def _retry_all(mesh: TaskMesh, where: Where, dry_run: DryRun = False, undo: Undo = True) -> BulkResult:
    """Retry every task that matches a filter."""
    return await mesh.bulk.retry(where, dry_run=dry_run, undo_ms=_undo_ms(undo))


@_operation("bulk.cancel", "POST", "/bulk/cancel", takes_by=True)
async def _cancel_all(mesh: TaskMesh, where: Where, dry_run: DryRun = False, undo: Undo = True) -> BulkResult:
    """Cancel every unfinished task that matches a filter."""
    return await mesh.bulk.cancel(where, dry_run=dry_run, undo_ms=_undo_ms(undo))


@_operation("bulk.delete", "POST", "/bulk/delete", takes_by=True)
async def _delete_all(mesh: TaskMesh, where: Where, dry_run: DryRun = False, undo: Undo = True) -> BulkResult:
    """Delete every task that matches a filter."""
    return await mesh.bulk.delete(where, dry_run=dry_run, undo_ms=_undo_ms(undo))


@_operation("bulk.purge", "POST", "/bulk/purge", takes_by=True)
async def _purge(mesh: TaskMesh, where: Where = "", dry_run: DryRun = False) -> BulkResult:
    """Delete every finished task that matches a filter."""
    return await mesh.bulk.purge(where, dry_run=dry_run)


@_operation("bulk.list", "GET", "/bulk")
async def _bulk_actions(mesh: TaskMesh) -> list[BulkAction]:
    """Return what was done to many tasks at once within the last month, the newest first."""
    return await mesh.bulk.actions()


@_operation("bulk.undo", "POST", "/bulk/{id}/undo")
async def _undo(mesh: TaskMesh, id: str) -> UndoResult:  # noqa: A002 — the name that it has in the address
    """Undo a bulk action; tasks that have changed since stay as they are."""
    return await mesh.bulk.undo(id)


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
async def _stop_worker(mesh: TaskMesh, worker_id: str, grace_ms: int = 30_000) -> None:
    """Stop a worker gracefully."""
    await mesh.stop_worker(worker_id, grace_ms)


@_operation("worker.pause", "POST", "/workers/{worker_id}/pause")
async def _pause_worker(mesh: TaskMesh, worker_id: str) -> None:
    """Pause a worker: it claims nothing more."""
    await mesh.pause_worker(worker_id)


@_operation("worker.resume", "POST", "/workers/{worker_id}/resume")
async def _resume_worker(mesh: TaskMesh, worker_id: str) -> None:
    """Resume a paused worker."""
    await mesh.resume_worker(worker_id)


@_operation("worker.set_concurrency", "POST", "/workers/{worker_id}/concurrency")
async def _set_concurrency(mesh: TaskMesh, worker_id: str, concurrency: int) -> None:
    """Change how many executions a worker runs at once."""
    await mesh.fleet.set_concurrency(worker_id, concurrency)


# --- queues ---


@_operation("queues.list", "GET", "/queues")
async def _queues(mesh: TaskMesh) -> list[QueueInfo]:
    """Return the queues with their pauses and limits, and how long their tasks waited and ran, of the newest that ended."""
    return await mesh.queues.all(latencies=True)


@_operation("queue.pause", "POST", "/queues/{queue}/pause", takes_by=True)
async def _pause(
    mesh: TaskMesh,
    queue: str,
    reason: str | None = None,
    for_ms: Annotated[int, Field(ge=1, le=MAX_DURATION_MS)] | None = None,
    group: str | None = None,
) -> None:
    """Pause a queue, or one group of it: workers claim nothing from it."""
    until = None if for_ms is None else mesh.clock.now() + timedelta(milliseconds=for_ms)
    await mesh.pause(queue, group=group, reason=reason, until=until)


@_operation("queue.resume", "POST", "/queues/{queue}/resume")
async def _resume(mesh: TaskMesh, queue: str, group: str | None = None) -> None:
    """Resume a queue, or one group of it: workers claim from it again."""
    await mesh.resume(queue, group=group)


@_operation("queue.forget", "DELETE", "/queues/{queue}")
async def _forget(mesh: TaskMesh, queue: str) -> None:
    """Remove the settings of an empty queue; it is no longer listed then."""
    await mesh.queues.forget(queue)


@_operation("queue.redrive", "POST", "/queues/{queue}/redrive", takes_by=True)
async def _redrive(mesh: TaskMesh, queue: str, dry_run: DryRun = False, undo: Undo = True) -> BulkResult:
    """Retry the dead letters of a queue: each goes back to the queue that it came from."""
    return await mesh.bulk.redrive(queue, dry_run=dry_run, undo_ms=_undo_ms(undo))


@_operation("queue.set_limit", "PUT", "/queues/{queue}/limit")
async def _set_limit(mesh: TaskMesh, queue: str, **limits: Unpack[LimitFields]) -> None:
    """Limit a queue: null takes a limit away, what is left out stays as it is."""
    await mesh.set_limit(queue, **limits)


@_operation("queue.what_if_limit", "GET", "/queues/{queue}/limit/what-if")
async def _what_if_limit(
    mesh: TaskMesh,
    queue: str,
    group: Annotated[str | None, Field(description="Try `running` for this group alone.")] = None,
    **limits: Unpack[LimitFields],
) -> LimitEffect:
    """Show what limits would do: how many waiting tasks could start now, and with the limits."""
    if group is not None:
        return await mesh.what_if.group_limit(queue, group, limits.get("running"))
    return await mesh.what_if.limit(queue, **limits)


@_operation("queue.set_group_limit", "PUT", "/queues/{queue}/group-limit")
async def _set_group_limit(mesh: TaskMesh, queue: str, group: str, running: int | None = None) -> None:
    """Limit one group of a queue; without `running`, the limit of every group applies."""
    await mesh.queues.set_group_limit(queue, group, running)


# --- schedules ---


@_operation("schedules.list", "GET", "/schedules")
async def _schedules(mesh: TaskMesh) -> list[ScheduleInfo]:
    """Return all schedules, the next to run first."""
    return await mesh.schedules.all()


@_operation("schedule.declare", "PUT", "/schedules/{schedule_id}")
async def _declare(mesh: TaskMesh, schedule_id: str, **fields: Unpack[ScheduleFields]) -> ScheduleInfo:
    """Create a schedule, or change the given fields of an existing one."""
    return await mesh.schedules.put(schedule_id, **fields)


@_operation("schedule.what_if", "GET", "/schedules/what-if")
async def _what_if_schedule(
    mesh: TaskMesh,
    schedule_id: str | None = None,
    cron: str | None = None,
    interval_ms: int | None = None,
    timezone: str | None = None,
) -> ScheduleEffect:
    """Show when a schedule would run next. What is not given is taken from the schedule of that id, if there is one."""
    return await mesh.what_if.schedule(schedule_id, cron=cron, interval_ms=interval_ms, timezone=timezone)


@_operation("schedule.pause", "POST", "/schedules/{schedule_id}/pause", takes_by=True)
async def _pause_schedule(mesh: TaskMesh, schedule_id: str, reason: str | None = None) -> ScheduleInfo:
    """Pause a schedule: it publishes nothing until it is resumed."""
    return await mesh.schedules.pause(schedule_id, reason=reason)


@_operation("schedule.resume", "POST", "/schedules/{schedule_id}/resume")
async def _resume_schedule(mesh: TaskMesh, schedule_id: str) -> ScheduleInfo:
    """Resume a paused schedule. Runs that it missed are not made up for."""
    return await mesh.schedules.resume(schedule_id)


@_operation("schedule.trigger", "POST", "/schedules/{schedule_id}/trigger")
async def _trigger(mesh: TaskMesh, schedule_id: str) -> Published:
    """Publish a schedule's task now."""
    return Published.model_validate(await mesh.schedules.trigger(schedule_id), from_attributes=True)


@_operation("schedule.remove", "DELETE", "/schedules/{schedule_id}")
async def _unschedule(mesh: TaskMesh, schedule_id: str) -> ScheduleInfo:
    """Remove a schedule; its tasks stay."""
    return await mesh.schedules.remove(schedule_id)
