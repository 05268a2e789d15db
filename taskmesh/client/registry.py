"""The registry as publishers read it: the workers, what they registered about a task, and whether any of them could run it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from datetime import datetime

from pymongo.errors import OperationFailure

from taskmesh.client.registered import RegisteredDefinition
from taskmesh.model.configuration import Configuration
from taskmesh.model.labels import words
from taskmesh.model.queue import QueueLimits
from taskmesh.model.worker import WorkerInfo, able_workers, known_names, read_workers
from taskmesh.store import Store, registry
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import is_passing, patiently

_TRUSTED_S = 2.0
_ASKED_AGAIN_S = 0.25
_MOST_DEFINITIONS = 1_000
"""The most definitions that a publisher caches."""


class Registry:
    """Reads the registry, not more often than needed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._live: list[WorkerInfo] = []
        self._queues: dict[str, Document] = {}
        self._read_at = self._outdated_at = float("-inf")
        self._reading = asyncio.Lock()
        self._definitions: OrderedDict[str, tuple[float, RegisteredDefinition]] = OrderedDict()

    async def read(self) -> list[WorkerInfo]:
        """Return all workers of the last hour."""
        return read_workers(await registry.workers(self._store))

    def outdate(self) -> None:
        """Read it again for the next publication: something has just changed."""
        self._outdated_at = time.monotonic()

    async def definition(self, name: str, *, newly: bool = False) -> RegisteredDefinition:
        """Return what workers have registered about the tasks of this name. Reads at most every two seconds; `newly`: at once."""
        read_at, definition = self._definitions.get(name, (float("-inf"), None))
        age = time.monotonic() - read_at
        if definition is not None and age <= (_ASKED_AGAIN_S if newly or not definition.found else _TRUSTED_S):
            return definition
        begun = time.monotonic()
        try:
            document = await patiently(lambda: registry.read_definition(self._store, name))
        except OperationFailure as error:
            if is_passing(error):
                raise
            document = None  # this user may not read it: a warning says that nothing is known
        definition = RegisteredDefinition(name, document)
        self._definitions[name] = begun, definition
        self._definitions.move_to_end(name)
        while len(self._definitions) > _MOST_DEFINITIONS:
            self._definitions.popitem(last=False)
        return definition

    async def warnings(self, name: str, configuration: Configuration, now: datetime, *, found: bool) -> list[str]:
        """Return why no worker could run such a task now. Reads at most every two seconds while all is well.

        `found`: its queue, option and params are those of its definition, or of what workers have registered.
        """
        return [*await self._unable(name, configuration, now), *([] if found else self._unregistered(name))]

    @property
    def places_differ(self) -> bool:
        """Whether it may matter in which queue and group a task is, as of the last reading."""
        return any(worker.queues is not None for worker in self._live) or any(
            queue.get("paused")
            or queue.get("paused_groups")
            or QueueLimits.from_document(queue.get("limits") or {}).ever_start_nothing
            for queue in self._queues.values()
        )

    def _unregistered(self, name: str) -> list[str]:
        if name not in known_names(self._live):
            return []
        said = (
            f"live workers run {name!r}, but its queue, option and params are not registered (these workers are of an older "
            "release), or may not be read here: the defaults are used where nothing was given, and the params are unchecked"
        )
        return [said]

    async def _unable(self, name: str, configuration: Configuration, now: datetime) -> list[str]:
        age = time.monotonic() - self._read_at
        if age > _TRUSTED_S or self._read_at < self._outdated_at:
            await self._refresh()
            age = 0.0
        found = self._warnings(name, configuration, now)
        if found and age > _ASKED_AGAIN_S:
            await self._refresh()
            found = self._warnings(name, configuration, now)
        return found

    async def _refresh(self) -> None:
        asked = time.monotonic()
        async with self._reading:  # many publish at once: one reads, and the others use what it found
            if self._read_at >= asked:
                return
            begun = time.monotonic()
            self._live = read_workers(await registry.workers(self._store, live_only=True))
            self._queues = await registry.queues(self._store)
            self._read_at = begun

    def _warnings(self, name: str, configuration: Configuration, now: datetime) -> list[str]:
        found = []
        knowing = able_workers(self._live, name, configuration.queue)
        named = configuration.option.specific_worker_ids
        if not self._live:
            found.append("no worker is alive: start one with `taskmesh worker MODULE:MESH`")
        elif not knowing:
            found.append(f"no live worker runs tasks named {name!r} from queue {configuration.queue!r}")
        allowed = able_workers(knowing, name, configuration.queue, only=named)
        if knowing and named and not allowed:
            found.append(f"none of specific_worker_ids ({', '.join(named)}) is a live worker that runs {name!r}")
        needs = words(configuration.needs)
        if knowing and needs and not able_workers(knowing, name, configuration.queue, needs=needs):
            found.append(f"no live worker that runs {name!r} has the labels that it needs: {', '.join(needs)}")
        elif allowed and named and needs and not able_workers(allowed, name, configuration.queue, needs=needs):
            found.append(
                f"none of specific_worker_ids ({', '.join(named)}) that is live has the labels that it needs: {', '.join(needs)}"
            )
        wanted = configuration.option.concurrent_worker_cnt
        # One name may represent all processes of a supervisor.
        most = max(len(set(named)), len(allowed))
        if named and wanted > most:
            found.append(
                f"it can never finish: concurrent_worker_cnt={wanted} different workers, of {most} that specific_worker_ids names"
            )
        queue = self._queues.get(configuration.queue)
        if queue is not None and queue.get("paused"):
            found.append(f"queue {configuration.queue!r} is paused")
        limits = QueueLimits.from_document((queue or {}).get("limits") or {})
        if limits.starts_nothing:
            found.append(f"queue {configuration.queue!r} is limited to 0: nothing starts until that is changed")
        if limits.starts_nothing_of(configuration.group):
            of_queue = f"group {configuration.group!r} of queue {configuration.queue!r}"
            found.append(f"{of_queue} is limited to 0: nothing of it starts until that is changed")
        if queue is not None and configuration.group in {pause["g"] for pause in queue.get("paused_groups") or ()}:
            found.append(f"group {configuration.group!r} of queue {configuration.queue!r} is paused")
        start = configuration.starts(now)
        if configuration.expire_time is not None and configuration.expire_time <= max(now, start or now):
            found.append(f"it expires at {configuration.expire_time.isoformat()}, before it can start")
        return found
