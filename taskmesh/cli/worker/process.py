"""What one worker process does: loads the mesh, runs its consumer, stops on signals, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from taskmesh.cli import output
from taskmesh.cli.connected import COMMAND_LINE_URI, CannotLoad, load_mesh
from taskmesh.cli.worker.child import FAILED, HOPELESS, Pipe
from taskmesh.cli.worker.endpoints import Health, Routes, metrics, probes, serve, worker_metrics
from taskmesh.cli.worker.force_exit import ForcedExit, stop_signals
from taskmesh.cli.worker.system import loop_factory, notify
from taskmesh.consumer.worker import Consumer
from taskmesh.mesh import TaskMesh
from taskmesh.model.errors import IncompatibleCollection, InvalidOption, NotAReplicaSet, TaskMeshError, WorkerIdTaken
from taskmesh.model.labels import WORKER
from taskmesh.model.labels import words as label_words

logger = logging.getLogger("taskmesh.worker")

_EXIT_DEADLINE_S = 10.0
_STOP_DEADLINE_S = 25.0
"""On top of the grace: the consumer's own time for releasing what is left, and a margin."""
_LOOK_S = 0.2
_BEAT_S = 1.0
_PYTHONS_GC_THRESHOLD = gc.get_threshold()
_GC_THRESHOLD = 50_000
_SILENCE_MS = 10_000
"""A worker whose heartbeat has not reached the database for this long (five are due) is not ready."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options of the command line."""

    target: str
    uri: str | None
    database: str | None
    collection: str | None
    worker_id: str | None
    concurrency: int
    queues: list[str] | None
    names: list[str] | None
    labels: dict[str, Any]
    until_idle: bool
    grace_ms: int
    listen: bool
    log_level: str
    log_format: str
    max_tasks: int | None
    health: tuple[str, int] | None
    """Host and port of the probes; a supervisor answers for its children."""
    metrics: tuple[str, int] | None
    """Host and port of the metrics; of several children each takes the next port."""

    def command(self, worker_id: str, place: int, base: str) -> list[str]:
        """Return the command line of child number `place`, which runs under this id. `base`: the id that all children share.

        The URI travels by environment.
        """
        words = [sys.executable, "-m", "taskmesh", "worker", self.target, "--worker-id", worker_id]
        words += ["--concurrency", str(self.concurrency), "--grace-ms", str(self.grace_ms)]
        words += ["--log-level", self.log_level, "--log-format", self.log_format]
        for name, values in (("--queues", self.queues), ("--names", self.names)):
            words += [name, ",".join(values)] if values is not None else []
        for label in label_words({WORKER: base, **self.labels}):
            words += ["--label", label]
        if self.metrics is not None:
            host, port = self.metrics
            words += ["--metrics-host", host, "--metrics-port", str(port + place if port else 0)]
        words += ["--until-idle"] if self.until_idle else []
        words += [] if self.listen else ["--no-listen"]
        words += ["--max-tasks-per-process", str(self.max_tasks)] if self.max_tasks is not None else []
        return words

    def environment(self) -> dict[str, str]:
        """Return the environment of a child. It contains the URI, whose password must not appear in a list of processes."""
        where = {
            COMMAND_LINE_URI: self.uri,
            "TASKMESH_DATABASE": self.database,
            "TASKMESH_COLLECTION": self.collection,
        }
        return os.environ | {name: value for name, value in where.items() if value is not None}


def run_one(options: WorkerOptions, pipe: Pipe) -> int:
    """Run one worker until it ends, and return the exit status. Without a supervisor, raises what a restart cannot fix."""
    try:
        mesh = load_mesh(options.target)
        _collect_garbage_less_often()
        mesh.connect_to(options.uri, database=options.database, collection=options.collection)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_Worker(mesh, options, pipe).run())
    except (CannotLoad, InvalidOption, NotAReplicaSet, IncompatibleCollection, WorkerIdTaken) as error:
        if not pipe.supervised:
            raise
        output.say(f"taskmesh: {error}", stderr=True)
        return HOPELESS
    except TaskMeshError as error:
        output.say(f"taskmesh: {error}", stderr=True)
        return FAILED
    return 0


def _collect_garbage_less_often() -> None:
    """Save a busy worker a quarter of its CPU time, unless the loaded module has settings of its own.

    Thousands of documents are in flight, none of them in a cycle, and the collector would traverse them again and again.
    """
    if gc.get_threshold() == _PYTHONS_GC_THRESHOLD:
        gc.set_threshold(_GC_THRESHOLD)


class _Worker:
    """One worker process: its consumer, and the signals that stop it at any moment of its life."""

    def __init__(self, mesh: TaskMesh, options: WorkerOptions, pipe: Pipe) -> None:
        self._mesh = mesh
        self._options = options
        self._pipe = pipe
        self._consumer: Consumer | None = None
        self._stops = 0
        """Signals that the event loop has received."""
        self._recycling = False
        self._main: asyncio.Task[Any] | None = None
        self._measured = worker_metrics() if options.metrics is not None else None
        self._forced_exit = ForcedExit(self._forced_status)

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
            self._pipe.say("recycle" if self._recycling else "done")
        self._forced_exit.within(_EXIT_DEADLINE_S)

    async def _connect_and_run(self) -> None:
        options = self._options
        async with self._mesh as mesh:
            consumer = mesh.consumer(
                worker_id=options.worker_id,
                concurrency=options.concurrency,
                names=options.names,
                queues=options.queues,
                labels=options.labels,
                listen=options.listen,
                observer=self._measured,
            )
            self._consumer = consumer
            dump_on_signal(consumer)
            if not self._pipe.supervised:
                self._introduce(consumer)
            watching = [asyncio.create_task(self._watch(consumer)), asyncio.create_task(self._beat(consumer))]
            try:
                async with contextlib.AsyncExitStack() as answering:
                    if options.health is not None:
                        routes = probes(lambda: _health(consumer))
                        await answering.enter_async_context(_answering("probes answer", options.health, routes))
                    if options.metrics is not None and self._measured is not None:
                        routes = metrics(mesh, self._measured, lambda: consumer)
                        await answering.enter_async_context(_answering("metrics are", options.metrics, routes))
                    await consumer.run(until_idle=options.until_idle)
            finally:
                for task in watching:
                    task.cancel()

    async def _beat(self, consumer: Consumer) -> None:
        """Tell the supervisor from this event loop that it responds."""
        while True:
            self._pipe.say("well" if _health(consumer).ready else "unwell")
            await asyncio.sleep(_BEAT_S)

    def _introduce(self, consumer: Consumer) -> None:
        banner(
            f"taskmesh worker {consumer.worker_id} (pid {os.getpid()})",
            runs=f"{', '.join(consumer.names)} (of {self._options.target})",
            source=f"{'all queues' if consumer.queues is None else ', '.join(consumer.queues)} at {self._mesh.address}",
            at_once=str(consumer.concurrency),
            grace_ms=self._options.grace_ms,
        )

    async def _watch(self, consumer: Consumer) -> None:
        """Report when it is ready, and stop it after `--max-tasks-per-process` tasks."""
        while consumer.state == "ready":  # noqa: ASYNC110  # a consumer has no event for that
            await asyncio.sleep(0.01)
        self._pipe.say("ready")
        if not self._pipe.supervised:
            notify("READY=1", f"STATUS=worker {consumer.worker_id} runs")
        limit = self._options.max_tasks
        while limit is not None and consumer.finished < limit:  # noqa: ASYNC110  # a count has no event
            await asyncio.sleep(_LOOK_S)
        if limit is not None:
            logger.info("worker %s has run %d tasks and is replaced by a new one", consumer.worker_id, limit)
            self._recycling = True
            consumer.begin_stop(self._options.grace_ms)

    def _take_signals(self) -> None:
        """Handle signals from now on, before anything else; the consumer then installs no handlers of its own."""
        loop = asyncio.get_running_loop()
        self._pipe.when_alone(lambda: self._stop("the supervisor has gone"))

        def heard(number: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._stop, signal.Signals(number).name)

        self._forced_exit.watch(stop_signals(), heard)

    def _forced_status(self) -> int:
        """Return the status of a forced exit: 0 if everything that ran was released."""
        return 0 if self._consumer is None or self._consumer.state in ("ready", "stopped") else FAILED

    def _stop(self, why: str) -> None:
        self._stops += 1
        grace_s = self._options.grace_ms / 1000 if self._stops == 1 else 0.0
        self._forced_exit.after(grace_s + _STOP_DEADLINE_S)
        consumer = self._consumer
        if consumer is None or consumer.state == "ready":
            assert self._main is not None
            self._main.cancel()
            return
        if not self._pipe.supervised:
            notify("STOPPING=1")
        logger.info("%s: worker %s stops %s", why, consumer.worker_id, "gracefully" if self._stops == 1 else "at once")
        consumer.begin_stop(self._options.grace_ms if self._stops == 1 else 0)


@contextlib.asynccontextmanager
async def _answering(what: str, where: tuple[str, int], routes: Routes) -> AsyncIterator[None]:
    server = await serve(*where, routes)
    logger.info("%s at http://%s:%d", what, *server.sockets[0].getsockname()[:2])
    try:
        yield
    finally:
        server.close()


def _health(consumer: Consumer) -> Health:
    heard = consumer.silent_ms < _SILENCE_MS
    about = {"worker_id": consumer.worker_id, "state": consumer.state, "running": len(consumer.running)}
    about["stream_silent_ms"] = round(consumer.stream_silent_ms)
    return Health(live=consumer.state != "stopped", ready=consumer.state == "running" and heard, about=about)


def banner(title: str, *, runs: str, source: str, at_once: str, grace_ms: int) -> None:
    """Print five lines: what it is, which tasks, from where, how many, and how to stop it."""
    output.say(title)
    output.say(f"  runs     {runs}")
    output.say(f"  from     {source}")
    output.say(f"  at once  {at_once}")
    output.say(
        f"  stop     Ctrl-C or SIGTERM; running tasks get {grace_ms / 1000:g} s to finish; a second signal stops at once"
    )
    with contextlib.suppress(OSError):
        sys.stdout.flush()


_MOST = 200


def dump_on_signal(consumer: Consumer) -> None:
    """Dump stacks on SIGUSR1. A plain signal handler, not the loop's: it also works while a handler blocks the loop."""
    loop = asyncio.get_running_loop()

    def dump(_number: int, _frame: FrameType | None) -> None:
        # Raised here, an exception would come out of whatever code the signal has interrupted, and end the worker.
        with contextlib.suppress(Exception):
            _write_stacks(consumer, loop)

    signal.signal(signal.SIGUSR1, dump)


def _write_stacks(consumer: Consumer, loop: asyncio.AbstractEventLoop) -> None:
    """Write to standard error what runs, and where each thread and each task of the loop is."""
    running = consumer.running
    say = sys.stderr.write
    say(f"--- worker {consumer.worker_id}: {consumer.state}, {len(running)} running\n")
    for key in running[:_MOST]:
        say(f"    {output.printable(key)}\n")
    say("--- threads\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    say("--- tasks of the event loop\n")
    for task in list(asyncio.all_tasks(loop))[:_MOST]:
        try:
            task.print_stack(limit=8, file=sys.stderr)
        except Exception as error:  # noqa: BLE001 — Python 3.11 does for a frame that has no line yet (TypeError)
            say(f"{task!r}: its stack cannot be written ({type(error).__name__})\n")
    say("--- end\n")
    sys.stderr.flush()
