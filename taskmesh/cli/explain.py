"""What is wrong, and why: `explain` (a task that does not run), `errors` (what fails), `doctor` (all the rest)."""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskmesh.admin.doctor import Finding
from taskmesh.admin.error_groups import ErrorGroup, ErrorReport
from taskmesh.admin.explain import NO_WORKER, WORKER_KNOWS, Explanation, Waiting, not_registered
from taskmesh.admin.words import first_three, tasks
from taskmesh.cli import completion, output
from taskmesh.cli.output import Json, Listing, Watch, nothing_found, show
from taskmesh.cli.tasks import OnlyName
from taskmesh.mesh import TaskMesh
from taskmesh.model.task import Status, Task
from taskmesh.model.times import age

_LOOKED_AT = 200


async def explain(
    mesh: TaskMesh,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The task's name.", autocompletion=completion.name)
    ] = None,
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY", help="The task's key. Without it: the tasks that wait.", autocompletion=completion.key
        ),
    ] = None,
    worker_id: Annotated[
        str | None,
        typer.Option(
            "--worker-id",
            "--worker",
            help="Ask for this worker instead of every live one.",
            autocompletion=completion.worker,
        ),
    ] = None,
    as_json: Json = False,
    watch: Watch = None,
) -> None:
    """Show why a task is not running: every gate of the claim rule, as the server judges it.

    Without a KEY, and with --worker-id: what keeps that worker from the oldest tasks that wait.
    """
    if key is None and worker_id is None:
        raise typer.BadParameter("say which task: NAME KEY; or which worker: --worker-id ID")

    async def read() -> Listing:
        unknown = None
        if worker_id is not None and all(worker.worker_id != worker_id for worker in await mesh.workers()):
            unknown = not_registered(worker_id)
        if unknown and as_json:
            output.say(f"warning: {unknown}", stderr=True)
        if name is None or key is None:
            assert worker_id is not None
            waiting = await mesh.inspect.explain_worker(worker_id, name, at_most=_LOOKED_AT)
            if not waiting:
                return nothing_found(mesh, f"no task waits{f'; {unknown}' if unknown else ''}", [])
            return Listing(waiting, _what_waits(waiting, worker_id, unknown=unknown))
        explanations = await mesh.explain(name, key, worker_id)
        task = await mesh.get(name, key)
        return Listing(explanations, _verdict(task, explanations, worker_id, unknown=unknown))

    await show(read, as_json=as_json, every_s=watch)


def _what_waits(waiting: list[Waiting], worker_id: str, *, unknown: str | None) -> RenderableType:
    """Which gates are shut for one worker, of what waits."""
    looked_at = sum(group.tasks for group in waiting)
    open_ = sum(group.tasks for group in waiting if not group.shut)
    which = f"the {looked_at} oldest tasks that wait" if looked_at >= _LOOKED_AT else f"the {looked_at} tasks that wait"
    said = f"{worker_id} could claim {open_} of {which} now."
    if unknown:
        said += f" {'But' if open_ else 'And'} {unknown}."
    rows: list[list[object]] = [
        [
            group.tasks,
            group.name,
            Text("open", style="green") if not group.shut else Text(", ".join(group.shut), style="bold red"),
            group.example_key,
            "; ".join(group.reasons) or None,
        ]
        for group in waiting
    ]
    head = Text(output.printable(said), style="bold")
    return Group(head, output.table(["TASKS", "NAME", "SHUT", "ONE OF THEM", "WHY"], rows))


def _verdict(
    task: Task, explanations: list[Explanation], worker_id: str | None, *, unknown: str | None = None
) -> RenderableType:
    """A sentence first; then the gates, once for all workers that they judge alike."""
    now = datetime.now(UTC)
    able = [explanation.worker_id for explanation in explanations if explanation.claimable]
    times = [explanation.next_claim_time for explanation in explanations if explanation.next_claim_time is not None]
    if task.status.finished:
        said = f"It is finished: {task.status}."
    elif able and unknown:
        said = f"A worker with this id could claim it now, but {unknown}."
    elif able:
        said = f"It can be claimed now, by {first_three(able)}."
    elif task.status is Status.RUNNING:
        said = "It is running."
    elif times:
        said = f"Nobody can claim it yet; the first could {age(min(times), now)}."
    else:
        reason = _common_reason(task, explanations, of_all=worker_id is None)
        said = f"Nobody can claim it, and time alone will not change that: {reason}."
    if unknown and not able and not task.status.finished:
        said += f" And {unknown}."
    if not task.status.finished and [each.worker_id for each in explanations] == [NO_WORKER]:
        said += " No worker is alive."
    parts: list[RenderableType] = [Text(f"{task.name} {output.printable(task.key)}: {said}", style="bold")]
    groups: dict[tuple[tuple[str, bool], ...], list[Explanation]] = {}
    for explanation in explanations:
        alike = tuple((gate.name, gate.open) for gate in explanation.gates)
        groups.setdefault(alike, []).append(explanation)
    for group in groups.values():
        rows = [
            [
                Text("open", style="green") if gate.open else Text("SHUT", style="bold red"),
                gate.name,
                gate.reason,
                None if gate.opens_at is None else output.cell(gate.opens_at, now=now),
            ]
            for gate in sorted(group[0].gates, key=lambda gate: gate.open)
        ]
        parts += [
            Text(f"\nfor {first_three([each.worker_id for each in group])}"),
            output.table(["", "GATE", "WHY", "OPENS"], rows),
        ]
    return Group(*parts)


def _common_reason(task: Task, explanations: list[Explanation], *, of_all: bool) -> str:
    """What stands in the way of every worker that was asked."""
    shut = [{gate.name: gate.reason for gate in each.gates if not gate.open} for each in explanations]
    if of_all and all(WORKER_KNOWS in gates for gates in shut):
        return f"no live worker knows tasks named {task.name!r} from queue {task.queue!r}"
    common = [name for name in shut[0] if all(name in gates for gates in shut)]
    return "; ".join(shut[0][name] for name in common) or "each worker for a reason of its own"


_EXPANDED = re.compile(r'[\\`$"]')
"""What a shell would expand in double quotes."""
_COUNTED_TO = 10_000
_COUNTING_MS = 2_000


async def errors(
    mesh: TaskMesh,
    name: OnlyName = None,
    at_most: Annotated[int, typer.Option(min=1, help="Look at this many tasks, some of each name.")] = 10_000,
    as_json: Json = False,
    watch: Watch = None,
) -> None:
    """Show what fails and why: failures grouped by task, type of error and place, the most frequent first."""

    async def read() -> Listing:
        report = await mesh.inspect.errors(name, at_most=at_most)
        filters = [group.where for group in report.groups]
        fits = await mesh.listing.count_each(filters, at_most=_COUNTED_TO, within_ms=_COUNTING_MS)
        if as_json and not report.complete:
            output.say(f"warning: {report.looked_at} tasks were looked at; there are more", stderr=True)
        about = {"looked_at": report.looked_at, "complete": report.complete}
        groups = [dict(group) | {"fits": n} | about for group, n in zip(report.groups, fits, strict=True)]
        if not groups:
            return nothing_found(mesh, f"nothing fails: {_looked_at(report)}", groups)
        return Listing(groups, _report(report, fits))

    await show(read, as_json=as_json, every_s=watch)


def _report(report: ErrorReport, fits: list[int | None]) -> RenderableType:
    now = datetime.now(UTC)
    parts = [_group(group, n, now) for group, n in zip(report.groups, fits, strict=True)]
    return Group(*parts, Text(_looked_at(report), style="dim"))


def _looked_at(report: ErrorReport) -> str:
    more = "" if report.complete else "; there are more, --at-most N looks at more of them"
    return f"{tasks(report.looked_at)} {'was' if report.looked_at == 1 else 'were'} looked at{more}"


def _group(group: ErrorGroup, fits: int | None, now: datetime) -> RenderableType:
    counts = [f"{group.failed} failed" if group.failed else "", f"{group.retrying} retrying" if group.retrying else ""]
    head = Text()
    head.append(output.printable(group.name), style="bold")
    head.append(f"  {output.printable(group.error)}", style=output.STYLES["FAIL"])
    head.append(f"  {', '.join(filter(None, counts))}")
    if group.first_time is not None and group.last_time is not None:
        head.append(f"  since {age(group.first_time, now)}, last {age(group.last_time, now)}")
    lines = [f"    {output.printable(group.message)}"]
    if group.frame is not None:
        lines.append(f"    at {output.printable(group.frame)}")
    lines.append(f"    one of them: taskmesh show {group.name} {output.printable(_word(group.example_key))}")
    # A filter knows no place in the code, and takes whatever entry of a task says this.
    fitting = "" if fits is None else f" ({tasks(fits, fits >= _COUNTED_TO)})"
    lines.append(
        f"    these and others like them{fitting}: taskmesh retry --where {output.printable(_word(group.where))}\n"
    )
    return Group(head, *(Text(line, no_wrap=True, overflow="ignore") for line in lines))  # commands are to be copied


def _word(text: str) -> str:
    """Return a text as one word of a shell's command, in the quotes that read best."""
    if "'" not in text or "!" in text:  # which a shell that one types into would expand in double quotes
        return shlex.quote(text)
    escaped = _EXPANDED.sub(r"\\\g<0>", text)
    return f'"{escaped}"'


async def doctor(mesh: TaskMesh, as_json: Json = False) -> None:
    """Look for what is wrong, with the remedy for each finding. Exits with 1 if something needs attention now."""
    findings = await mesh.inspect.doctor()
    if as_json:
        output.show_json(findings)
    else:
        output.console().print(_diagnosis(findings), crop=False)
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
