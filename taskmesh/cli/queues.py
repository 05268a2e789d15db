"""Queues and schedules: the commands of the panels `Queues` and `Schedules` of `taskmesh --help`."""

from __future__ import annotations

import difflib
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from taskmesh.admin.queues import NEWEST_ENDED, LimitFields
from taskmesh.cli import completion, output
from taskmesh.cli.connected import App, Collection, Database, Uri, mesh_of, run_at
from taskmesh.cli.output import Json, Watch, show_found
from taskmesh.cli.publishing import params_of
from taskmesh.mesh import TaskMesh
from taskmesh.model.configuration import checked_settings
from taskmesh.model.errors import MAX_DURATION_MS
from taskmesh.model.queue import Percentiles, QueueInfo, QueueLatency, QueueLimits, checked_queue
from taskmesh.model.schedule import ScheduleInfo
from taskmesh.model.times import duration

_OF_ENDED = f"of the newest {NEWEST_ENDED:,} tasks that ended".replace(",", " ")
_NO_SCHEDULES = "no schedules: declare one in code (@mesh.task(cron=…), mesh.every), or by `taskmesh schedule`"


class _Limit(StrEnum):
    """A limit that `--without` removes; with an underscore it is an argument of `set_limit`."""

    RATE = "rate"
    RUNNING = "running"
    GROUP_RUNNING = "group-running"
    GROUP_RATE = "group-rate"


Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", autocompletion=completion.queue)]
ScheduleId = Annotated[
    str, typer.Argument(metavar="SCHEDULE", help="The schedule's id.", autocompletion=completion.schedule)
]
Reason = Annotated[str | None, typer.Option(help="Why; shown in listings and by `explain`.")]


async def queues(mesh: TaskMesh, as_json: Json = False, watch: Watch = None) -> None:
    """List the queues that have tasks or settings, how far their limits are used up, and how long their tasks wait and run."""

    async def read() -> list[QueueInfo]:
        return await mesh.queues.all(latencies=True)

    await show_found(mesh, read, queue_table, "no queues", as_json=as_json, every_s=watch)


def queue_table(found: list[QueueInfo]) -> RenderableType:
    """Return a table of queues."""
    if not found:
        return Text("no queues", style="dim")
    rows = [
        [
            each.queue,
            "paused" if each.paused else "shut" if each.shut_because else "open",
            _of(each.running, each.limits.running),
            f"{each.waiting}+" if each.more_waiting else each.waiting,
            None if each.limits.rate is None else f"{each.started}/{each.limits.rate} in {each.limits.per_ms} ms",
            _of_groups(each),
            each.dead_letters or None,
            each.shut_because,
        ]
        for each in found
    ]
    columns = ["QUEUE", "STATE", "RUNNING", "WAITING", "STARTS", "GROUPS", "DEAD", "WHY"]
    if not any(each.latency for each in found):
        return output.table(columns, rows)
    for row, latency in zip(rows, (each.latency or QueueLatency(ended=0) for each in found), strict=True):
        row.extend(map(_percentiles, (latency.wait, latency.run)))
    told = Text(f"WAITED, RAN: 50th, 95th and 99th percentile {_OF_ENDED}", "dim")
    return Group(output.table([*columns, "WAITED", "RAN"], rows), told)


def _percentiles(times: Percentiles | None) -> str | None:
    return None if times is None else ", ".join(map(duration, (times.p50_ms, times.p95_ms, times.p99_ms)))


def _of(used: int, limit: int | None) -> str:
    return str(used) if limit is None else f"{used}/{limit}"


def _of_groups(queue: QueueInfo) -> str | None:
    limits = queue.limits
    paused = ", ".join(sorted(queue.paused_groups))
    said = [
        f"{limits.group_running} per group" if limits.group_running is not None else "",
        f"{limits.group_rate} per group in {limits.group_per_ms} ms" if limits.group_rate is not None else "",
        f"paused: {paused}" if paused else "",
    ]
    return "; ".join(filter(None, said)) or None


async def pause(
    mesh: TaskMesh,
    queue: Queue,
    group: Annotated[str | None, typer.Option(help="Only this group of the queue.")] = None,
    reason: Reason = None,
    for_ms: Annotated[
        int | None, typer.Option(min=1, max=MAX_DURATION_MS, help="Only for this many milliseconds.")
    ] = None,
) -> None:
    """Pause a queue, or one group of it: workers claim nothing from it. Running tasks go on."""
    await _tell_if_nobody_knows(mesh, queue)
    until = None if for_ms is None else datetime.now(UTC) + timedelta(milliseconds=for_ms)
    await mesh.pause(queue, group=group, reason=reason, until=until)
    output.say(f"{_place(queue, group)} is paused" + (f" until {until.isoformat(' ', 'seconds')}" if until else ""))


async def _tell_if_nobody_knows(mesh: TaskMesh, queue: str) -> None:
    """Warn of a name that no task, worker or setting has: it may be a typo, and the queue that was meant goes on."""
    known = {"default", *(each.queue for each in await mesh.queues.all(counted_to=1))}
    known |= {taken for worker in await mesh.workers() for taken in worker.queues or ()}
    if queue in known or [task async for task in mesh.find(queue=checked_queue(queue), limit=1)]:
        return
    alike = difflib.get_close_matches(queue, known, n=1)
    meant = f": did you mean {alike[0]}?" if alike else ""
    output.say(f"warning: no task, worker or setting names a queue {queue}{meant}", stderr=True)


def _place(queue: str, group: str | None) -> str:
    return f"queue {queue}" if group is None else f"group {group} of queue {queue}"


async def resume(
    mesh: TaskMesh,
    queue: Queue,
    group: Annotated[str | None, typer.Option(help="Only this group, if the group was paused.")] = None,
) -> None:
    """Let workers claim from a queue again."""
    await _tell_if_nobody_knows(mesh, queue)
    await mesh.resume(queue, group=group)
    output.say(f"{_place(queue, group)} is open")


def limit(
    queue: Queue,
    *,
    rate: Annotated[int | None, typer.Option(min=0, help="At most this many starts in --per-ms.")] = None,
    per_ms: Annotated[int | None, typer.Option(min=1, help="The length of that window.  [default: 1000]")] = None,
    running: Annotated[int | None, typer.Option(min=0, help="At most this many executions at once.")] = None,
    group_running: Annotated[
        int | None, typer.Option(min=0, help="At most this many executions of each group at once.")
    ] = None,
    group_rate: Annotated[
        int | None, typer.Option(min=0, help="At most this many starts of each group in --group-per-ms.")
    ] = None,
    group_per_ms: Annotated[int | None, typer.Option(min=1, help="The length of that window.  [default: 1000]")] = None,
    group: Annotated[str | None, typer.Option(help="With --running (or --none): of this one group.")] = None,
    without: Annotated[list[_Limit] | None, typer.Option(help="Remove this limit; may be given several times.")] = None,
    none: Annotated[bool, typer.Option("--none", help="Remove every limit of the queue, or that of --group.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show how many tasks could start then.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the queue as JSON; with --dry-run, what would change.")
    ] = False,
    app: App = None,
    uri: Uri = None,
    database: Database = None,
    collection: Collection = None,
) -> None:
    """Limit a queue across all workers. A limit that is not named stays as it is."""
    numbers = {
        "rate": rate,
        "per_ms": per_ms,
        "running": running,
        "group_running": group_running,
        "group_rate": group_rate,
        "group_per_ms": group_per_ms,
    }
    given: dict[str, int | None] = {name: value for name, value in numbers.items() if value is not None}
    removed = {each.replace("-", "_"): None for each in without or ()}
    if both := [each.replace("_", "-") for each in removed if each in given]:
        raise typer.BadParameter(f"--{both[0]} and --without {both[0]} contradict each other")
    given |= removed
    if none == bool(given):
        raise typer.BadParameter(
            "say what the limit is: --rate, --running, --group-running or --group-rate; or --without one of them; or --none"
        )
    if group is not None and given.keys() - {"running"}:
        raise typer.BadParameter("a single group can only be limited by --running")
    limits = LimitFields(**({each.replace("-", "_"): None for each in _Limit} if none else given))  # type: ignore[typeddict-item]  # by name

    async def use(mesh: TaskMesh) -> None:
        await _tell_if_nobody_knows(mesh, queue)
        if group is not None:
            await mesh.queues.set_group_limit(queue, group, running)
        else:
            await mesh.set_limit(queue, **limits)
        info = next((each for each in await mesh.queues.all(counted_to=1) if each.queue == queue), None)
        where = f"queue {queue}" if group is None else f"queue {queue}, group {group}"
        if as_json:
            output.show_json(info or QueueInfo(queue=queue))
        else:
            output.say(f"{where}: {_limits_of(info.limits if info else QueueLimits(), group)}")

    async def tell(mesh: TaskMesh) -> None:
        if group is not None:
            effect = await mesh.what_if.group_limit(queue, group, running)
        else:
            effect = await mesh.what_if.limit(queue, **limits)
        output.show_json(effect) if as_json else output.say(f"queue {queue}: {effect.sentence}")

    run_at(mesh_of(app, uri, database, collection), tell if dry_run else use)


def _limits_of(limits: QueueLimits, group: str | None) -> str:
    """Return the limits of a queue, or of one group of it, in words."""
    if group is not None:
        most = limits.of_group(group)
        return "no limit" if most is None else f"{most} at a time"
    said = [
        f"{limits.rate} starts in {limits.per_ms} ms" if limits.rate is not None else "",
        f"{limits.running} at a time" if limits.running is not None else "",
        f"{limits.group_running} at a time of each group" if limits.group_running is not None else "",
        f"{limits.group_rate} starts in {limits.group_per_ms} ms of each group"
        if limits.group_rate is not None
        else "",
    ]
    return ", ".join(filter(None, said)) or "no limit"


async def forget_queue(
    mesh: TaskMesh,
    queue: Queue,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove the settings of an empty queue, like one whose name was a typo; it is no longer listed then."""
    output.confirm(f"remove all settings of queue {queue}?", yes=yes)
    await mesh.queues.forget(queue)
    output.say(f"the settings of queue {queue} are removed")


async def schedules(mesh: TaskMesh, as_json: Json = False, watch: Watch = None) -> None:
    """List the schedules, the next to run first."""
    await show_found(mesh, mesh.schedules.all, _schedule_table, _NO_SCHEDULES, as_json=as_json, every_s=watch)


def _schedule_table(found: list[ScheduleInfo]) -> RenderableType:
    now = datetime.now(UTC)
    rows = [
        [
            each.schedule_id,
            each.name,
            each.timing,
            "paused" if each.paused else "active",
            None if each.next_time is None or each.paused else output.cell(each.next_time, now=now),
            output.cell(each.ticks[-1].time, now=now) if each.ticks else None,
            each.paused_reason,
        ]
        for each in found
    ]
    return output.table(["SCHEDULE", "TASK", "WHEN", "STATE", "NEXT", "LAST", "WHY"], rows)


_when = partial(typer.Option, rich_help_panel="When")


async def schedule(
    mesh: TaskMesh,
    schedule_id: ScheduleId,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The task's name.", autocompletion=completion.name)
    ] = None,
    params: Annotated[str | None, typer.Argument(metavar="JSON", help="The task's params, as a JSON object.")] = None,
    *,
    cron: Annotated[str | None, _when(help="Minute, hour, day of month, month, day of week.")] = None,
    timezone: Annotated[str | None, _when(help="The time zone of --cron.  [default: UTC]")] = None,
    interval_ms: Annotated[int | None, _when(help="Or: milliseconds between runs.")] = None,
    jitter_ms: Annotated[int | None, _when(help="Start each run up to this much later, at random.")] = None,
    missed: Annotated[str | None, _when(help="Runs that no worker was there for: latest, skip or all.")] = None,
    overlap: Annotated[str | None, _when(help="While the previous run is unfinished: allow or skip.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE", help="A setting of its tasks, like queue=mail or priority=5; can be repeated."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show when it would run.")] = False,
    as_json: Json = False,
) -> None:
    """Create a schedule, or change one: what is not given stays as it is.

    Code that declares the same schedule sets it back when a worker starts.
    """
    if dry_run:
        effect = await mesh.what_if.schedule(schedule_id, cron=cron, interval_ms=interval_ms, timezone=timezone)
        output.show_json(effect) if as_json else output.say(f"schedule {schedule_id}: {effect.sentence}")
        return
    named: dict[str, Any] = {
        "name": name,
        "cron": cron,
        "interval_ms": interval_ms,
        "timezone": timezone,
        "jitter_ms": jitter_ms,
        "missed": missed,
        "overlap": overlap,
    }
    given = {field: value for field, value in named.items() if value is not None}
    given |= checked_settings(output.settings(option or []))
    if params is not None:
        given["params"] = params_of(params)
    stored = await mesh.schedules.put(schedule_id, **given)
    if as_json:
        output.show_json(stored)
        return
    soon = await mesh.what_if.schedule(schedule_id)
    output.say(
        f"schedule {schedule_id} publishes {stored.name}: {soon.sentence}" + (" (paused)" if stored.paused else "")
    )


async def pause_schedule(mesh: TaskMesh, schedule_id: ScheduleId, reason: Reason = None) -> None:
    """Pause a schedule: it publishes nothing until it is resumed."""
    await mesh.schedules.pause(schedule_id, reason=reason)
    output.say(f"schedule {schedule_id} is paused")


async def resume_schedule(mesh: TaskMesh, schedule_id: ScheduleId) -> None:
    """Resume a paused schedule. Runs that it missed meanwhile are not made up for."""
    schedule = await mesh.schedules.resume(schedule_id)
    output.say(
        f"schedule {schedule_id} is active again" + (f", next at {schedule.next_time}" if schedule.next_time else "")
    )


async def trigger(mesh: TaskMesh, schedule_id: ScheduleId, as_json: Json = False) -> None:
    """Publish a schedule's task now, in addition to its scheduled runs."""
    handle = await mesh.schedules.trigger(schedule_id)
    if as_json:
        output.show_json({"name": handle.name, "key": handle.key, "created": handle.created})
    else:
        output.say(f"{handle.name} {handle.key} is published")


async def unschedule(
    mesh: TaskMesh,
    schedule_id: ScheduleId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a schedule; its tasks stay. Code that still declares it brings it back."""
    output.confirm(f"remove the schedule {schedule_id}?", yes=yes)
    await mesh.schedules.remove(schedule_id)
    output.say(f"schedule {schedule_id} is removed")
