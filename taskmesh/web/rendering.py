"""Rendering: the templates, what every page shows, and the message about the last action, shown once on the next page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import quote, unquote, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from taskmesh.mesh import TaskMesh
from taskmesh.model.task import Status
from taskmesh.web import api
from taskmesh.web.connection import ANSWERS_WITHIN_S, Connection, DatabaseUnavailable, mesh_of
from taskmesh.web.security import Rules, prefix_of
from taskmesh.web.templating import environment

_SHOWN_WITHIN_S = 15.0
_FLASH = "taskmesh_told"
_LONGEST_TOLD = 3_500
"""A browser drops a cookie of more than 4 096 bytes, and the message with it."""
_ENVIRONMENT = environment()

_TITLES = {
    403: "This is not allowed",
    404: "Not found",
    409: "This cannot be done now",
    422: "This cannot be read",
    503: "The database does not answer",
}

Page = Callable[[Request, TaskMesh], Coroutine[Any, Any, Response]]


def as_page(show: Page) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Make an endpoint of a page: it gets a connected mesh, and every error becomes a page."""

    async def endpoint(request: Request) -> Response:
        try:
            return await _shown_in_time(show, request)
        except Exception as error:  # noqa: BLE001 — each error becomes a page; unexpected ones are logged
            status, _, message = api.told(error)
            return HTMLResponse(
                error_page(request, status, _TITLES.get(status, "Something went wrong"), message), status
            )

    return endpoint


async def _shown_in_time(show: Page, request: Request) -> Response:
    """Make the page; give up when the database stops answering or takes too long. Raises `DatabaseUnavailable`."""
    mesh = await mesh_of(request)
    connection: Connection = request.app.state.connection
    making = asyncio.ensure_future(show(request, mesh))
    until = time.monotonic() + _SHOWN_WITHIN_S
    try:
        while time.monotonic() < until:
            await asyncio.wait([making], timeout=ANSWERS_WITHIN_S)
            if making.done():
                return making.result()
            await connection.ask()
        raise DatabaseUnavailable(
            f"the database did not answer within {_SHOWN_WITHIN_S:.0f} s what this page asks for: try again"
        )
    finally:
        making.cancel()


def rendered(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page made of a template and these values."""
    rules: Rules = request.app.state.rules
    told = _told(request)
    text = _ENVIRONMENT.get_template(template).render(
        prefix=prefix_of(request.scope),
        here=request.url.path.removeprefix(prefix_of(request.scope)) or "/",
        back=_here(request),
        read_only=rules.read_only,
        has_token=rules.token is not None,
        told=told,
        statuses=[str(status) for status in Status],
        **values,
    )
    response = HTMLResponse(text, status)
    if told is not None:
        response.delete_cookie(_FLASH, path=cookie_path(request))
    return response


def error_page(request: Request, status: int, title: str, message: str) -> str:
    """Return a page that says what went wrong."""
    return bytes(
        rendered(request, "error.html", status, title=title, message=message, away=status == 503).body
    ).decode()


def _here(request: Request) -> str:
    """Return the address of this page, to come back to; without the field `back`, which a form adds."""
    path = request.url.path.removeprefix(prefix_of(request.scope)) or "/"
    query = urlencode([(name, value) for name, value in request.query_params.multi_items() if name != "back"])
    return f"{path}?{query}" if query else path


def cookie_path(request: Request) -> str:
    """Return the path of our cookies."""
    return prefix_of(request.scope) + "/"


# --- the message about the last action, shown once on the next page ---


def _told(request: Request) -> dict[str, str] | None:
    try:
        told = json.loads(unquote(request.cookies.get(_FLASH, "null")))
    except ValueError:
        return None
    if isinstance(told, dict) and isinstance(told.get("text"), str):
        return {"kind": "bad" if told.get("kind") == "bad" else "good", "text": told["text"][:500]}
    return None


def led_back(request: Request, where: str, text: str, kind: str = "good") -> Response:
    """Redirect to one of our pages, and show there what happened."""
    safe = where if where.startswith("/") and not where.startswith(("//", "/\\")) else "/"
    response = RedirectResponse(prefix_of(request.scope) + safe, 303)
    told = _as_cookie(kind, text[:500])
    if len(told) > _LONGEST_TOLD:
        told = _as_cookie(kind, text[:200] + " …")
    response.set_cookie(_FLASH, told, max_age=60, httponly=True, samesite="strict", path=cookie_path(request))
    return response


def _as_cookie(kind: str, text: str) -> str:
    return quote(json.dumps({"kind": kind, "text": text}, ensure_ascii=False).encode("utf-8", "replace"))
