"""What the forms of the pages do: each performs an operation, or one for each ticked task, and redirects to its page."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from taskmesh.admin.bulk import BulkResult, UndoResult
from taskmesh.model.errors import TaskMeshError
from taskmesh.operations.table import OPERATIONS, BadRequest, Published
from taskmesh.web import api
from taskmesh.web.connection import mesh_of
from taskmesh.web.param_fields import params_from
from taskmesh.web.rendering import cookie_path, led_back, rendered
from taskmesh.web.security import Rules, prefix_of

_WRONG_TOKEN_COSTS_S = 0.5


async def _fields_of(request: Request) -> list[tuple[str, str]]:
    raw = await api.read_body(request)
    try:
        return parse_qsl(raw.decode(), keep_blank_values=True, strict_parsing=bool(raw), max_num_fields=2_000)
    except ValueError:
        raise BadRequest("the form cannot be read", 400) from None


async def do(request: Request) -> Response:
    """Perform the operation of a form, and redirect to its page."""
    where = "/"
    try:
        fields = await _fields_of(request)
        given: dict[str, Any] = {name: value for name, value in fields if value != ""}
        if given.pop("empty_takes_away", None):
            given |= {name: None for name, value in fields if value == ""}
        where = str(given.pop("back", "/"))
        done_where = str(given.pop("then", where))
        operation = OPERATIONS.get(request.path_params["operation"])
        if operation is None or not operation.changes:
            raise BadRequest("there is no such operation", 404)  # noqa: TRY301 — it becomes an answer below
        if operation.body is not None:
            given |= {
                name: _json_field(name, given[name]) for name in ("params", "configuration", "changes") if name in given
            }
            given = _with_params(given)
        mesh = await mesh_of(request)
        with api.signed(request, mesh, operation, given):
            result = await operation.perform_given(mesh, given)
    except Exception as error:  # noqa: BLE001 — the page shows it; unexpected errors are logged
        _, _, message = api.told(error)
        return led_back(request, where, message, "bad")
    return led_back(request, done_where, _done_text(operation.name, given, result))


def _json_field(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{name} must be JSON: {error}") from None


def _with_params(given: dict[str, Any]) -> dict[str, Any]:
    """Combine the params that have form fields of their own."""
    try:
        params, rest = params_from(given)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    return rest | {"params": params} if params else rest


def _done_text(name: str, given: dict[str, Any], result: Any) -> str:
    what = given.get("key") or given.get("worker_id") or given.get("queue") or given.get("schedule_id") or ""
    if isinstance(result, Published):
        warnings = "".join(f" — {warning}" for warning in result.warnings)
        return f"{'published' if result.created else 'was there already'}: {result.name} {result.key}{warnings}"
    if isinstance(result, UndoResult):
        left = f"; {result.left} left as they are, since something has happened to them" if result.left else ""
        return f"undone: {result.action} of {result.restored} tasks{left}"
    if isinstance(result, BulkResult):
        return f"{result.action}: {result.done} of {result.matched} tasks"
    return f"{name.partition('.')[2].replace('_', ' ')}: {what}"


async def do_selected(request: Request) -> Response:
    """Retry, cancel or delete the ticked tasks."""
    where = "/tasks"
    try:
        fields = await _fields_of(request)
        where = next((value for name, value in fields if name == "back"), where)
        action = next((value for name, value in fields if name == "action"), "")
        if action not in ("retry", "cancel", "delete"):
            raise BadRequest(f"action must be retry, cancel or delete, got {action!r}")  # noqa: TRY301 — answered below
        mesh = await mesh_of(request)
        operation = OPERATIONS[f"task.{action}"]
        selected = [value.partition(":") for name, value in fields if name == "task"]
        done, problems = 0, []
        for name, _, key in selected:
            try:
                with api.signed(request, mesh, operation, {"name": name, "key": key}):
                    await operation.perform_given(mesh, {"name": name, "key": key})
                done += 1
            except (TaskMeshError, BadRequest) as error:  # the others are done all the same
                problems.append(str(error))
    except Exception as error:  # noqa: BLE001 — the page shows it; unexpected errors are logged
        return led_back(request, where, api.told(error)[2], "bad")
    text = f"{action}: {done} of {len(selected)} tasks" + (f"; {problems[0]}" if problems else "")
    return led_back(request, where, text, "bad" if problems else "good")


async def login(request: Request) -> Response:
    """Check the token, and give the browser a session."""
    rules: Rules = request.app.state.rules
    then = request.query_params.get("then", "/")
    if rules.token is None:
        return led_back(request, "/", "no token is needed here")
    if request.method == "GET":
        return rendered(request, "login.html", then=then, wrong=False)
    try:
        fields = dict(await _fields_of(request))
    except BadRequest as error:
        return api.error_response(error)
    if not rules.knows(fields.get("token", "")):
        await asyncio.sleep(_WRONG_TOKEN_COSTS_S)
        return rendered(request, "login.html", 401, then=fields.get("then", "/"), wrong=True)
    response = led_back(request, fields.get("then", "/"), "welcome")
    secure = request.url.scheme == "https"
    name, value = rules.session()
    # Lax: a link in a mail leads to the page and not to the login. What changes something, the guard looks at anyway.
    response.set_cookie(name, value, httponly=True, samesite="lax", secure=secure, path=cookie_path(request))
    return response


async def logout(request: Request) -> Response:
    """Remove the session from this browser. The server keeps no sessions: a copy stays valid until the token changes."""
    rules: Rules = request.app.state.rules
    response = RedirectResponse(prefix_of(request.scope) + "/login", 303)
    response.delete_cookie(rules.session()[0], path=cookie_path(request))
    return response
