"""Looking at tasks, following and tuning them: `ls show set-option result events`."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC, datetime
from typing import Annotated, Any, get_args

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskmesh.admin.timeline import Bar, Timeline
from taskmesh.cli import completion, output
from taskmesh.cli.output import Json, Listing, Watch, nothing_found, show
from taskmesh.client.handle import TaskHandle
from taskmesh.client.tasks import UNSAID
from taskmesh.mesh import TaskMesh
from taskmesh.model.codec import ENCRYPTED
from taskmesh.model.errors import CannotDecrypt, TaskMeshError
from taskmesh.model.event import TaskEvent
from taskmesh.model.jsonable import jsonable
from taskmesh.model.labels import words
from taskmesh.model.option import checked_changes
from taskmesh.model.task import Standing, Status, Task, WorkerState
from taskmesh.model.times import age

Name = Annotated[str, typer.Argument(metavar="NAME", help="The task's name.", autocompletion=completion.name)]
OnlyName = Annotated[
    str | None, typer.Option("--name", help="Only tasks of this name.", autocompletion=completion.name)
]
Key = Annotated[str, typer.Argument(metavar="KEY", help="Its key.", autocompletion=completion.key)]


async def ls(
    mesh: TaskMesh,
    name: OnlyName = None,
    status: Annotated[
        list[str] | None,
        typer.Option(
            autocompletion=lambda: [*map(str, Status), *get_args(Standing)],
            metavar="STATUS",
            help="Only of this status, or of what INIT holds: ready, scheduled, retrying; can be given several times.",
        ),
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Only of this queue.", autocompletion=completion.queue)] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="Only tasks with this tag; can be given several times: all of them.")
    ] = None,
    key_prefix: Annotated[str | None, typer.Option(help="Only keys that begin with this.")] = None,
    where: Annotated[
        str | None,
        typer.Option(metavar="FILTER", help="Instead of those: 'status:FAIL name:resize error:timeout age>1h'."),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="At most this many; 0: all.")] = 100,
    by_key: Annotated[bool, typer.Option("--by-key", help="By name and key, not the newest first.")] = False,
    params: Annotated[bool, typer.Option("--params", help="Show params too.")] = False,
    as_json: Json = False,
    watch: Watch = None,
) -> None:
    """List tasks, the newest first."""

    async def read() -> Listing:
        found = mesh.find(
            name,
            [word.upper() for word in status or ()] or None,
            queue,
            limit,
            tags=tag or None,
            key_prefix=key_prefix,
            sort="key" if by_key else "newest",
            params=params,
            where=where,
        )
        tasks = [task async for task in found]
        if not tasks:
            filtered = name or status or queue or tag or key_prefix or where
            return nothing_found(mesh, "no tasks match" if filtered else "no tasks", [])
        return Listing(
            [task_json(task) for task in tasks], _task_table(tasks, params=params, limit=limit, by_key=by_key)
        )

    await show(read, as_json=as_json, every_s=watch)


def task_json(task: Task) -> dict[str, Any]:
    """Return the task for a program; without `params` if they were not asked for."""
    found: dict[str, Any] = jsonable(task)
    if task.params is None:
        del found["params"]
    return found


def _task_table(tasks: list[Task], *, params: bool, limit: int, by_key: bool) -> RenderableType:
    now = datetime.now(UTC)
    columns = ["NAME", "KEY", "STATUS", "QUEUE", "PRIO", "FAILED", "LOST", "WORKERS", "NEXT", "CREATED"]
    rows: list[list[object]] = [
        [
            task.name,
            task.key,
            task.standing or task.status,
            task.queue,
            task.task_option.priority,
            _failed(task),
            task.task_state.lost_cnt,
            sorted({entry.worker_id for entry in task.task_state.worker_states}),
            None if task.next_claim_time is None else output.cell(task.next_claim_time, now=now),
            output.cell(task.task_state.create_time, now=now),
            *([output.one_line(task.params)] if params else []),
        ]
        for task in tasks
    ]
    listed = output.table(columns + (["PARAMS"] if params else []), rows)
    if limit and len(tasks) == limit:
        return Group(listed, Text(f"the {'first' if by_key else 'newest'} {limit}; --limit 0 lists all", style="dim"))
    return listed


def _failed(task: Task) -> int:
    return task.task_state.dropped_fail_cnt + sum(entry.state == "FAIL" for entry in task.task_state.worker_states)


async def show_task(
    mesh: TaskMesh,
    name: Name,
    key: Key,
    with_timeline: Annotated[
        bool, typer.Option("--timeline", help="Also show its executions as bars over time, and its history.")
    ] = False,
    as_json: Json = False,
    watch: Watch = None,
) -> None:
    """Show one task: its params, and what each worker did with it."""

    async def read() -> Listing:
        if not with_timeline:
            task = await mesh.get(name, key)
            return Listing(task_json(task), _task_page(task))
        timeline = await mesh.inspect.timeline(name, key)
        page = Group(_task_page(timeline.task), Text(""), _drawn(timeline))
        lines = [dataclasses.asdict(happening) for happening in timeline.happenings]
        return Listing(task_json(timeline.task) | {"timeline": lines}, page)

    await show(read, as_json=as_json, every_s=watch)


def _task_page(task: Task) -> RenderableType:
    now = datetime.now(UTC)
    state = task.task_state
    facts: list[tuple[str, object]] = [
        ("status", f"{task.status}, {task.standing}" if task.standing else task.status),
        ("queue", task.queue if task.group is None else f"{task.queue}, group {task.group}"),
        ("dead letter from", task.task_state.home),
        ("runs", None if task.loop is None else task.loop.sentence),
        ("rounds", None if state.rounds is None else f"{state.rounds.cnt}, the last one on {state.rounds.worker_id}"),
        ("last end", None if state.rounds is None else state.rounds.end_time),
        ("created", state.create_time),
        ("start time", state.start_time),
        ("expires", state.expire_time),
        ("cancelled", state.cancel_time),
        ("next claim", task.next_claim_time),
        ("suspended", None if state.suspended_for is None else state.suspended_for.sentence),
        ("signals", ", ".join(signal.event for signal in state.signals) or None),
        ("finished", task.finish_time),
        ("kept until", task.delete_time),
        ("lost", f"{state.lost_cnt} executions, {state.timeout_cnt} in a row" if state.lost_cnt else None),
        ("progress", _progress(task)),
        ("option", _changed_option(task)),
        ("tags", ", ".join(task.tags) or None),
        ("needs", ", ".join(words(task.needs)) or None),
        ("params", task.params),
        *((name, value) for name, value in task.extra.items()),
    ]
    page = Table.grid(padding=(0, 2))
    page.add_row(Text(task.name, style="bold"), Text(output.printable(task.key), style="bold"))
    for name, value in facts:
        if value is not None:
            page.add_row(Text(output.printable(name), style="dim"), _fact(value, now))
    return Group(page, *_entries(task, now), *_steps(task))


def _fact(value: object, now: datetime) -> Text:
    if isinstance(value, datetime):
        return Text(f"{value.isoformat(' ', 'milliseconds')}  ({age(value, now)})")
    if isinstance(value, (dict, list)):
        return Text(output.printable(output.one_line(value)))
    return output.cell(value)


def _progress(task: Task) -> str | None:
    progress = task.task_state.progress
    return None if progress is None else f"{progress.fraction:.0%} {progress.message or ''}".strip()


def _changed_option(task: Task) -> str | None:
    """Only what is not the default: that is what somebody looks for."""
    fields = type(task.task_option).model_fields
    values = {name: getattr(task.task_option, name) for name in fields}
    changed = [f"{name}={value}" for name, value in values.items() if value != fields[name].default]
    return ", ".join(changed) or None


def _entries(task: Task, now: datetime) -> list[RenderableType]:
    rows: list[list[object]] = []
    texts: list[RenderableType] = _tracebacks(task)
    for entry in task.task_state.worker_states:
        end = entry.success_time or entry.fail_time
        rows.append(
            [
                entry.worker_id,
                entry.state,
                _moment(entry.start_time),
                _lasted(entry.start_time, end or now),
                output.one_line(entry.returns) if entry.state == "SUCCESS" else _why_failed(entry),
            ]
        )
        texts += [
            Text(f"{line.time.isoformat(' ', 'milliseconds')}  {entry.worker_id}  {output.printable(line.message)}")
            for line in entry.logs
        ]
    rows += [
        [
            loss.worker_id,
            "LOST",
            _moment(loss.start_time),
            _lasted(loss.start_time, loss.ping_expire_time),
            "no ping: died, hung or was cut off",
        ]
        for loss in task.task_state.losses
    ]
    if not rows:
        return []
    return [Text(""), output.table(["WORKER", "STATE", "STARTED", "TOOK", "RESULT"], rows), *texts]


def _why_failed(entry: WorkerState) -> str:
    reason = (entry.fail_reason or "").partition("\n")[0]
    return f"{reason} (FAILed for good: {entry.final_because})" if entry.final_because else reason


def _steps(task: Task) -> list[RenderableType]:
    """What its executions have recorded, in order."""
    rows: list[list[object]] = [
        [
            step.name,
            step.kind,
            None if step.time is None else step.time.isoformat(" ", "milliseconds"),
            step.worker_id,
            step.attempt,
            f"failed: {step.error}" if step.error is not None else output.one_line(step.value),
        ]
        for step in task.steps
    ]
    return [Text(""), output.table(["STEP", "KIND", "RECORDED", "WORKER", "ATTEMPT", "VALUE"], rows)] if rows else []


def _moment(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat(" ", "milliseconds")


def _lasted(start: datetime | None, end: datetime | None) -> str | None:
    return None if start is None or end is None else f"{(end - start).total_seconds():.3f} s"


def _tracebacks(task: Task) -> list[RenderableType]:
    """Each different traceback once, with who met it: retries mostly fail alike."""
    met: dict[str, list[str]] = {}
    for entry in task.task_state.worker_states:
        if entry.fail_reason and "\n" in entry.fail_reason:
            met.setdefault(entry.fail_reason, []).append(entry.worker_id)
    return [Text(f"\n{_times(workers)} failed: {output.printable(reason)}") for reason, workers in met.items()]


def _times(workers: list[str]) -> str:
    """Name each worker once, with how often: "w1 (3 times), w2"."""
    counts = {worker: workers.count(worker) for worker in workers}
    return ", ".join(worker if n == 1 else f"{worker} ({n} times)" for worker, n in counts.items())


async def signal(
    mesh: TaskMesh,
    name: Name,
    key: Key,
    event: Annotated[str, typer.Argument(metavar="EVENT", help="What the handler waits for.")],
    payload: Annotated[str | None, typer.Argument(metavar="JSON", help="The payload, as JSON.  [default: {}]")] = None,
    signal_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Identifies the signal: sent twice, it counts once.")
    ] = None,
) -> None:
    """Send a task a signal, which its handler waits for or will wait for."""
    given: Any = UNSAID
    if payload is not None:
        try:
            given = output.from_json(payload)
        except ValueError as error:
            raise typer.BadParameter(f"the payload must be JSON, got {payload!r:.100}: {error}") from None
    await mesh.signal(name, key, event, given, signal_id=signal_id)
    output.say(f"{name} {key}: signal {event} sent")


async def set_option(
    mesh: TaskMesh,
    name: Name,
    key: Key,
    changes: Annotated[
        list[str], typer.Argument(metavar="FIELD=VALUE…", help="Fields of TaskOption, like priority=5.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what the change would do.")] = False,
    as_json: Json = False,
) -> None:
    """Change the option of a task that is published already."""
    wanted = checked_changes(output.settings(changes))
    if dry_run:
        effect = await mesh.what_if.option(name, key, **wanted)
        output.show_json(effect) if as_json else output.say(f"{effect.name} {effect.key}: {effect.sentence}")
        return
    task = await mesh.set_option(name, key, **wanted)
    if as_json:
        output.show_json(task_json(task))
    else:
        output.say(f"{task.name} {task.key}: {_changed_option(task) or 'every option is at its default'}")


_WIDTH = 48
_STYLES = {**output.STYLES, "LOST": "red"}
_FILLED = {"RUNNING": "▒"}


def _drawn(timeline: Timeline) -> RenderableType:
    """Return the bars, and below them what happened."""
    rows = [
        [
            happening.time.isoformat(" ", "milliseconds"),
            happening.worker_id,
            Text(output.printable(happening.what), style=_style(happening.what)),
        ]
        for happening in timeline.happenings
    ]
    parts: list[RenderableType] = [_bars(timeline.bars), Text("")] if timeline.bars else []
    return Group(*parts, output.table(["WHEN", "WORKER", "WHAT"], rows))


def _style(what: str) -> str:
    return _STYLES.get(what.partition(":")[0].removeprefix("finished").upper(), "")


def _bars(bars: list[Bar]) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for bar in bars:
        style = _STYLES.get(bar.state, "")
        took = f"{(bar.end - bar.start).total_seconds():.3f} s" if bar.end is not None else "so far"
        grid.add_row(
            Text(output.printable(bar.worker_id)), Text(line_of(bar), style=style), Text(bar.state, style=style), took
        )
    return grid


def line_of(bar: Bar, width: int = _WIDTH) -> str:
    """Return a bar as a line of so many characters, one of them filled at least."""
    begin = min(width - 1, int(bar.begins * width))
    end = min(width, max(begin + 1, round((bar.begins + bar.lasts) * width)))
    return "·" * begin + _FILLED.get(bar.state, "█") * (end - begin) + "·" * (width - end)


Timeout = Annotated[
    float | None, typer.Option(min=0.1, metavar="SECONDS", help="Give up after this time, with exit status 1.")
]


async def result(mesh: TaskMesh, name: Name, key: Key, timeout: Timeout = None) -> None:
    """Wait until a task is finished and print its result as JSON. Exits with 1 on FAIL, CANCELLED or EXPIRED."""
    await show_result(mesh.handle(name, key), timeout)


async def show_result(handle: TaskHandle[Any], timeout: float | None) -> None:
    """Wait for the result, and print it. Raises `TaskMeshError` if there is none, or not in time."""
    try:
        value = await handle.result(timeout)
    except TimeoutError as error:
        raise TaskMeshError(str(error)) from None
    except CannotDecrypt:
        value = ENCRYPTED
    output.show_json(value)


async def events(
    mesh: TaskMesh,
    name: OnlyName = None,
    key: Annotated[str | None, typer.Option(help="Only tasks with this key.")] = None,
    after: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Resume after the event with this token (see --json).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object on each line.")] = False,
) -> None:
    """Print what happens to tasks from now on, one line per event, until Ctrl-C."""
    try:
        async with mesh.events(name, key, after=after) as happening:
            output.say("listening; Ctrl-C ends", stderr=True)
            async for event in happening:
                line = output.one_line(dataclasses.asdict(event)) if as_json else output.printable(_line(event))
                print(line, flush=True)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(0) from None  # Ctrl-C is the normal end


def _line(event: TaskEvent) -> str:
    time = event.time.isoformat(" ", "milliseconds")
    if event.kind == "missed":
        return f"{time}  {event.missed} events were dropped: they came too fast"
    if event.kind == "gap":
        return f"{time}  the stream was interrupted: some events may be missing"
    words = [f"{time}  {event.kind:<14}", event.name, event.key, event.worker_id, event.status]
    return "  ".join(word for word in words if word)
