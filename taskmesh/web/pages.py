"""The pages: each asks the public API and shows the answer; each form does one operation, and leads back.

They work without scripts; the script makes them live, asks before what cannot be undone, and knows the keyboard.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from taskmesh.bulk import TaskPage, UndoResult
from taskmesh.errors import InvalidOption, TaskMeshError
from taskmesh.mesh import TaskMesh
from taskmesh.stats import Stats
from taskmesh.task import Status
from taskmesh.web import api
from taskmesh.web.attention import remarks
from taskmesh.web.connection import mesh_of
from taskmesh.web.guard import SESSION, Rules, prefix_of
from taskmesh.web.jsonable import to_json
from taskmesh.web.operations import OPERATIONS
from taskmesh.web.pulse import Pulse, sample_data
from taskmesh.web.requests import Published
from taskmesh.web.views import STATIC, bars_of, environment, option_rows, query, whys_of
from taskmesh.where import TaskFilter, milliseconds

SHORTEST_TOKEN = 16
_FLASH = "taskmesh_told"
_LONGEST_TOLD = 3_500
_WRONG_TOKEN_COSTS_S = 0.5
_COUNT_AT_MOST = 10_000
_COUNT_WITHIN_MS = 120
_LISTED_WITHIN_MS = 1_500
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_ENVIRONMENT = environment()
_TEMPLATES = {name: _ENVIRONMENT.get_template(name) for name in _ENVIRONMENT.list_templates()}

Page = Callable[[Request, TaskMesh], Awaitable[Response]]


def routes() -> list[Route]:
    """Return the routes of the pages, of what their forms do, and of what they load."""
    return [
        Route("/", _page(overview)),
        Route("/tasks", _page(tasks)),
        Route("/task", _page(task)),
        Route("/bulk", _page(bulk)),
        Route("/workers", _page(workers)),
        Route("/queues", _page(queues)),
        Route("/schedules", _page(schedules)),
        Route("/api", _page(api_page)),
        Route("/login", login, methods=["GET", "POST"]),
        Route("/logout", logout, methods=["POST"]),
        Route("/do/{operation}", do, methods=["POST"]),
        Route("/do-selected", do_selected, methods=["POST"]),
        Route("/live", live),
        Route("/static/{name}", static),
    ]


def _page(show: Page) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await show(request, await mesh_of(request))
        except Exception as error:  # noqa: BLE001 — each becomes a page; what is unexpected is logged
            status, name, message = api.told(error)
            return HTMLResponse(error_page(request, status, name, message), status)

    return endpoint


def _render(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    rules: Rules = request.app.state.rules
    told = _told(request)
    page = _TEMPLATES[template].render(
        prefix=prefix_of(request.scope),
        here=request.url.path.removeprefix(prefix_of(request.scope)) or "/",
        back=_here(request),
        read_only=rules.read_only,
        has_token=rules.token is not None,
        told=told,
        statuses=[str(status) for status in Status],
        **values,
    )
    response = HTMLResponse(page, status)
    if told is not None:
        response.delete_cookie(_FLASH, path=_cookie_path(request))
    return response


def error_page(request: Request, status: int, title: str, message: str) -> str:
    """Return a page that says what went wrong."""
    return bytes(_render(request, "error.html", status, title=title, message=message).body).decode()


def _here(request: Request) -> str:
    path = request.url.path.removeprefix(prefix_of(request.scope)) or "/"
    return f"{path}?{request.url.query}" if request.url.query else path


def _cookie_path(request: Request) -> str:
    return prefix_of(request.scope) + "/"


# --- what was done is told on the next page, once ---


def _told(request: Request) -> dict[str, str] | None:
    try:
        told = json.loads(unquote(request.cookies.get(_FLASH, "null")))
    except ValueError:
        return None
    if isinstance(told, dict) and isinstance(told.get("text"), str):
        return {"kind": "bad" if told.get("kind") == "bad" else "good", "text": told["text"][:500]}
    return None


def _back(request: Request, where: str, text: str, kind: str = "good") -> Response:
    """Lead back to a page of ours, and tell there what happened."""
    safe = where if where.startswith("/") and not where.startswith(("//", "/\\")) else "/"
    response = RedirectResponse(prefix_of(request.scope) + safe, 303)
    told = quote(json.dumps({"kind": kind, "text": text[:500]}, ensure_ascii=False).encode("utf-8", "replace"))
    if (
        len(told) > _LONGEST_TOLD
    ):  # a browser drops a cookie of more than 4 096 bytes, and nobody would be told anything
        told = quote(
            json.dumps({"kind": kind, "text": text[:200] + " …"}, ensure_ascii=False).encode("utf-8", "replace")
        )
    response.set_cookie(_FLASH, told, max_age=60, httponly=True, samesite="strict", path=_cookie_path(request))
    return response


# --- pages ---


async def overview(request: Request, mesh: TaskMesh) -> Response:
    """Show how it is going."""
    pulse: Pulse = request.app.state.pulse
    stats = await pulse.stats()
    all_workers = await mesh.workers()
    live_workers = [worker for worker in all_workers if worker.live]
    all_schedules = await mesh.schedules()
    return _render(
        request,
        "overview.html",
        stats=stats,
        totals=_totals(stats),
        remarks=remarks(stats, all_workers, pulse.queues, all_schedules),
        failures=sorted(
            ((name, counts["FAIL"]) for name, counts in stats.counts.items() if counts.get("FAIL")), key=lambda f: -f[1]
        ),
        samples=to_json([sample_data(sample) for sample in pulse.samples]),
        workers=live_workers,
        slots=sum(worker.concurrency for worker in live_workers),
        busy=sum(worker.running for worker in live_workers),
        upcoming=[schedule for schedule in all_schedules if not schedule.paused][:5],
    )


def _totals(stats: Stats) -> dict[str, int]:
    return {str(status): sum(counts.get(str(status), 0) for counts in stats.counts.values()) for status in Status}


def _filter_of(request: Request) -> tuple[str, TaskFilter | None, str | None]:
    """Return the filter's text, the filter, and what is wrong with it. Fields of the form are added to the text."""
    given = request.query_params
    text = given.get("where", "")
    try:
        which = TaskFilter.parse(text)
        fields: dict[str, Any] = {name: given[name] for name in ("name", "queue", "error", "worker") if given.get(name)}
        if given.get("key"):
            fields["key_prefix"] = given["key"]
        if statuses := [status for status in given.getlist("status") if status]:
            fields["status"] = tuple(statuses)
        if given.get("older"):
            fields["older_than_ms"] = milliseconds(given["older"])
        which = TaskFilter.checked(**{**which.model_dump(exclude_defaults=True), **fields})
    except InvalidOption as error:
        return text, None, str(error)
    return str(which), which, None


async def tasks(request: Request, mesh: TaskMesh) -> Response:
    """Show which tasks there are."""
    text, which, problem = _filter_of(request)
    newest = request.query_params.get("order", "newest") == "newest"
    page = TaskPage(tasks=[], newest_first=newest, following=None)
    count: int | None = 0
    if which is not None:
        after = request.query_params.get("after") or None
        # One after the other: of two at once, a refusal of one would leave the other on its way.
        page = await mesh.page(which, newest_first=newest, after=after, deadline_ms=_LISTED_WITHIN_MS)
        count = await mesh.count_within(which, at_most=_COUNT_AT_MOST, deadline_ms=_COUNT_WITHIN_MS)
    stats = await request.app.state.pulse.stats()
    return _render(
        request,
        "tasks.html",
        200 if problem is None else 422,
        page=page,
        where=text,
        which=which or TaskFilter(),
        problem=problem,
        count=count,
        counted_all=count is not None and count < _COUNT_AT_MOST,
        names=sorted(stats.counts),
        order="newest" if newest else "key",
        is_first=not request.query_params.get("after"),
    )


async def task(request: Request, mesh: TaskMesh) -> Response:
    """Show all about one task."""
    name, key = request.query_params.get("name", ""), request.query_params.get("key", "")
    found = await mesh.get(name, key)
    explanations = [] if found.status.finished else await mesh.explain(name, key)
    now = mesh.clock.now()
    return _render(
        request,
        "task.html",
        task=found,
        bars=bars_of(found, now),
        whys=whys_of(explanations),
        option_rows=option_rows(found.task_option),
        api_query=query(name=name, key=key),
    )


async def bulk(request: Request, mesh: TaskMesh) -> Response:
    """Tell how many tasks something would be done to, and ask."""
    action = request.query_params.get("action", "")
    if not action:
        return _render(request, "actions.html", actions=await mesh.bulk_actions())
    if action not in ("retry", "cancel", "delete"):
        raise api.BadRequest(f"the actions are retry, cancel and delete, not {action!r}", 404)
    text, which, problem = _filter_of(request)
    if which is None:
        raise InvalidOption(problem or "")
    if which.is_empty:
        raise InvalidOption("an empty filter means every task: name at least a status, like status:FAIL")
    count = await mesh.count_within(which, at_most=_COUNT_AT_MOST, deadline_ms=_COUNT_WITHIN_MS)
    first = await mesh.page(which, newest_first=False, limit=10, deadline_ms=_LISTED_WITHIN_MS)
    return _render(
        request, "bulk.html", action=action, where=text, count=count, at_most=_COUNT_AT_MOST, examples=first.tasks
    )


async def workers(request: Request, mesh: TaskMesh) -> Response:
    """Show who works."""
    found = sorted(await mesh.workers(), key=lambda worker: (not worker.live, worker.worker_id))
    return _render(request, "workers.html", workers=found)


async def queues(request: Request, mesh: TaskMesh) -> Response:
    """Show which queues there are."""
    return _render(request, "queues.html", queues=await mesh.queues())


async def schedules(request: Request, mesh: TaskMesh) -> Response:
    """Show what runs periodically."""
    return _render(request, "schedules.html", schedules=await mesh.schedules())


async def api_page(request: Request, _: TaskMesh) -> Response:
    """Show what programs can ask."""
    return _render(request, "api.html", operations=list(OPERATIONS.values()))


# --- forms ---


async def _fields_of(request: Request) -> list[tuple[str, str]]:
    raw = await api.read_body(request)
    try:
        return parse_qsl(raw.decode(), keep_blank_values=True, strict_parsing=bool(raw), max_num_fields=2_000)
    except ValueError:
        raise api.BadRequest("the form cannot be read", 400) from None


async def do(request: Request) -> Response:
    """Do the operation of a form, and lead back to its page."""
    where = "/"
    try:
        fields = await _fields_of(request)
        given: dict[str, Any] = {name: value for name, value in fields if value != ""}
        where = str(given.pop("back", "/"))
        done_where = str(given.pop("then", where))
        operation = OPERATIONS.get(request.path_params["operation"])
        if operation is None or not operation.changes:
            raise api.BadRequest("there is no such operation", 404)  # noqa: TRY301 — it becomes an answer below
        if operation.body is not None:
            given |= {
                name: _json_field(given[name]) for name in ("params", "configuration", "changes") if name in given
            }
        result = await api.perform(await mesh_of(request), operation, given)
    except Exception as error:  # noqa: BLE001 — it is told on the page; what is unexpected is logged
        _, _, message = api.told(error)
        return _back(request, where, message, "bad")
    return _back(request, done_where, _done_text(operation.name, given, result))


def _json_field(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise api.BadRequest(f"this is no JSON: {error}") from None


def _done_text(name: str, given: dict[str, Any], result: Any) -> str:
    what = given.get("key") or given.get("worker_id") or given.get("queue") or given.get("schedule_id") or ""
    if isinstance(result, Published):
        warnings = "".join(f" — {warning}" for warning in result.warnings)
        return f"{'published' if result.created else 'was there already'}: {result.name} {result.key}{warnings}"
    if isinstance(result, UndoResult):
        left = f"; {result.left} left as they are, since something has happened to them" if result.left else ""
        return f"undone: {result.action} of {result.restored} tasks{left}"
    if name.startswith("bulk."):
        return f"{name.removeprefix('bulk.')}: {result.done} of {result.matched} tasks"
    return f"{name.partition('.')[2].replace('_', ' ')}: {what}"


async def do_selected(request: Request) -> Response:
    """Do something to the tasks whose boxes are ticked."""
    where = "/tasks"
    try:
        fields = await _fields_of(request)
        where = next((value for name, value in fields if name == "back"), where)
        action = next((value for name, value in fields if name == "action"), "")
        if action not in ("retry", "cancel", "delete"):
            raise api.BadRequest(f"the actions are retry, cancel and delete, not {action!r}")  # noqa: TRY301 — answered below
        mesh = await mesh_of(request)
        selected = [value.partition(":") for name, value in fields if name == "task"]
        done, problems = 0, []
        for name, _, key in selected:
            try:
                await api.perform(mesh, OPERATIONS[f"task.{action}"], {"name": name, "key": key})
                done += 1
            except TaskMeshError as error:
                problems.append(str(error))
    except Exception as error:  # noqa: BLE001 — it is told on the page; what is unexpected is logged
        return _back(request, where, api.told(error)[2], "bad")
    text = f"{action}: {done} of {len(selected)} tasks" + (f"; {problems[0]}" if problems else "")
    return _back(request, where, text, "bad" if problems else "good")


async def login(request: Request) -> Response:
    """Take the token, and give the browser a session for it."""
    rules: Rules = request.app.state.rules
    then = request.query_params.get("then", "/")
    if rules.token is None:
        return _back(request, "/", "no token is needed here")
    if request.method == "GET":
        return _render(request, "login.html", then=then, wrong=False)
    try:
        fields = dict(await _fields_of(request))
    except api.BadRequest as error:
        return api.error_response(error)
    if not rules.knows(fields.get("token", "")):
        await asyncio.sleep(_WRONG_TOKEN_COSTS_S)
        return _render(request, "login.html", 401, then=fields.get("then", "/"), wrong=True)
    response = _back(request, fields.get("then", "/"), "welcome")
    secure = request.url.scheme == "https"
    response.set_cookie(
        SESSION, rules.session(), httponly=True, samesite="strict", secure=secure, path=_cookie_path(request)
    )
    return response


async def logout(request: Request) -> Response:
    """Forget the session."""
    response = RedirectResponse(prefix_of(request.scope) + "/login", 303)
    response.delete_cookie(SESSION, path=_cookie_path(request))
    return response


# --- what the pages load ---


async def live(request: Request) -> Response:
    """Tell a browser what changes, for as long as it listens."""
    pulse: Pulse = request.app.state.pulse
    return StreamingResponse(pulse.watch(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def static(request: Request) -> Response:
    """Return a file that comes with the pages."""
    name = request.path_params["name"]
    if name not in STATIC:
        return HTMLResponse(error_page(request, 404, "There is no such file", name), 404)
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(STATIC[name], media_type=_TYPES[name.rpartition(".")[2]], headers=headers)
