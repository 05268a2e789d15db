"""`publish`: one task from the command line, or many from a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from taskmesh.cli import completion, output
from taskmesh.cli.connected import Collection, Database, Uri, mesh_of, run_at
from taskmesh.cli.output import Json
from taskmesh.cli.tasks import Timeout, show_result
from taskmesh.client.handle import TaskHandle
from taskmesh.mesh import TaskMesh
from taskmesh.model.configuration import checked_settings
from taskmesh.model.errors import InvalidKey, InvalidParams
from taskmesh.model.ids import shown
from taskmesh.model.task import checked_key

_BATCH = 1_000
_how = partial(typer.Option, rich_help_panel="How it runs")
_existing = partial(typer.Option, rich_help_panel="If the key is there already")


def publish(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The task's name.", autocompletion=completion.name)],
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="The task's key; not with --from-file.")] = None,
    params: Annotated[str | None, typer.Argument(metavar="JSON", help="The task's params, as a JSON object.")] = None,
    *,
    from_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help='Many: one object with "key" and "params" on each line ("-": standard input).'
        ),
    ] = None,
    queue: Annotated[str | None, _how(help="Its queue.")] = None,
    group: Annotated[str | None, _how(help="Its group, for limits.")] = None,
    sequence_key: Annotated[
        str | None, _how(help="Tasks of one key in one queue run one after the other, as published.")
    ] = None,
    on_sequence_failure: Annotated[
        str | None, _how(help="If it FAILs, whether the next task of its key runs: continue or block.")
    ] = None,
    tag: Annotated[list[str] | None, _how(help="A tag to find it by; can be given several times.")] = None,
    delay_ms: Annotated[int | None, _how(help="Start no sooner than this many milliseconds from now.")] = None,
    start_time: Annotated[str | None, _how(help="Not before, ISO 8601 (UTC if without zone).")] = None,
    expire_time: Annotated[str | None, _how(help="Not after, ISO 8601.")] = None,
    priority: Annotated[int | None, _how(help="Higher is claimed first.")] = None,
    option: Annotated[
        list[str] | None, _how(metavar="FIELD=VALUE", help="Any field of TaskOption; can be given several times.")
    ] = None,
    run_again: Annotated[bool, _existing("--run-again", help="One more run with these params.")] = False,
    replace_running: Annotated[
        bool, _existing("--replace-running", help="One more run; a running one is stopped.")
    ] = False,
    debounce_ms: Annotated[
        int | None, _existing(help="Run once, this long after the last publication of this key.")
    ] = None,
    debounce_max_ms: Annotated[
        int | None, _existing(help="With --debounce-ms: no later than this after the first.")
    ] = None,
    throttle_ms: Annotated[
        int | None, _existing(help="Ignore publications within this time after the last one that counted.")
    ] = None,
    update_existing_params: Annotated[bool, _existing("--update-existing-params", help="Set these params.")] = False,
    not_update_running: Annotated[bool, _existing("--not-update-running", help="Fail if it is running.")] = False,
    clean_success: Annotated[bool, _existing("--clean-success", help="Forget its successes.")] = False,
    clean_failed: Annotated[bool, _existing("--clean-failed", help="Forget its failures.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it is finished, and print its result as JSON instead.")
    ] = False,
    timeout: Timeout = None,
    as_json: Json = False,
    app: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:MESH", help="Check the params against its handler, and take its options and queue."
        ),
    ] = None,
    uri: Uri = None,
    database: Database = None,
    collection: Collection = None,
) -> None:
    """Publish a task, once: a key that is there already is left as it is, unless told otherwise."""
    given: dict[str, Any] = {
        "queue": queue,
        "group": group,
        "sequence_key": sequence_key,
        "on_sequence_failure": on_sequence_failure,
        "tags": tag or None,
        "delay_ms": delay_ms,
        "start_time": _time("--start-time", start_time),
        "expire_time": _time("--expire-time", expire_time),
        "priority": priority,
        **checked_settings(output.settings(option or [])),
        "run_again": run_again or None,
        "replace_running": replace_running or None,
        "debounce_ms": debounce_ms,
        "debounce_max_ms": debounce_max_ms,
        "throttle_ms": throttle_ms,
        "update_existing_params": update_existing_params or None,
        "not_update_running": not_update_running or None,
        "clean_success": clean_success or None,
        "clean_failed": clean_failed or None,
    }
    configuration = {setting: value for setting, value in given.items() if value is not None}
    if (from_file is not None or as_json) and wait:
        raise typer.BadParameter(
            "--wait prints the result of one task: it cannot be combined with --from-file or --json"
        )
    if timeout is not None and not wait:
        raise typer.BadParameter("--timeout needs --wait")
    if from_file is not None:
        if key is not None:
            raise typer.BadParameter("give either KEY or --from-file: each line of the file has its own key")
        tasks = dict(_read_lines(from_file))

        async def use(mesh: TaskMesh) -> None:
            await _publish_all(mesh, name, tasks, configuration, as_json=as_json)
    elif key is None:
        raise typer.BadParameter("KEY is missing: give a key, or --from-file")
    else:
        task = params_of(params)

        async def use(mesh: TaskMesh) -> None:
            handle = await _publish_one(mesh, name, key, task, configuration, as_json=as_json, wait=wait)
            if wait:
                await show_result(handle, timeout)

    run_at(mesh_of(app, uri, database, collection), use)


async def _publish_one(
    mesh: TaskMesh,
    name: str,
    key: str,
    params: dict[str, Any],
    configuration: dict[str, Any],
    *,
    as_json: bool,
    wait: bool,
) -> TaskHandle[Any]:
    handle = await mesh.publish(name, key, params, **configuration)
    if as_json:
        output.show_json(_handle_json(handle))
    else:
        output.say(f"{name} {key} {_what_happened(handle)}", stderr=wait)  # what it prints then is the result
    for warning in handle.warnings:
        output.say(f"warning: {warning}", stderr=True)
    return handle


async def _publish_all(
    mesh: TaskMesh, name: str, tasks: dict[str, dict[str, Any]], configuration: dict[str, Any], *, as_json: bool
) -> None:
    handles: list[TaskHandle[Any]] = []
    keys = list(tasks)
    if len(keys) > _BATCH:  # what does not fit its handler costs nothing either, in whatever line
        await mesh.publisher.check_many(name, tasks, **configuration)
    console = output.console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("publishing", total=len(keys))
        for start in range(0, len(keys), _BATCH):
            batch = {key: tasks[key] for key in keys[start : start + _BATCH]}
            handles += await mesh.publisher.publish_many(name, batch, **configuration)
            progress.advance(bar, len(batch))
    if as_json:
        output.show_json([_handle_json(handle) for handle in handles])
        return
    created = sum(handle.created for handle in handles)
    updated = sum(handle.updated for handle in handles)
    output.say(f"{len(handles)} tasks: {created} created, {updated} updated, {len(handles) - created - updated} left")
    for warning in sorted({warning for handle in handles for warning in handle.warnings}):
        output.say(f"warning: {warning}", stderr=True)


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read a file of tasks; all of it before anything is written, so that a mistake in its last line costs nothing."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from None
    seen: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):  # JSON has other ends of lines as they are in its texts
        if not line.strip():
            continue
        try:
            task = output.from_json(line)
        except ValueError as error:
            raise typer.BadParameter(f"{path}, line {number} must be JSON, got {shown(line)}: {error}") from None
        if not isinstance(task, dict) or not isinstance(task.get("key"), str) or task.keys() - {"key", "params"}:
            raise typer.BadParameter(f'{path}, line {number}: expected an object with "key" and "params"')
        params = {} if task.get("params") is None else task["params"]
        if not isinstance(params, dict):
            raise typer.BadParameter(f"{path}, line {number}: the params must be a JSON object, got {shown(params)}")
        try:
            checked_key(task["key"])
        except InvalidKey as error:
            raise typer.BadParameter(f"{path}, line {number}: {error}") from None
        if task["key"] in seen:
            raise typer.BadParameter(f"{path}, line {number}: the key {task['key']!r} occurs twice")
        seen.add(task["key"])
        yield task["key"], params


def params_of(text: str | None) -> dict[str, Any]:
    """Read params, which are a JSON object. Raises typer's `BadParameter`, `InvalidParams`."""
    if text is None:
        return {}
    try:
        value = output.from_json(text)
    except ValueError as error:
        raise typer.BadParameter(f"the params must be JSON, like '{{\"n\": 1}}', got {shown(text)}: {error}") from None
    if not isinstance(value, dict):
        raise InvalidParams(f"params must be a JSON object by parameter name, got {text}")
    return value


def _time(name: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{name}: {text!r} is not a time like 2026-12-31T18:00:00+01:00") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _handle_json(handle: TaskHandle[Any]) -> dict[str, Any]:
    return {
        "name": handle.name,
        "key": handle.key,
        "created": handle.created,
        "updated": handle.updated,
        "warnings": handle.warnings,
    }


def _what_happened(handle: TaskHandle[Any]) -> str:
    return "is published" if handle.created else "is updated" if handle.updated else "was there already: left as it is"
