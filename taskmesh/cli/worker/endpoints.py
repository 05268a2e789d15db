"""A worker's HTTP endpoints: `/livez`, `/readyz` and `/metrics`. A few lines, so that no web framework is needed.

The server runs in the event loop that it reports on: if that is blocked, there is no answer, which probes take for a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from taskmesh.mesh import TaskMesh
from taskmesh.model.distribution import check_extra
from taskmesh.model.errors import TaskMeshError

_DEADLINE_S = 10.0
_LONGEST_REQUEST = 8_192


@dataclass(frozen=True)
class Answer:
    """An HTTP response."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "application/json"


Routes = Mapping[str, Callable[[], Awaitable[Answer]]]


@dataclass(frozen=True)
class Health:
    """The health of a process. Not `live`: restart it. Not `ready`: wait."""

    live: bool
    ready: bool
    about: dict[str, Any] = field(default_factory=dict)


def probes(look: Callable[[], Health]) -> Routes:
    """Return the routes for probes."""

    async def livez() -> Answer:
        health = look()
        return _health(health, good=health.live)

    async def readyz() -> Answer:
        health = look()
        return _health(health, good=health.live and health.ready)

    return {"/livez": livez, "/readyz": readyz}


def _health(health: Health, *, good: bool) -> Answer:
    body = json.dumps({"live": health.live, "ready": health.ready, **health.about}).encode() + b"\n"
    return Answer(body, HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE)


async def serve(host: str, port: int, routes: Routes) -> asyncio.Server:
    """Answer until the server is closed. Raises `TaskMeshError` if the port is taken."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_DEADLINE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await _response(head.split(b"\r\n", 1)[0].decode("latin-1"), routes))
                await writer.drain()
        writer.close()

    try:
        return await asyncio.start_server(answer, host, port, limit=_LONGEST_REQUEST)
    except OSError as error:
        raise TaskMeshError(f"cannot listen on {host}:{port}: {error}") from None


async def _response(request: str, routes: Routes) -> bytes:
    method, _, rest = request.partition(" ")
    found = routes.get(rest.partition(" ")[0].partition("?")[0])
    if method not in ("GET", "HEAD"):
        answer = Answer(b"", HTTPStatus.METHOD_NOT_ALLOWED)
    elif found is None:
        answer = Answer(b"", HTTPStatus.NOT_FOUND)
    else:
        answer = await found()
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else answer.body)


if TYPE_CHECKING:
    from taskmesh.consumer.worker import Consumer
    from taskmesh.integrations.metrics import WorkerMetrics


def worker_metrics() -> WorkerMetrics:
    """Return what measures a consumer. Raises `TaskMeshError` without the extra."""
    check_extra("metrics", ("prometheus_client",), "--metrics-port")
    from taskmesh.integrations.metrics import WorkerMetrics  # noqa: PLC0415 — an extra

    return WorkerMetrics()


def metrics(mesh: TaskMesh, measured: WorkerMetrics, consumer: Callable[[], Consumer]) -> Routes:
    """Return the routes for Prometheus."""
    from taskmesh.integrations.metrics import CONTENT_TYPE, fleet_metrics  # noqa: PLC0415 — an extra

    async def own() -> Answer:
        return Answer(await measured.text(consumer()), content_type=CONTENT_TYPE)

    async def fleet() -> Answer:
        try:
            return Answer(await fleet_metrics(mesh), content_type=CONTENT_TYPE)
        except (PyMongoError, TaskMeshError) as error:
            told = f"the database does not answer ({type(error).__name__})\n"
            return Answer(told.encode(), HTTPStatus.SERVICE_UNAVAILABLE, "text/plain")

    return {"/metrics": own, "/metrics/fleet": fleet}
