"""The pages: each asks the public API and shows the answer. What their forms do is in `forms`.

They work without scripts; the script adds live updates, confirmation of what cannot be undone, and keyboard shortcuts.
"""

from __future__ import annotations

from typing import Any, get_args
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from taskmesh.admin.bulk import cancellable
from taskmesh.admin.filters import TaskFilter
from taskmesh.admin.listing import TaskPage
from taskmesh.admin.queues import NEWEST_ENDED
from taskmesh.admin.stats import Stats
from taskmesh.mesh import TaskMesh
from taskmesh.model.errors import InvalidOption, TaskNotFound
from taskmesh.model.jsonable import to_json
from taskmesh.model.option import TaskOption
from taskmesh.model.queue import QueueLimits
from taskmesh.model.task import Standing, Status
from taskmesh.model.times import milliseconds
from taskmesh.model.worker import known_names
from taskmesh.operations.table import OPERATIONS, BadRequest
from taskmesh.web.alerts import remarks
from taskmesh.web.flow_graph import drawn
from taskmesh.web.forms import do, do_selected, login, logout
from taskmesh.web.history import WINDOWS, window_named
from taskmesh.web.live_view import Pulse
from taskmesh.web.param_fields import param_fields
from taskmesh.web.rendering import as_page, error_page, rendered
from taskmesh.web.security import prefix_of
from taskmesh.web.templating import STATIC, copied, copied_settings, failures_of, option_rows, query, whys_of

_COUNT_AT_MOST = 10_000
_COUNT_WITHIN_MS = 120
_LISTED_WITHIN_MS = 1_500
_ERRORS_AMONG = 1_000
_TRAIL = 30
"""How many pages back one can go: an address must not become too long."""
_FITS_AT_MOST = 1_000
_FITS_WITHIN_MS = 60
_WORST_FIRST = ("error", "warning", "note", "ok")
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def routes() -> list[Route]:
    """Return the routes of the pages, of what their forms do, and of what they load."""
    return [
        Route("/", as_page(overview)),
        Route("/tasks", as_page(tasks)),
        Route("/publish", publish),
        Route("/task", as_page(task)),
        Route("/flow", as_page(flow)),
        Route("/bulk", as_page(bulk)),
        Route("/errors", as_page(errors)),
        Route("/workers", as_page(workers)),
        Route("/worker", as_page(worker)),
        Route("/queues", as_page(queues)),
        Route("/schedules", as_page(schedules)),
        Route("/doctor", as_page(doctor)),
        Route("/api", as_page(api_page)),
        Route("/login", login, methods=["GET", "POST"]),
        Route("/logout", logout, methods=["POST"]),
        Route("/do/{operation}", do, methods=["POST"]),
        Route("/do-selected", do_selected, methods=["POST"]),
        Route("/live", live),
        Route("/static/{name}", static),
    ]


# --- pages ---


async def overview(request: Request, mesh: TaskMesh) -> Response:
    """Show the state of the whole mesh."""
    pulse: Pulse = request.app.state.pulse
    window = window_named(request.query_params.get("window", ""))
    stats = await pulse.stats()
    all_workers = await mesh.workers()
    live_workers = [worker for worker in all_workers if worker.live]
    all_schedules = await mesh.schedules.all()
    return rendered(
        request,
        "overview.html",
        stats=stats,
        totals=_totals(stats),
        standing={word: sum(by.get(word, 0) for by in stats.standing.values()) for word in get_args(Standing)},
        remarks=remarks(stats, all_workers, pulse.queues, all_schedules),
        failures=sorted(
            ((name, counts["FAIL"]) for name, counts in stats.counts.items() if counts.get("FAIL")), key=lambda f: -f[1]
        ),
        points=to_json(pulse.history.points(window)),
        window=window,
        windows=WINDOWS,
        workers=live_workers,
        slots=sum(worker.concurrency for worker in live_workers),
        busy=sum(worker.running for worker in live_workers),
        upcoming=[schedule for schedule in all_schedules if not schedule.paused][:5],
    )


def _totals(stats: Stats) -> dict[str, int]:
    return {str(status): sum(counts.get(str(status), 0) for counts in stats.counts.values()) for status in Status}


def _filter_of(request: Request) -> tuple[str, TaskFilter | None, str | None]:
    """Return the text of the filter, the filter, and what is wrong with it. Fields of the form are merged into it."""
    given = request.query_params
    text = given.get("where", "")
    try:
        which = TaskFilter.parse(text)
        fields: dict[str, Any] = {name: given[name] for name in ("name", "queue", "error", "worker") if given.get(name)}
        if given.get("key"):
            fields["key_prefix"] = given["key"]
        if statuses := [status for status in given.getlist("status") if status]:
            fields |= {"status": tuple(statuses), "standing": ()}
        if given.get("older"):
            fields["older_than_ms"] = milliseconds(given["older"])
        which = TaskFilter.checked(**{**which.model_dump(exclude_defaults=True), **fields})
    except InvalidOption as error:
        return text, None, str(error)
    return str(which), which, None


async def tasks(request: Request, mesh: TaskMesh) -> Response:
    """List tasks."""
    text, which, problem = _filter_of(request)
    newest = request.query_params.get("order", "newest") == "newest"
    page = TaskPage(tasks=[], newest_first=newest, following=None)
    count: int | None = 0
    if which is not None:
        after = request.query_params.get("after") or None
        # One after the other: of two at once, a refusal of one would leave the other on its way.
        page = await mesh.listing.page(which, newest_first=newest, after=after, deadline_ms=_LISTED_WITHIN_MS)
        count = await mesh.listing.count_within(which, at_most=_COUNT_AT_MOST, deadline_ms=_COUNT_WITHIN_MS)
    stats = await request.app.state.pulse.stats()
    to_publish = request.query_params.get("publish", "")
    registered = await mesh.publisher.registered(to_publish) if to_publish else None
    return rendered(
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
        publishable=sorted({*stats.counts, *known_names([each for each in await mesh.workers() if each.live])}),
        publish=to_publish,
        is_known=registered is not None and registered.found,
        param_fields=param_fields(registered.schema) if registered is not None else None,
        order="newest" if newest else "key",
        is_first=not request.query_params.get("after"),
        after=request.query_params.get("after"),
        trail=request.query_params.getlist("trail")[-_TRAIL:],
    )


async def task(request: Request, mesh: TaskMesh) -> Response:
    """Show one task; with `changes`, also what they would do to it."""
    name, key = request.query_params.get("name", ""), request.query_params.get("key", "")
    timeline = await mesh.inspect.timeline(name, key)
    found = timeline.task
    explanations = [] if found.status.finished else await mesh.explain(name, key)
    definition = mesh.definitions.get(name)
    effect = None
    if changes := request.query_params.get("changes"):
        asked = {"name": name, "key": key, "changes": changes}
        effect = await OPERATIONS["task.what_if_option"].perform_given(mesh, asked)
    return rendered(
        request,
        "task.html",
        effect=effect,
        task=found,
        copy=copied(found.params),
        copy_settings=copied_settings(found, definition.option if definition is not None else TaskOption()),
        flow=await mesh.flows.key_of(name, key),
        bars=timeline.bars,
        failures=failures_of(found),
        whys=whys_of(explanations),
        option_rows=option_rows(found.task_option),
        api_path=f"tasks/{quote(name, safe='')}/{quote(key, safe='')}",
    )


async def flow(request: Request, mesh: TaskMesh) -> Response:
    """Show the progress of a flow, as a graph."""
    found = await mesh.flow_status(request.query_params.get("key", ""))
    return rendered(request, "flow.html", flow=found, drawing=drawn(found))


async def bulk(request: Request, mesh: TaskMesh) -> Response:
    """Show how many tasks a bulk action would change, and ask for confirmation."""
    action = request.query_params.get("action", "")
    if not action:
        return rendered(request, "actions.html", actions=await mesh.bulk.actions(), noted=await mesh.audit.actions())
    if action not in ("retry", "cancel", "delete"):
        raise BadRequest(f"action must be retry, cancel or delete, got {action!r}", 404)
    text, which, problem = _filter_of(request)
    if which is None:
        raise InvalidOption(problem or "")
    if which.is_empty:
        raise InvalidOption("an empty filter means every task: name at least a status, like status:FAIL")
    if action == "cancel":
        which = cancellable(which)
        text = str(which)
    count = await mesh.listing.count_within(which, at_most=_COUNT_AT_MOST, deadline_ms=_COUNT_WITHIN_MS)
    first = await mesh.listing.page(which, newest_first=False, limit=10, deadline_ms=_LISTED_WITHIN_MS)
    return rendered(
        request, "bulk.html", action=action, where=text, count=count, at_most=_COUNT_AT_MOST, examples=first.tasks
    )


async def errors(request: Request, mesh: TaskMesh) -> Response:
    """Show failures, grouped by cause."""
    name = request.query_params.get("name") or None
    report = await mesh.inspect.errors(name, at_most=_ERRORS_AMONG, deadline_ms=_LISTED_WITHIN_MS)
    filters = [group.where for group in report.groups]
    counts = await mesh.listing.count_each(filters, at_most=_FITS_AT_MOST, within_ms=_FITS_WITHIN_MS)
    fits = {where: count for where, count in zip(filters, counts, strict=True) if count is not None}
    return rendered(request, "errors.html", report=report, name=name, fits=fits, at_most=_FITS_AT_MOST)


async def doctor(request: Request, mesh: TaskMesh) -> Response:
    """Show what doctor finds."""
    findings = sorted(await mesh.inspect.doctor(), key=lambda finding: _WORST_FIRST.index(finding.level))
    bad = sum(finding.level in ("warning", "error") for finding in findings)
    return rendered(request, "doctor.html", findings=findings, bad=bad)


async def workers(request: Request, mesh: TaskMesh) -> Response:
    """List workers."""
    found = sorted(await mesh.workers(), key=lambda worker: (not worker.live, worker.worker_id))
    return rendered(request, "workers.html", workers=found)


async def worker(request: Request, mesh: TaskMesh) -> Response:
    """Show one worker: what it runs, its resources, and its health."""
    id_ = request.query_params.get("id", "")
    found = next((each for each in await mesh.workers() if each.worker_id == id_), None)
    if found is None:
        raise TaskNotFound(f"no worker {id_!r} was seen within the last hour")
    lists = []
    for name, title, statuses in (
        ("running", "What it runs", (Status.RUNNING,)),
        ("failed", "What failed, and it had a part in", (Status.FAIL,)),
    ):
        which = TaskFilter.checked(worker=id_, status=statuses)
        page = await mesh.listing.page(which, limit=20, deadline_ms=_COUNT_WITHIN_MS)
        lists.append((name, title, page, str(which)))
    return rendered(request, "worker.html", worker=found, lists=lists)


async def queues(request: Request, mesh: TaskMesh) -> Response:
    """List queues; with limits given, also what they would do to one queue."""
    effect = None
    if "queue" in request.query_params:
        limits = ("rate", "per_ms", "running", "group_running", "group_rate", "group_per_ms")
        asked: dict[str, str | None] = {"queue": request.query_params["queue"]}
        asked |= {field: request.query_params[field] or None for field in limits if field in request.query_params}
        effect = await OPERATIONS["queue.what_if_limit"].perform_given(mesh, asked)
    pulse: Pulse = request.app.state.pulse
    waits = (await pulse.stats()).oldest_claimable_ms_by_queue
    found = await mesh.queues.all()
    settled = {each.queue for each in found if each.paused or each.failure_pause or each.limits != QueueLimits()}
    return rendered(
        request,
        "queues.html",
        queues=found,
        settled=settled,
        waits=waits,
        latencies={each.queue: each.latency for each in pulse.queues if each.latency is not None},
        ended=NEWEST_ENDED,
        effect=effect,
    )


async def schedules(request: Request, mesh: TaskMesh) -> Response:
    """List schedules; with a timing given, also when a schedule with it would run."""
    fields = ("schedule_id", "name", "cron", "timezone", "interval_ms", "params")
    asked = {field: request.query_params.get(field, "") for field in fields}
    effect = None
    if asked["cron"] or asked["interval_ms"]:
        when = {field: asked[field] for field in ("schedule_id", "cron", "timezone", "interval_ms") if asked[field]}
        effect = await OPERATIONS["schedule.what_if"].perform_given(mesh, when)
    return rendered(request, "schedules.html", schedules=await mesh.schedules.all(), effect=effect, asked=asked)


async def api_page(request: Request, _: TaskMesh) -> Response:
    """List the operations of the REST API."""
    return rendered(request, "api.html", operations=list(OPERATIONS.values()))


# --- what the pages load ---


async def publish(request: Request) -> Response:
    """Redirect to the form for the params of the named task, so that publishing works without scripts."""
    where = "/tasks?" + query(publish=request.query_params.get("name")) + "#publish"
    return RedirectResponse(prefix_of(request.scope) + where, 303)


async def live(request: Request) -> Response:
    """Stream changes to a browser."""
    pulse: Pulse = request.app.state.pulse
    return StreamingResponse(pulse.watch(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def static(request: Request) -> Response:
    """Return a file that comes with the pages."""
    name = request.path_params["name"]
    if name not in STATIC:
        return HTMLResponse(error_page(request, 404, "There is no such file", name), 404)
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(STATIC[name], media_type=_TYPES[name.rpartition(".")[2]], headers=headers)
