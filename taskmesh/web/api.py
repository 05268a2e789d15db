"""The REST API: each operation as a route, and every error as a status with a JSON body that says what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from pymongo.errors import PyMongoError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import Scope

from taskmesh.admin.database import is_passing
from taskmesh.mesh import TaskMesh
from taskmesh.model import errors
from taskmesh.model.jsonable import to_json
from taskmesh.operations.table import OPERATIONS, BadRequest, Operation, validated
from taskmesh.web.connection import mesh_of

logger = logging.getLogger("taskmesh.web")

MAX_BODY_BYTES = 20_000_000
_STATUS: dict[type[BaseException], int] = {
    errors.TaskNotFound: 404,
    errors.TaskRunning: 409,
    errors.TaskFinished: 409,
    errors.QueueNotEmpty: 409,
    errors.TaskTooLarge: 413,
    errors.TooManySignals: 413,
    errors.UnstorableValue: 422,
    errors.InvalidName: 422,
    errors.InvalidKey: 422,
    errors.InvalidParams: 422,
    errors.InvalidOption: 422,
    errors.IncompatibleCollection: 422,
    errors.CannotDecrypt: 422,
    errors.PayloadMissing: 422,
}
_KEEP_ALIVE_S = 15.0
_ANY_TEXT = re.compile(r"{(key|worker_id|schedule_id|event)}")
"""Parameters that may contain a slash. An unencoded one is part of the value, unless a longer path is an operation."""
_TOLD = (
    *("name", "key", "queue", "group", "worker_id", "schedule_id", "id", "where", "event"),
    *("changes", "concurrency", "running", "rate", "per_ms", "group_running", "group_rate", "group_per_ms"),
    *("for_ms", "cron", "interval_ms"),
)
_LONGEST_TOLD = 1_000
_LONGEST_SIGNATURE = 200


class _SentRoute(Route):
    """A route that is matched against the path as it was sent, so that `%2F` is part of a key and not a separator."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match, and decode what stands in the path."""
        root, sent = str(scope.get("root_path", "")), scope.get("raw_path", b"").decode("latin-1")
        before = quote(root)
        if not sent.startswith(before):  # a server that does not provide the raw path
            return super().matches(scope)
        match, found = super().matches({**scope, "path": root + sent[len(before) :]})
        placed = {name: unquote(value) for name, value in found.get("path_params", {}).items()}
        return match, {**found, "path_params": placed}


def routes() -> list[Route]:
    """Return a route for each path with all of its operations, longest path first, and the route of the event stream."""
    at: dict[str, dict[str, Operation]] = {}
    for operation in OPERATIONS.values():
        at.setdefault(operation.path, {})[operation.method] = operation
    found: list[Route] = [
        _SentRoute(_ANY_TEXT.sub(r"{\1:path}", path), _endpoint(at[path]), methods=[*at[path]])
        for path in sorted(at, key=lambda path: -path.count("/"))
    ]
    return [*found, Route("/events", events, methods=["GET"])]


def json_response(value: Any, status: int = 200) -> Response:
    """Return a value as JSON."""
    return Response(to_json(value), status, media_type="application/json")


def error_response(error: BaseException) -> Response:
    """Return an error as JSON, with the status that fits it."""
    status, name, message = told(error)
    return json_response({"error": name, "message": message}, status)


def told(error: BaseException) -> tuple[int, str, str]:
    """Return status, name and message for an error. An unexpected one is logged, and described in general terms only."""
    if isinstance(error, BadRequest):
        return error.status, "BadRequest", str(error)
    if isinstance(error, errors.TaskMeshError):
        return _STATUS.get(type(error), 503), type(error).__name__, str(error)
    if isinstance(error, PyMongoError) and is_passing(error):
        logger.warning("the database did not answer: %s", error)
        return (
            503,
            "DatabaseUnavailable",
            f"the database did not answer ({type(error).__name__}): try again",
        )
    logger.error("a request failed", exc_info=error)
    return 500, "InternalError", "internal error: see the server's log"


def _endpoint(operations: Mapping[str, Operation]) -> Any:
    async def endpoint(request: Request) -> Response:
        operation = operations["GET" if request.method == "HEAD" else request.method]
        try:
            query = validated(operation.query, _query_of(request))
            body = None
            if operation.body is not None:
                body = validated(operation.body, await _body_of(request), strict=True)
            mesh = await mesh_of(request)
            if operation.name == "stats":  # those of the pages: counting millions of tasks takes a second
                return json_response(await request.app.state.pulse.stats())
            given = {**dict(query), **dict(body or ())}
            with signed(request, mesh, operation, given):
                answer = await operation.perform(mesh, query, body)
            return json_response(answer)
        except Exception as error:  # noqa: BLE001 — each error becomes an answer; unexpected ones are logged
            return error_response(error)

    return endpoint


@contextlib.contextmanager
def signed(request: Request, mesh: TaskMesh, operation: Operation, given: Mapping[str, Any]) -> Iterator[None]:
    """Sign what the block does with the requester's name, and log it without params and reasons, which can be confidential."""
    by = signature(request, given.get("by"))
    if operation.changes:
        about = ", ".join(f"{name} {given[name]!r}" for name in _TOLD if given.get(name) is not None)[:_LONGEST_TOLD]
        logger.info("%s by %s: %s", operation.name, by, about)
    with mesh.audit.acting_as(by):
        yield


def signature(request: Request, said: str | None = None) -> str:
    """Return who sent a request: by the proxy's header, if there is one; else as the request says; else its address."""
    header: str | None = request.app.state.user_header
    if header is not None and (user := request.headers.get(header)):
        return user[:_LONGEST_SIGNATURE]
    if said:
        return said
    return f"the dashboard, from {request.client.host}" if request.client is not None else "the dashboard"


def _query_of(request: Request) -> dict[str, str]:
    query: dict[str, str] = dict(request.path_params)
    for name, value in request.query_params.multi_items():
        if name in query:
            raise BadRequest(f"the parameter {name!r} is given twice")
        query[name] = value
    return query


async def _body_of(request: Request) -> Any:
    raw = await read_body(request)
    if not raw:
        return {}
    if not request.headers.get("content-type", "application/json").partition(";")[0].strip().endswith("json"):
        raise BadRequest("the body must be application/json", 415)
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON", 400) from None


async def read_body(request: Request) -> bytes:
    """Return a request's body. Raises `BadRequest` for one that is too large."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise BadRequest(f"the body is larger than {MAX_BODY_BYTES} bytes", 413)
        parts.append(part)
    return b"".join(parts)


# --- events ---


async def events(request: Request) -> Response:
    """Stream what happens to tasks as server-sent events; resumes after `Last-Event-ID`, or the parameter `after`."""
    try:
        mesh = await mesh_of(request)
        query = _query_of(request)
        if unknown := sorted(query.keys() - {"name", "key", "after"}):
            raise BadRequest(f"events takes no {', '.join(unknown)}; it takes: name, key, after")  # noqa: TRY301 — answered below
        after = request.headers.get("last-event-id") or query.get("after")
        reader = mesh.events(query.get("name"), query.get("key"), after=after)
    except Exception as error:  # noqa: BLE001 — each error becomes an answer; unexpected ones are logged
        return error_response(error)
    return StreamingResponse(_event_lines(reader), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _event_lines(reader: Any) -> AsyncIterator[str]:
    pending: asyncio.Task[Any] | None = None
    try:
        await reader
        yield ": the stream is open\n\n"
        while True:
            pending = pending or asyncio.ensure_future(anext(reader))
            done, _ = await asyncio.wait([pending], timeout=_KEEP_ALIVE_S)
            if not done:
                yield ": still there\n\n"
                continue
            try:
                event = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            told_event = {name: getattr(event, name) for name in ("kind", "name", "key", "worker_id", "time", "status")}
            place = f"id: {event.token}\n" if event.token else ""
            yield f"{place}event: {event.kind}\ndata: {to_json(told_event | {'missed': event.missed})}\n\n"
    finally:
        if pending is not None:
            pending.cancel()
        reader.close()
