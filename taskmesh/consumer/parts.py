"""The parts of a running consumer: made here, connected, started; and what they tell each other.

listener (the feed's hints) ─┐
                             ├→ claim queue → claimer → executor → finisher
scanner (the truth) ─────────┘                   pinger (a thread) keeps the leases
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import anyio.abc
from pymongo.errors import PyMongoError

from taskmesh.consumer.backup_claims import BackupClaims
from taskmesh.consumer.claim_queue import ClaimQueue
from taskmesh.consumer.claimer import Claimer, Narrow
from taskmesh.consumer.execution import Execution
from taskmesh.consumer.executor import Executor
from taskmesh.consumer.finisher import Finisher
from taskmesh.consumer.limits import Limits
from taskmesh.consumer.listener import Listener
from taskmesh.consumer.partitions import Partitions
from taskmesh.consumer.pinger import Pinger
from taskmesh.consumer.registration import Registration
from taskmesh.consumer.reporter import Reporter
from taskmesh.consumer.scanner import Scanner
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.ticker import Ticker
from taskmesh.consumer.unserved import Unserved
from taskmesh.consumer.worker_stats import WorkerStats
from taskmesh.store import registry
from taskmesh.store.definitions import register
from taskmesh.store.driver import Document
from taskmesh.store.finish import Outcome
from taskmesh.store.server_errors import patiently

if TYPE_CHECKING:
    from taskmesh.consumer.worker import Mesh  # for a moment: these two files become one

logger = logging.getLogger("taskmesh.consumer")


class Parts:
    """The parts of one consumer. Made in the event loop that it runs in."""

    def __init__(
        self,
        mesh: Mesh,
        settings: Settings,
        *,
        narrow: Narrow,
        state: Callable[[], Document],
        ordered: Callable[[Document], None],
        id_lost: Callable[[], None],
    ) -> None:
        """Make and connect them.

        `narrow` asks the hook `on_claim`. `state` returns what the registry shows of the consumer itself. `ordered` is told
        what somebody wants this worker to do, `id_lost` that another worker has its id.
        """
        store, clock = mesh.store, mesh.clock
        self.store = store
        self.settings = settings
        self._clock = clock
        self._state = state
        self._definitions = mesh.definitions
        self._ordered = ordered
        self._obeyed: Document = {}
        """When what was ordered last, of each kind of order."""
        self._claims_made = 0
        self.closed_queues: frozenset[str] = frozenset()
        """Queues that are paused for everybody."""
        self.fleet: list[Document] = []
        """The registered workers, this one among them."""
        self.freed = asyncio.Event()
        """Set whenever an execution gives its slot back."""
        self.queue = ClaimQueue(queue_limit(settings.concurrency))
        self._lanes = Partitions(settings.worker_id)
        self._last_hour = WorkerStats()
        self.finisher = Finisher(store, settings.worker_id)
        self.reporter = Reporter(store, settings.worker_id)
        self.pinger = Pinger(
            store,
            asyncio.get_running_loop(),
            lambda: self.executor.executions,
            lambda execution, reason: self.executor.stop_because(execution, reason),  # noqa: PLW0108 — made later
            settings.stall_limit_ms,
            self._last_hour,
            settings.observer,
        )
        self.executor = Executor(
            store,
            settings.worker_id,
            clock,
            self.finisher,
            self.pinger,
            mesh.definitions,
            before=settings.before,
            after=settings.after,
            slot_freed=self._slot_freed,
            report=self.reporter.add,
            reports_written=self.reporter.written,
            make_publication=mesh.publisher.publication_of,
            observer=settings.observer,
        )
        self.limits = Limits(
            store,
            settings.worker_id,
            clock,
            self.queue,
            names=settings.names,
            is_busy=self._is_busy,
            wake=lambda: self.claimer.wake(),  # noqa: PLW0108 — likewise
            want_more=lambda: self.scanner.order_scan(),  # noqa: PLW0108 — likewise
        )
        self.claimer = Claimer(
            store,
            settings.worker_id,
            self.queue,
            concurrency=lambda: settings.concurrency,
            free_slots=lambda: self.executor.free_slots(settings.concurrency),
            narrow=narrow,
            closed_queues=lambda: self.closed_queues,
            limits=self.limits,
            params_of={name: mesh.definitions[name].projection for name in settings.names},
            whole_state=settings.before is not None or settings.after is not None,
            start=self.executor.start,
            give_back=self.release,
            next_running_id=self._next_running_id,
            is_busy=self._is_busy,
            want_more=self._want_more,
            observer=settings.observer,
        )
        self._second_look = BackupClaims(
            store,
            settings.worker_id,
            lambda *found: self.scanner.still_there(*found),  # noqa: PLW0108 — likewise
        )
        self.scanner = Scanner(
            store,
            settings.worker_id,
            self.queue,
            self._lanes,
            clock,
            names=settings.names,
            queues=settings.queues,
            usual_queues=["default", *(mesh.definitions[name].configuration.queue for name in settings.names)],
            closed_queues=lambda: self.closed_queues,
            limits=self.limits,
            narrow=narrow,
            wanted=lambda: self.executor.free_slots(settings.concurrency),
            skip=lambda id_: self._is_busy(id_) or self.claimer.is_aside(id_),
            being_claimed=lambda: self.claimer.being_claimed,
            found=self.claimer.wake,
            want_hints=self._want_hints,
            second_look=self._second_look,
            page=max(1_000, min(5_000, 4 * settings.concurrency)),
        )
        self.ticker = Ticker(store, mesh.schedules.publication_of_tick)
        self.listener = Listener(
            mesh.feed,
            store,
            settings.worker_id,
            names=settings.names,
            queues=settings.queues,
            lanes=self._lanes,
            clock=clock,
            queue=self.queue,
            executor=self.executor,
            pinger=self.pinger,
            scanner=self.scanner,
            wake=self.claimer.wake,
            second_look=self._second_look,
            closed_queues=lambda: self.closed_queues,
            being_claimed=lambda: self.claimer.being_claimed,
            read_queues=self.read_queues,
            read_orders=self._read_orders,
        )
        self.registration = Registration(
            store,
            clock,
            settings.worker_id,
            settings.instance,
            describe=self._described,
            on_document=self._read_order,
            on_fleet=self._meet_fleet,
            on_lost=id_lost,
        )

    # --- start ---

    async def open(self) -> None:
        """Get ready to work."""
        await patiently(self.read_queues)
        self.pinger.start()
        if self.settings.listen:
            await self.listener.open()  # before the first scan, so that nothing falls in between

    async def enter(self) -> None:
        """Register: first the tasks, so that whoever sees the worker sees them too. Raises as `Registration.enter` does."""
        await self._register_definitions()
        await patiently(self.registration.enter)

    async def _register_definitions(self) -> None:
        """Tell publishers without the code which queue and option these tasks have, and what params they take."""
        definitions = {name: self._definitions[name].described() for name in self.settings.names}
        try:
            await patiently(lambda: register(self.store, definitions))
        except PyMongoError as error:  # it works all the same
            logger.warning("the definitions of tasks could not be registered (%s): %.200s", type(error).__name__, error)

    def start(self, loops: anyio.abc.TaskGroup) -> None:
        """Begin to work. The loops run until their task group is cancelled."""
        loops.start_soon(self.scanner.run, name="taskmesh scanner")
        loops.start_soon(self.claimer.run, name="taskmesh claimer")
        loops.start_soon(self.listener.run, name="taskmesh listener")
        loops.start_soon(self._second_look.run, name="taskmesh second look")
        loops.start_soon(self.reporter.run, name="taskmesh reporter")
        loops.start_soon(Unserved(self.store, lambda: self.fleet).run, name="taskmesh neglected")
        loops.start_soon(self.ticker.run, name="taskmesh ticker")
        loops.start_soon(self.registration.run, name="taskmesh registration")
        self.registration.show_soon()
        self.scanner.order_scan()

    # --- what the consumer asks and tells ---

    @property
    def executions(self) -> Collection[Execution]:
        """What holds a slot now."""
        return list(self.executor.executions.values())

    def set_claiming(self, wanted: bool) -> None:
        """Claim no more, or again; what runs, runs on."""
        self.claimer.open = wanted
        self.claimer.wake()
        if wanted:
            self.scanner.order_scan()

    def close_claims(self) -> None:
        """Claim no more, and look for nothing more, for ever."""
        self.claimer.open = False
        self.scanner.open = False

    def concurrency_changed(self) -> None:
        """Go by the new number of slots."""
        self.queue.set_limit(queue_limit(self.settings.concurrency))
        self.claimer.wake()

    def release(self, id_: str, running_id: str) -> None:
        """Give a claimed task back unharmed."""
        self.finisher.add(Outcome(id_, running_id, "released"), lambda _: None)

    # --- what the parts tell each other ---

    def _is_busy(self, id_: str) -> bool:
        return id_ in self.executor.executions

    def _slot_freed(self) -> None:
        self.freed.set()
        self.limits.slot_freed()
        self.claimer.wake()

    async def _want_hints(self, wanted: bool) -> None:
        """Under a backlog the stream is not asked for new work; when it is worked off, a scan closes the gap."""
        if self.settings.listen and wanted != self.listener.wants_hints:
            await self.listener.want_hints(wanted)
            if wanted:
                self.scanner.order_scan()

    def _want_more(self) -> None:
        """The claimer has few candidates left."""
        if self.queue.ready_count(time.monotonic()) < max(1, self.settings.concurrency // 2) and self.scanner.more:
            self.scanner.want_more()

    def _next_running_id(self) -> str:
        self._claims_made += 1
        return f"{self.settings.instance}-{self._claims_made:x}"

    # --- what comes from afar ---

    async def read_queues(self) -> None:
        """Learn which queues are closed or limited now."""
        settings = await registry.queues(self.store)
        self.limits.learn(settings)
        closed = frozenset(name for name, queue in settings.items() if queue.get("paused"))
        if closed != self.closed_queues:
            reopened = self.closed_queues - closed
            self.closed_queues = closed
            self.queue.discard_queues(closed)
            if reopened:
                self.scanner.order_scan()

    async def _read_orders(self) -> None:
        document = await registry.read_worker(self.store, self.settings.worker_id)
        if document is not None and document.get("instance") == self.settings.instance:
            self._read_order(document)

    def _read_order(self, document: Document) -> None:
        """Hand on what was ordered, each order once."""
        order: Document = document.get("order", {})
        times = {name: document.get("order_times", {}).get(name, document["order_time"]) for name in order}
        if new := {name: value for name, value in order.items() if times[name] != self._obeyed.get(name)}:
            self._obeyed = times
            self._ordered(new)

    def _meet_fleet(self, workers: list[Document]) -> None:
        """Learn who lives and does the same work."""
        self.fleet = workers
        mine, queues = set(self.settings.names), self.settings.queues
        peers = [
            worker["_id"]
            for worker in workers
            if worker.get("live")
            and worker.get("state") == "running"
            and mine & set(worker.get("names", ()))
            and not worker.get("paused")
            and (queues is None or worker.get("queues") is None or set(queues) & set(worker["queues"]))
        ]
        if self._lanes.set_workers(peers):
            logger.debug("worker %s shares its work with %d others", self.settings.worker_id, len(peers) - 1)

    def _described(self) -> Document:
        return {
            "names": self.settings.names,
            "queues": self.settings.queues,
            "concurrency": self.settings.concurrency,
            "running": len(self.executor.executions),
            "started": self.executor.started,
            "finished": self.executor.finished,
            # Nothing goes by this machine's own clock; people wonder about the times in its log.
            "clock_off_ms": round((time.time() - self._clock.now().timestamp()) * 1000),
            **self._last_hour.described(self.claimer.tried, self.claimer.won),
            **self._state(),
        }


def queue_limit(concurrency: int) -> int:
    """How many candidates are kept at most: enough to be busy until the next scan, however large the backlog."""
    return max(5_000, 10 * concurrency)
