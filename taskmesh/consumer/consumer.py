"""The consumer: wires the loops together, and owns start and stop. What each loop does stands in its own file.

listener (the feed's hints) ─┐
                             ├→ claim queue → claimer → executor → finisher
scanner (the truth) ─────────┘                   pinger (a thread) keeps the leases
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import anyio
from pymongo.errors import PyMongoError

from taskmesh.consumer import signals
from taskmesh.consumer.claim_queue import ClaimQueue
from taskmesh.consumer.claimer import Claimer
from taskmesh.consumer.execution import Execution, Stop
from taskmesh.consumer.executor import AfterHook, BeforeHook, Executor
from taskmesh.consumer.finisher import Finisher
from taskmesh.consumer.lanes import Lanes
from taskmesh.consumer.limits import Limits
from taskmesh.consumer.listener import Listener
from taskmesh.consumer.neglected import Neglected
from taskmesh.consumer.pause import until
from taskmesh.consumer.pinger import Pinger
from taskmesh.consumer.registration import Registration
from taskmesh.consumer.reporter import Reporter
from taskmesh.consumer.scanner import Scanner
from taskmesh.consumer.second_look import SecondLook
from taskmesh.consumer.ticker import Ticker
from taskmesh.errors import InvalidOption, WorkerIdTaken
from taskmesh.events import DEFAULT_BUFFER, EventReader
from taskmesh.store import fleet
from taskmesh.store.driver import Document
from taskmesh.store.find import unfinished_left
from taskmesh.store.finish import Outcome

if TYPE_CHECKING:
    from taskmesh.mesh import TaskMesh

logger = logging.getLogger("taskmesh.consumer")

State = Literal["ready", "running", "stopping", "stopped"]
ClaimHook = Callable[["Consumer"], Mapping[str, Any] | Awaitable[Mapping[str, Any] | None] | None]

DEFAULT_STALL_LIMIT_MS = 60_000
_IDLE_CHECK_S = 0.1
_RELEASE_DEADLINE_S = 10.0


class Consumer:
    """A worker: claims tasks and runs their handlers. Made by `mesh.consumer(…)`, run once."""

    def __init__(
        self,
        mesh: TaskMesh,
        *,
        worker_id: str | None = None,
        concurrency: int = 100,
        names: Sequence[str] | None = None,
        queues: Sequence[str] | None = None,
        listen: bool = True,
        on_claim: ClaimHook | None = None,
        before: BeforeHook | None = None,
        after: AfterHook | None = None,
        stall_limit_ms: int = DEFAULT_STALL_LIMIT_MS,
    ) -> None:
        self._mesh = mesh
        self.worker_id = checked_worker_id(worker_id)
        self.instance = secrets.token_hex(6)
        self._concurrency = checked_concurrency(concurrency)
        self.names = _checked_names(mesh.definitions, names)
        self.queues = list(queues) if queues is not None else None
        self._listen = listen
        self._on_claim = on_claim
        self._before = before
        self._after = after
        self._stall_limit_ms = stall_limit_ms
        self.state: State = "ready"
        self.paused = False
        self._sequence = 0
        self._stop_asked = asyncio.Event()
        self._grace_ms = 30_000
        self._hastened = asyncio.Event()
        self._freed = asyncio.Event()
        self._stopped = asyncio.Event()
        self._readers: list[EventReader] = []
        self._order_time: Any = None
        self._fleet_closed: frozenset[str] = frozenset()
        self._fleet: list[Document] = []
        self._fatal: BaseException | None = None
        self._executor: Executor | None = None
        self._claimer: Claimer | None = None
        self._registration: Registration | None = None

    # --- what a user can ask and set ---

    @property
    def running(self) -> list[str]:
        """The keys of the tasks that run here."""
        return [execution.key for execution in self._executions()]

    @property
    def finished(self) -> int:
        """How many executions have ended here, whatever their outcome."""
        return 0 if self._executor is None else self._executor.finished

    @property
    def silent_ms(self) -> float:
        """How long ago the database last took this worker's sign of life; they come every two seconds."""
        return 0.0 if self._registration is None else (time.monotonic() - self._registration.seen_at) * 1000

    @property
    def concurrency(self) -> int:
        """How many executions may run here at once. Can be set while the consumer runs; what runs, runs on."""
        return self._concurrency

    @concurrency.setter
    def concurrency(self, concurrency: int) -> None:
        self._concurrency = checked_concurrency(concurrency)
        if self._claimer is not None:
            self._queue.set_limit(_queue_limit(concurrency))
            self._claimer.wake()

    def pause(self) -> None:
        """Claim no more, on this worker alone; what runs, runs on."""
        self._set_paused(True)

    def resume(self) -> None:
        """Claim again."""
        self._set_paused(False)

    def events(self, *, buffer: int = DEFAULT_BUFFER) -> EventReader:
        """Return an async iterator of what this worker does with tasks, from now on. It ends when the consumer has stopped."""
        reader = EventReader(self._mesh.feed, self._mesh.store, worker_id=self.worker_id, buffer=buffer)
        self._readers.append(reader)
        if self.state == "stopped":
            reader.close()
        return reader

    async def stop(self, grace_ms: int = 30_000) -> None:
        """Stop: no new claims; wait up to `grace_ms` for what runs; then cancel and release the rest, uncharged.

        Returns when the consumer has stopped. A second call with a shorter grace hastens the first.
        """
        if self.state == "ready":
            self.state = "stopped"
            self._stopped.set()
        self.begin_stop(grace_ms)
        await self._stopped.wait()

    def begin_stop(self, grace_ms: int) -> None:
        """Ask the consumer to stop, without waiting for it."""
        self._grace_ms = min(self._grace_ms, grace_ms) if self._stop_asked.is_set() else grace_ms
        self._stop_asked.set()
        self._hastened.set()

    # --- running ---

    async def run(self, until_idle: bool = False) -> None:
        """Work until `stop()`, a signal, or cancellation (which cancels and releases what runs).

        `until_idle`: return once nothing that this worker may run is claimable or running anywhere. In the main thread,
        SIGINT and SIGTERM stop it (the first gracefully, the second at once) unless the program handles them itself.
        """
        if self.state != "ready":
            raise RuntimeError(f"this consumer is {self.state}: a consumer runs once, make another")
        if getattr(sys.modules.get("taskmesh.consumer.child"), "serving", False):
            raise RuntimeError(
                "a consumer was started in the child process of a handler: the script that defines the handler must start "
                "its consumer under `if __name__ == '__main__':`"
            )
        self._wire()
        await self._registration_entered()
        self.state = "running"
        with signals.handled_by(self):
            try:
                async with anyio.create_task_group() as loops:
                    await self._start_loops(loops)
                    await self._until_asked_to_stop(until_idle)
                    await self._wind_down(self._grace_ms)
                    loops.cancel_scope.cancel()
            except BaseException:
                self.state = "stopping"
                self._close_claims()
                await _unless_it_takes_too_long(self._wind_down(0))
                raise
            finally:
                await _unless_it_takes_too_long(self._end())
                self._stopped.set()
        if self._fatal is not None:
            raise self._fatal

    def _wire(self) -> None:
        """Make the parts and connect them."""
        store, clock = self._mesh.store, self._mesh.clock
        self._queue = ClaimQueue(_queue_limit(self._concurrency))
        self._lanes = Lanes(self.worker_id)
        self._finisher = Finisher(store, self.worker_id)
        self._reporter = Reporter(store, self.worker_id)
        self._pinger = Pinger(
            store, asyncio.get_running_loop(), lambda: self._executor_().executions, self._lose, self._stall_limit_ms
        )
        self._executor = Executor(
            store,
            self.worker_id,
            clock,
            self._finisher,
            self._pinger,
            self._mesh.definitions,
            before=self._before,
            after=self._after,
            slot_freed=self._slot_freed,
            report=self._reporter.add,
            reports_written=self._reporter.written,
            make_publication=self._mesh.publication_of,
        )
        self._limits = Limits(
            store,
            self.worker_id,
            clock,
            self._queue,
            names=self.names,
            is_busy=lambda id_: id_ in self._executor_().executions,
            wake=lambda: self._claimer_().wake(),
            want_more=lambda: self._scanner.order_scan(),  # noqa: PLW0108 — the scanner is made later
        )
        self._claimer = Claimer(
            store,
            self.worker_id,
            self._queue,
            concurrency=lambda: self._concurrency,
            free_slots=lambda: self._concurrency - len(self._executor_().executions),
            narrow=self._narrow,
            closed_queues=lambda: self._fleet_closed,
            limits=self._limits,
            params_of={name: self._mesh.definitions[name].projection for name in self.names},
            whole_state=self._before is not None or self._after is not None,
            start=self._executor.start,
            give_back=self._give_back,
            next_running_id=self._next_running_id,
            is_busy=lambda id_: id_ in self._executor_().executions,
            want_more=self._want_more,
        )
        self._second_look = SecondLook(store, self.worker_id, lambda *found: self._scanner.still_there(*found))  # noqa: PLW0108 — likewise
        self._scanner = Scanner(
            store,
            self.worker_id,
            self._queue,
            self._lanes,
            clock,
            names=self.names,
            queues=self.queues,
            closed_queues=lambda: self._fleet_closed,
            limits=self._limits,
            wanted=self._free_slots,
            skip=lambda id_: id_ in self._executor_().executions or self._claimer_().is_aside(id_),
            being_claimed=lambda: self._claimer_().being_claimed,
            found=self._claimer.wake,
            want_hints=self._want_hints,
            second_look=self._second_look,
            page=max(1_000, min(5_000, 4 * self._concurrency)),
        )
        self._ticker = Ticker(store, self._mesh.publication_of_tick)
        self._listener = Listener(
            self._mesh.feed,
            store,
            self.worker_id,
            names=self.names,
            queues=self.queues,
            lanes=self._lanes,
            clock=clock,
            queue=self._queue,
            executor=self._executor,
            pinger=self._pinger,
            scanner=self._scanner,
            wake=self._claimer.wake,
            second_look=self._second_look,
            closed_queues=lambda: self._fleet_closed,
            read_queues=self._read_queues,
            read_orders=self._read_orders,
        )
        self._registration = Registration(
            store,
            clock,
            self.worker_id,
            self.instance,
            describe=self._described,
            on_document=self._obey,
            on_fleet=self._meet_fleet,
            on_lost=self._lose_id,
        )

    async def _registration_entered(self) -> None:
        assert self._registration is not None
        await self._registration.enter()

    async def _start_loops(self, loops: anyio.abc.TaskGroup) -> None:
        await self._read_queues()
        self._pinger.start()
        if self._listen:
            await self._listener.open()  # before the first scan, so that nothing falls in between
        loops.start_soon(self._scanner.run, name="taskmesh scanner")
        loops.start_soon(self._claimer_().run, name="taskmesh claimer")
        loops.start_soon(self._listener.run, name="taskmesh listener")
        loops.start_soon(self._second_look.run, name="taskmesh second look")
        loops.start_soon(self._reporter.run, name="taskmesh reporter")
        loops.start_soon(Neglected(self._mesh.store, lambda: self._fleet).run, name="taskmesh neglected")
        loops.start_soon(self._ticker.run, name="taskmesh ticker")
        assert self._registration is not None
        loops.start_soon(self._registration.run, name="taskmesh registration")
        self._registration.show_soon()
        self._scanner.order_scan()
        logger.info(
            "worker %s runs %s from %s, %d at once",
            self.worker_id,
            ", ".join(self.names),
            self.queues or "all queues",
            self._concurrency,
        )

    async def _until_asked_to_stop(self, until_idle: bool) -> None:
        while not self._stop_asked.is_set():
            stopping = await until(self._stop_asked, _IDLE_CHECK_S if until_idle else None)
            if not stopping and await self._is_idle():
                return

    async def _is_idle(self) -> bool:
        if self._executions() or not self._claimer_().idle or not self._finisher.idle:
            return False
        if self.names and self._scanner.scans == 0:
            return False
        if self._queue.ready_count(time.monotonic()):
            return False
        try:
            return not await unfinished_left(
                self._mesh.store, self.worker_id, self.names, self.queues, self._fleet_closed
            )
        except PyMongoError as error:  # the database is away: surely not idle
            logger.debug("could not ask whether anything is left: %s", error)
            return False

    # --- stopping ---

    async def _wind_down(self, grace_ms: int) -> None:
        """Claim no more, wait for what runs, then cancel and release the rest. Leases are renewed to the end."""
        self.state = "stopping"
        self._close_claims()
        if self._registration is not None:
            self._registration.show_soon()
        await self._claimer_().drain()
        await self._wait_for_executions(grace_ms)
        for execution in self._executions():
            self._executor_().stop(execution, Stop.WORKER_STOPS)
        await self._wait_for_handlers()
        await self._finisher.drain()

    def _close_claims(self) -> None:
        self._claimer_().open = False
        self._scanner.open = False

    async def _wait_for_executions(self, grace_ms: int) -> None:
        """Wait until nothing runs, or the grace is over; a later, shorter grace counts from then."""
        deadline = time.monotonic() + grace_ms / 1000
        while self._executions() and time.monotonic() < deadline:
            self._hastened.clear()
            waits = {asyncio.ensure_future(self._freed.wait()), asyncio.ensure_future(self._hastened.wait())}
            self._freed.clear()
            await asyncio.wait(waits, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            deadline = min(deadline, time.monotonic() + self._grace_ms / 1000)

    async def _wait_for_handlers(self) -> None:
        """Wait for cancelled handlers to end, but not for ever: one that will not is left behind, and fenced."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            left = [e for e in self._executions() if not e.ended and e.task is not None and not e.task.done()]
            if not left:
                return
            await asyncio.wait([e.task for e in left if e.task is not None], timeout=deadline - time.monotonic())
        for execution in self._executions():
            if not execution.ended:
                logger.error("task %s ignores its cancellation: giving its task back", execution.id)
                self._finisher.add(Outcome(execution.id, execution.running_id, "released"), lambda _: None)

    async def _end(self) -> None:
        """Give everything back."""
        self._listener.close()
        self._limits.close()
        await self._pinger.stop()
        await self._reporter.flush()
        await self._executor_().close()
        self.state = "stopped"
        if self._registration is not None and not isinstance(self._fatal, WorkerIdTaken):
            await self._registration.leave()
        for reader in self._readers:
            reader.close()
        logger.info("worker %s has stopped", self.worker_id)

    # --- what the parts tell each other ---

    def _slot_freed(self) -> None:
        self._freed.set()
        self._limits.slot_freed()
        self._claimer_().wake()

    async def _want_hints(self, wanted: bool) -> None:
        """Under a backlog the stream is not asked for new work; when it is worked off, a scan closes the gap."""
        if self._listen and wanted != self._listener.wants_hints:
            await self._listener.want_hints(wanted)
            if wanted:
                self._scanner.order_scan()

    def _want_more(self) -> None:
        """The claimer has few candidates left."""
        if self._queue.ready_count(time.monotonic()) < max(1, self._concurrency // 2) and (self._scanner.more):
            self._scanner.want_more()

    def _free_slots(self) -> int:
        return max(0, self._concurrency - len(self._executions()))

    def _lose(self, execution: Execution) -> None:
        self._executor_().lose(execution)

    def _give_back(self, document: Document, running_id: str) -> None:
        self._finisher.add(Outcome(document["_id"], running_id, "released"), lambda _: None)

    def _next_running_id(self) -> str:
        self._sequence += 1
        return f"{self.instance}-{self._sequence:x}"

    async def _narrow(self) -> Mapping[str, Any] | None:
        if self._on_claim is None:
            return {}
        try:
            narrowed_by = self._on_claim(self)
            if isinstance(narrowed_by, Awaitable):
                narrowed_by = await narrowed_by
        except Exception:
            logger.exception("the hook 'on_claim' failed: no claims this round")
            return None
        return narrowed_by

    async def _read_queues(self) -> None:
        """Learn which queues are closed now."""
        settings = await fleet.queues(self._mesh.store)
        self._limits.learn(settings)
        closed = frozenset(name for name, queue in settings.items() if queue.get("paused"))
        if closed != self._fleet_closed:
            reopened = self._fleet_closed - closed
            self._fleet_closed = closed
            self._queue.discard_queues(closed)
            if reopened:
                self._scanner.order_scan()

    async def _read_orders(self) -> None:
        document = await fleet.read_worker(self._mesh.store, self.worker_id)
        if document is not None and document.get("instance") == self.instance:
            self._obey(document)

    def _obey(self, document: Document) -> None:
        """Do what was ordered from afar, once."""
        if "order_time" not in document or document["order_time"] == self._order_time:
            return
        self._order_time = document["order_time"]
        orders: Document = document.get("order", {})
        if "concurrency" in orders:
            self.concurrency = orders["concurrency"]
        if "paused" in orders:
            self._set_paused(bool(orders["paused"]))
        if "stop_grace_ms" in orders:
            logger.info("worker %s was told to stop", self.worker_id)
            self.begin_stop(orders["stop_grace_ms"])

    def _set_paused(self, paused: bool) -> None:
        self.paused = paused
        if self._claimer is not None and self.state == "running":
            self._claimer.open = not paused
            self._claimer.wake()
            if not paused:
                self._scanner.order_scan()
        if self._registration is not None:
            self._registration.show_soon()

    def _meet_fleet(self, workers: list[Document]) -> None:
        """Learn who lives and does the same work."""
        self._fleet = workers
        mine = set(self.names)
        peers = [
            worker["_id"]
            for worker in workers
            if worker.get("live")
            and worker.get("state") == "running"
            and mine & set(worker.get("names", ()))
            and not worker.get("paused")
            and (self.queues is None or worker.get("queues") is None or set(self.queues) & set(worker["queues"]))
        ]
        if self._lanes.set_workers(peers):
            logger.debug("worker %s shares its work with %d others", self.worker_id, len(peers) - 1)

    def _lose_id(self) -> None:
        """Another worker has our id, since we were silent for too long."""
        self._fatal = WorkerIdTaken(
            f"worker id {self.worker_id!r} was taken over by another process while this one was silent: this one stops"
        )
        logger.error("%s", self._fatal)
        self.begin_stop(0)

    def _described(self) -> Document:
        executor = self._executor_()
        return {
            "state": self.state if self.state != "ready" else "running",
            "names": self.names,
            "queues": self.queues,
            "concurrency": self._concurrency,
            "paused": self.paused,
            "running": len(executor.executions),
            "started": executor.started,
            "finished": executor.finished,
        }

    def _executions(self) -> Collection[Execution]:
        return list(self._executor.executions.values()) if self._executor is not None else []

    def _executor_(self) -> Executor:
        assert self._executor is not None
        return self._executor

    def _claimer_(self) -> Claimer:
        assert self._claimer is not None
        return self._claimer


async def _unless_it_takes_too_long(ending: Awaitable[None]) -> None:
    """Do this even while we are being cancelled, in a task of its own, up to a deadline."""
    task = asyncio.ensure_future(ending)
    with anyio.CancelScope(shield=True):
        await asyncio.wait([task], timeout=_RELEASE_DEADLINE_S)
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        logger.error("stopping met an error", exc_info=error)


def _queue_limit(concurrency: int) -> int:
    return max(5_000, 10 * concurrency)


def checked_worker_id(worker_id: str | None) -> str:
    """Return the id, or a made-up one. Raises `InvalidOption`."""
    if worker_id is None:
        return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    if not isinstance(worker_id, str) or not 1 <= len(worker_id) <= 256 or not worker_id.isprintable():
        raise InvalidOption(f"a worker id is a printable text of 1 to 256 characters, not {worker_id!r}")
    return worker_id


def checked_concurrency(concurrency: int) -> int:
    """Return the number, or raise `InvalidOption`."""
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or not 1 <= concurrency <= 1_000_000:
        raise InvalidOption(f"concurrency is a whole number from 1, not {concurrency!r}")
    return concurrency


def _checked_names(definitions: Mapping[str, Any], names: Sequence[str] | None) -> list[str]:
    if names is None:
        return sorted(definitions)
    if unknown := sorted(set(names) - set(definitions)):
        raise InvalidOption(
            f"no handler is defined for {', '.join(unknown)}; there are: {', '.join(sorted(definitions)) or 'none'}"
        )
    return sorted(names)
