"""The ASGI app: pages, API and probes behind one guard. Mount it in a service of your own, or let `serve` run it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

from pymongo.errors import PyMongoError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

from taskmesh.admin.stats import Stats
from taskmesh.mesh import TaskMesh
from taskmesh.model import distribution
from taskmesh.model.errors import InvalidOption, TaskMeshError
from taskmesh.web import api, openapi, pages
from taskmesh.web.connection import Connection, mesh_of
from taskmesh.web.live_view import Pulse
from taskmesh.web.rendering import error_page
from taskmesh.web.security import SHORTEST_TOKEN, Guard, Rules

try:
    from taskmesh.integrations import metrics
except ImportError:  # the extra is not there
    _fleet_metrics: Callable[[TaskMesh, Stats], Awaitable[bytes]] | None = None
else:
    _fleet_metrics = metrics.fleet_metrics

API = "/api/v1"


def create_app(
    mesh: TaskMesh,
    *,
    read_only: bool = False,
    token: str | None = None,
    base_path: str = "",
    hosts: Collection[str] | None = None,
    user_header: str | None = None,
) -> Starlette:
    """Return the dashboard and the REST API as an ASGI app.

    `mesh`: used as it is if it is connected, else connected by the first request. `read_only`: nobody can change anything.
    `token`: everybody has to show it; without one, the service that mounts the app has to guard it. `base_path`: the path
    under which a proxy serves it, if the app cannot see that itself. `hosts`: answer only under these host names. `user_header`:
    the header in which a proxy says who asks, like `X-Forwarded-User`: nobody else may reach the app then. Raises
    `InvalidOption` for a token that is too short.
    """
    token = None if token is None else token.strip()  # a file or a secret often ends with a newline
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise InvalidOption(
            f"a token must have at least {SHORTEST_TOKEN} characters: make one by `openssl rand -hex 32`"
        )
    connection = Connection(mesh)
    pulse = Pulse(connection)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        keeping = asyncio.get_running_loop().create_task(pulse.keep(), name="taskmesh charts")
        yield
        keeping.cancel()
        await asyncio.wait([keeping])
        await pulse.close()
        await connection.close()

    rules = Rules(token=token, read_only=read_only, hosts=hosts)
    app = Starlette(
        routes=[
            Mount(API, routes=[*api.routes(), Route("/openapi.json", _openapi)]),
            Route("/livez", _livez),
            Route("/readyz", _readyz),
            Route("/metrics", _metrics),
            *pages.routes(),
        ],
        middleware=[Middleware(Guard, rules=rules)],
        exception_handlers={404: _not_found, 405: _not_allowed},
        lifespan=lifespan,
    )
    app.state.connection = connection
    app.state.pulse = pulse
    app.state.rules = rules
    app.state.user_header = user_header
    app.state.base_path = f"/{base_path.strip('/')}".rstrip("/")
    return app


async def _openapi(request: Request) -> Response:
    """Return the OpenAPI document of the API."""
    rules: Rules = request.app.state.rules
    root = request.scope.get("root_path", "").removesuffix(API)
    prefix = request.app.state.base_path or root
    return api.json_response(openapi.document(f"{prefix}{API}", needs_token=rules.token is not None))


async def _livez(_: Request) -> Response:
    """Say that the event loop responds."""
    return PlainTextResponse("alive\n")


async def _readyz(request: Request) -> Response:
    """Say whether the database answers."""
    try:
        await mesh_of(request)
        await request.app.state.connection.ask()
    except (PyMongoError, TaskMeshError) as error:
        return PlainTextResponse(f"the database does not answer ({type(error).__name__})\n", 503)
    return PlainTextResponse("ready\n")


async def _metrics(request: Request) -> Response:
    """Return the metrics of the fleet for Prometheus."""
    if _fleet_metrics is None:
        return PlainTextResponse(f"metrics need prometheus-client: {distribution.install('metrics')}\n", 501)
    try:
        mesh = await mesh_of(request)
        text = await _fleet_metrics(mesh, await request.app.state.pulse.stats())
    except (PyMongoError, TaskMeshError) as error:
        return PlainTextResponse(f"the database does not answer ({type(error).__name__})\n", 503)
    return Response(text, media_type=metrics.CONTENT_TYPE)


async def _not_found(request: Request, error: Exception) -> Response:
    if f"{API}/" in request.url.path:
        return api.json_response({"error": "NotFound", "message": "there is no such path: see openapi.json"}, 404)
    return HTMLResponse(error_page(request, 404, "There is no such page", str(error)), 404)


async def _not_allowed(request: Request, error: Exception) -> Response:
    headers = getattr(error, "headers", None)
    found = api.json_response({"error": "NotAllowed", "message": f"not by {request.method}: see openapi.json"}, 405)
    found.headers.update(headers or {})
    return found
