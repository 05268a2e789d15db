"""All commands of `taskmesh`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

import typer

from taskmesh.cli import bulk, call, explain, fleet, flows, migration, publishing, queues, serving, tasks
from taskmesh.cli.connected import COMMAND_LINE_URI, Collection, Database, Uri, connected
from taskmesh.cli.demo import demo
from taskmesh.cli.worker.command import worker
from taskmesh.model.distribution import VERSION

app = typer.Typer(
    help="taskmesh: tasks on MongoDB, with leases, fencing and retries. See `taskmesh COMMAND --help`.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"taskmesh {VERSION}")
        raise typer.Exit


@app.callback()
def _everywhere(
    uri: Uri = None,
    database: Database = None,
    collection: Collection = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    # Given before the command they mean the same as after it: the commands read them from the environment.
    given = {COMMAND_LINE_URI: uri, "TASKMESH_DATABASE": database, "TASKMESH_COLLECTION": collection}
    os.environ.update({name: value for name, value in given.items() if value is not None})


_COMMANDS: dict[str, list[Callable[..., Any]]] = {
    "Run": [worker, serving.dev, demo, serving.web],
    "Tasks": [
        *(
            publishing.publish,
            tasks.ls,
            tasks.show_task,
            tasks.set_option,
            tasks.signal,
            explain.explain,
            tasks.result,
            tasks.events,
        ),
        *(flows.flow, explain.errors, bulk.retry, bulk.cancel, bulk.delete, bulk.redrive, bulk.purge, bulk.undo),
        migration.migrate,
    ],
    "Queues": [queues.queues, queues.pause, queues.resume, queues.limit, queues.forget_queue],
    "Schedules": [
        *(queues.schedules, queues.schedule, queues.pause_schedule, queues.resume_schedule, queues.trigger),
        queues.unschedule,
    ],
    "Fleet": [
        *(fleet.workers, fleet.stop_worker, fleet.pause_worker, fleet.resume_worker, fleet.set_concurrency),
        *(fleet.stats, fleet.health, fleet.top, explain.doctor, bulk.audit, call.call),
    ],
}
"""By the panel of `--help`. A coroutine function takes a connected mesh; another connects by itself."""

for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        _run = connected(_command) if inspect.iscoroutinefunction(_command) else _command
        app.command(_command.__name__.removesuffix("_task").replace("_", "-"), rich_help_panel=_panel)(_run)


@cache
def command() -> Callable[..., Any]:
    """Return the command with all subcommands, made once per process: typer needs 40 ms to read their signatures.

    Calling `app` itself would build them each time, and would show rich's traceback instead of Python's.
    """
    return typer.main.get_command(app)
