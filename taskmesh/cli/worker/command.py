"""`worker`: run the tasks of a module's mesh, in this process or under a supervisor in several."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from functools import partial
from typing import Annotated, Literal

import typer

from taskmesh.cli.connected import Collection, Database, Uri, check_target
from taskmesh.cli.worker.child import Pipe
from taskmesh.cli.worker.process import WorkerOptions, banner, run_one
from taskmesh.cli.worker.supervisor import Supervisor
from taskmesh.consumer import logs
from taskmesh.model.ids import checked_worker_id
from taskmesh.model.labels import checked_labels, label_of
from taskmesh.model.worker import checked_concurrency

_many = partial(typer.Option, rich_help_panel="Several processes")
_probe = partial(typer.Option, rich_help_panel="Probes and metrics")


def worker(
    target: Annotated[str, typer.Argument(metavar="MODULE:MESH", help="The mesh whose tasks it runs.")],
    *,
    processes: Annotated[int, _many(min=1, help="How many processes; a supervisor restarts those that die.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Executions at once, in each process.")] = 100,
    worker_id: Annotated[str | None, typer.Option(help="Its id; of several processes ID-1, ID-2, …")] = None,
    queues: Annotated[str | None, typer.Option(metavar="A,B", help="Only from these queues.")] = None,
    names: Annotated[str | None, typer.Option(metavar="A,B", help="Only tasks of these names.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A label that tasks may need: gpu=true (JSON, else a text); can be given several times.",
        ),
    ] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when nothing it may run is claimable or running.")
    ] = False,
    grace_ms: Annotated[
        int, typer.Option(min=0, help="After SIGTERM: milliseconds for running tasks to finish.")
    ] = 30_000,
    listen: Annotated[
        bool, typer.Option(help="Hear of new tasks at once by a change stream; scans go on either way.")
    ] = True,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(metavar="text|json", help="json: an object on each line, with the task's fields."),
    ] = "text",
    max_tasks_per_process: Annotated[
        int | None, _many(min=1, help="Replace a process by a new one after this many tasks.")
    ] = None,
    max_rss_mb: Annotated[
        int | None, _many(min=1, help="Replace a process that uses more than this many megabytes.")
    ] = None,
    reload: Annotated[bool, _many("--reload", help="Restart when a .py file below this directory changes.")] = False,
    hang_timeout_ms: Annotated[
        int, _many(min=0, help="Replace a process whose event loop blocks for this long; 0: never.")
    ] = 90_000,
    health_port: Annotated[
        int | None, _probe(min=0, max=65_535, help="Port for /livez and /readyz; 0: any free port.")
    ] = None,
    health_host: Annotated[str, _probe(help="The address to listen on; 0.0.0.0 in a container.")] = "127.0.0.1",
    metrics_port: Annotated[
        int | None,
        _probe(
            min=0,
            max=65_535,
            help="Port for Prometheus at /metrics; each of several processes takes the next one. 0: any free port.",
        ),
    ] = None,
    metrics_host: Annotated[str, _probe(help="The address to listen on; 0.0.0.0 in a container.")] = "127.0.0.1",
    uri: Uri = None,
    database: Database = None,
    collection: Collection = None,
) -> None:
    """Run tasks until SIGTERM or Ctrl-C. The first signal waits for running tasks, a second stops at once.

    SIGUSR1 writes all stacks and the running keys to standard error. With several processes SIGHUP replaces them
    one by one.
    """
    check_target(target)
    pipe = Pipe.from_environment()
    options = WorkerOptions(
        target=target,
        uri=uri,
        database=database,
        collection=collection,
        worker_id=checked_worker_id(worker_id) if worker_id is not None else None,
        concurrency=checked_concurrency(concurrency),
        queues=_listed("--queues", queues),
        names=_listed("--names", names),
        labels=checked_labels("labels", dict(map(label_of, label or ()))),
        until_idle=until_idle,
        grace_ms=grace_ms,
        listen=listen,
        log_level=log_level,
        log_format=log_format,
        max_tasks=max_tasks_per_process,
        health=None if health_port is None else (health_host, health_port),
        metrics=None if metrics_port is None else (metrics_host, metrics_port),
    )
    _set_up_logging(log_level, log_format)
    alone = processes == 1 and max_tasks_per_process is None and max_rss_mb is None and not reload
    if alone or pipe.supervised:
        raise typer.Exit(run_one(options, pipe))
    raise typer.Exit(_supervise(options, processes, max_rss_mb, hang_timeout_ms, reload=reload))


def _listed(option: str, text: str | None) -> list[str] | None:
    if text is None:
        return None
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise typer.BadParameter(f"{option} is empty: leave it out to take all")
    return found


def _set_up_logging(level: str, format_: logs.Format) -> None:
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise typer.BadParameter(f"--log-level must be debug, info, warning or error, got {level!r}")
    # Nothing, if the user's module sets logging up itself: that happens later, and replaces ours with force=True.
    logs.set_up(number, format_)


def _supervise(
    options: WorkerOptions, processes: int, max_rss_mb: int | None, hang_timeout_ms: int, *, reload: bool
) -> int:
    base = options.worker_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    ids = [f"{base}-{number}" for number in range(1, processes + 1)]
    supervisor = Supervisor(
        {worker_id: options.command(worker_id, place, base) for place, worker_id in enumerate(ids)},
        environment=options.environment(),
        grace_ms=options.grace_ms,
        max_rss_mb=max_rss_mb,
        hang_timeout_ms=hang_timeout_ms,
        reload=reload,
        health=options.health,
    )
    banner(
        f"taskmesh supervisor (pid {os.getpid()}): {ids[0]}" + (f" … {ids[-1]}" if processes > 1 else ""),
        runs=f"the tasks of {options.target}" + (f": {', '.join(options.names)}" if options.names else ""),
        source="all queues" if options.queues is None else f"queues {', '.join(options.queues)}",
        at_once=f"{processes} processes, {options.concurrency} each",
        grace_ms=options.grace_ms,
    )
    return asyncio.run(supervisor.run())
