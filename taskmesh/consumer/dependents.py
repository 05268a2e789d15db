"""The dependents of what was finished here: who waits for it hears of it as soon as the outcome is recorded.

Many at once: while one question is under way the next tasks collect. Nothing is kept here that matters: a mark stands in each
task until somebody has asked, and the scanner's sweep finds what a dead or hurried worker has left.
"""

from __future__ import annotations

import asyncio
import logging

from pymongo.errors import PyMongoError

from taskmesh.store import Store, flows, sequences
from taskmesh.store.dependencies import MARKS_FOUND_AFTER_MS, sweep, tell

logger = logging.getLogger("taskmesh.dependents")

_MANY = 20
_COLLECT_S = 0.05


class Dependents:
    """Who waits for the tasks of one consumer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._finished: set[str] = set()
        self._asking: set[str] = set()
        """About whom somebody is being told at the moment."""
        self._telling: asyncio.Task[None] | None = None
        self._sweeping = False

    def finished(self, id_: str) -> None:
        """Tell those that wait for this task, whose outcome is recorded; nothing to do if there are none."""
        self._finished.add(id_)
        if self._telling is None:
            self._telling = asyncio.get_running_loop().create_task(self._tell(), name="taskmesh dependents")

    @property
    def idle(self) -> bool:
        """Whether nobody is to be told."""
        return self._telling is None and not self._sweeping

    async def drain(self) -> None:
        """Wait until all that was finished so far is told."""
        while self._telling is not None:
            await asyncio.wait([self._telling])

    async def sweep(self, *, at_once: bool = False) -> None:
        """Ask where others have left a mark, a second ago or longer; `at_once`: or just now."""
        self._sweeping = True
        try:
            await sweep(self._store, 0 if at_once else MARKS_FOUND_AFTER_MS, self._asking | self._finished)
            if not at_once:
                await flows.sweep(self._store)
                await sequences.sweep(self._store)
        except PyMongoError as error:  # what waits, waits for the next sweep; the scan goes on
            logger.info("a sweep for dependents failed (%s: %.200s)", type(error).__name__, error)
        finally:
            self._sweeping = False

    async def _tell(self) -> None:
        try:
            while self._finished:
                ids, self._finished = self._finished, set()
                self._asking = ids
                await tell(self._store, ids)
                if len(ids) > _MANY:
                    await asyncio.sleep(_COLLECT_S)  # a question costs the same for few and for many
        except Exception:
            logger.exception("unexpected error while telling dependents: the sweep will do it again")
        finally:
            self._asking = set()
            self._telling = None
