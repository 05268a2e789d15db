"""Dependents: tasks that wait for a task that finishes here are opened as soon as its outcome is recorded.

Many at once: while one query is under way, finished tasks collect for the next. Nothing important is kept in memory: each
finished task carries a mark until its dependents have been told, and the scanner's sweep finds the marks that a worker left
when it died or stopped in a hurry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from pymongo.errors import PyMongoError

from taskmesh.store import Store, flows
from taskmesh.store.relations import sequences
from taskmesh.store.relations.dependencies import MARKS_FOUND_AFTER_MS, Leftovers, sweep, tell
from taskmesh.store.upkeep import Upkeep

logger = logging.getLogger("taskmesh.dependents")

_MANY = 20
_COLLECT_S = 0.05


class Dependents:
    """Tells those that wait for the tasks of one consumer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._leftovers = Leftovers(store)
        self._finished: set[str] = set()
        self._asking: set[str] = set()
        """The tasks whose dependents are being told at the moment."""
        self._telling: asyncio.Task[None] | None = None
        self._sweeping = False

    def finished(self, id_: str) -> None:
        """Tell the tasks that wait for this one, whose outcome is recorded. Does nothing if there are none."""
        self._finished.add(id_)
        if self._telling is None:
            self._telling = asyncio.get_running_loop().create_task(self._tell(), name="taskmesh dependents")

    @property
    def idle(self) -> bool:
        """Whether nobody remains to be told."""
        return self._telling is None and not self._sweeping

    async def drain(self) -> None:
        """Wait until the dependents of everything that has finished so far are told, and nothing of that is left."""
        while self._telling is not None:
            await asyncio.wait([self._telling])
        await self._leftovers.removed()

    async def sweep(self, due: Collection[Upkeep], *, at_once: bool = False) -> None:
        """Do what is due of the upkeep of dependents. `at_once`: for all marks, not only those that are a second old."""
        self._sweeping = True
        try:
            if Upkeep.MARKS in due:
                await sweep(self._store, 0 if at_once else MARKS_FOUND_AFTER_MS, self._asking | self._finished)
            if Upkeep.FLOWS in due:
                await flows.sweep(self._store)
            if Upkeep.SEQUENCES in due:
                await sequences.sweep(self._store)
        except PyMongoError as error:  # what waits is opened by the next sweep; the scan goes on
            logger.info("a sweep for dependents failed (%s: %.200s)", type(error).__name__, error)
        finally:
            self._sweeping = False

    async def _tell(self) -> None:
        try:
            while self._finished:
                ids, self._finished = self._finished, set()
                self._asking = ids
                await tell(self._store, ids, self._leftovers)
                if len(ids) > _MANY:
                    await asyncio.sleep(_COLLECT_S)  # a question costs the same for few and for many
        except Exception:
            logger.exception("unexpected error while telling dependents: the sweep will do it again")
        finally:
            self._asking = set()
            self._telling = None
