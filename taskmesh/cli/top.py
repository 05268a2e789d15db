"""`top`: the fleet, live; `doctor`: what is wrong with it."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskmesh.admin.doctor import Finding
from taskmesh.cli import output
from taskmesh.cli.connected import connected
from taskmesh.cli.fleet import stats_page, worker_table
from taskmesh.cli.listing import Json, Listing, show, show_found
from taskmesh.cli.queues import queue_table
from taskmesh.mesh import TaskMesh
from taskmesh.model.worker import WorkerInfo

_BARS = " ▁▂▃▄▅▆▇█"
_HISTORY = 60


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.command("top", rich_help_panel="Fleet")(connected(top))
    app.command("doctor", rich_help_panel="Fleet")(connected(doctor))


async def top(
    mesh: TaskMesh,
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How often it looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    as_json: Json = False,
) -> None:
    """Show tasks, queues and workers, live, until Ctrl-C. --json prints an array with one object each time."""
    history: deque[float] = deque(maxlen=_HISTORY)

    async def read() -> Listing:
        stats, queues = await mesh.stats(), await mesh.queues()
        workers = [worker for worker in await mesh.workers() if worker.live or worker.state == "gone"]
        history.append(stats.finished_per_s)
        parts: list[RenderableType] = [
            Text(f"{mesh.address}   {datetime.now(UTC).isoformat(' ', 'seconds')}", style="dim"),
            Text(""),
            stats_page(stats),
            Text(f"finished/s {sparkline(history)} {stats.finished_per_s:.1f}"),
            Text(""),
            queue_table(queues),
            Text(""),
            _worker_table(workers),
        ]
        return Listing([{"stats": stats, "queues": queues, "workers": workers}], Group(*parts))

    await show(read, as_json=as_json, every_s=None if once else every)


def _worker_table(found: list[WorkerInfo]) -> RenderableType:
    """What changes from moment to moment; `workers` tells the rest."""
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
    lost = Text("of the last hour: claims that won nothing, and the least of a lease left at its renewal", "dim")
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


async def doctor(mesh: TaskMesh, as_json: Json = False) -> None:
    """Look for what is wrong, with the remedy for each finding. Ends with 1 if something hurts now."""
    findings = await mesh.doctor()

    async def found() -> list[Finding]:
        return findings

    await show_found(mesh, found, _diagnosis, "nothing was looked at", as_json=as_json)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


def _diagnosis(findings: list[Finding]) -> RenderableType:
    told = Table.grid(padding=(0, 2))
    for finding in findings:
        level = Text(finding.level, style=output.STYLES.get(finding.level, ""))
        told.add_row(level, Text(finding.subject, style="bold"), Text(output.printable(finding.found)))
        if finding.remedy is not None:
            told.add_row("", "", Text(f"→ {output.printable(finding.remedy)}", style="italic"))
    bad = [finding for finding in findings if finding.level in ("warning", "error")]
    verdict = f"{len(bad)} of {len(findings)} findings need attention" if bad else "all is well"
    return Group(told, Text(f"\n{verdict}"))
