"""A worker, whole: what its user holds of it (`Consumer`), and the parts that it is made of and their life (`Worker`).

    listener (the stream's hints) ─┐                    limits
                                   ├→ claim queue → claimer → executor → finisher → the database
    scanner (the truth) ───────────┘                            │
      backup claims: what others should take             pinger (a thread): leases;  reporter: progress, logs

Each part holds those that it needs by their type, so each line below makes what the lines after it use. The parts that go on by
themselves have `run`, a loop around `run_once`. The finding parts and the claimer meet at the claim queue.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import anyio
import anyio.abc
from pymongo.errors import PyMongoError

from taskmesh.client.acceptance import Acceptance
from taskmesh.client.change_feed import Feed
from taskmesh.client.data_changes import DataChanges
from taskmesh.client.definition import TaskDefinition
from taskmesh.client.events import DEFAULT_BUFFER, EventReader
from taskmesh.client.publisher import Publisher
from taskmesh.client.registry import Registry
from taskmesh.client.schedules import Schedules
from taskmesh.consumer.broadcasts import Broadcasts
from taskmesh.consumer.candidates.backup_claims import BackupClaims
from taskmesh.consumer.candidates.claim_filter import ClaimFilter
from taskmesh.consumer.candidates.claim_queue import ClaimQueue
from taskmesh.consumer.candidates.failure_counts import FailureCounts
from taskmesh.consumer.candidates.groups import Groups
from taskmesh.consumer.candidates.inserted_tasks import InsertedTasks
from taskmesh.consumer.candidates.limits import Limits
from taskmesh.consumer.candidates.listening import Listening
from taskmesh.consumer.candidates.partitions import Partitions
from taskmesh.consumer.candidates.queues import Queues
from taskmesh.consumer.candidates.slots import Slots
from taskmesh.consumer.candidates.tasks_for_room import TasksForRoom
from taskmesh.consumer.claimer import Claimer
from taskmesh.consumer.durable.journal import Journals
from taskmesh.consumer.durable.transactions import Transactions
from taskmesh.consumer.executor import Executor
from taskmesh.consumer.idleness import Idleness
from taskmesh.consumer.life import DEFAULT_GRACE_MS, Life, State
from taskmesh.consumer.lifespan import CLOSES_WITHIN_S, Lifespan, Opening
from taskmesh.consumer.listener import Listener
from taskmesh.consumer.loops import Loops, publications_of
from taskmesh.consumer.registration import Commanded, Orders, Registration
from taskmesh.consumer.run.dependency_results import DependencyResults
from taskmesh.consumer.run.dependents import Dependents
from taskmesh.consumer.run.executions import Executions
from taskmesh.consumer.run.finisher import Finisher
from taskmesh.consumer.run.pinger import Pinger
from taskmesh.consumer.run.reporter import Reporter
from taskmesh.consumer.scanner import Scanner
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.signals import handled_by
from taskmesh.consumer.stopping import Stopping, unless_it_takes_too_long
from taskmesh.consumer.ticker import Ticker
from taskmesh.consumer.timing import until
from taskmesh.consumer.unserved import Unserved
from taskmesh.consumer.worker_stats import WorkerStats
from taskmesh.consumer.write_times import WriteTimes
from taskmesh.model.errors import WorkerIdTaken
from taskmesh.model.worker import checked_concurrency, checked_grace
from taskmesh.store import Store
from taskmesh.store.clock import ServerClock
from taskmesh.store.mongodb.server_errors import patiently
from taskmesh.store.registry import register_definitions

logger = logging.getLogger("taskmesh.consumer")

ClaimHook = Callable[["Consumer"], Mapping[str, Any] | Awaitable[Mapping[str, Any] | None] | None]

_IDLE_CHECK_S = 0.1
_TELL_WITHIN_S = 2.0
"""How long a stopping worker goes on to open the dependents of its tasks. After that other workers do it."""


class Mesh(Protocol):
    """What a consumer needs from its mesh."""

    # ruff: noqa: D102 — documented where the mesh has them

    @property
    def store(self) -> Store: ...
    @property
    def clock(self) -> ServerClock: ...
    @property
    def feed(self) -> Feed: ...
    @property
    def definitions(self) -> Mapping[str, TaskDefinition[Any, Any]]: ...
    @property
    def worker_lifespan(self) -> Lifespan[Any] | None: ...
    @property
    def data_changes(self) -> Mapping[str, DataChanges]: ...
    @property
    def publisher(self) -> Publisher: ...
    @property
    def schedules(self) -> Schedules: ...


class Consumer:
    """A worker: claims tasks and runs their handlers. Created by `mesh.consumer(…)`, run once."""

    def __init__(self, mesh: Mesh, settings: Settings, on_claim: ClaimHook | None = None) -> None:
        self._mesh = mesh
        self._settings = settings
        self._life = Life()
        self._claim_filter = ClaimFilter(on_claim, self)
        self.worker_id = self._settings.worker_id
        self.names = self._settings.names
        self.queues = self._settings.queues
        self._begun = False
        """Whether `run` was called. Until it is registered its state is still shown as ready."""
        self._worker: Worker | None = None
        """None until it runs."""
        self._stopped = asyncio.Event()
        self._readers: list[EventReader] = []

    # --- what a user can read and set ---

    @property
    def state(self) -> State:
        """Its state: ready, running, stopping or stopped."""
        return self._life.state

    @property
    def paused(self) -> bool:
        """Whether it is paused: it claims nothing, on this worker alone, until `resume`."""
        return self._life.paused

    @property
    def running(self) -> list[str]:
        """The keys of the tasks that run here."""
        return [] if self._worker is None else [execution.key for execution in self._worker.executions.values()]

    @property
    def at_work(self) -> bool:
        """Whether `run()` has begun and not ended yet."""
        return self._begun and not self._stopped.is_set()

    @property
    def finished(self) -> int:
        """How many executions have ended here, whatever their outcome."""
        return 0 if self._worker is None else self._worker.executions.finished

    @property
    def silent_ms(self) -> float:
        """How long ago, in ms, the database last took this worker's heartbeat. Heartbeats come every two seconds."""
        return 0.0 if self._worker is None else (time.monotonic() - self._worker.registration.seen_at) * 1000

    @property
    def stream_silent_ms(self) -> float:
        """How long, in ms, the change stream has not moved on: see `Feed.silent_ms`. 0 for a worker that does not listen."""
        worker = self._worker
        return self._mesh.feed.silent_ms if worker is not None and worker.listening.wanted else 0.0

    @property
    def concurrency(self) -> int:
        """How many executions may run here at once. Can be set while the consumer runs; running executions are not affected."""
        return self._settings.concurrency

    @concurrency.setter
    def concurrency(self, concurrency: int) -> None:
        self._settings.concurrency = checked_concurrency(concurrency)
        if self._worker is not None:
            self._worker.candidates.ready.set()

    def pause(self) -> None:
        """Stop claiming, on this worker alone. Running executions go on."""
        self._set_paused(True)

    def resume(self) -> None:
        """Claim again."""
        self._set_paused(False)

    def _set_paused(self, paused: bool) -> None:
        self._life.paused = paused
        if self._worker is not None:
            self._worker.claiming_changed()

    def events(self, *, buffer: int = DEFAULT_BUFFER) -> EventReader:
        """Return an async iterator over what this worker does with tasks, from now on. It ends when the consumer has stopped."""
        reader = EventReader(self._mesh.feed, self._mesh.store, worker_id=self.worker_id, buffer=buffer)
        self._readers.append(reader)
        if self.state == "stopped":
            reader.close()
        return reader

    async def read_queues(self) -> None:
        """Learn at once which queues are paused or limited, as the mesh does when it has changed one."""
        if self._worker is not None and self.state == "running":
            await self._worker.queues.read()

    async def stop(self, grace_ms: int = DEFAULT_GRACE_MS) -> None:
        """Stop: claim nothing more; wait up to `grace_ms` for what runs; then cancel and release the rest, uncharged.

        Returns when the consumer has stopped. A second call with a shorter grace period speeds up the first. Raises
        `InvalidOption`.
        """
        checked_grace(grace_ms)
        if not self._begun:
            self._end_before_it_ran()
        self.begin_stop(grace_ms)
        await self._stopped.wait()

    def begin_stop(self, grace_ms: int) -> None:
        """Ask the consumer to stop, without waiting for it."""
        self._life.stop(grace_ms)

    # --- its life ---

    async def run(self, until_idle: bool = False) -> None:
        """Work until `stop()`, a signal, or cancellation (which cancels and releases what runs).

        `until_idle`: return as soon as nothing that this worker may run is claimable or running anywhere. It may not run what
        `on_claim` excludes, or what is paused or limited to 0; while it is paused itself, it may run nothing. Loops and
        singletons are left to other workers. In the main thread, SIGINT and SIGTERM stop it (the first gracefully, the second
        at once) unless the program handles them itself.
        """
        if self._begun or self.state != "ready":
            state = "starting" if self.state == "ready" else self.state
            raise RuntimeError(f"this consumer is {state}: a consumer runs once, make another")
        if getattr(sys.modules.get("taskmesh.consumer.subprocess.child"), "serving", False):
            raise RuntimeError(
                "a consumer was started in the child process of a handler: the script that defines the handler must start "
                "its consumer under `if __name__ == '__main__':`"
            )
        if until_idle:
            self.names = self._settings.names = [name for name in self.names if not self._mesh.definitions[name].loop]
        life = self._life
        worker = self._worker = Worker(self._mesh, self._settings, life, self._claim_filter, self)
        self._begun = True
        opening = self._mesh.worker_lifespan.join() if self._mesh.worker_lifespan is not None else None
        try:
            entered = await life.unless_stopped(_enter(worker, opening))
        except BaseException:
            await _leave(opening)
            self._begun = False
            if life.stop_asked.is_set():
                self._end_before_it_ran()
            raise
        if entered:
            life.state = "running"
            self._mesh.publisher.workers_changed()
        with handled_by(self):
            try:
                async with anyio.create_task_group() as loops:
                    if entered and await life.unless_stopped(worker.open()):
                        worker.start(loops)
                        if opening is not None:
                            loops.start_soon(_end_with, opening, life, name="taskmesh lifespan")
                        self._tell_start()
                        await worker.work(until_idle)
                    await worker.wind_down(life.grace_ms)
                    loops.cancel_scope.cancel()
            except BaseException:
                life.state = "stopping"
                await unless_it_takes_too_long(worker.wind_down(0))
                raise
            finally:
                try:
                    await unless_it_takes_too_long(self._end(worker))
                finally:
                    await _leave(opening)
                    self._stopped.set()
        if life.ended_by is not None:
            raise life.ended_by

    def _end_before_it_ran(self) -> None:
        self._life.state = "stopped"
        self._stopped.set()

    def _tell_start(self) -> None:
        names, queues = ", ".join(self.names), self.queues or "all queues"
        logger.info("worker %s runs %s from %s, %d at once", self.worker_id, names, queues, self.concurrency)

    async def _end(self, worker: Worker) -> None:
        """Give everything back."""
        await worker.close()
        self._mesh.publisher.workers_changed()
        for reader in self._readers:
            reader.close()
        logger.info("worker %s has stopped", self.worker_id, extra={"worker": self.worker_id})


async def _enter(worker: Worker, opening: Opening | None) -> None:
    """Open what its handlers need, before the worker is registered."""
    if opening is not None:
        await opening.opened()
    await worker.enter()


async def _end_with(opening: Opening, life: Life) -> None:
    """Stop the worker if what its handlers need ends before it."""
    life.end_by(await opening.ended())


async def _leave(opening: Opening | None) -> None:
    if opening is not None:
        await unless_it_takes_too_long(opening.leave(), CLOSES_WITHIN_S + 1)


class Worker:
    """The parts of a running consumer. Created in the event loop in which it runs."""

    def __init__(
        self, mesh: Mesh, settings: Settings, life: Life, claim_filter: ClaimFilter, consumer: Commanded
    ) -> None:
        """`consumer` carries out remote orders."""
        store, clock, worker_id = mesh.store, mesh.clock, settings.worker_id
        definitions = {name: mesh.definitions[name] for name in settings.names}
        settings.loop_ids = frozenset(publications_of(settings, definitions))
        self._store = store
        self._settings = settings
        self._life = life
        self._definitions = definitions
        self._data_changes = [changes for name, changes in mesh.data_changes.items() if name in definitions]
        # What all parts look at: what runs, what to try, who else does this work, which queues are open.
        self.executions = Executions(settings)
        self.candidates = ClaimQueue(settings)
        self.partitions = Partitions(settings)
        self.listening = Listening(settings)
        self.slots = Slots(store, settings, clock)
        self.limits = Limits(store, settings, clock, self.candidates, self.executions, self.slots, self.partitions)
        usual_queues = ["default", *(queue for definition in definitions.values() for queue in definition.queues)]
        self.failures = FailureCounts(store, self.limits)
        self.queues = Queues(
            store, settings, self.candidates, self.limits, self.failures, self.partitions, usual_queues
        )
        # From the claim to the outcome.
        stats = WorkerStats()
        write_times = WriteTimes()
        self.pinger = Pinger(store, settings, self.executions, stats, write_times)
        self.reporter = Reporter(store, worker_id)
        self.finisher = Finisher(store, worker_id, write_times)
        self.dependents = Dependents(store)
        self.transactions = Transactions(store, worker_id, clock, self.pinger, self.reporter)
        self.journals = Journals(store, worker_id, self.finisher, self.transactions, clock)
        self.executor = Executor(
            mesh.publisher,
            mesh.definitions,
            settings,
            clock,
            self.executions,
            self.candidates,
            self.limits,
            self.pinger,
            self.reporter,
            self.journals,
            self.finisher,
            self.dependents,
            failures=self.failures,
            dependency_results=DependencyResults(store, mesh.definitions, mesh.publisher.payloads),
            lifespan=mesh.worker_lifespan,
        )
        self.claimer = Claimer(
            store,
            settings,
            self.candidates,
            self.executions,
            self.queues,
            self.limits,
            claim_filter,
            life,
            self.executor,
            self.finisher,
            write_times,
            params_of={
                name: definition.projection if len(definition.queues) == 1 else None
                for name, definition in definitions.items()
            },
        )
        # Those that find tasks.
        self.backup_claims = BackupClaims(
            store, settings.claimant, clock, self.candidates, self.executions, self.limits, self.partitions
        )
        self.groups = Groups(
            store,
            settings,
            clock,
            self.candidates,
            self.partitions,
            self.limits,
            claim_filter,
            self.backup_claims,
        )
        self.tasks_for_room = TasksForRoom(
            store,
            settings,
            clock,
            self.candidates,
            self.partitions,
            self.queues,
            self.limits,
            self.groups,
            claim_filter,
            life,
            self.backup_claims,
        )
        self.inserted_tasks = InsertedTasks(Acceptance(store, clock, Registry(store)), self._settings, self.partitions)
        orders = Orders(store, settings, consumer)
        self.listener = Listener(
            mesh.feed,
            store,
            settings,
            self.listening,
            clock,
            self.candidates,
            self.executions,
            self.partitions,
            self.queues,
            self.backup_claims,
            self.pinger,
            orders,
            inserted_tasks=self.inserted_tasks,
        )
        self.scanner = Scanner(
            store,
            settings,
            clock,
            self.candidates,
            self.executions,
            self.partitions,
            self.queues,
            self.limits,
            claim_filter,
            self.backup_claims,
            self.listening,
            self.listener,
            write_times=write_times,
            dependents=self.dependents,
            groups=self.groups,
        )
        # Those that look after the fleet, and the end.
        self.ticker = Ticker(store, mesh.schedules, self.partitions)
        self.registration = Registration(
            store,
            clock,
            settings,
            life,
            self.partitions,
            self.listening,
            self.candidates,
            self.executions,
            self.claimer,
            stats,
            orders,
            claim_filter,
        )
        self.unserved = Unserved(store, self.registration)
        self.loops = Loops(
            store,
            settings,
            clock,
            definitions,
            self.candidates,
            self.executions,
            self.partitions,
        )
        self.broadcasts = Broadcasts(store, definitions, self.partitions)
        self._idleness = Idleness(
            store,
            settings,
            life,
            self.candidates,
            self.executions,
            self.queues,
            self.limits,
            claim_filter,
            self.claimer,
            self.scanner,
            self.finisher,
            self.dependents,
            inserted_tasks=self.inserted_tasks,
        )
        self._stopping = Stopping(life, self.claimer, self.executions, self.finisher)

    async def enter(self) -> None:
        """Register the tasks, then the worker, so that whoever sees the worker sees its tasks, too.

        Raises as `Registration.enter` does, and `InvalidOption` if the server does not let us watch what a task is declared
        for.
        """
        for changes in self._data_changes:
            await changes.check()
        await self._register_definitions()
        await patiently(self.registration.enter)

    async def _register_definitions(self) -> None:
        """Tell publishers without the code which queue and option these tasks have, and what params they take."""
        definitions = {name: definition.described() for name, definition in self._definitions.items()}
        try:
            await patiently(lambda: register_definitions(self._store, definitions))
        except PyMongoError as error:  # it works all the same
            logger.warning("the definitions of tasks could not be registered (%s): %.200s", type(error).__name__, error)

    async def open(self) -> None:
        """Get ready to work."""
        await patiently(self.queues.read)
        await patiently(self.loops.declare)
        self.pinger.start()
        if self.listening.wanted:
            await self.listener.open()  # before the first scan, so that nothing is missed in between

    def start(self, loops: anyio.abc.TaskGroup) -> None:
        """Start working. The loops run until their task group is cancelled."""
        loops.start_soon(self.scanner.run, name="taskmesh scanner")
        loops.start_soon(self.claimer.run, name="taskmesh claimer")
        loops.start_soon(self.groups.run, name="taskmesh groups")
        loops.start_soon(self.tasks_for_room.run, name="taskmesh tasks for room")
        loops.start_soon(self.limits.run, name="taskmesh limits")
        loops.start_soon(self.listener.run, name="taskmesh listener")
        loops.start_soon(self.backup_claims.run, name="taskmesh backup claims")
        loops.start_soon(self.reporter.run, name="taskmesh reporter")
        loops.start_soon(self.failures.run, name="taskmesh failure counts")
        loops.start_soon(self.unserved.run, name="taskmesh unserved")
        loops.start_soon(self.ticker.run, name="taskmesh ticker")
        loops.start_soon(self.registration.run, name="taskmesh registration")
        loops.start_soon(self.loops.run, name="taskmesh loops")
        loops.start_soon(self.broadcasts.run, name="taskmesh broadcasts")
        loops.start_soon(self.inserted_tasks.run, name="taskmesh inserted tasks")
        self.registration.show_soon()
        self.candidates.order_scan()

    async def work(self, until_idle: bool) -> None:
        """Wait until it is asked to stop. `until_idle`: or until there is nothing left to do."""
        stop_asked = self._life.stop_asked
        while not stop_asked.is_set():
            stopping = await until(stop_asked, _IDLE_CHECK_S if until_idle else None)
            if not stopping and await self._idleness.is_idle():
                return

    def claiming_changed(self) -> None:
        """Claim again, or stop claiming. Running executions go on."""
        self.candidates.ready.set()
        if self._life.claims:
            self.candidates.order_scan()
        self.registration.show_soon()

    async def wind_down(self, grace_ms: int) -> None:
        """Claim and look for nothing more, and bring what runs to its end."""
        self._life.state = "stopping"
        self.scanner.open = False
        self.registration.show_soon()
        await self._stopping.wind_down(grace_ms)
        with anyio.move_on_after(_TELL_WITHIN_S):
            await self.dependents.drain()

    async def close(self) -> None:
        """Give everything back."""
        self.listener.close()
        with anyio.move_on_after(_TELL_WITHIN_S):
            await self.scanner.close()
        self.limits.close()
        await self.slots.close()
        await self.pinger.stop()
        await self.reporter.flush()
        await self.executor.close()
        await self.transactions.close()
        await self.loops.leave()
        self._life.state = "stopped"
        if not isinstance(self._life.ended_by, WorkerIdTaken):
            await self.registration.leave()
