"""Idleness: what `run(until_idle=True)` waits for. Nothing that this worker may run is claimable or running anywhere.

What this worker may not run is no reason to wait: tasks that the hook `on_claim` excludes, or that are paused or limited to 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.consumer.candidates.claim_filter import ClaimFilter
from taskmesh.consumer.candidates.claim_queue import ClaimQueue
from taskmesh.consumer.candidates.inserted_tasks import InsertedTasks
from taskmesh.consumer.candidates.limits import Limits
from taskmesh.consumer.candidates.queues import Queues
from taskmesh.consumer.claimer import Claimer
from taskmesh.consumer.life import Life
from taskmesh.consumer.run.dependents import Dependents
from taskmesh.consumer.run.executions import Executions
from taskmesh.consumer.run.finisher import Finisher
from taskmesh.consumer.scanner import Scanner
from taskmesh.consumer.settings import Settings
from taskmesh.store import Store
from taskmesh.store.find import unfinished_left
from taskmesh.store.relations.dependencies import any_marks

logger = logging.getLogger("taskmesh.consumer")


class Idleness:
    """Whether one consumer has anything left to do."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        life: Life,
        candidates: ClaimQueue,
        executions: Executions,
        queues: Queues,
        limits: Limits,
        claim_filter: ClaimFilter,
        claimer: Claimer,
        scanner: Scanner,
        finisher: Finisher,
        dependents: Dependents,
        *,
        inserted_tasks: InsertedTasks,
    ) -> None:
        self._store = store
        self._settings = settings
        self._life = life
        self._candidates = candidates
        self._executions = executions
        self._queues = queues
        self._limits = limits
        self._claim_filter = claim_filter
        self._claimer = claimer
        self._scanner = scanner
        self._finisher = finisher
        self._dependents = dependents
        self._inserted_tasks = inserted_tasks

    async def is_idle(self) -> bool:
        """Whether nothing runs here, nothing is on its way, and the database holds nothing that this worker may run.

        The hook and the database are asked only when everything is quiet here. While one of them cannot answer, the worker does
        not count as idle.
        """
        settings = self._settings
        if not self._is_quiet():
            return False
        if not self._life.claims:
            return True
        if settings.names and self._scanner.scans == 0:
            return False
        try:
            narrowed_by = await self._claim_filter.ask()
        except Exception as error:  # noqa: BLE001 -- a user's hook; the scanner, which asks it as well, logs what it raises
            logger.debug("on_claim did not tell whether anything may be claimed: %s", error)
            return False
        if narrowed_by is None:
            return self._is_quiet()
        if self._candidates.ready_count(time.monotonic()):
            return False
        await self._dependents.drain()
        claimed_before = self._claimer.won
        try:
            # What finishes in between opens its dependents: that leaves a mark or, again, something claimable.
            left = (
                await self._inserted_tasks.any_left()
                or await self._unfinished_left(narrowed_by)
                or await any_marks(self._store)
                or await self._unfinished_left(narrowed_by)
            )
        except PyMongoError as error:
            logger.debug("could not ask whether anything is left: %s", error)
            return False
        # What was claimed while the database was asked did not look claimable: it runs now, or goes on in another queue.
        claimed = self._claimer.won - claimed_before
        return not left and not claimed and self._is_quiet() and not self._candidates.ready_count(time.monotonic())

    async def _unfinished_left(self, narrowed_by: Mapping[str, Any]) -> bool:
        settings, shut_groups = self._settings, self._limits.shut_groups
        return await unfinished_left(
            self._store,
            settings.claimant,
            settings.names,
            settings.queues,
            self._queues.paused | self._limits.shut_queues,
            known_queues=self._queues.known,
            narrowed_by={"$and": [dict(narrowed_by), {"$nor": shut_groups}]} if shut_groups else narrowed_by,
        )

    def _is_quiet(self) -> bool:
        return not self._executions and self._claimer.idle and self._finisher.idle and self._dependents.idle
