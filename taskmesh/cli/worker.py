"""`worker`: run the tasks of a module's mesh, in this process or under a supervisor in several."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from taskmesh.cli import FAILED, output
from taskmesh.cli.connected import Collection, Database, Uri
from taskmesh.cli.dump import dump_on_signal
from taskmesh.cli.link import HOPELESS, Link
from taskmesh.cli.loading import CannotLoad, check_target, load_mesh
from taskmesh.cli.notify import notify
from taskmesh.cli.supervisor import Supervisor
from taskmesh.consumer import Consumer
from taskmesh.consumer.consumer import checked_concurrency, checked_worker_id
from taskmesh.errors import IncompatibleCollection, InvalidOption, NotAReplicaSet, TaskMeshError, WorkerIdTaken
from taskmesh.mesh import TaskMesh

logger = logging.getLogger("taskmesh.worker")

_EXIT_DEADLINE_S = 10.0
_LOOK_S = 0.2

_MANY = "Several processes"


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What was asked for on the command line."""

    target: str
    uri: str | None
    database: str | None
    collection: str | None
    worker_id: str | None
    concurrency: int
    queues: list[str] | None
    names: list[str] | None
    until_idle: bool
    grace_ms: int
    listen: bool
    log_level: str
    max_tasks: int | None

    def command(self, worker_id: str) -> list[str]:
        """Return the command line of a child that does the same under this id. The URI travels by environment."""
        words = [sys.executable, "-m", "taskmesh.cli", "worker", self.target, "--worker-id", worker_id]
        words += ["--concurrency", str(self.concurrency), "--grace-ms", str(self.grace_ms)]
        words += ["--log-level", self.log_level]
        for name, values in (("--queues", self.queues), ("--names", self.names)):
            words += [name, ",".join(values)] if values is not None else []
        words += ["--until-idle"] if self.until_idle else []
        words += [] if self.listen else ["--no-listen"]
        words += ["--max-tasks-per-process", str(self.max_tasks)] if self.max_tasks is not None else []
        return words

    def environment(self) -> dict[str, str]:
        """Return what a child finds in its environment: a password does not belong in a list of processes."""
        where = {
            "TASKMESH_URI": self.uri,
            "TASKMESH_DATABASE": self.database,
            "TASKMESH_COLLECTION": self.collection,
        }
        return os.environ | {name: value for name, value in where.items() if value is not None}


def worker(
    target: Annotated[str, typer.Argument(metavar="MODULE:MESH", help="The mesh whose tasks it runs.")],
    *,
    processes: Annotated[
        int,
        typer.Option(min=1, help="How many processes; a supervisor restarts those that die.", rich_help_panel=_MANY),
    ] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Executions at once, in each process.")] = 100,
    worker_id: Annotated[str | None, typer.Option(help="Its id; of several processes ID-1, ID-2, …")] = None,
    queues: Annotated[str | None, typer.Option(metavar="A,B", help="Only from these queues.")] = None,
    names: Annotated[str | None, typer.Option(metavar="A,B", help="Only tasks of these names.")] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when nothing it may run is claimable or running.")
    ] = False,
    grace_ms: Annotated[int, typer.Option(min=0, help="At a stop, how long what runs may go on.")] = 30_000,
    listen: Annotated[bool, typer.Option(help="Hear of new tasks by a change stream, beside the scans.")] = True,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    max_tasks_per_process: Annotated[
        int | None, typer.Option(min=1, help="A process makes way for a new one after so many.", rich_help_panel=_MANY)
    ] = None,
    max_rss_mb: Annotated[
        int | None, typer.Option(min=1, help="... or when its memory grows past this.", rich_help_panel=_MANY)
    ] = None,
    reload: Annotated[
        bool,
        typer.Option("--reload", help="Restart when a .py file below this directory changes.", rich_help_panel=_MANY),
    ] = False,
    uri: Uri = None,
    database: Database = None,
    collection: Collection = None,
) -> None:
    """Run tasks until SIGTERM or Ctrl-C: the first waits for what runs, the second does not.

    SIGUSR1 writes all stacks and the running keys to standard error. With several processes SIGHUP replaces them
    one by one.
    """
    check_target(target)
    link = Link.from_environment()
    options = WorkerOptions(
        target=target,
        uri=uri,
        database=database,
        collection=collection,
        worker_id=checked_worker_id(worker_id) if worker_id is not None else None,
        concurrency=checked_concurrency(concurrency),
        queues=_listed("--queues", queues),
        names=_listed("--names", names),
        until_idle=until_idle,
        grace_ms=grace_ms,
        listen=listen,
        log_level=log_level,
        max_tasks=max_tasks_per_process,
    )
    _set_up_logging(log_level)
    alone = processes == 1 and max_tasks_per_process is None and max_rss_mb is None and not reload
    if alone or link.supervised:
        raise typer.Exit(_run_one(options, link))
    raise typer.Exit(_supervise(options, processes, max_rss_mb, reload=reload))


def _listed(option: str, text: str | None) -> list[str] | None:
    if text is None:
        return None
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise typer.BadParameter(f"{option} names nothing: leave it out for all")
    return found


def _set_up_logging(level: str) -> None:
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise typer.BadParameter(f"--log-level {level!r}: debug, info, warning or error is wanted")
    # Nothing, if the user's module sets logging up itself: that happens later, and replaces ours with force=True.
    logging.basicConfig(level=number, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def _supervise(options: WorkerOptions, processes: int, max_rss_mb: int | None, *, reload: bool) -> int:
    base = options.worker_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    ids = [f"{base}-{number}" for number in range(1, processes + 1)]
    supervisor = Supervisor(
        {worker_id: options.command(worker_id) for worker_id in ids},
        environment=options.environment(),
        grace_ms=options.grace_ms,
        max_rss_mb=max_rss_mb,
        reload=reload,
    )
    _banner(
        f"taskmesh supervisor (pid {os.getpid()}): {ids[0]}" + (f" … {ids[-1]}" if processes > 1 else ""),
        runs=f"the tasks of {options.target}" + (f": {', '.join(options.names)}" if options.names else ""),
        source="all queues" if options.queues is None else f"queues {', '.join(options.queues)}",
        at_once=f"{processes} processes, {options.concurrency} each",
        grace_ms=options.grace_ms,
    )
    return asyncio.run(supervisor.run())


def _run_one(options: WorkerOptions, link: Link) -> int:
    try:
        mesh = load_mesh(options.target)
        mesh.connect_to(options.uri, database=options.database, collection=options.collection)
        asyncio.run(_Worker(mesh, options, link).run())
    except (CannotLoad, InvalidOption, NotAReplicaSet, IncompatibleCollection, WorkerIdTaken) as error:
        if not link.supervised:
            raise
        output.say(f"taskmesh: {error}", stderr=True)
        return HOPELESS
    except TaskMeshError as error:
        output.say(f"taskmesh: {error}", stderr=True)
        return FAILED
    return 0


class _Worker:
    """One worker process: its consumer, and the signals that stop it at any moment of its life."""

    def __init__(self, mesh: TaskMesh, options: WorkerOptions, link: Link) -> None:
        self._mesh = mesh
        self._options = options
        self._link = link
        self._consumer: Consumer | None = None
        self._stops = 0
        self._recycling = False
        self._main: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        self._main = asyncio.current_task()
        self._take_signals()
        try:
            await self._connect_and_run()
        except asyncio.CancelledError:
            if not self._stops:
                raise
            logger.info("stopped before it began")
        if not self._stops:
            self._link.say("recycle" if self._recycling else "done")
        _end_by_force_later()

    async def _connect_and_run(self) -> None:
        options = self._options
        async with self._mesh as mesh:
            consumer = mesh.consumer(
                worker_id=options.worker_id,
                concurrency=options.concurrency,
                names=options.names,
                queues=options.queues,
                listen=options.listen,
            )
            self._consumer = consumer
            dump_on_signal(consumer)
            if not self._link.supervised:
                self._introduce(consumer)
            watching = asyncio.create_task(self._watch(consumer))
            try:
                await consumer.run(until_idle=options.until_idle)
            finally:
                watching.cancel()

    def _introduce(self, consumer: Consumer) -> None:
        _banner(
            f"taskmesh worker {consumer.worker_id} (pid {os.getpid()})",
            runs=f"{', '.join(consumer.names)} (of {self._options.target})",
            source=f"{'all queues' if consumer.queues is None else ', '.join(consumer.queues)} at {self._mesh.address}",
            at_once=str(consumer.concurrency),
            grace_ms=self._options.grace_ms,
        )

    async def _watch(self, consumer: Consumer) -> None:
        """Say when it is ready, and stop it when it has done its share."""
        while consumer.state == "ready":  # noqa: ASYNC110  # a consumer has no event for that
            await asyncio.sleep(0.01)
        self._link.say("ready")
        if not self._link.supervised:
            notify("READY=1", f"STATUS=worker {consumer.worker_id} runs")
        limit = self._options.max_tasks
        while limit is not None and consumer.finished < limit:  # noqa: ASYNC110  # a count has no event
            await asyncio.sleep(_LOOK_S)
        if limit is not None:
            logger.info("worker %s has run %d tasks and makes way for a new one", consumer.worker_id, limit)
            self._recycling = True
            consumer.begin_stop(self._options.grace_ms)

    def _take_signals(self) -> None:
        """Before anything else, so that none comes too early; the consumer then leaves them alone."""
        loop = asyncio.get_running_loop()
        self._link.when_alone(lambda: self._stop("the supervisor has gone"))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop, signal.Signals(number).name)

    def _stop(self, why: str) -> None:
        self._stops += 1
        consumer = self._consumer
        if consumer is None or consumer.state == "ready":
            assert self._main is not None
            self._main.cancel()
            return
        if not self._link.supervised:
            notify("STOPPING=1")
        logger.info("%s: worker %s stops %s", why, consumer.worker_id, "gracefully" if self._stops == 1 else "at once")
        consumer.begin_stop(self._options.grace_ms if self._stops == 1 else 0)


def _banner(title: str, *, runs: str, source: str, at_once: str, grace_ms: int) -> None:
    """Five lines: what, which tasks, from where, how many, and how to stop it."""
    output.say(title)
    output.say(f"  runs     {runs}")
    output.say(f"  from     {source}")
    output.say(f"  at once  {at_once}")
    output.say(f"  stop     Ctrl-C or SIGTERM; what runs has {grace_ms / 1000:g} s; again: at once")
    with contextlib.suppress(OSError):
        sys.stdout.flush()


def _end_by_force_later() -> None:
    """A thread that a handler left behind must not keep a process alive whose consumer has given everything back."""

    def end() -> None:
        time.sleep(_EXIT_DEADLINE_S)
        logger.warning(
            "threads of handlers go on %.0f s after the stop: the process ends without them", _EXIT_DEADLINE_S
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    threading.Thread(target=end, name="taskmesh end", daemon=True).start()
