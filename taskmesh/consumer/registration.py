"""The worker's entry in the registry: a sign of life every two seconds, and orders from afar in the same round trip."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.consumer.throughput import Throughput
from taskmesh.consumer.timing import until
from taskmesh.model import distribution
from taskmesh.model.errors import WorkerIdTaken
from taskmesh.store import Store, registry
from taskmesh.store.clock import ServerClock
from taskmesh.store.driver import Document

logger = logging.getLogger("taskmesh.registration")


RELEASE = distribution.release()
"""The release of taskmesh that runs here. Read once, at import: it takes a look into several files."""


class Registration:
    """One worker's document in `workers`."""

    def __init__(
        self,
        store: Store,
        clock: ServerClock,
        worker_id: str,
        instance: str,
        *,
        describe: Callable[[], Document],
        on_document: Callable[[Document], None],
        on_fleet: Callable[[list[Document]], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._worker_id = worker_id
        self._instance = instance
        self._describe = describe
        self._on_document = on_document
        self._on_fleet = on_fleet
        self._on_lost = on_lost
        self._wake = asyncio.Event()
        self._told_outage = False
        self._throughput = Throughput()
        self.seen_at = time.monotonic()
        """When (monotonic) the database last took a sign of life."""

    async def enter(self) -> None:
        """Register. Raises `WorkerIdTaken` while another live worker has the id.

        A predecessor on this host whose process is gone is no obstacle; of others the sign of life has to run out.
        """
        waited_until = time.monotonic() + registry.LIVE_MS / 1000 + 1
        first_seen: Any = None
        while True:
            sent = time.monotonic()
            document = await registry.register(self._store, self._worker_id, self._instance, self._description())
            if document is not None:
                self._clock.observe(document["last_seen"], sent, time.monotonic())
                self._on_document(document)
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
        """Show signs of life for ever."""
        while True:
            await until(self._wake, registry.HEARTBEAT_MS / 1000)
            self._wake.clear()
            await self.run_once()

    async def run_once(self) -> None:
        """Show one sign of life, and learn who else lives."""
        try:
            sent = time.monotonic()
            document = await registry.heartbeat(self._store, self._worker_id, self._instance, self._description())
            if document is None:
                document = await registry.register(self._store, self._worker_id, self._instance, self._description())
            if document is None:
                self._on_lost()
                return
            self.seen_at = time.monotonic()
            self._clock.observe(document["last_seen"], sent, self.seen_at)
            self._on_document(document)
            await self._read_fleet()
            self._told_outage = False
        except PyMongoError as error:
            if not self._told_outage:
                logger.warning("no sign of life could be written (%s): trying again", type(error).__name__)
                self._told_outage = True

    def show_soon(self) -> None:
        """Write the next sign of life at once."""
        self._wake.set()

    async def leave(self) -> None:
        """Say that this worker has stopped."""
        try:
            await registry.heartbeat(self._store, self._worker_id, self._instance, self._description())
        except PyMongoError as error:
            logger.warning("could not write that worker %s has stopped: %s", self._worker_id, type(error).__name__)

    async def _read_fleet(self) -> None:
        self._on_fleet(await registry.workers(self._store))

    def _description(self) -> Document:
        described = self._describe()
        rates = self._throughput.rates(described["started"], described["finished"])
        return {"host": socket.gethostname(), "pid": os.getpid(), "version": RELEASE, **described, **rates}


def _is_dead_here(other: Document) -> bool:
    """Whether the process behind a registration is on this host, and gone."""
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
