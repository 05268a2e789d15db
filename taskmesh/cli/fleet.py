"""Workers, counts and probes: `workers stop-worker pause-worker resume-worker set-concurrency stats top health`."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, get_args

import typer
from pymongo.errors import PyMongoError
from rich.console import Group, RenderableType
from rich.text import Text

from taskmesh.admin.stats import Stats
from taskmesh.cli import completion, output
from taskmesh.cli.connected import App, Collection, Database, Uri, mesh_of
from taskmesh.cli.output import Json, Listing, Watch, nothing_found, show, show_found
from taskmesh.cli.queues import queue_table
from taskmesh.mesh import TaskMesh
from taskmesh.model.errors import TaskMeshError
from taskmesh.model.task import Standing, Status
from taskmesh.model.times import duration
from taskmesh.model.worker import MOST_AT_ONCE, WorkerInfo

_NO_WORKERS = "no workers: start one with `taskmesh worker MODULE:MESH`"

WorkerId = Annotated[str, typer.Argument(metavar="WORKER", help="The worker's id.", autocompletion=completion.worker)]


async def workers(
    mesh: TaskMesh,
    live: Annotated[bool, typer.Option("--live", help="Only workers that are alive.")] = False,
    as_json: Json = False,
    watch: Watch = None,
) -> None:
    """List the live workers, and those that went within the last hour."""

    async def find() -> list[WorkerInfo]:
        return [worker for worker in await mesh.workers() if worker.live or not live]

    await show_found(mesh, find, worker_table, _NO_WORKERS, as_json=as_json, every_s=watch)


def worker_table(found: list[WorkerInfo]) -> RenderableType:
    """Return a table of workers."""
    if not found:
        return Text(_NO_WORKERS, style="dim")
    now = datetime.now(UTC)
    rows = [
        [
            worker.worker_id,
            worker.host,
            worker.pid,
            "paused" if worker.paused and worker.live else worker.state,
            f"{worker.running}/{worker.concurrency}",
            worker.finished,
            "all" if worker.queues is None else worker.queues,
            worker.names,
            worker.version,
            output.cell(worker.last_seen, now=now),
        ]
        for worker in found
    ]
    columns = ["WORKER", "HOST", "PID", "STATE", "RUNNING", "DONE", "QUEUES", "TASKS", "VERSION", "SEEN"]
    return output.table(columns, rows)


async def stop_worker(
    mesh: TaskMesh,
    worker_id: WorkerId,
    grace_ms: Annotated[int, typer.Option(min=0, help="Milliseconds for running tasks to finish.")] = 30_000,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it has stopped.")] = False,
) -> None:
    """Stop a worker gracefully, wherever it runs."""
    await mesh.stop_worker(worker_id, grace_ms)
    while wait and await _lives(mesh, worker_id):  # noqa: ASYNC110  # it is another process
        await asyncio.sleep(0.2)
    output.say(f"worker {worker_id} {'has stopped' if wait else 'will stop'}")


async def _lives(mesh: TaskMesh, worker_id: str) -> bool:
    return any(worker.worker_id == worker_id and worker.live for worker in await mesh.workers())


async def pause_worker(mesh: TaskMesh, worker_id: WorkerId) -> None:
    """Pause one worker: it claims nothing more. Its running tasks go on."""
    await mesh.pause_worker(worker_id)
    output.say(f"worker {worker_id} will pause")


async def resume_worker(mesh: TaskMesh, worker_id: WorkerId) -> None:
    """Resume a paused worker."""
    await mesh.resume_worker(worker_id)
    output.say(f"worker {worker_id} will resume")


async def set_concurrency(
    mesh: TaskMesh,
    worker_id: WorkerId,
    concurrency: Annotated[
        int, typer.Argument(min=1, max=MOST_AT_ONCE, metavar="N", help="How many executions at once.")
    ],
) -> None:
    """Change how many executions a worker runs at once."""
    await mesh.fleet.set_concurrency(worker_id, concurrency)
    output.say(f"worker {worker_id} will run {concurrency} at once")


async def stats(mesh: TaskMesh, as_json: Json = False, watch: Watch = None) -> None:
    """Count the tasks by name and status, and show how far behind the workers are."""

    async def read() -> Listing:
        found = await mesh.stats()
        return Listing(found, stats_page(found)) if found.counts else nothing_found(mesh, "no tasks", found)

    await show(read, as_json=as_json, every_s=watch)


Sort = Literal["name", "pending", "running", "failed"]
"""What the tasks are sorted by; numbers in descending order."""
_COUNTED = {"pending": Status.INIT, "running": Status.RUNNING, "failed": Status.FAIL}


def stats_page(found: Stats, sort: Sort = "name") -> RenderableType:
    """Return a table of counts, and a line about speed."""
    # A terminal has little room: of what INIT holds there is a column where there is something to tell.
    words = [word for word in get_args(Standing) if any(by.get(word) for by in found.standing.values())]
    rows: list[list[object]] = []
    by_name = sorted(found.counts.items())
    if (counted := _COUNTED.get(sort)) is not None:
        by_name.sort(key=lambda item: -item[1].get(counted, 0))
    for name, by_status in by_name:
        init, *others = (by_status.get(status, 0) for status in Status)
        more = "+" if name in found.standing_at_least else ""
        rows.append([name, init, *(f"{found.standing.get(name, {}).get(word, 0)}{more}" for word in words), *others])
    if len(rows) > 1:
        init, *others = (sum(by.get(status, 0) for by in found.counts.values()) for status in Status)
        more = "+" if found.standing_at_least else ""
        stand = (f"{sum(by.get(word, 0) for by in found.standing.values())}{more}" for word in words)
        rows.append(["all", init, *stand, *others])
    lag = "–" if found.oldest_claimable_ms is None else duration(found.oldest_claimable_ms)
    speed = Text(
        f"oldest claimable {lag} · started {found.started_per_s:.1f}/s · finished {found.finished_per_s:.1f}/s"
    )
    if not rows:
        return Group(Text("no tasks", style="dim"), speed)
    init_column, *other_columns = Status
    return Group(output.table(["TASKS", init_column, *words, *other_columns], rows), speed)


def health(
    worker_id: Annotated[str | None, typer.Option(help="The worker that must be alive.  [default: any]")] = None,
    timeout_ms: Annotated[int, typer.Option(min=1, help="Milliseconds to wait for an answer.")] = 5_000,
    as_json: Json = False,
    app: App = None,
    uri: Uri = None,
    database: Database = None,
    collection: Collection = None,
) -> None:
    """Exit with 0 if the database answers and a worker is alive, else with 1. For probes."""

    async def check() -> None:
        nowhere = uri is None and app is None and not os.environ.get("TASKMESH_URI")
        running = await asyncio.to_thread(_running_here) if nowhere else uri
        mesh = mesh_of(app, running, database, collection, timeout_ms)
        await mesh.connect(create=False)
        try:
            _check_workers(mesh, await mesh.workers(), worker_id)
        finally:
            await mesh.close()

    problem, hangs = _problem_within(timeout_ms, check)
    found: dict[str, Any] = {"healthy": problem is None, "problem": problem}
    if as_json:
        output.show_json(found)
    else:
        output.say("healthy" if problem is None else f"taskmesh: {problem}", stderr=problem is not None)
    if hangs:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the interpreter would wait for the driver's threads, and they for the server
    raise typer.Exit(0 if problem is None else 1)


def _check_workers(mesh: TaskMesh, found: list[WorkerInfo], worker_id: str | None) -> None:
    """Raise `TaskMeshError` unless this worker is alive; None: any."""
    if worker_id is None:
        if not any(worker.live for worker in found):
            raise TaskMeshError(f"no worker is alive; looked at {mesh.address}")
        return
    states = {worker.worker_id: worker for worker in found}
    if worker_id not in states:
        raise TaskMeshError(f"no worker {worker_id!r} is registered; looked at {mesh.address}")
    if not states[worker_id].live:
        raise TaskMeshError(f"worker {worker_id!r} is {states[worker_id].state}")


def _running_here() -> str:
    """Return the URI of this directory's embedded MongoDB. A probe starts none. Raises `TaskMeshError` if none answers."""
    from taskmesh.embedded import running_in  # noqa: PLC0415 — an extra

    running = running_in()
    if running is None:
        raise TaskMeshError("no embedded MongoDB answers in this directory, and neither --uri nor TASKMESH_URI is set")
    return running


def _problem_within(timeout_ms: int, check: Callable[[], Coroutine[Any, Any, None]]) -> tuple[str | None, bool]:
    """Return what is wrong, and whether the check still hangs. In a thread: nothing that hangs in it can hold a probe."""
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            asyncio.run(check())
        except (TaskMeshError, PyMongoError) as error:
            ended.put(str(error))
        except BaseException as error:
            ended.put(f"{type(error).__name__}: {error}")
            raise
        else:
            ended.put(None)

    threading.Thread(target=run, name="taskmesh health", daemon=True).start()
    try:
        return ended.get(timeout=timeout_ms / 1000), False
    except queue.Empty:
        return f"the database did not answer within {timeout_ms} ms", True


_BARS = " ▁▂▃▄▅▆▇█"
_HISTORY = 60


async def top(
    mesh: TaskMesh,
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Refresh interval.")] = 1.0,
    sort: Annotated[Sort, typer.Option(help="Sort the tasks by this; numbers in descending order.")] = "name",
    once: Annotated[bool, typer.Option("--once", help="Show it once and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Show workers, queues and tasks, live, until q or Ctrl-C; arrow keys scroll. --json prints an array with one object."""
    history: deque[float] = deque(maxlen=_HISTORY)

    async def read() -> Listing:
        stats, queues = await mesh.stats(), await mesh.queues.all()
        workers = [worker for worker in await mesh.workers() if worker.live or worker.state == "gone"]
        history.append(stats.finished_per_s)
        parts: list[RenderableType] = [
            Text(f"{mesh.address}   {datetime.now(UTC).isoformat(' ', 'seconds')}", style="dim"),
            Text(f"finished/s {sparkline(history)} {stats.finished_per_s:.1f}"),
            Text(""),
            _worker_table(workers),  # first: on a small screen they would be the ones that are not seen
            Text(""),
            queue_table(queues),
            Text(""),
            stats_page(stats, sort),
        ]
        return Listing([{"stats": stats, "queues": queues, "workers": workers}], Group(*parts))

    await show(read, as_json=as_json, every_s=None if once else every)


def _worker_table(found: list[WorkerInfo]) -> RenderableType:
    """Return a table of what changes from moment to moment; `workers` shows the rest."""
    if not any(worker.live for worker in found):
        return worker_table(found)
    now = datetime.now(UTC)
    rows = [
        [
            worker.worker_id,
            "paused" if worker.paused and worker.live else worker.state,
            f"{worker.running}/{worker.concurrency}",
            f"{worker.finished_per_s:.1f}",
            percent(worker.claims_lost_share),
            None if worker.least_lease_left is None else percent(worker.least_lease_left.share),
            output.cell(worker.last_seen, now=now),
        ]
        for worker in found
    ]
    lost = Text(
        "CLAIMS LOST, LEASE LEFT: claims that won nothing, and the smallest share of a lease left, within the last hour",
        "dim",
    )
    columns = ["WORKER", "STATE", "RUNNING", "DONE/S", "CLAIMS LOST", "LEASE LEFT", "SEEN"]
    return Group(output.table(columns, rows), lost)


def percent(share: float | None) -> str | None:
    """Return a share in per cent."""
    return None if share is None else f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def sparkline(values: deque[float]) -> str:
    """Return a bar for each value, the highest of them full."""
    highest = max(values, default=0.0)
    if highest <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[round(value / highest * (len(_BARS) - 1))] for value in values)
