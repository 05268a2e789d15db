"""The worker's entry in the registry: a heartbeat every two seconds, and remote orders in the same round trip."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from typing import Any, Protocol

from pymongo.errors import PyMongoError

from taskmesh.consumer.candidates.claim_filter import ClaimFilter
from taskmesh.consumer.candidates.claim_queue import ClaimQueue
from taskmesh.consumer.candidates.listening import Listening
from taskmesh.consumer.candidates.partitions import Partitions
from taskmesh.consumer.claimer import Claimer
from taskmesh.consumer.life import Life
from taskmesh.consumer.run.executions import Executions
from taskmesh.consumer.settings import Settings
from taskmesh.consumer.timing import until
from taskmesh.consumer.worker_stats import Throughput, WorkerStats
from taskmesh.model.distribution import VERSION
from taskmesh.model.errors import InvalidOption, WorkerIdTaken
from taskmesh.model.worker import WorkerInfo, read_workers
from taskmesh.store import Store, registry
from taskmesh.store.clock import ServerClock
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.uncut import CLOSE_DEADLINE_S
from taskmesh.store.schema import INDEX_GENERATION
from taskmesh.store.values import cleaned

logger = logging.getLogger("taskmesh.registration")

_ALL_LOOK = 128
"""In larger fleets not every heartbeat reads who is live: what all workers read together would grow with the square of the
fleet."""


class Commanded(Protocol):
    """What carries out orders: the consumer, as if its user had called it."""

    # ruff: noqa: D102 — see `Consumer`

    worker_id: str
    concurrency: int

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def begin_stop(self, grace_ms: int) -> None: ...


class Orders:
    """Remote orders in a worker's registration. Each is obeyed once."""

    def __init__(self, store: Store, settings: Settings, consumer: Commanded) -> None:
        self._store = store
        self._settings = settings
        self._consumer = consumer
        self._obeyed: Document = {}
        """The time of the last order of each kind that was obeyed."""

    async def read(self) -> None:
        """Look for orders now."""
        document = await registry.read_worker(self._store, self._settings.worker_id)
        if document is not None and document.get("instance") == self._settings.instance:
            self.obey(document)

    def obey(self, document: Document) -> None:
        """Obey what is new in a registration."""
        order: Document = document.get("order", {})
        times = {name: document.get("order_times", {}).get(name, document["order_time"]) for name in order}
        if new := {name: value for name, value in order.items() if times[name] != self._obeyed.get(name)}:
            self._obeyed = times
            self._do(new)

    def _do(self, order: Document) -> None:
        if "concurrency" in order:
            try:
                self._consumer.concurrency = order["concurrency"]
            except InvalidOption as error:  # from another release, or entered by hand
                logger.warning("command to this worker ignored: %s", error)
        if "paused" in order:
            if order["paused"]:
                self._consumer.pause()
            else:
                self._consumer.resume()
        if "stop_grace_ms" in order:
            worker_id = self._settings.worker_id
            logger.info("worker %s was told to stop", worker_id, extra={"worker": worker_id})
            self._consumer.begin_stop(order["stop_grace_ms"])


class Registration:
    """One worker's document in `workers`."""

    def __init__(
        self,
        store: Store,
        clock: ServerClock,
        settings: Settings,
        life: Life,
        partitions: Partitions,
        listening: Listening,
        candidates: ClaimQueue,
        executions: Executions,
        claimer: Claimer,
        stats: WorkerStats,
        orders: Orders,
        claim_filter: ClaimFilter,
    ) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._worker_id = settings.worker_id
        self._instance = settings.instance
        self._life = life
        self._partitions = partitions
        self._listening = listening
        self._candidates = candidates
        self._executions = executions
        self._claimer = claimer
        self._stats = stats
        self._orders = orders
        self._claim_filter = claim_filter
        self.fleet: list[WorkerInfo] = []
        """The live workers, this one among them."""
        self._next_look = 0.0
        self._wake = asyncio.Event()
        self._told_outage = False
        self._throughput = Throughput()
        self.seen_at = time.monotonic()
        """When (monotonic) the database last took a heartbeat."""

    async def enter(self) -> None:
        """Register. Raises `WorkerIdTaken` while another live worker has the id.

        A predecessor on this host whose process is gone is no obstacle; any other one has to miss its heartbeats first.
        """
        waited_until = time.monotonic() + registry.LIVE_MS / 1000 + 1
        first_seen: Any = None
        while True:
            sent = time.monotonic()
            document = await registry.register(self._store, self._worker_id, self._instance, self._description())
            if document is not None:
                self._clock.observe(document["last_seen"], sent, time.monotonic())
                self._orders.obey(document)
                await self._read_fleet()
                return
            other = await registry.read_worker(self._store, self._worker_id) or {}
            if _is_dead_here(other):
                await registry.forget(self._store, self._worker_id, other["instance"])
                continue
            if (first_seen is not None and other.get("last_seen") != first_seen) or time.monotonic() > waited_until:
                raise WorkerIdTaken(
                    f"worker id {self._worker_id!r} is in use by process {other.get('pid')} on {other.get('host')}: "
                    "give each worker its own id, or none (then one is made up)"
                )
            first_seen = other.get("last_seen")
            await asyncio.sleep(registry.HEARTBEAT_MS / 1000 + 0.3)

    async def run(self) -> None:
        """Send heartbeats for ever."""
        while True:
            await until(self._wake, registry.HEARTBEAT_MS / 1000)
            self._wake.clear()
            await self.run_once()

    async def run_once(self) -> None:
        """Send one heartbeat, and learn which workers are live."""
        try:
            sent = time.monotonic()
            document = await registry.heartbeat(self._store, self._worker_id, self._instance, self._description())
            if document is None:
                document = await registry.register(self._store, self._worker_id, self._instance, self._description())
            if document is None:
                taken = "was taken over by another process while this one was silent: this one stops"
                self._life.end_by(WorkerIdTaken(f"worker id {self._worker_id!r} {taken}"))
                return
            self.seen_at = time.monotonic()
            self._clock.observe(document["last_seen"], sent, self.seen_at)
            self._orders.obey(document)
            await self._read_fleet()
            self._told_outage = False
        except PyMongoError as error:
            if not self._told_outage:
                logger.warning("the heartbeat could not be written (%s): trying again", type(error).__name__)
                self._told_outage = True

    def show_soon(self) -> None:
        """Send the next heartbeat at once."""
        self._wake.set()

    async def leave(self) -> None:
        """Say that this worker has stopped. A registration that was given up may still be on its way, and comes first."""
        await self._store.driver.calls.ended(CLOSE_DEADLINE_S)
        try:
            await registry.heartbeat(self._store, self._worker_id, self._instance, self._description())
        except PyMongoError as error:
            logger.warning("could not record that worker %s has stopped: %s", self._worker_id, type(error).__name__)

    async def _read_fleet(self) -> None:
        """Learn which workers are live, and which of them do the same work."""
        if len(self.fleet) > _ALL_LOOK and time.monotonic() < self._next_look:
            return
        self.fleet = read_workers(await registry.workers(self._store, live_only=True))
        self._next_look = time.monotonic() + registry.HEARTBEAT_MS / 1000 * len(self.fleet) / _ALL_LOOK
        names, queues = self._settings.names, self._settings.queues
        peers = [worker for worker in self.fleet if worker.competes_for(names, queues)]
        everybody = self._partitions.everybody
        if self._partitions.set_workers(peers):
            logger.debug("worker %s shares its work with %d others", self._worker_id, len(peers) - 1)
            self._listening.wake.set()
        if self._partitions.everybody != everybody:
            self._candidates.order_scan()  # lanes have changed hands
        if self._listening.learn(self.fleet, {worker.worker_id for worker in peers}):
            self.show_soon()

    def _description(self) -> Document:
        settings, life, executions = self._settings, self._life, self._executions
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": VERSION,
            "indexes": INDEX_GENERATION,
            "names": settings.names,
            "queues": settings.queues,
            "labels": settings.labels,
            "listens": self._listening.wanted,
            "may_listen": settings.listen,
            "on_claim": None if self._claim_filter.said is None else cleaned(self._claim_filter.said),
            "on_claim_claims_nothing": self._claim_filter.claims_nothing,
            "concurrency": settings.concurrency,
            "running": len(executions),
            "started": executions.started,
            "finished": executions.finished,
            # Nothing depends on this machine's clock; it only makes the times in its log puzzling.
            "clock_off_ms": round((time.time() - self._clock.now().timestamp()) * 1000),
            **self._stats.described(self._claimer.tried, self._claimer.won),
            "state": life.state if life.state != "ready" else "running",
            "paused": life.paused,
            **self._throughput.rates(executions.started, executions.finished),
        }


def _is_dead_here(other: Document) -> bool:
    """Whether the process behind a registration was on this host, and is gone."""
    if other.get("host") != socket.gethostname() or not isinstance(other.get("pid"), int):
        return False
    if other["pid"] == os.getpid():
        return False
    try:
        os.kill(other["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
